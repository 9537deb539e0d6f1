import math

import pytest

from fos_rl.compare.load import load
from fos_rl.compare.quantities import FIRST_FLOOR, Quantity, late_steps, recorded_quantities

# The first step trained on nothing, so it measured no k3.
STEPS = [
    {"reward/mean": 0.0},
    {"reward/mean": 0.1, "mismatch/kl_k3": 1.0},
    {"reward/mean": 0.2, "mismatch/kl_k3": 2.0},
    {"reward/mean": 0.4, "mismatch/kl_k3": 6.0},
    {"reward/mean": 0.8},
]


def _quantity(key: str, window, reduce="mean") -> Quantity:
    return Quantity(section="s", label="l", key=key, window=window, reduce=reduce)


@pytest.mark.parametrize(
    ("key", "window", "reduce", "value"),
    [
        ("reward/mean", "first", "mean", 0.0),
        ("reward/mean", "later", "mean", 1.5 / 4),
        ("reward/mean", "late", "mean", 0.8),
        ("reward/mean", "all", "mean", 0.3),
        ("reward/mean", "all", "max", 0.8),
        ("mismatch/kl_k3", "first", "mean", 1.0),
        ("mismatch/kl_k3", "later", "mean", 4.0),
        ("mismatch/kl_k3", "later", "max", 6.0),
        ("mismatch/kl_k3", "late", "mean", None),
        ("loss/clip_frac", "all", "max", None),
    ],
)
def test_windows(tmp_path, write_run, key, window, reduce, value) -> None:
    (run,) = load([write_run(tmp_path / "run", STEPS)]).runs
    found = _quantity(key, window, reduce).of(run)
    assert found is None if value is None else found == pytest.approx(value)


def test_the_first_step_of_a_mismatch_is_one_for_all_its_figures(tmp_path, write_run) -> None:
    """The ratio is not recorded over a floor of 0: that of a later step is not the first step's."""
    mean = "mismatch/log_prob_abs_diff/mean"
    steps = [{mean: 0.5}, {mean: 0.5, "mismatch/over_floor": 8.0}]
    (run,) = load([write_run(tmp_path / "run", steps)]).runs
    assert _quantity("mismatch/over_floor", "first").of(run) is None
    assert _quantity("mismatch/over_floor", "later").of(run) == 8.0


def test_late_is_the_last_quarter_and_never_empty() -> None:
    steps = [{"step": float(n)} for n in range(12)]
    assert [m["step"] for m in late_steps(steps)] == [9, 10, 11]
    assert late_steps(steps[:1]) == steps[:1]


def test_seeds_are_averaged_and_maxima_kept(tmp_path, write_run) -> None:
    for seed, value in enumerate((1.0, 3.0)):
        write_run(tmp_path / f"a/seed_{seed}", [{"trainer/grad_norm": value}])
    (arm,) = load([tmp_path / "a"]).arms
    assert _quantity("trainer/grad_norm", "all").of_arm(arm) == 2.0
    assert _quantity("trainer/grad_norm", "all", "max").of_arm(arm) == 3.0


def test_layers_are_averaged_and_nan_is_not_hidden(tmp_path, write_run) -> None:
    key = "mismatch/routing_flip_frac"
    steps = [
        {f"{key}/layer_0": 0.1, f"{key}/layer_1": 0.3, "a/b": 1.0},
        {f"{key}/layer_0": 0.4, f"{key}/layer_1": 0.4, "a/b": math.nan},
    ]
    (run,) = load([write_run(tmp_path / "run", steps)]).runs
    assert _quantity(f"{key}/*", "all").of(run) == pytest.approx(0.3)
    shown = _quantity("a/b", "all")
    assert shown.show(shown.of(run)) == "nan"


@pytest.mark.parametrize("key", ["eval/gsm8k/avg@8", "correction/truncated_frac"])
def test_rows_of_some_runs_appear_when_recorded(tmp_path, write_run, key) -> None:
    with_row = load([write_run(tmp_path / "a", [{key: 0.4}])]).runs
    without = load([write_run(tmp_path / "b", [{"reward/mean": 1.0}])]).runs
    (row,) = [q for q in recorded_quantities(with_row) if q.key == key]
    assert row.of(with_row[0]) == 0.4
    assert key not in {q.key for q in recorded_quantities(without)}


def test_a_step_that_skipped_no_update_counts(tmp_path, write_run) -> None:
    """The metric is absent where there were none: two in one of four steps are 0.5 per step."""
    steps = [{"trainer/grad_norm": 1.0}] * 3 + [{"trainer/skipped_updates": 2.0}]
    (run,) = load([write_run(tmp_path / "run", steps)]).runs
    assert _quantity("trainer/skipped_updates", "all").of(run) == 0.5
    (healthy,) = load([write_run(tmp_path / "healthy", steps[:3])]).runs
    assert _quantity("trainer/skipped_updates", "all").of(healthy) is None


def test_one_odd_step_moves_the_mean_and_not_the_median(tmp_path, write_run) -> None:
    """As one flipped code does: 0.5 in one of ten steps that otherwise have 1e-6."""
    steps = [{"x/y": 0.5 if step == 4 else 1e-6} for step in range(10)]
    for seed in range(2):
        write_run(tmp_path / f"a/seed_{seed}", steps)
    (arm,) = load([tmp_path / "a"]).arms
    shown = _quantity("x/y", "all")
    assert shown.of_arm(arm) == pytest.approx((0.5 + 9e-6) / 10)
    assert shown.median(arm.whole) == 1e-6
    assert _quantity("x/y", "all", "max").median(arm.whole) is None


def test_a_floor_of_0_is_below_what_fp32_shows() -> None:
    assert FIRST_FLOOR.show(0.0) == "below what fp32 shows"
    assert FIRST_FLOOR.show(1e-9) == "1.00e-09"
    assert FIRST_FLOOR.show(None) == "-"
