"""What makes runs not comparable is said, and nothing is said of those that are."""

import json
import math
from pathlib import Path

import pytest

from fos_rl.compare.cautions import cautions
from fos_rl.compare.load import load
from fos_rl.compare.table import arm_grid

STEPS = [{"reward/mean": 0.5, "trainer/grad_norm": 1.0}] * 4


@pytest.fixture
def pair(tmp_path: Path, write_run) -> Path:
    """Two comparable arms of two seeds."""
    for arm, lr in (("a", 1e-4), ("b", 2e-4)):
        for seed in range(2):
            write_run(
                tmp_path / arm / f"seed_{seed}",
                STEPS,
                rewards=[[0.0, 1.0]] * 4,
                overrides=[f"trainer.lr={lr}"],
            )
    return tmp_path


def _cautions(folder: Path) -> list[str]:
    return cautions(load([folder], "a"))


def test_comparable_arms_need_no_word(pair: Path) -> None:
    assert _cautions(pair) == []


def test_a_short_run_and_arms_of_other_lengths(pair: Path, write_run) -> None:
    write_run(pair / "b/seed_2", STEPS[:1])
    write_run(pair / "c/seed_0", STEPS[:2])
    short, lengths, *_ = _cautions(pair)
    assert short.startswith("Left out: b/seed_2 (1 steps), shorter than b's other runs")
    assert "(a 4, b 4, c 2)" in lengths


def test_seeds_of_other_settings(pair: Path, write_run) -> None:
    write_run(pair / "b/seed_2", STEPS, overrides=["trainer.lr=1", "logging.tensorboard=true"])
    (said,) = _cautions(pair)
    assert said == "Mixed: the runs of b differ in trainer.lr; their mean is of no single setting."


def test_other_prompts_under_one_seed(pair: Path, write_run) -> None:
    for seed in range(2):
        rewards = [[0.0, 1.0, 1.0]] * 4
        write_run(pair / f"c/seed_{seed}", STEPS, rewards=rewards)
    (said,) = _cautions(pair)
    assert said.startswith("Prompts: c/seed_0 and a/seed_0 at step 0 saw different ones (2 of 2")


def test_other_clip_rules(pair: Path, write_run) -> None:
    for seed in range(2):
        overrides = ["algorithm.type=cispo"]
        write_run(pair / f"c/seed_{seed}", STEPS, rewards=[[0.0, 1.0]] * 4, overrides=overrides)
    (said,) = _cautions(pair)
    assert said.startswith("Clipping: the arms clip by different rules")


def test_other_devices(pair: Path) -> None:
    for arm, device in (("a", "H200"), ("b", "CPU")):
        file = pair / arm / "seed_0" / "environment.json"
        file.write_text(json.dumps({"device": device}))
    (said,) = _cautions(pair)
    assert said.startswith("Devices: the runs were made on different ones (CPU, H200)")


def test_metrics_that_are_not_finite(pair: Path, write_run) -> None:
    broken = [*STEPS[:2], {**STEPS[0], "trainer/grad_norm": math.nan}, STEPS[3]]
    write_run(pair / "b/seed_2", broken, rewards=[[0.0, 1.0]] * 4, overrides=["trainer.lr=2e-4"])
    (said,) = _cautions(pair)
    assert said.startswith(
        "Not finite: b/seed_2 has trainer/grad_norm as NaN or infinity at step 2"
    )


def test_an_interval_without_width_has_its_reason(tmp_path: Path, write_run) -> None:
    for seed in range(3):
        write_run(tmp_path / f"equal/seed_{seed}", STEPS)
    write_run(tmp_path / "lone/seed_0", STEPS)
    write_run(tmp_path / "groups/seed_0", STEPS, rewards=[[0.5, 0.5]] * 4)
    comparison = load([tmp_path], "equal")
    (row,) = [row for row in arm_grid(comparison).rows if row[0] == "reward, late"]
    cells = dict(zip([arm.name for arm in comparison.arms], row[1:], strict=True))
    assert cells["equal"] == "0.500 (0.500) [0.500, 0.500], 3 equal seeds"
    assert cells["lone"] == "0.500, no interval (one seed)"
    assert cells["groups"] == "0.500 [0.500, 0.500], 2 equal prompt groups"
