"""`fos-rl parity` and `fos-rl rescore`, from parsed arguments to exit status."""

import json
import math
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from fos_rl.config import RunConfig
from fos_rl.diagnose.hosts import host_pair
from fos_rl.diagnose.parity import Parity, compare_hosts
from fos_rl.diagnose.parity_report import print_parity, verdict
from fos_rl.launch import planned

PROMPTS, RESPONSES = 8, 2
"""Parity samples two responses each to so many prompts."""
# Tables are wide; a terminal's own width holds where it is wider, a file gets this one.
_WIDTH = 140


def parity(config: RunConfig, *, tokens: int, fail_above: float | None, out: Path | None) -> int:
    """Compare the hosts of a config on about `tokens` sampled tokens; 1 when they are too far."""
    console = _console()
    config = _sized(config, tokens)
    with planned(config) as plan:
        for note in plan.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)
        with host_pair(plan, config) as pair:
            rollouts = pair.sample(plan.prompts.batch(0), config.seed)
            found = compare_hosts(pair.trainer, pair.generator, rollouts)
    print_parity(console, found, plan.spec.precision)
    if out is not None:
        out.write_text(json.dumps(_as_json(found, plan.spec.contract_hash()), indent=2) + "\n")
    # NaN means that no token was comparable, which is no pass.
    mean = found.sampled_differences.get("mismatch/log_prob_abs_diff/mean", math.nan)
    if fail_above is None or mean <= fail_above:
        return 0
    console.print(f"failed: mean |log-prob difference| {mean:.2e} is above {fail_above:g}")
    return 1


def _sized(config: RunConfig, tokens: int) -> RunConfig:
    """The config with just enough prompts and new tokens a response."""
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
