"""Flipped codes are told from settings: real flips by a change of 1e-7, and planted differences."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fos_rl.cli import main
from fos_rl.config import RunConfig, parse_config
from fos_rl.diagnose.attribution import Attribution
from fos_rl.diagnose.flips import Differences, find_flips, is_noise
from fos_rl.diagnose.records import Record
from fos_rl.diagnose.rescore import Scene, explain_step, open_scene
from fos_rl.diagnose.scorer import run_forward
from fos_rl.model.decoder import Decoder
from fos_rl.model.tiny import write_tiny_model
from fos_rl.run_folder.folder import resolved_toml

RESPONSES, TOKENS = 32, 24


def _config(folder: Path, recipe: str, family: str = "qwen3") -> RunConfig:
    precision = {"recipe": recipe, "compute_dtype": "float32"}
    return parse_config(
        {
            "model": {
                "path": str(write_tiny_model(family, folder, seed=0)),
                "precision": precision,
            },
            "data": {"type": "arithmetic"},
            "trainer": {"microbatch_tokens": 4096},
        }
    )


def _records() -> list[Record]:
    rng = np.random.default_rng(0)
    return [
        Record(
            prompt_ids=rng.integers(0, 256, 10 + number % 5).tolist(),
            response_ids=rng.integers(0, 256, TOKENS).tolist(),
            generator=np.zeros(TOKENS),
            trainer=None,
            policy_version=0,
        )
        for number in range(RESPONSES)
    ]


def _nudge(decoder: Decoder) -> None:
    """A change of the embeddings in their last bit, as another kernel makes one."""
    generator = torch.Generator().manual_seed(1)
    decoder.model.embed_tokens.register_forward_hook(
        lambda module, inputs, out: out * (1 + 1e-7 * torch.randn(out.shape, generator=generator))
    )


def _with(records: list[Record], log_probs: np.ndarray) -> list[Record]:
    rows = log_probs.reshape(RESPONSES, TOKENS)
    return [replace(r, generator=row) for r, row in zip(records, rows, strict=True)]


def _explained(scene: Scene, records: list[Record]) -> Attribution:
    (found,) = explain_step(scene, records, 0, 100_000)
    return found


@pytest.fixture(scope="module")
def four_over_six(tmp_path_factory) -> RunConfig:
    return _config(tmp_path_factory.mktemp("model"), "nvfp4_four_over_six")


def _write(path: Path, records: list[Record]) -> None:
    rows = [
        {
            "prompt_ids": r.prompt_ids,
            "response_ids": r.response_ids,
            "log_probs": r.generator.tolist(),
        }
        for r in records
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_real_flips_are_named_and_exit_0(
    four_over_six: RunConfig, tmp_path: Path, capsys, monkeypatch
) -> None:
    with open_scene(four_over_six, None) as scene:
        forward = scene.forward(_records(), 0)
        arm = run_forward(forward).log_probs.reshape(RESPONSES, TOKENS)
        other = run_forward(forward.but(edit_decoder=_nudge)).log_probs.reshape(RESPONSES, TOKENS)
    off = np.flatnonzero(np.abs(other - arm).max(1) > 1e-4)
    assert 0 < off.size < 8
    # One of them alone, all else as the other kernel has it.
    one = np.where(np.isin(np.arange(RESPONSES), off[1:])[:, None], arm, other)
    (tmp_path / "run.toml").write_text(resolved_toml(four_over_six))
    command = ["rescore", str(tmp_path / "rows.jsonl"), "--config", str(tmp_path / "run.toml")]
    command += ["--tokens", "100000"]
    for log_probs, count in ((one, 1), (other, off.size)):
        _write(tmp_path / "rows.jsonl", _with(_records(), log_probs.ravel()))
        assert main(command) == 0
        shown = capsys.readouterr().out
        assert f"flipped code: {count} of 32 responses, median at the noise" in shown
        assert f"response {off[0]} from its token" in shown
        # Every hypothesis has had its try at the first; once is enough.
        monkeypatch.setattr("fos_rl.diagnose.attribution._hypotheses", lambda *_: iter(()))

    # In every response it is no flip.
    shift = 0.01 * np.random.default_rng(0).standard_normal(arm.shape)
    _write(tmp_path / "rows.jsonl", _with(_records(), (arm + shift).ravel()))
    assert main(command) == 1
    assert "not explained" in capsys.readouterr().out


Plant = Callable[[np.ndarray], None]


def _late_shift(rows: np.ndarray) -> None:
    rows[7, 10:] += 0.05


def _one_token(rows: np.ndarray) -> None:
    rows[31, 23] -= 0.01


def _far_too_much(rows: np.ndarray) -> None:
    rows[7] -= 20.0


def _most_responses(rows: np.ndarray) -> None:
    rows[:20, 5:] += 0.05


def _others_are_off(rows: np.ndarray) -> None:
    rows += 1e-5 * np.random.default_rng(0).standard_normal(rows.shape)
    rows[7, 10:] += 0.05


@pytest.mark.parametrize(
    ("plant", "cause"),
    [
        (_late_shift, "flipped code"),
        (_one_token, "flipped code"),
        (_far_too_much, None),
        (_most_responses, None),
        (_others_are_off, None),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_flips_do_and_what_they_do_not(
    four_over_six: RunConfig, plant: Plant, cause: str | None, monkeypatch
) -> None:
    # The other hypotheses are tested elsewhere.
    monkeypatch.setattr("fos_rl.diagnose.attribution._hypotheses", lambda *_: iter(()))
    with open_scene(four_over_six, None) as scene:
        rows = run_forward(scene.forward(_records(), 0)).log_probs.reshape(RESPONSES, TOKENS)
        plant(rows)
        assert _explained(scene, _with(_records(), rows.ravel())).cause == cause


@pytest.mark.parametrize(
    ("recipe", "family", "consistency", "cause"),
    [
        ("bf16", "qwen3", "fast", None),
        ("bf16", "qwen3_moe", "fast", "flipped expert choice"),
        ("mxfp8", "llama", "fast", "flipped code"),
        ("nvfp4", "qwen3_moe", "fast", "flipped code or expert choice"),
        ("nvfp4_four_over_six", "qwen3", "exact", None),
    ],
)
def test_a_flip_is_named_only_where_something_can_flip(
    tmp_path: Path, recipe: str, family: str, consistency: str, cause: str | None, monkeypatch
) -> None:
    monkeypatch.setattr("fos_rl.diagnose.attribution._hypotheses", lambda *_: iter(()))
    config = _config(tmp_path / "model", recipe, family)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"consistency": consistency})}
    )
    with open_scene(config, None) as scene:
        rows = run_forward(scene.forward(_records(), 0)).log_probs.reshape(RESPONSES, TOKENS)
        rows[3, 12:] += 0.003
        assert _explained(scene, _with(_records(), rows.ravel())).cause == cause


def test_a_flip_in_the_measured_noise_hides_nothing() -> None:
    quiet = [np.full(4, 1e-7)] * 9
    noise = Differences(responses=[*quiet, np.full(4, 0.1)])
    # Every response is off by 1e-3, a tenth of the noise's mean of 1e-2.
    everywhere = Differences(responses=[np.full(4, 1e-3)] * 10)
    assert noise.mean == pytest.approx(0.01, rel=1e-4)
    assert everywhere.mean < noise.mean
    assert not is_noise(everywhere, noise)
    assert find_flips(everywhere, noise, "flipped code", lambda: 1.0) is None
    assert is_noise(Differences(responses=quiet), noise)


def test_jumps_by_hand() -> None:
    noise = Differences(responses=[np.full(3, 1e-6)] * 4)
    jumped = np.array([1e-6, 0.2, 0.4])
    found = Differences(responses=[np.full(3, 2e-6), jumped, np.full(3, np.nan), np.full(3, 1e-6)])
    # Means 2e-6, 0.2, none, 1e-6: the median is 2e-6.
    assert found.typical == pytest.approx(2e-6)
    flips = find_flips(found, noise, "flipped code", lambda: 0.2)
    assert flips is not None
    assert flips.others == pytest.approx(1.5e-6)
    assert flips.verdict.startswith("flipped code: 1 of 4 responses, median at the noise (response")
    assert "1 from its token 1 on, mean |d| 3.00e-01" in flips.verdict
    # 0.3 is more than three times what flips would do.
    assert find_flips(found, noise, "flipped code", lambda: 0.09) is None
