"""The comparison in plain words: what is resolved, what is not, and how far above the floor."""

from collections.abc import Sequence
from dataclasses import dataclass

from fos_rl.compare.checks import Check, backward_pairs
from fos_rl.compare.load import Arm, Comparison
from fos_rl.compare.quantities import (
    BELOW_FP32,
    DIFFERENCES,
    FIRST_DIFFERENCE,
    FIRST_FLOOR,
    FIRST_FLOOR_P50,
    FIRST_P50,
    REWARD,
    Quantity,
)
from fos_rl.compare.statistics import (
    Interval,
    paired_difference,
    paired_runs,
    seeds_to_resolve,
    show_interval,
    widened,
)

# An estimate from a few seeds' spread says no more than "very many".
_MOST_SEEDS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`arm` minus `other` in one quantity; `interval` is None where pairs are too few."""

    arm: Arm
    other: Arm
    quantity: Quantity
    interval: Interval | None

    @property
    def verdict(self) -> str:
        """What can be said: higher, lower, identical, not resolved, or why nothing can."""
        if self.interval is None:
            pairs = len(paired_runs(self.arm, self.other))
            return "no common seed" if pairs == 0 else "too few pairs"
        if self.interval.mean == self.interval.half_width == 0:
            return "identical"
        if not self.interval.resolved:
            return "not resolved"
        return "higher" if self.interval.mean > 0 else "lower"

    def show(self) -> str:
        """`+0.031 [+0.012, +0.05]`, to two digits, as an interval knows no more, or as many as tell
        its ends apart."""
        if self.interval is None:
            return "-"
        form = widened("{:+.2g}", self.interval)
        return f"{form.format(self.interval.mean)} {show_interval(self.interval, form)}"

    @property
    def reason(self) -> str:
        """`, 3 equal seeds` where the interval has no width, else nothing."""
        reason = self.interval.reason if self.interval else None
        return f", {reason}" if reason else ""


def baseline_differences(comparison: Comparison) -> list[Difference]:
    """Every arm against the baseline, quantity by quantity."""
    return [
        difference
        for arm in comparison.arms[1:]
        for difference in _differences(arm, comparison.baseline)
    ]


def backward_differences(comparison: Comparison) -> list[Difference]:
    """Every backward mode against its format's first."""
    return [
        difference
        for arm, reference in backward_pairs(comparison.arms)
        for difference in _differences(arm, reference)
    ]


def summary(comparison: Comparison, checks: Sequence[Check]) -> list[str]:
    """What a reader should know before looking at a table."""
    return [
        *_reward_findings(comparison),
        *_floor_findings(comparison),
        *_backward_findings(comparison, checks),
        *_caution(comparison),
    ]


def _differences(arm: Arm, other: Arm) -> list[Difference]:
    """In every quantity where seeds can be paired, else in the reward, whose prompts can."""
    quantities = DIFFERENCES if len(paired_runs(arm, other)) > 1 else (REWARD,)
    return [_difference(arm, other, quantity) for quantity in quantities]


def _difference(arm: Arm, other: Arm, quantity: Quantity) -> Difference:
    interval = paired_difference(arm, other, quantity)
    return Difference(arm=arm, other=other, quantity=quantity, interval=interval)


def _reward_findings(comparison: Comparison) -> list[str]:
    baseline = comparison.baseline
    found = [_difference(arm, baseline, REWARD) for arm in comparison.arms[1:]]
    if not found:
        return [f"Reward: one arm, {baseline.name}, and nothing to compare it with."]
    sentences = [
        f"Reward: resolved for {d.arm.name}, {d.verdict} than {baseline.name}'s by {d.show()} "
        f"over {d.interval.units}."
        for d in found
        if d.interval is not None and d.interval.resolved
    ]
    unresolved = [d for d in found if d.interval is None or not d.interval.resolved]
    if unresolved:
        names = _join([d.arm.name for d in unresolved])
        sentence = f"Reward: not resolved against {baseline.name} for {names}"
        intervals = [d.interval for d in unresolved if d.interval and d.interval.half_width]
        if intervals:
            widest = max(intervals, key=lambda interval: interval.half_width)
            sentence += (
                f"; with {widest.units} a difference under {widest.half_width:.2g} cannot be seen"
            )
        sentences += [sentence + ".", _what_it_takes(unresolved)]
    return sentences


