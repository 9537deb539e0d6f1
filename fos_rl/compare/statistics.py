"""Confidence intervals of means, and of paired differences between two arms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fos_rl.compare.load import Arm, Run
from fos_rl.compare.quantities import Quantity, late_steps

RESAMPLES = 4000
# Quantiles of the normal distribution.
_Z_975, _Z_80 = 1.959964, 0.841621
_RNG_SEED = 20240229

Unit = Literal["seeds", "prompt groups", "problems"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its 95 % confidence interval, mean - half_width .. mean + half_width.

    Example: mean 0.10, half_width 0.04 is 0.06 .. 0.14, and resolved: 0 is not in it.
    """

    mean: float
    half_width: float
    count: int
    unit: Unit

    @property
    def low(self) -> float:
        """The interval's lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The interval's upper end."""
        return self.mean + self.half_width

    @property
    def resolved(self) -> bool:
        """Whether 0 is outside. Values without any spread resolve nothing: a handful of equal
        numbers says that the quantity is coarse, not that it is certain."""
        return 0 < self.half_width < abs(self.mean)

    @property
    def units(self) -> str:
        """What the mean is taken over, as in "3 seeds"."""
        return f"{self.count} {self.unit}"

    @property
    def reason(self) -> str | None:
        """Why it has no width, where it has none."""
        return f"{self.count} equal {self.unit}" if self.half_width == 0 else None

    @property
    def spread(self) -> float:
        """Standard deviation of the units' values."""
        return self.half_width / t_quantile(self.count - 1) * math.sqrt(self.count)


def bootstrap_interval(values: Sequence[float], unit: Unit) -> Interval | None:
    """The mean of independent units with a 95 % t interval on its bootstrap standard error.

    half_width = t(0.975, n - 1) * sqrt(n / (n - 1)) * (standard deviation of the resampled means).
    With few units the plain percentile bootstrap is too narrow (of three seeds it covers the truth
    three times in four), which is what the t quantile and the factor under the root repair:
    Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 4
    (https://doi.org/10.1080/00031305.2015.1089789).

    Returns None for fewer than two values, or when one is not finite.
    """
    data = np.asarray(values, np.float64)
    n = data.size
    if n < 2 or not np.isfinite(data).all():
        return None
    rng = np.random.default_rng(_RNG_SEED)
    means = data[rng.integers(0, n, (RESAMPLES, n))].mean(axis=1)
    # Equal values have no spread, which the sum of their rounding errors must not feign.
    error = 0.0 if np.ptp(data) == 0 else float(means.std()) * math.sqrt(n / (n - 1))
    return Interval(
        mean=float(data.mean()), half_width=t_quantile(n - 1) * error, count=n, unit=unit
    )


def seeds_to_resolve(difference: Interval) -> int | None:
    """About how many paired seeds would resolve a difference as large as the measured one.

    n = (z(0.975) + z(0.8))^2 (s / d)^2 + z(0.975)^2 / 2 for a two-sided t test at 5 % with a power
    of 80 %, s the standard deviation of the paired differences and d their mean: Guenther, "Sample
    Size Formulas for Normal Theory t Tests", The American Statistician 35 (1981) 243-244. Of
    unpaired arms s^2 is the sum of their variances, which makes it the two-sample estimate. The
    spread of a few seeds is itself rough, and so is the number.

    Example: s / d = 2 gives 7.849 * 4 + 1.92 = 33.3, that is 34 seeds.

    Returns None where the spread or the difference is 0, or where the units are not seeds.
    """
    if difference.unit != "seeds" or difference.half_width == 0 or difference.mean == 0:
        return None
    ratio = difference.spread / difference.mean
    return math.ceil((_Z_975 + _Z_80) ** 2 * ratio**2 + _Z_975**2 / 2)


def show_interval(interval: Interval, form: str) -> str:
    """`[0.010, 0.034]` in a format such as {:.3f}, widened where its ends would read alike."""
    wider = widened(form, interval)
    return f"[{wider.format(interval.low)}, {wider.format(interval.high)}]"


