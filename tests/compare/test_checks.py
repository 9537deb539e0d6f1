import json
import math
from pathlib import Path

import pytest

from fos_rl.compare.checks import (
    Limit,
    backward_pairs,
    check_backward_modes,
    check_limits,
    setting_differences,
)
from fos_rl.compare.load import Comparison, load
from tests.compare.conftest import QUANTIZED

STEP = {"mismatch/kl_k3": 0.01, "mismatch/floor_kl_k3": 0.001, "mismatch/over_floor": 10.0}


def _two_modes(write_run, folder: Path, **second) -> Comparison:
    for mode, overrides in QUANTIZED.items():
        given = {"metrics": [STEP, {}], "rewards": [[0.0, 1.0]], "overrides": overrides}
        if mode == "dequantized":
            given |= second
        write_run(folder / mode / "seed_0", **given)
    return load([folder], "high_precision")


def test_identical_first_steps_pass(tmp_path, write_run) -> None:
    # The floor is noise, later steps are not compared.
    other = {**STEP, "mismatch/floor_kl_k3": 0.002, "mismatch/over_floor": 5.0}
    runs = _two_modes(write_run, tmp_path, metrics=[other, {"mismatch/kl_k3": 7.0}])
    (check,) = check_backward_modes(runs.arms)
    assert check.passed
    assert check.detail == "dequantized/seed_0 and high_precision/seed_0: identical first step"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"log_prob": -1.0000001}, "generator log-probs differ in 4 of 4 responses"),
        (
            {"metrics": [{**STEP, "mismatch/kl_k3": 0.0100001}, {}]},
            "1 mismatch metrics differ, as mismatch/kl_k3: 0.0100001 != 0.01",
        ),
        ({"metrics": [{}, {}]}, "mismatch/kl_k3: None != 0.01"),
        ({"rewards": [[0.0, 1.0, 1.0]]}, "one has 6 responses, the other 4"),
    ],
    ids=["log-probs", "mismatch", "mismatch missing", "responses"],
)
def test_a_different_first_step_fails(tmp_path, write_run, second, said) -> None:
    (check,) = check_backward_modes(_two_modes(write_run, tmp_path, **second).arms)
    assert not check.passed
    assert said in check.detail


def test_a_different_token_fails(tmp_path, write_run) -> None:
    runs = _two_modes(write_run, tmp_path)
    file = runs.runs[1].path / "rollouts" / "000000.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[2]["response_ids"] = [3]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (check,) = check_backward_modes(runs.arms)
    assert "tokens differ in 1 of 4 responses" in check.detail


@pytest.mark.parametrize(
    ("more", "paired"),
    [
        ([], True),
        (["steps=9", "logging.tensorboard=true"], True),
        (["trainer.lr=0.5"], False),
        (["model.precision.weight_block=1x16"], False),
        (["trainer.backward_override=high_precision"], False),
    ],
)
def test_a_pair_differs_in_the_backward_mode_alone(tmp_path, write_run, more, paired) -> None:
    overrides = [*QUANTIZED["dequantized"], *more]
    arms = _two_modes(write_run, tmp_path, overrides=overrides).arms
    names = [(arm.name, reference.name) for arm, reference in backward_pairs(arms)]
    assert names == ([("dequantized", "high_precision")] if paired else [])


def test_bf16_has_no_backward_mode(tmp_path, write_run) -> None:
    paths = [write_run(tmp_path / name, [STEP]) for name in ("a", "b")]
    assert backward_pairs(load(paths).arms) == []


def test_limits(tmp_path, write_run) -> None:
    healthy = write_run(tmp_path / "healthy", [{"x/y": 1.0}, {"x/y": 2.0}, {}])
    bad = write_run(tmp_path / "bad", [{"x/y": 1.0}, {"x/y": 2.5}, {"x/y": 2.25}])
    broken = write_run(tmp_path / "broken", [{"x/y": 9.0}, {"x/y": math.nan}])
    checks = check_limits(load([healthy, bad, broken]).runs, [Limit.parse("x/y=2")])
    assert [check.passed for check in checks] == [True, False, False]
    assert checks[1].detail == "bad/seed_0, step 1: x/y = 2.5 is above 2 (2 of 3 steps are)"
    assert checks[2].detail.startswith("broken/seed_0, step 1: x/y = nan is above 2")


def test_a_limit_on_what_is_not_recorded_is_a_mistake(tmp_path, write_run) -> None:
    runs = load([write_run(tmp_path / "run", [STEP])]).runs
    with pytest.raises(ValueError, match=r"no such metric; did you mean mismatch/kl_k3\?"):
        check_limits(runs, [Limit.parse("mismatch/kl_k4=1")])
    # A share that is absent when nothing went wrong is 0.
    (check,) = check_limits(runs, [Limit.parse("mismatch/non_finite_frac=0")])
    assert check.passed


@pytest.mark.parametrize("text", ["mismatch/kl_k3", "=1", "mismatch/kl_k3=low", "a=nan", ""])
def test_a_limit_is_a_metric_and_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="write it as METRIC=NUMBER"):
        Limit.parse(text)


def test_setting_differences(tmp_path, write_run) -> None:
    arms = _two_modes(write_run, tmp_path).arms
    assert setting_differences(arms) == {
        "trainer.backward_override": ["high_precision", "dequantized"]
    }