def _what_it_takes(unresolved: Sequence[Difference]) -> str:
    """What "not resolved" says, and how many seeds would do."""
    said = (
        "Not resolved: the 95 % interval of the difference covers 0, so these seeds do not tell "
        "which arm is better; it does not say that the arms are equal."
    )
    needed = [
        f"{d.arm.name} {f'{seeds:,}' if seeds <= _MOST_SEEDS else f'over {_MOST_SEEDS:,}'}"
        for d in unresolved
        if d.interval and (seeds := seeds_to_resolve(d.interval)) is not None
    ]
    if needed:
        return (
            f"{said} If the difference is the one measured, about so many seeds would resolve it "
            f"(two-sided t test, 5 %, power 80 %, spread of these seeds): {'; '.join(needed)}."
        )
    return (
        f"{said} How many seeds are needed cannot be derived from these: it takes differences of "
        "two or more seeds that are not all equal."
    )


def _floor_findings(comparison: Comparison) -> list[str]:
    parts = [f"{arm.name} {_against_floor(arm)}" for arm in comparison.arms]
    sentences = [f"Mismatch at the first step, mean |d|: {'; '.join(parts)}."]
    without = [
        arm.name
        for arm in comparison.arms
        if FIRST_FLOOR.of_arm(arm) is None and FIRST_DIFFERENCE.of_arm(arm)
    ]
    if without:
        names = "any arm" if len(without) == len(comparison.arms) else _join(without)
        sentences.append(
            f"Noise floor: not recorded for {names}, so how much of that mismatch is plain batch "
            "noise is open."
        )
    return sentences


def _against_floor(arm: Arm) -> str:
    """`0.038, median 0.021 (5.2 times the noise floor)`."""
    difference, floor = FIRST_DIFFERENCE.of_arm(arm), FIRST_FLOOR.of_arm(arm)
    if difference is None:
        return "not measured"
    if difference == 0:
        return "0 (equal to the last bit)"
    median = FIRST_P50.of_arm(arm)
    text = f"{difference:.2g}" + ("" if median is None else f", median {median:.2g}")
    if floor is None:
        return text
    if floor == 0:
        return f"{text} (the noise floor is {BELOW_FP32})"
    if difference <= floor:
        return f"{text} (within the noise floor of {floor:.2g})"
    said = f"{_times(difference / floor)} times the noise floor"
    floor_median = FIRST_FLOOR_P50.of_arm(arm)
    if median and floor_median:
        said += f", medians {_times(median / floor_median)} times"
    return f"{text} ({said})"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 1000 else f"{ratio:.0e}"


def _backward_findings(comparison: Comparison, checks: Sequence[Check]) -> list[str]:
    pairs = backward_pairs(comparison.arms)
    if not pairs:
        return ["Backward modes: no two arms differ in the backward mode alone; nothing to check."]
    failed = sum(not check.passed for check in checks)
    sentences = [
        f"Backward modes: the first steps of {len(checks)} pairs of runs are identical to the last "
        "bit, as they must be."
        if not failed
        else f"Backward modes: the first steps of {failed} of {len(checks)} pairs of runs differ, "
        "which must not be; nothing below can be trusted until that is explained."
    ]
    for arm, reference in pairs:
        found = _difference(arm, reference, REWARD)
        said = "not resolved"
        if found.interval is not None:
            said = f"{found.verdict}, {found.show()}{found.reason}"
        sentences.append(f"Backward modes, reward: {arm.name} against {reference.name} {said}.")
    return sentences


def _caution(comparison: Comparison) -> list[str]:
    baseline = comparison.baseline
    lone = [arm for arm in comparison.arms[1:] if len(paired_runs(arm, baseline)) == 1]
    if not lone:
        return []
    who = "" if len(lone) == len(comparison.arms) - 1 else f" ({_join([a.name for a in lone])})"
    return [
        f"One seed: {baseline.name} and an arm have one in common{who}, so intervals are over "
        "prompt groups and say nothing about another seed; they cannot order the arms. Add seeds."
    ]


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
