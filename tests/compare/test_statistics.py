import itertools
import math

import numpy as np
import pytest

from fos_rl.compare.load import load
from fos_rl.compare.quantities import GRAD_NORM, LATER_K3, REWARD
from fos_rl.compare.statistics import (
    Interval,
    arm_interval,
    bootstrap_interval,
    paired_difference,
    seeds_to_resolve,
    show_interval,
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


def _difference_of(effect: float, count: int = 3) -> Interval:
    """Paired seeds whose mean difference is `effect` standard deviations."""
    half_width = t_quantile(count - 1) * 1.0 / math.sqrt(count)
    return Interval(mean=effect, half_width=half_width, count=count, unit="seeds")


@pytest.mark.parametrize(
    ("effect", "pairs"), [(0.2, 199), (0.5, 34), (-0.5, 34), (0.8, 15), (1.0, 10)]
)
def test_seeds_to_resolve_are_those_of_power_tables(effect: float, pairs: int) -> None:
    """Pairs for a two-sided paired t test, 5 %, power 80 %, as G*Power 3.1 gives them."""
    assert seeds_to_resolve(_difference_of(effect)) == pairs


def test_seeds_to_resolve_have_the_power_they_say() -> None:
    """By simulation: t tests of that many differences of spread 1 and mean 0.7."""
    seeds = seeds_to_resolve(_difference_of(0.7))
    assert seeds is not None
    draws = np.random.default_rng(0).normal(0.7, 1.0, (4000, seeds))
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(seeds))
    # Four standard errors of a share of 0.8 in 4000 trials are 0.025; a seed more or less is 0.02.
    assert (np.abs(t) > t_quantile(seeds - 1)).mean() == pytest.approx(0.8, abs=0.045)


def test_no_spread_no_difference_or_no_seeds_tell_no_number() -> None:
    assert seeds_to_resolve(Interval(mean=1.0, half_width=0.0, count=3, unit="seeds")) is None
    assert seeds_to_resolve(Interval(mean=0.0, half_width=0.1, count=3, unit="seeds")) is None
    groups = Interval(mean=0.1, half_width=0.2, count=64, unit="prompt groups")
    assert seeds_to_resolve(groups) is None


@pytest.mark.parametrize(
    ("mean", "half_width", "shown"),
    [
        (0.5, 0.1, "[0.400, 0.600]"),
        # The ends would both read 0.022.
        (0.0222, 0.0002, "[0.0220, 0.0224]"),
        (1e-6, 1e-7, "[0.0000009, 0.0000011]"),
        (0.5, 0.0, "[0.500, 0.500]"),
    ],
)
def test_an_intervals_ends_read_alike_only_where_they_are(mean, half_width, shown) -> None:
    interval = Interval(mean=mean, half_width=half_width, count=3, unit="seeds")
    assert show_interval(interval, "{:.3f}") == shown
    assert interval.reason == ("3 equal seeds" if half_width == 0 else None)


def test_a_metric_is_paired_where_both_runs_have_it(tmp_path, write_run) -> None:
    """The first arm's last two steps trained on nothing: their pair is no difference of means."""
    full = [{"trainer/grad_norm": float(step)} for step in range(4)]
    for seed in range(2):
        write_run(tmp_path / f"a/seed_{seed}", [*full[:2], {}, {}])
        write_run(tmp_path / f"b/seed_{seed}", full)
    first, second = load([tmp_path]).arms
    found = paired_difference(first, second, GRAD_NORM)
    assert found is not None
    # (0 + 1) / 2 - (0 + 1) / 2, and not 0.5 - 1.5.
    assert found.mean == 0


def test_a_shorter_run_is_in_no_mean(tmp_path, write_run) -> None:
    """Its late steps are early ones of the others."""
    rising = [{"reward/mean": float(step)} for step in range(8)]
    for seed, steps in enumerate((8, 8, 2)):
        write_run(tmp_path / f"a/seed_{seed}", rising[:steps])
        write_run(tmp_path / f"b/seed_{seed}", rising)
    first, second = load([tmp_path]).arms
    # Mean of steps 6 and 7; with the short run's step 1 it would be 4.7.
    assert REWARD.of_arm(first) == 6.5
    found = paired_difference(first, second, REWARD)
    assert found is not None
    assert (found.mean, found.count) == (0.0, 2)
