"""`fos-rl parity` and `fos-rl rescore`, from parsed arguments to exit status."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from fos_rl.algorithms.mismatch import mismatch_metrics
from fos_rl.config import RunConfig
from fos_rl.diagnose.pair import open_pair
from fos_rl.diagnose.parity import Parity, compare_forwards
from fos_rl.diagnose.parity_report import print_parity, verdict
from fos_rl.diagnose.records import (
    Record,
    read_jsonl,
    read_step,
    run_steps,
    sample_records,
    torn_rollouts,
)
from fos_rl.diagnose.rescore import (
    Scene,
    explain_step,
    model_spec,
    open_scene,
    recorded_log_probs,
)
from fos_rl.diagnose.rescore_report import print_attribution, print_mismatches
from fos_rl.diagnose.scorer import run_forward
from fos_rl.files.whole import write_whole
from fos_rl.run_folder.preflight import check_writable
from fos_rl.runtime.launch import planned

PROMPTS, RESPONSES = 8, 2
"""Parity samples two responses each to so many prompts."""
# Tables are wide; a terminal's own width holds where it is wider, a file gets this one.
_WIDTH = 140


def parity(config: RunConfig, *, tokens: int, fail_above: float | None, out: Path | None) -> int:
    """Compare trainer and generator of a config on about `tokens` sampled tokens; 1 when they are
    too far apart."""
    console = _console()
    config = _sized(config, tokens)
    if out is not None:
        check_writable(out.parent, "--json")
    with planned(config) as plan:
        for note in plan.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)
        with open_pair(plan, config) as pair:
            rollouts = pair.sample(plan.prompts.batch(0), config.seed)
            found = compare_forwards(pair.trainer, pair.generator, rollouts)
    print_parity(console, found, plan.spec.precision)
    if out is not None:
        write_whole(out, json.dumps(_as_json(found, plan.spec.contract_hash()), indent=2) + "\n")
    # NaN means that no token was comparable, which is no pass.
    mean = found.sampled_differences.get("mismatch/log_prob_abs_diff/mean", math.nan)
    if fail_above is None or mean <= fail_above:
        return 0
    console.print(f"failed: mean |log-prob difference| {mean:.2e} is above {fail_above:g}")
    return 1


def rescore(
    source: Path,
    config: RunConfig,
    *,
    arm: RunConfig | None,
    steps: Sequence[int] | None,
    tokens: int,
) -> int:
    """Explain stored log-probs; with another arm, print its mismatch with them instead.

    Args:
        source: a run folder, or a JSONL file of another toolkit.

    Returns:
        1 when a difference is not explained, or only in part; else 0.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = _console()
    run = source if source.is_dir() else None
    explained = True
    with open_scene(config, run) as scene:
        for title, version, records in _stored(source, scene, steps):
            console.print(title, style="bold")
            _print_recorded(console, records)
            if arm is not None:
                _print_arm(console, scene, arm, sample_records(records, tokens), version)
                continue
            if (scored := len(sample_records(records, tokens))) < len(records):
                console.print(
                    f"scored {scored} of {len(records)} responses; --tokens sets how many"
                )
            for found in explain_step(scene, records, version, tokens):
                print_attribution(console, found)
                explained = explained and found.cause is not None
    return 0 if explained else 1


def _stored(
    source: Path, scene: Scene, steps: Sequence[int] | None
) -> Iterator[tuple[str, int, list[Record]]]:
    """(title, policy version of the trainer, records) of each asked step, or of a file."""
    if not source.is_dir():
        yield str(source), 0, read_jsonl(source, scene.spec.architecture.vocab_size)
        return
    there = run_steps(source)
    if wrong := [step for step in steps or () if step not in there]:
        raise ValueError(
            f"--steps: {source} has no rollouts of step {wrong[0]}; it has {there[0]} to "
            f"{there[-1]}"
        )
    for step in steps or there:
        records = read_step(source, step)
        stated = {r.policy_version for r in records}
        behind = (
            f", sampled by policy version {sorted(stated, key=str)}" if stated != {step} else ""
        )
        torn = "".join(f"\n{words}" for words in torn_rollouts(source, step))
        yield f"step {step}{behind}{torn}", step, records


def _print_recorded(console: Console, records: Sequence[Record]) -> None:
    ours, theirs = (recorded_log_probs(records, actor) for actor in ("trainer", "generator"))
    if ours is not None and theirs is not None:
        print_mismatches(
            console, {"recorded, trainer - generator": mismatch_metrics([ours], [theirs])}
        )


def _print_arm(
    console: Console, scene: Scene, arm: RunConfig, records: Sequence[Record], version: int
) -> None:
    if version not in scene.versions.sources:
        console.print(
            f"skipped: weights of policy version {version} were not kept (trainer.save_every)"
        )
        return
    theirs = np.concatenate([record.generator for record in records])
    columns = {}
    for name, config in (("configured arm", scene.config), ("this arm", arm)):
        other = replace(scene, config=config, spec=model_spec(config, scene.model_folder))
        scored = run_forward(other.forward(records, version)).log_probs
        columns[f"{name} - generator"] = mismatch_metrics([scored], [theirs])
    print_mismatches(console, columns)


def _sized(config: RunConfig, tokens: int) -> RunConfig:
    """The config with just enough prompts and new tokens per response."""
    new_tokens = max(1, math.ceil(tokens / (PROMPTS * RESPONSES)))
    rollout = {
        "prompts_per_step": PROMPTS,
        "group_size": RESPONSES,
        "max_new_tokens": min(new_tokens, config.rollout.max_new_tokens),
    }
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})


def _as_json(found: Parity, contract: str) -> dict[str, object]:
    return {"contract": contract, "verdict": verdict(found), **asdict(found)}


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.width >= _WIDTH else Console(highlight=False, width=_WIDTH)
