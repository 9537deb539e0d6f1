"""Rescore names the planted cause: real runs with one thing changed in trainer or generator."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fos_rl.cli import main
from fos_rl.config import RunConfig, load_config, parse_config
from fos_rl.diagnose.architecture import _bf16_router, _reroute
from fos_rl.diagnose.attribution import Attribution
from fos_rl.diagnose.records import read_step
from fos_rl.diagnose.rescore import explain_step, open_scene
from fos_rl.diagnose.weight_versions import weights_of_run
from fos_rl.generator.inspection import generator_decoder
from fos_rl.model.convert import QuantizedLinear, prepare_weights
from fos_rl.model.rope import RotaryTable
from fos_rl.run_folder.folder import RunFolder
from fos_rl.trainer.checkpoint import checkpoint_folder, save_checkpoint
from fos_rl.types import Prompt, Rollout, Sample, TrainBatch
from tests.support.pair import Pair, batch_of, random_prompts, tiny_pair

TOKENS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A synced pair of one model and recipe, and the config that describes it."""

    pair: Pair
    config: RunConfig


@contextmanager
def _setup(family: str, folder: Path, precision: dict[str, Any]) -> Iterator[Setup]:
    config = parse_config(
        {
            "model": {"path": str(folder), "precision": precision},
            "data": {"type": "arithmetic"},
            "rollout": {"group_size": 2, "max_new_tokens": 12, "max_prompt_tokens": 512},
            # Two micro-batches of several sequences.
            "trainer": {"lr": 1e-2, "microbatch_tokens": 600},
        }
    )
    with tiny_pair(
        family,
        folder,
        precision=config.model.precision,
        rollout=config.rollout,
        trainer=config.trainer,
    ) as pair:
        pair.sync()
        yield Setup(pair=pair, config=config)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Iterator[Setup]:
    precision = {"recipe": "bf16", "compute_dtype": "float32"}
    with _setup("qwen3", tmp_path_factory.mktemp("dense"), precision) as setup:
        yield setup


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Iterator[Setup]:
    precision = {"recipe": "nvfp4", "compute_dtype": "float32"}
    with _setup("qwen3", tmp_path_factory.mktemp("quantized"), precision) as setup:
        yield setup


def _prompts() -> list[Prompt]:
    return random_prompts(4)


def _scores(pair: Pair, batch: TrainBatch) -> list[np.ndarray]:
    with torch.no_grad():
        return [values.cpu().numpy() for values in pair.trainer._score(batch)]


def _sample(rollout: Rollout) -> Sample:
    return Sample(
        rollout=rollout,
        answer="",
        group=int(rollout.prompt_id),
        reward=0.0,
        advantage=0.0,
        zero_variance=False,
        masked=False,
    )


def _write(
    run: Path, config: RunConfig, step: int, rollouts: list[Rollout], scored: list[np.ndarray]
) -> None:
    folder = RunFolder(run) if run.exists() else RunFolder.create(run, config, {})
    samples = [_sample(rollout) for rollout in rollouts]
    folder.rollouts(step, samples)
    folder.trainer_log_probs(step, samples, scored)


def _explain(run: Path, step: int = 0) -> dict[str, Attribution]:
    with open_scene(load_config(run / "config.toml"), run) as scene:
        found = explain_step(scene, read_step(run, step), step, TOKENS)
    return {attribution.actor: attribution for attribution in found}


def _causes(found: dict[str, Attribution]) -> dict[str, str | None]:
    return {actor: attribution.cause for actor, attribution in found.items()}


NOISE = "kernel and batch noise"


def _rope_theta(setup: Setup, patch: pytest.MonkeyPatch) -> None:
    backbone = generator_decoder(setup.pair.generator).model
    other = setup.pair.trainer.spec.architecture.model_copy(update={"rope_theta": 1e6})
    patch.setattr(backbone, "rotary", RotaryTable(other))


def _bf16_head(setup: Setup, patch: pytest.MonkeyPatch) -> None:
    decoder = generator_decoder(setup.pair.generator)
    exact = decoder.logits
    patch.setattr(decoder, "logits", lambda hidden: exact(hidden).to(torch.bfloat16).float())


def _temperature(setup: Setup, patch: pytest.MonkeyPatch) -> None:
    generator = setup.pair.generator
    patch.setattr(generator, "rollout", generator.rollout.model_copy(update={"temperature": 0.7}))


def _nothing(setup: Setup, patch: pytest.MonkeyPatch) -> None:
    del setup, patch


