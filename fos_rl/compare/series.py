"""What a plot draws of an arm: a metric step by step, bin by bin or layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fos_rl.compare.load import Arm, Run
from fos_rl.compare.quantities import value_of
from fos_rl.compare.statistics import Interval, bootstrap_interval, paired_runs
from fos_rl.files.reading import read_json_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A mean with a range, step by step."""

    steps: list[int]
    means: list[float]
    lows: list[float]
    highs: list[float]


def step_series(arm: Arm, key: str) -> Series:
    """A metric's mean over the seeds, with the smallest and the largest seed."""
    return _over_runs([_by_step(run, key) for run in arm.whole])


def reward_series(arm: Arm) -> Series:
    """The reward; of an arm with one seed, with the bootstrap interval over prompt groups."""
    if len(arm.whole) > 1:
        return step_series(arm, "reward/mean")
    (run,) = arm.whole
    groups = {step: list(run.group_rewards(step).values()) for step in _steps(run)}
    if not all(groups.values()):
        return step_series(arm, "reward/mean")
    return _over_groups(groups)


def difference_series(arm: Arm, other: Arm, key: str) -> Series:
    """A metric of `arm` minus `other`'s, seed by seed; of one seed's reward, prompt by prompt."""
    pairs = paired_runs(arm, other)
    if len(pairs) == 1 and key == "reward/mean":
        ours, theirs = pairs[0]
        groups = {
            step: _group_differences(ours, theirs, step)
            for step in _steps(ours)
            if step in _steps(theirs)
        }
        if groups and all(groups.values()):
            return _over_groups(groups)
    differences = []
    for ours, theirs in pairs:
        left, right = _by_step(ours, key), _by_step(theirs, key)
        differences.append({step: left[step] - right[step] for step in left if step in right})
    return _over_runs(differences)


def bin_means(arm: Arm, start: str) -> dict[int, float]:
    """Mean over steps and seeds of the metrics that are `start` and a number, by that number."""
    found: dict[int, list[float]] = {}
    for run in arm.whole:
        for metrics in run.steps:
            for key, value in metrics.items():
                if key.startswith(start) and key.removeprefix(start).isdigit():
                    found.setdefault(int(key.removeprefix(start)), []).append(value)
    return {number: float(np.mean(found[number])) for number in sorted(found)}


def layer_errors(arm: Arm) -> dict[str, float]:
    """Mean over the seeds of per_layer.json, {"layer name": relative error}, in its order."""
    found: dict[str, list[float]] = {}
    for run in arm.runs:
        file = run.path / "per_layer.json"
        if file.is_file():
            for name, error in read_json_object(file, "remove it, or restore it").items():
                found.setdefault(name, []).append(error)
    return {name: float(np.mean(errors)) for name, errors in found.items()}


def _steps(run: Run) -> list[int]:
    return [int(metrics["step"]) for metrics in run.steps]


def _by_step(run: Run, key: str) -> dict[int, float]:
    values = {int(metrics["step"]): value_of(metrics, key) for metrics in run.steps}
    return {step: v for step, v in values.items() if v is not None and np.isfinite(v)}


def _group_differences(ours: Run, theirs: Run, step: int) -> list[float]:
    left, right = ours.group_rewards(step), theirs.group_rewards(step)
    return [left[prompt] - right[prompt] for prompt in left if prompt in right]


def _over_runs(runs: Sequence[dict[int, float]]) -> Series:
    steps = sorted({step for values in runs for step in values})
    columns = [[values[step] for values in runs if step in values] for step in steps]
    return Series(
        steps=steps,
        means=[float(np.mean(column)) for column in columns],
        lows=[min(column) for column in columns],
        highs=[max(column) for column in columns],
    )


def _over_groups(groups: dict[int, list[float]]) -> Series:
    found: dict[int, Interval] = {
        step: interval
        for step, values in groups.items()
        if (interval := bootstrap_interval(values, "prompt groups")) is not None
    }
    return Series(
        steps=list(found),
        means=[interval.mean for interval in found.values()],
        lows=[interval.low for interval in found.values()],
        highs=[interval.high for interval in found.values()],
    )
