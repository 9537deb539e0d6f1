"""What must hold, and what a caller says must not be exceeded."""

import difflib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fos_rl.compare.load import Arm, Run
from fos_rl.compare.quantities import ABSENT_IS_ZERO

# A run's length, its logs and the cluster's limits change no number of its first step; how a layer
# differentiates changes none before the first update, which is what is checked.
_CHANGES_NO_FIRST_STEP = ("steps", "logging.", "cluster.", "eval.", "trainer.backward_override")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One statement about the runs, and whether it is true. `detail` says what was found."""

    passed: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest value that a metric may have at any step of any run."""

    key: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Limit":
        """`mismatch/kl_k3=0.015`."""
        key, separator, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not separator or not key or not math.isfinite(value):
            raise ValueError(
                f"--fail-above {text!r}: write it as METRIC=NUMBER, as in mismatch/kl_k3=0.015; "
                "nothing is above an infinite limit, or one that is not a number"
            )
        return cls(key=key, value=value)


def check_limits(runs: Sequence[Run], limits: Sequence[Limit]) -> list[Check]:
    """One check for a run and limit, failed at the run's largest excess; NaN exceeds every limit.

    Raises:
        ValueError: when a run does not record the metric, so that nothing could be exceeded.
    """
    return [_check_limit(run, limit) for limit in limits for run in runs]


def _check_limit(run: Run, limit: Limit) -> Check:
    steps = {int(m["step"]): m[limit.key] for m in run.steps if limit.key in m}
    if not steps and limit.key not in ABSENT_IS_ZERO:
        known = sorted({key for metrics in run.steps for key in metrics})
        close = difflib.get_close_matches(limit.key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
        raise ValueError(f"--fail-above {limit.key}: {run.name} records no such metric; {hint}")
    above = {step: value for step, value in steps.items() if not value <= limit.value}
    if not above:
        return Check(
            passed=True, detail=f"{run.name}: {limit.key} is at most {limit.value:g} in every step"
        )
    worst = max(above, key=lambda step: math.inf if math.isnan(above[step]) else above[step])
    return Check(
        passed=False,
        detail=f"{run.name}, step {worst}: {limit.key} = {above[worst]:g} is above {limit.value:g} "
        f"({len(above)} of {len(steps)} steps are)",
    )


def backward_pairs(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """Arms that differ in nothing but the backward mode, as (other, reference); the first of each
    format is the reference of its others."""
    pairs: list[tuple[Arm, Arm]] = []
    references: dict[str, Arm] = {}
    for arm in arms:
        if arm.runs[0].backward is None:
            continue
        reference = references.setdefault(_first_step_settings(arm.runs[0]), arm)
        if reference.runs[0].backward != arm.runs[0].backward:
            pairs.append((arm, reference))
    return pairs


def check_backward_modes(arms: Sequence[Arm]) -> list[Check]:
    """Before its first update a run cannot know how it will differentiate, so arms that differ in
    the backward mode alone must have sampled the same tokens with the same log-probs, and must show
    the same mismatch, to the last bit."""
    return [
        _same_first_step(ours, theirs)
        for arm, reference in backward_pairs(arms)
        for ours in arm.runs
        if (theirs := reference.run_of(ours.seed)) is not None
    ]


def _same_first_step(ours: Run, theirs: Run) -> Check:
    names = f"{ours.name} and {theirs.name}"
    differences = [*_rollout_differences(ours, theirs), *_mismatch_differences(ours, theirs)]
    if not differences:
        # Without the samples only the metrics could be compared.
        seen = "step" if ours.rollouts(int(ours.steps[0]["step"])) else "mismatch; no rollouts kept"
        return Check(passed=True, detail=f"{names}: identical first {seen}")
    return Check(
        passed=False,
        detail=f"{names} differ in the backward mode alone, so their first steps must be "
        f"identical, but {'; '.join(differences)}. Either something else differs (code, device, "
        "threads) or the backward mode leaks into the forward.",
    )


def _rollout_differences(ours: Run, theirs: Run) -> list[str]:
    left, right = (run.rollouts(int(run.steps[0]["step"])) for run in (ours, theirs))
    if len(left) != len(right):
        return [f"one has {len(left)} responses, the other {len(right)}"]
    found: list[str] = []
    for key, name in (("response_ids", "tokens"), ("log_probs", "generator log-probs")):
        different = sum(a[key] != b[key] for a, b in zip(left, right, strict=True))
        if different:
            found.append(f"{name} differ in {different} of {len(left)} responses")
    return found


def _mismatch_differences(ours: Run, theirs: Run) -> list[str]:
    left, right = _first_mismatch(ours), _first_mismatch(theirs)
    different = [key for key in sorted(left | right) if left.get(key) != right.get(key)]
    if not different:
        return []
    key = different[0]
    return [
        f"{len(different)} mismatch metrics differ, as {key}: {left.get(key)} != {right.get(key)}"
    ]


def _first_mismatch(run: Run) -> dict[str, float]:
    """The first measured mismatch. The floor is left out: it is noise by definition."""
    steps = (
        {key: value for key, value in metrics.items() if key.startswith("mismatch/")}
        for metrics in run.steps
    )
    first = next((metrics for metrics in steps if metrics), {})
    return {key: value for key, value in first.items() if "floor" not in key and value == value}


def _first_step_settings(run: Run) -> str:
    """All that can change a run's first step, except the seed."""
    items = {
        key: value
        for key, value in run.settings.items()
        if key != "seed" and not key.startswith(_CHANGES_NO_FIRST_STEP)
    }
    return json.dumps(items, sort_keys=True, default=str)


def setting_differences(arms: Sequence[Arm]) -> dict[str, list[object]]:
    """The settings in which arms differ, one value per arm; None where an arm does not have it."""
    names = sorted(set(itertools.chain.from_iterable(arm.runs[0].settings for arm in arms)))
    values = {name: [arm.runs[0].settings.get(name) for arm in arms] for name in names}
    return {
        name: row
        for name, row in values.items()
        if name != "seed" and any(value != row[0] for value in row)
    }
