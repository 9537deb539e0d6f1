import json
import math

import pytest

from fos_rl.compare.load import load
from fos_rl.compare.series import (
    bin_means,
    difference_series,
    layer_errors,
    reward_series,
    step_series,
)


def test_seeds_have_a_mean_and_a_range(tmp_path, write_run) -> None:
    write_run(tmp_path / "a/seed_0", [{"x": 1.0}, {"x": 2.0}, {"x": 5.0}])
    write_run(tmp_path / "a/seed_1", [{"x": 3.0}, {}, {"x": math.nan}])
    (arm,) = load([tmp_path]).arms
    series = step_series(arm, "x")
    assert series.steps == [0, 1, 2]
    assert series.means == [2.0, 2.0, 5.0]
    assert series.lows == [1.0, 2.0, 5.0]
    assert series.highs == [3.0, 2.0, 5.0]


def test_one_seeds_reward_has_an_interval_over_prompts(tmp_path, write_run) -> None:
    write_run(tmp_path / "a/seed_0", [{"reward/mean": 0.5}], rewards=[[0.25, 0.5, 0.75]])
    write_run(tmp_path / "b/seed_0", [{"reward/mean": 0.5}], rewards=[[0.25, 0.25, 0.25]])
    first, second = load([tmp_path]).arms
    series = reward_series(first)
    assert series.means == [0.5]
    # t(2) s / sqrt(3); the bootstrap knows s to 1.1 %, times four.
    assert series.highs[0] - 0.5 == pytest.approx(4.3027 * 0.25 / math.sqrt(3), rel=0.045)
    paired = difference_series(first, second, "reward/mean")
    assert paired.means == [0.25]
    assert paired.lows[0] < 0 < paired.highs[0]


def test_differences_are_seed_by_seed(tmp_path, write_run) -> None:
    for seed, (ours, theirs) in enumerate([(1.0, 0.5), (9.0, 8.0)]):
        write_run(tmp_path / f"a/seed_{seed}", [{"x": ours}, {"x": ours}])
        write_run(tmp_path / f"b/seed_{seed}", [{"x": theirs}])
    first, second = load([tmp_path]).arms
    series = difference_series(first, second, "x")
    assert (series.steps, series.means) == ([0], [0.75])
    assert (series.lows, series.highs) == ([0.5], [1.0])


def test_bins_and_layers(tmp_path, write_run) -> None:
    steps = [{"m/by/0": 1.0, "m/by/9": 4.0, "m/by/x": 7.0, "m/bye/1": 7.0}, {"m/by/0": 3.0}]
    for seed, errors in enumerate(({"b": 0.1, "a": 0.2}, {"b": 0.3})):
        folder = write_run(tmp_path / f"a/seed_{seed}", steps)
        (folder / "per_layer.json").write_text(json.dumps(errors))
    (arm,) = load([tmp_path]).arms
    assert bin_means(arm, "m/by/") == {0: 2.0, 9: 4.0}
    assert layer_errors(arm) == {"b": pytest.approx(0.2), "a": 0.2}
