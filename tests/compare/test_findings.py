import pytest

from fos_rl.compare import Limit, compare
from fos_rl.compare.checks import check_backward_modes
from fos_rl.compare.findings import backward_differences, baseline_differences, summary
from fos_rl.compare.load import Comparison, load
from tests.compare.conftest import QUANTIZED

P50 = "mismatch/log_prob_abs_diff/p50"
MEAN, FLOOR = "mismatch/log_prob_abs_diff/mean", "mismatch/floor_log_prob_abs_diff/mean"


def _study(write_run, folder, arms: dict[str, list[float]], **metrics: float) -> Comparison:
    """Arms with a late reward for each of seeds 0, 1, ..."""
    for arm, rewards in arms.items():
        for seed, reward in enumerate(rewards):
            write_run(folder / arm / f"seed_{seed}", [{"reward/mean": reward, **metrics}])
    return load([folder], next(iter(arms)))


def test_a_reward_is_resolved_or_not(tmp_path, write_run) -> None:
    arms = {"base": [0.5, 0.6, 0.7], "near": [0.55, 0.5, 0.75], "worse": [0.2, 0.31, 0.4]}
    words = summary(_study(write_run, tmp_path, arms), [])
    assert words[0].startswith("Reward: resolved for worse, lower than base's by -0.3 [")
    assert words[0].endswith("over 3 seeds.")
    assert words[1].startswith("Reward: not resolved against base for near; with 3 seeds")


def test_what_would_resolve_a_reward(tmp_path, write_run) -> None:
    arms = {"base": [0.5, 0.6, 0.7], "near": [0.51, 0.65, 0.73], "same": [0.5, 0.6, 0.7]}
    words = summary(_study(write_run, tmp_path, arms), [])
    (said,) = [line for line in words if line.startswith("Not resolved: ")]
    assert "it does not say that the arms are equal" in said
    # Differences 0.01, 0.05, 0.03: s / d = 0.02 / 0.03; 7.849 * 0.444 + 1.92 = 5.41.
    assert said.endswith("near 6.")
    lone = {"base": [0.5], "other": [0.6]}
    (said,) = [
        line
        for line in summary(_study(write_run, tmp_path / "lone", lone), [])
        if line.startswith("Not resolved: ")
    ]
    assert "cannot be derived from these" in said


def test_one_common_seed_orders_no_arms(tmp_path, write_run) -> None:
    """An interval over prompt groups can exclude 0, and says nothing about another seed."""
    for seed in range(2):
        write_run(tmp_path / f"base/seed_{seed}", [{"reward/mean": 0.1}], [[0.1, 0.1, 0.11]])
        write_run(tmp_path / f"two/seed_{seed}", [{"reward/mean": 0.1}], [[0.1, 0.1, 0.11]])
    write_run(tmp_path / "lone/seed_0", [{"reward/mean": 0.9}], [[0.9, 0.8, 0.9]])
    words = summary(load([tmp_path], "base"), [])
    assert words[0].startswith("Reward: resolved for lone, higher than base's by")
    assert "base and an arm have one in common (lone), so intervals are over prompt" in words[-1]


def test_medians_stand_against_the_floors_median(tmp_path, write_run) -> None:
    """One flipped code: the mean is a thousand times the floor, the median is at it."""
    floor_p50 = "mismatch/floor_log_prob_abs_diff/p50"
    metrics = {MEAN: 0.01, P50: 2e-7, FLOOR: 1e-6, floor_p50: 2e-7}
    words = summary(_study(write_run, tmp_path, {"base": [0.5]}, **metrics), [])
    assert "0.01, median 2e-07 (1e+04 times the noise floor, medians 1.0 times)" in words[1]


def test_limits_are_no_backward_checks(tmp_path, write_run, capsys) -> None:
    """A limit that is exceeded says nothing about the first steps of backward modes."""
    for mode, overrides in QUANTIZED.items():
        write_run(tmp_path / mode / "seed_0", [{"x/y": 1.0}], [[0.5]], overrides=overrides)
    assert len(compare([tmp_path], limits=[Limit(key="x/y", value=0.5)])) == 2
    assert "the first steps of 1 pairs of runs are identical" in capsys.readouterr().out


def test_verdicts(tmp_path, write_run) -> None:
    arms = {"base": [0.5, 0.6], "same": [0.5, 0.6], "other": [0.9, 0.1], "lone": [0.5]}
    found = {
        (d.arm.name, d.quantity.key): (d.verdict, d.show())
        for d in baseline_differences(_study(write_run, tmp_path, arms))
    }
    assert found["same", "reward/mean"] == ("identical", "+0 [+0, +0]")
    assert found["other", "reward/mean"][0] == "not resolved"
    assert found["other", "mismatch/kl_k3"] == ("too few pairs", "-")
    # One seed pairs rewards alone.
    assert [quantity for arm, quantity in found if arm == "lone"] == ["reward/mean"]


def test_no_common_seed(tmp_path, write_run) -> None:
    write_run(tmp_path / "a/seed_0", [{"reward/mean": 0.5}])
    write_run(tmp_path / "b/seed_1", [{"reward/mean": 0.5}])
    (found,) = baseline_differences(load([tmp_path]))
    assert found.verdict == "no common seed"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({MEAN: 0.03, FLOOR: 0.01}, "base 0.03 (3.0 times the noise floor)"),
        ({MEAN: 0.16, FLOOR: 1.8e-8}, "base 0.16 (9e+06 times the noise floor)"),
        ({MEAN: 0.01, FLOOR: 0.03}, "base 0.01 (within the noise floor of 0.03)"),
        ({MEAN: 0.03, FLOOR: 0.0}, "base 0.03 (the noise floor is below what fp32 shows)"),
        ({MEAN: 0.03, P50: 0.01, FLOOR: 0.01}, "base 0.03, median 0.01 (3.0 times the noise"),
        ({MEAN: 0.0}, "base 0 (equal to the last bit)"),
        ({MEAN: 0.03}, "base 0.03."),
        ({}, "base not measured."),
    ],
)
def test_mismatch_stands_against_the_floor(tmp_path, write_run, metrics, said) -> None:
    words = summary(_study(write_run, tmp_path, {"base": [0.5]}, **metrics), [])
    assert said in words[1]
    assert any(line.startswith("Noise floor: not recorded") for line in words) == (
        metrics.keys() == {MEAN} and metrics[MEAN] > 0
    )


def test_backward_modes_in_words(tmp_path, write_run) -> None:
    for number, (mode, overrides) in enumerate(QUANTIZED.items()):
        for seed in range(2):
            reward = {"reward/mean": 0.5 + 0.1 * number * seed}
            write_run(tmp_path / mode / f"seed_{seed}", [reward], overrides=overrides)
    comparison = load([tmp_path], "high_precision")
    checks = check_backward_modes(comparison.arms)
    words = summary(comparison, checks)
    assert (
        "Backward modes: the first steps of 2 pairs of runs are identical to the last bit, as they "
        "must be." in words
    )
    reward = next(d for d in backward_differences(comparison) if d.quantity.key == "reward/mean")
    assert reward.interval is not None
    assert reward.interval.mean == pytest.approx(0.05)
    assert f"dequantized against high_precision not resolved, {reward.show()}." in words[-1]