def widened(form: str, interval: Interval) -> str:
    """The format with as many more digits as tell an interval's ends apart, unless they are equal.

    Example: {:.3f} for 0.0221 .. 0.0224 is {:.4f}.
    """
    digits = int(form[form.index(".") + 1 : -2])
    # A float has 17 digits.
    for more in range(17):
        wider = form.replace(f".{digits}", f".{digits + more}")
        if interval.low == interval.high or wider.format(interval.low) != wider.format(
            interval.high
        ):
            return wider
    return form


def t_quantile(degrees: int) -> float:
    """Student's t at 97.5 %: tabulated below ten degrees of freedom, then the expansion in
    1 / degrees (Abramowitz and Stegun 26.7.5), whose error is under 1e-3 there."""
    if degrees <= len(_T_975):
        return _T_975[degrees - 1]
    z = _Z_975
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


_T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


def arm_interval(arm: Arm, quantity: Quantity) -> Interval | None:
    """A quantity of an arm over its seeds; with one seed, for the reward, over prompt groups."""
    runs = arm.whole
    if len(runs) > 1:
        values = [quantity.of(run) for run in runs]
        return bootstrap_interval([v for v in values if v is not None], "seeds")
    if quantity.key != "reward/mean":
        return None
    rewards = late_group_rewards(runs[0])
    return bootstrap_interval(list(rewards.values()), "prompt groups")


def paired_difference(arm: Arm, other: Arm, quantity: Quantity) -> Interval | None:
    """`arm` minus `other`, paired by seed; with one seed in common, for the reward, by prompt.

    None when there are too few pairs to say anything.
    """
    pairs = paired_runs(arm, other)
    if len(pairs) > 1:
        both = [_where_both_measured(ours, theirs, quantity.key) for ours, theirs in pairs]
        values = [(quantity.of(ours), quantity.of(theirs)) for ours, theirs in both]
        differences = [a - b for a, b in values if a is not None and b is not None]
        return bootstrap_interval(differences, "seeds")
    if not pairs or quantity.key != "reward/mean":
        return None
    ours, theirs = (late_group_rewards(run) for run in pairs[0])
    differences = [ours[key] - theirs[key] for key in ours if key in theirs]
    return bootstrap_interval(differences, "prompt groups")


def paired_runs(arm: Arm, other: Arm) -> list[tuple[Run, Run]]:
    """The two arms' whole runs of each seed that both have, cut to the steps that both have."""
    theirs_by_seed = {run.seed: run for run in other.whole}
    return [
        _common_steps(run, theirs_by_seed[run.seed])
        for run in arm.whole
        if run.seed in theirs_by_seed
    ]


def _common_steps(ours: Run, theirs: Run) -> tuple[Run, Run]:
    common = {m["step"] for m in ours.steps} & {m["step"] for m in theirs.steps}
    left, right = (
        replace(run, steps=[m for m in run.steps if m["step"] in common]) for run in (ours, theirs)
    )
    return left, right


def _where_both_measured(ours: Run, theirs: Run, key: str) -> tuple[Run, Run]:
    """The runs without the metric in steps where one of them lacks it: means of other steps are no
    pair."""
    if key.endswith("/*"):
        return ours, theirs
    measured = [{m["step"] for m in run.steps if key in m} for run in (ours, theirs)]
    left, right = (
        replace(
            run,
            steps=[
                m if m["step"] in measured[0] & measured[1] else _without(m, key) for m in run.steps
            ],
        )
        for run in (ours, theirs)
    )
    return left, right


def _without(metrics: dict[str, float], key: str) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != key}


def late_group_rewards(run: Run) -> dict[tuple[int, int, str], float]:
    """Mean reward of each prompt group of the run's late steps, by (step, group, prompt id)."""
    steps = [int(metrics["step"]) for metrics in late_steps(run.steps)]
    return {
        (step, *prompt): reward
        for step in steps
        for prompt, reward in run.group_rewards(step).items()
    }
