import itertools
import math

import numpy as np
import pytest

from fos_rl.compare.load import load
from fos_rl.compare.quantities import LATER_K3, REWARD
from fos_rl.compare.statistics import (
    arm_interval,
    bootstrap_interval,
    paired_difference,
    t_quantile,
)


@pytest.mark.parametrize("degrees", [1, 2, 3, 9, 10, 15, 30, 200])
def test_t_quantile_leaves_2_5_percent_above_it(degrees: int) -> None:
    # Student's density, integrated from 0 by the trapezoid rule.
    x = np.linspace(0, t_quantile(degrees), 200_001)
    scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    density = math.exp(scale) / math.sqrt(degrees * math.pi)
    density = density * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    # 1e-3 of the quantile times a density of at most 0.06 there.
    assert 0.5 + np.trapezoid(density, x) == pytest.approx(0.975, abs=6e-5)


def test_standard_error_equals_that_of_all_resamples() -> None:
    values = [0.1, 0.4, 0.9]
    means = [np.mean(picked) for picked in itertools.product(values, repeat=3)]
    error = np.std(means) * math.sqrt(3 / 2)
    found = bootstrap_interval(values, "seeds")
    assert found is not None
    assert found.mean == pytest.approx(1.4 / 3)
    # 4000 resamples know a standard deviation to 1 / sqrt(8000) = 1.1 %; four of those.
    assert found.half_width == pytest.approx(t_quantile(2) * error, rel=0.045)
    # The factor makes it the textbook s / sqrt(n).
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(3))


@pytest.mark.parametrize(("count", "kind"), [(3, "normal"), (12, "normal"), (16, "groups")])
def test_intervals_cover_the_truth_as_often_as_they_say(count: int, kind: str) -> None:
    rng = np.random.default_rng(5)
    trials = 500

    def draw() -> np.ndarray:
        # Seeds' means, or mean rewards of groups of eight responses that are right with p = 0.4.
        return rng.normal(0.4, 0.1, count) if kind == "normal" else rng.binomial(8, 0.4, count) / 8

    covered = 0
    for _ in range(trials):
        interval = bootstrap_interval(list(draw()), "seeds")
        assert interval is not None
        covered += interval.low <= 0.4 <= interval.high
    # Four standard errors of a share of 0.95 in 500 trials: 0.039. The percentile bootstrap of
    # three values covers 0.75.
    assert covered / trials == pytest.approx(0.95, abs=0.039)


def test_resolved_means_that_zero_is_outside() -> None:
    clear, unclear = (
        bootstrap_interval(values, "seeds") for values in ([0.5, 0.6, 0.55], [0.5, -0.6, 0.55])
    )
    assert clear is not None
    assert clear.resolved
    assert clear.low > 0
    assert unclear is not None
    assert not unclear.resolved
    assert unclear.low < 0 < unclear.high


def test_equal_values_resolve_nothing() -> None:
    interval = bootstrap_interval([0.1, 0.1, 0.1], "seeds")
    assert interval is not None
    assert interval.half_width == 0
    assert not interval.resolved


@pytest.mark.parametrize("values", [[], [0.3], [0.3, math.nan], [0.3, math.inf]])
def test_too_few_or_broken_values_give_no_interval(values: list[float]) -> None:
    assert bootstrap_interval(values, "seeds") is None


def test_seeds_are_paired(tmp_path, write_run) -> None:
    # The seeds differ by far more than the arms; only pairing sees 0.1.
    for seed, level in enumerate((0.1, 0.5, 0.8)):
        noise = 0.001 * seed
        write_run(tmp_path / f"a/seed_{seed}", [{"reward/mean": level}])
        write_run(tmp_path / f"b/seed_{seed}", [{"reward/mean": level + 0.1 + noise}])
    write_run(tmp_path / "b/seed_7", [{"reward/mean": 5.0}])
    first, second = load([tmp_path]).arms
    found = paired_difference(second, first, REWARD)
    assert found is not None
    assert (found.mean, found.count, found.unit) == (pytest.approx(0.101), 3, "seeds")
    assert found.resolved
    unpaired = arm_interval(first, REWARD)
    assert unpaired is not None
    assert unpaired.half_width > 0.5
    assert paired_difference(second, first, LATER_K3) is None


def test_one_seed_pairs_prompts_of_the_late_steps(tmp_path, write_run) -> None:
    steps = [{"reward/mean": 0.5}] * 4
    # The last quarter of four steps is the fourth.
    ours = [[9, 9, 9]] * 3 + [[1.0, 0.5, 0.75]]
    theirs = [[0, 0, 0]] * 3 + [[0.5, 0.25, 0.0]]
    write_run(tmp_path / "a/seed_0", steps, rewards=ours)
    write_run(tmp_path / "b/seed_0", steps, rewards=theirs)
    first, second = load([tmp_path]).arms
    found = paired_difference(first, second, REWARD)
    assert found is not None
    assert (found.mean, found.count, found.unit) == (0.5, 3, "prompt groups")
    alone = arm_interval(first, REWARD)
    assert alone is not None
    assert (alone.mean, alone.count) == (0.75, 3)
    # Of other metrics one seed is one value.
    assert paired_difference(first, second, LATER_K3) is None


def test_only_common_steps_are_paired(tmp_path, write_run) -> None:
    """A run that is still going on is compared up to where it is."""
    rising = [{"reward/mean": float(step)} for step in range(8)]
    for seed in range(2):
        write_run(tmp_path / f"a/seed_{seed}", rising)
        write_run(tmp_path / f"b/seed_{seed}", rising[:4])
    first, second = load([tmp_path]).arms
    found = paired_difference(first, second, REWARD)
    assert found is not None
    assert found.mean == 0
