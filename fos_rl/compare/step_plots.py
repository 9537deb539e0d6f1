"""Plots against the step: what training does to each arm."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from fos_rl.compare.checks import backward_pairs
from fos_rl.compare.drawing import (
    INK,
    Plot,
    Scale,
    Sketch,
    draw,
    fit_lines,
    log_axis,
    whole_steps,
)
from fos_rl.compare.load import Arm
from fos_rl.compare.series import Series, difference_series, reward_series, step_series

_BAND = "Band: smallest to largest seed."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetric:
    """A metric that gets a plot of its own.

    `floor` is the key of its noise floor; `beside` is drawn on its right, as the median of a mean.
    """

    name: str
    title: str
    unit: str
    key: str
    scale: Scale
    caption: str = _BAND
    floor: str | None = None
    beside: "StepMetric | None" = None


_FLOOR = "Dotted: the arm's noise floor, at 0 where it is below what fp32 shows."
MISMATCH = StepMetric(
    name="mismatch",
    title="Mismatch: mean and median |d|",
    unit="mean |log-prob difference| (nats)",
    key="mismatch/log_prob_abs_diff/mean",
    scale="log",
    caption=f"{_BAND} {_FLOOR} A few tokens, as of one flipped code, move the mean alone.",
    floor="mismatch/floor_log_prob_abs_diff/mean",
    beside=StepMetric(
        name="mismatch-median",
        title="",
        unit="median |log-prob difference| (nats)",
        key="mismatch/log_prob_abs_diff/p50",
        scale="log",
        floor="mismatch/floor_log_prob_abs_diff/p50",
    ),
)
KL_K3 = StepMetric(
    name="kl-k3",
    title="Mismatch: k3",
    unit="KL(generator || trainer), k3 (nats)",
    key="mismatch/kl_k3",
    scale="log",
    caption=f"{_BAND} {_FLOOR}",
    floor="mismatch/floor_kl_k3",
)
CLIP_FRACTION = StepMetric(
    name="clip-fraction",
    title="Clipped tokens",
    unit="share of tokens without a gradient",
    key="loss/clip_frac",
    scale="log",
    caption=f"{_BAND} Where a step clips nothing, the axis is linear below the smallest share.",
)
GRAD_NORM = StepMetric(
    name="grad-norm",
    title="Gradient norm",
    unit="norm before clipping",
    key="trainer/grad_norm",
    scale="log",
)
ENTROPY = StepMetric(
    name="entropy",
    title="Entropy of the policy",
    unit="nats per token",
    key="policy/entropy",
    scale="linear",
)
LENGTH = StepMetric(
    name="length",
    title="Response length",
    unit="mean tokens",
    key="rollout/response_length/mean",
    scale="linear",
)


def plot_metric(arms: Sequence[Arm], metric: StepMetric) -> Plot:
    """A line per arm: the mean over its seeds, with their range."""
    panels = [metric, metric.beside] if metric.beside else [metric]

    def paint() -> Sketch:
        sketch = Sketch(metric.name, panels=len(panels), columns=len(panels))
        for axes, shown in zip(sketch.panels, panels, strict=True):
            _paint_metric(sketch, axes, arms, shown)
        return sketch

    missing = f"No run records {metric.key}."
    return draw(metric.name, metric.title, metric.caption, missing, paint)


def _paint_metric(sketch: Sketch, axes: Axes, arms: Sequence[Arm], metric: StepMetric) -> None:
    reached: list[float] = []
    for number, arm in enumerate(arms):
        series = step_series(arm, metric.key)
        _paint_series(sketch, number, series, arm.name, axes)
        reached += [*series.lows, *series.highs]
        if metric.floor is not None:
            floor = step_series(arm, metric.floor)
            sketch.line(number, floor.steps, floor.means, axes=axes, floor=True)
            reached += floor.means
    axes.set_ylabel(metric.unit)
    whole_steps(axes)
    if metric.scale == "log":
        log_axis(axes, "y", reached)


def plot_reward(arms: Sequence[Arm]) -> Plot:
    """The mean reward of each arm over the steps."""

    def paint() -> Sketch:
        sketch = Sketch("reward")
        for number, arm in enumerate(arms):
            _paint_series(sketch, number, reward_series(arm), arm.name)
        sketch.axes.set_ylabel("mean reward of a response")
        whole_steps(sketch.axes)
        fit_lines(sketch.axes)
        return sketch

    caption = (
        f"{_BAND} Of an arm with one seed: the 95 % bootstrap interval over its prompt groups. "
        "A band much wider than the lines is cut."
    )
    return draw("reward", "Reward", caption, "No run records reward/mean.", paint)


def plot_backward_modes(arms: Sequence[Arm]) -> Plot:
    """Backward modes of one format, one minus the other: reward, mismatch and gradient norm."""
    keys = (
        ("reward/mean", "reward"),
        ("mismatch/log_prob_abs_diff/mean", "mean |d| (nats)"),
        ("trainer/grad_norm", "gradient norm"),
    )

    def paint() -> Sketch:
        sketch = Sketch("backward-modes", panels=3, columns=3, height=0.9)
        for axes, (key, unit) in zip(sketch.panels, keys, strict=True):
            axes.axhline(0, color=INK, linewidth=1)
            axes.set_ylabel(f"difference in {unit}")
            whole_steps(axes)
            for arm, reference in backward_pairs(arms):
                series = difference_series(arm, reference, key)
                label = f"{arm.name} - {reference.name}"
                _paint_series(sketch, arms.index(arm), series, label, axes)
        return sketch

    caption = (
        f"One backward mode minus another of the same format, paired by seed. {_BAND} With one "
        "seed, for the reward: the 95 % bootstrap interval over prompt groups. Before the first "
        "update the difference must be 0."
    )
    missing = "No two arms differ in the backward mode alone."
    return draw("backward-modes", "Backward modes, paired", caption, missing, paint)


def _paint_series(
    sketch: Sketch, arm: int, series: Series, label: str, axes: Axes | None = None
) -> None:
    sketch.band(arm, series.steps, series.lows, series.highs, axes)
    sketch.line(arm, series.steps, series.means, label, axes)
