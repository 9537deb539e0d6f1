"""Plots with one row per arm: the first mismatch, the reward against the baseline, the time."""

from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from fos_rl.compare.drawing import (
    INK,
    MUTED,
    Plot,
    Sketch,
    colour,
    draw,
    log_axis,
    marker,
    name_rows,
)
from fos_rl.compare.findings import Difference
from fos_rl.compare.load import Arm
from fos_rl.compare.quantities import (
    BELOW_FP32,
    FIRST_DIFFERENCE,
    FIRST_FLOOR,
    FIRST_MAX,
    FIRST_P50,
    FIRST_P99,
    PHASES,
    REWARD,
)

# Here a colour is a phase, not an arm.
_PHASE_GREYS = ("#3d3d3d", "#777777", "#a8a8a8", "#d4d4d4")


def plot_first_step(arms: Sequence[Arm]) -> Plot:
    """Mean, median, 99th percentile and maximum of |d| at the first step, one row per arm."""

    def paint() -> Sketch:
        sketch = Sketch("first-step")
        shown: list[float] = []
        for number, arm in enumerate(arms):
            points = (
                (FIRST_DIFFERENCE, marker(number), 8, True),
                (FIRST_P50, "o", 6, False),
                (FIRST_P99, "|", 12, True),
                (FIRST_MAX, "x", 6, True),
            )
            for quantity, shape, size, filled in points:
                value = quantity.of_arm(arm)
                if value is not None:
                    _point(sketch, number, value, shape, size, filled)
                    shown.append(value)
            floor = FIRST_FLOOR.of_arm(arm)
            if floor is not None:
                ends = [number - 0.35, number + 0.35]
                (line,) = sketch.axes.plot([floor, floor], ends, color=MUTED, ls=":")
                sketch.belongs(line, number)
                shown.append(floor)
        name_rows(sketch.axes, [arm.name for arm in arms])
        sketch.axes.set_xlabel("|log-prob difference| at the first step (nats)")
        log_axis(sketch.axes, "x", shown)
        return sketch

    caption = (
        "Marker: mean; ring: median; bar: 99th percentile; cross: maximum. Dotted line: the arm's "
        "noise floor, the mean for the same tokens scored twice by the generator; at 0 where it is "
        f"{BELOW_FP32}."
    )
    missing = "No run records mismatch/log_prob_abs_diff."
    return draw("first-step", "Mismatch before any update", caption, missing, paint)


def plot_reward_differences(arms: Sequence[Arm], differences: Sequence[Difference]) -> Plot:
    """Late reward against the baseline's; `differences` are those against it."""
    rewards = [d for d in differences if d.quantity is REWARD]

    def paint() -> Sketch:
        sketch = Sketch("reward-difference")
        sketch.axes.axvline(0, color=INK, linewidth=1)
        for row, difference in enumerate(rewards):
            interval, number = difference.interval, arms.index(difference.arm)
            if interval is not None:
                ends = [interval.low, interval.high]
                (line,) = sketch.axes.plot(
                    ends, [row, row], color=colour(number), marker="|", clip_on=False
                )
                sketch.belongs(line, number)
                _point(sketch, number, interval.mean, marker(number), 8, interval.resolved, row)
        name_rows(sketch.axes, [d.arm.name for d in rewards])
        sketch.axes.set_xlabel(f"late reward minus {arms[0].name}'s")
        # Signed labels are long; more of them would run together.
        sketch.axes.xaxis.set_major_locator(MaxNLocator(5))
        return sketch

    caption = (
        "Paired difference with its 95 % bootstrap interval. Filled: resolved. Hollow: the "
        "interval covers 0, not resolved."
    )
    missing = "It takes two arms with a seed in common, and two pairs."
    return draw("reward-difference", "Reward against the baseline", caption, missing, paint)


def plot_phases(arms: Sequence[Arm]) -> Plot:
    """Seconds per step by phase, one bar per arm."""

    def paint() -> Sketch:
        sketch = Sketch("phases")
        labelled: set[str] = set()
        for row, arm in enumerate(arms):
            left = 0.0
            for grey, phase in zip(_PHASE_GREYS, PHASES[:-1], strict=True):
                seconds = phase.of_arm(arm)
                if seconds is None:
                    continue
                label = phase.label if phase.label not in labelled else None
                labelled.add(phase.label)
                bar = sketch.axes.barh(
                    row, seconds, left=left, color=grey, edgecolor="white", label=label
                )
                sketch.belongs(bar.patches[0], row)
                left += seconds
        name_rows(sketch.axes, [arm.name for arm in arms])
        sketch.axes.set_xlabel("seconds per step, without the first step")
        return sketch

    caption = "Mean over steps and seeds; the whole step's time is in the table."
    missing = "No run has a second step with time/ metrics."
    return draw("phases", "Where the time goes", caption, missing, paint)


def _point(
    sketch: Sketch,
    arm: int,
    value: float,
    shape: str,
    size: float,
    filled: bool = True,
    row: int | None = None,
) -> None:
    face = colour(arm) if filled else "white"
    (point,) = sketch.axes.plot(
        value,
        arm if row is None else row,
        marker=shape,
        ms=size,
        mew=1.8,
        mfc=face,
        ls="",
        clip_on=False,
    )
    point.set_markeredgecolor(colour(arm))
    sketch.belongs(point, arm)