@pytest.mark.parametrize(
    ("plant", "cause", "words"),
    [
        (_nothing, NOISE, "is within it"),
        (_temperature, "temperature", "temperature 0.7, not 1"),
        (_bf16_head, "head precision", "logits were rounded to bf16"),
        (_rope_theta, "rotary embedding", "rope_theta was 1e+06"),
    ],
    ids=["nothing", "temperature", "head precision", "rope"],
)
@pytest.mark.slow
def test_cause_in_the_generator(
    dense: Setup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[Setup, pytest.MonkeyPatch], None],
    cause: str,
    words: str,
) -> None:
    pair = dense.pair
    # Cached keys would be those of the case before.
    pair.sync()
    with monkeypatch.context() as patch:
        plant(dense, patch)
        rollouts = pair.generate(_prompts())
    pair.sync()
    _write(tmp_path / "run", dense.config, 0, rollouts, _scores(pair, batch_of(rollouts)))
    found = _explain(tmp_path / "run")
    assert _causes(found) == {"generator": cause, "trainer": NOISE}
    assert words in found["generator"].verdict


@pytest.mark.slow
def test_shifted_log_probs_and_a_missing_first_token(dense: Setup, tmp_path: Path) -> None:
    """Two faults of bookkeeping: what was recorded is not what was run."""
    pair = dense.pair
    pair.sync()
    rollouts = pair.generate(_prompts())
    scored = _scores(pair, batch_of(rollouts))
    shifted = [replace(r, log_probs=[*r.log_probs[1:], -1.0]) for r in rollouts]
    _write(tmp_path / "shifted", dense.config, 0, shifted, scored)
    found = _explain(tmp_path / "shifted")["generator"]
    # The last token of each response has no next one, so a little is left.
    assert found.best is not None
    assert (found.best.cause, found.cause) == ("shifted log-probs", "shifted log-probs")

    short = [replace(p, token_ids=p.token_ids[1:]) for p in _prompts()]
    full = {p.id: p.token_ids for p in _prompts()}
    sampled = pair.generate(short)
    recorded = [replace(r, prompt_ids=full[r.prompt_id]) for r in sampled]
    _write(tmp_path / "short", dense.config, 0, recorded, _scores(pair, batch_of(recorded)))
    found = _explain(tmp_path / "short")["generator"]
    assert found.cause == "prompt"
    assert "first token was missing" in found.verdict


@pytest.mark.slow
def test_packing_leak_and_compute_dtype_in_the_trainer(dense: Setup, tmp_path: Path) -> None:
    pair = dense.pair
    pair.sync()
    rollouts = pair.generate(_prompts())
    batch = batch_of(rollouts)
    sequences = pair.trainer._sequences
    honest = sequences.set
    sequences.set = lambda lengths: honest([sum(lengths)])  # type: ignore[method-assign]
    try:
        leaked = _scores(pair, batch)
    finally:
        del sequences.set
    _write(tmp_path / "leak", dense.config, 0, rollouts, leaked)
    found = _explain(tmp_path / "leak")
    assert _causes(found) == {"generator": NOISE, "trainer": "packing leak"}

    pair.trainer.decoder.to(torch.bfloat16)
    try:
        coarse = _scores(pair, batch)
    finally:
        pair.trainer.decoder.to(torch.float32)
        pair.trainer.masters.publish()
    _write(tmp_path / "dtype", dense.config, 0, rollouts, coarse)
    found = _explain(tmp_path / "dtype")
    assert _causes(found) == {"generator": NOISE, "trainer": "compute dtype"}


@pytest.mark.slow
def test_command_on_a_run_and_on_a_file(dense: Setup, tmp_path: Path, capsys) -> None:
    pair = dense.pair
    pair.sync()
    rollouts = pair.generate(_prompts())
    scored = _scores(pair, batch_of(rollouts))
    run = tmp_path / "run"
    _write(run, dense.config, 0, rollouts, scored)
    assert main(["rescore", str(run), "--set", "model.precision.recipe=nvfp4"]) == 0
    shown = capsys.readouterr().out
    assert "this arm - generator" in shown
    assert main(["rescore", str(run), "--steps", "3"]) == 2
    assert "no rollouts of step 3" in capsys.readouterr().err

    file = tmp_path / "rollouts.jsonl"
    rows = [
        {
            "prompt_token_ids": r.prompt_ids,
            "token_ids": r.response_ids,
            # Of another base, as a foreign toolkit may have it.
            "logprobs": [value / np.log(2) for value in r.log_probs],
        }
        for r in rollouts
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["rescore", str(file), "--config", str(run / "config.toml")]) == 0
    assert "verdict       units: the log-probs are base 2" in capsys.readouterr().out
    assert main(["rescore", str(file)]) == 2
    assert "give --config FILE" in capsys.readouterr().err
    file.write_text(json.dumps({**rows[0], "logprobs": [0.0]}) + "\n")
    assert main(["rescore", str(file), "--config", str(run / "config.toml")]) == 2
    assert "line 1: 1 log_probs for 12 response_ids" in capsys.readouterr().err


@pytest.mark.slow
def test_stale_weights_and_quantizer_input(quantized: Setup, tmp_path: Path) -> None:
    """One update whose weights never reached the generator; then fp32 masters in the quantizer."""
    pair, run = quantized.pair, tmp_path / "stale"
    pair.sync()
    first = pair.generate(_prompts())
    _write(run, quantized.config, 0, first, _scores(pair, batch_of(first)))
    pair.trainer.step(batch_of(first))
    (run / "checkpoints").mkdir()
    save_checkpoint(pair.trainer, checkpoint_folder(run, 1))
    stale = pair.generate(_prompts(), seed=1)
    _write(run, quantized.config, 1, stale, _scores(pair, batch_of(stale)))
    found = _explain(run, step=1)
    assert _causes(found) == {"generator": "stale weights", "trainer": NOISE}
    assert "all weights were those of the initial model" in found["generator"].verdict

    pair.sync()
    synced = pair.generate(_prompts(), seed=2)
    decoder = pair.trainer.decoder
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(pair.trainer.masters.weights[name])
    prepare_weights(decoder)
    unrounded = _scores(pair, batch_of(synced))
    pair.trainer.masters.publish()
    _write(run, quantized.config, 1, synced, unrounded)
    found = _explain(run, step=1)
    assert _causes(found) == {"generator": NOISE, "trainer": "quantizer input"}

    # Without the checkpoint only the initial model is left to try.
    (checkpoint_folder(run, 1) / "state.pt").unlink()
    _write(run, quantized.config, 1, stale, _scores(pair, batch_of(stale)))
    found = _explain(run, step=1)
    assert _causes(found) == {"generator": "stale weights"}
    assert "trainer.save_every" in found["generator"].untested[0].reason


def test_weights_of_an_exact_run_on_a_gpu_need_no_exact_cpu(
    dense: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(shapes: object) -> None:
        raise RuntimeError("this CPU's BLAS library treats the rows of a tile differently")

    monkeypatch.setattr("fos_rl.model.convert.check_fixed_tiles", refuse)
    spec = dense.pair.trainer.spec.model_copy(update={"consistency": "exact"})
    initial = weights_of_run(None, spec, Path(dense.config.model.path)).sources[0]()
    assert initial.keys() == dense.pair.trainer.masters.weights.keys()


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["trainer", "generator"])
def test_scale_scope(quantized: Setup, tmp_path: Path, actor: str) -> None:
    pair = quantized.pair
    pair.sync()
    decoders = {"trainer": pair.trainer.decoder, "generator": generator_decoder(pair.generator)}
    linears = [m for m in decoders[actor].modules() if isinstance(m, QuantizedLinear)]
    quantizer: Any = linears[0].quantizer
    version = pair.trainer.policy_version
    try:
        for linear in linears:
            linear.quantizer = replace(quantizer, row_scaled_activation=False)
        rollouts = pair.generate(_prompts())
        scored = _scores(pair, batch_of(rollouts))
    finally:
        for linear in linears:
            linear.quantizer = quantizer
    run = tmp_path / "run"
    _write(run, quantized.config, version, rollouts, scored)
    if version:
        (run / "checkpoints").mkdir()
        save_checkpoint(pair.trainer, checkpoint_folder(run, version))
    found = _explain(run, step=version)
    other = {"trainer": "generator", "generator": "trainer"}[actor]
    assert _causes(found) == {actor: "scale scope", other: NOISE}


@pytest.mark.slow
def test_router_in_bf16(tmp_path: Path) -> None:
    """Last in this file: closing its engine ends the others of this process."""
    precision = {"recipe": "bf16", "compute_dtype": "float32"}
    with _setup("qwen3_moe", tmp_path / "model", precision) as setup:
        _reroute(generator_decoder(setup.pair.generator), _bf16_router)
        rollouts = setup.pair.generate(_prompts())
        scored = _scores(setup.pair, batch_of(rollouts))
    _write(tmp_path / "run", setup.config, 0, rollouts, scored)
    assert _causes(_explain(tmp_path / "run")) == {"generator": "routing", "trainer": NOISE}
