"""What makes figures that stand side by side not comparable: said once, in words."""

import json
import math
from collections.abc import Iterator

from fos_rl.compare.load import Comparison, Run
from fos_rl.compare.statistics import paired_runs

# A run's seed, its length, its logs and where it runs are not its method.
_NOT_THE_METHOD = ("seed", "steps", "logging.", "cluster.", "eval.", "trainer.save_every")
_CLIP_RULES = tuple(
    f"algorithm.{name}" for name in ("type", "clip_low", "clip_high", "dual_clip", "ratio")
)


def cautions(comparison: Comparison) -> list[str]:
    """A sentence for each thing that a reader would otherwise not see."""
    return [
        *_short_runs(comparison),
        *_mixed_settings(comparison),
        *_other_prompts(comparison),
        *_clip_rules(comparison),
        *_devices(comparison),
        *_not_finite(comparison),
    ]


def _short_runs(comparison: Comparison) -> Iterator[str]:
    for arm in comparison.arms:
        short = [run for run in arm.runs if run not in arm.whole]
        if short:
            named = ", ".join(f"{run.name} ({len(run.steps)} steps)" for run in short)
            yield (
                f"Left out: {named}, shorter than {arm.name}'s other runs, is in no mean, interval "
                "or line of a plot; its own figures are under every run."
            )
    lengths = {arm.name: len(arm.whole[0].steps) for arm in comparison.arms}
    if len(set(lengths.values())) > 1:
        named = ", ".join(f"{name} {steps}" for name, steps in lengths.items())
        yield (
            f"Lengths: arms have different numbers of steps ({named}), so their late steps are not "
            "the same; differences are of the steps that both arms have."
        )


def _mixed_settings(comparison: Comparison) -> Iterator[str]:
    for arm in comparison.arms:
        first, *others = arm.runs
        names = sorted({name for run in others for name in _method_differences(first, run)})
        if names:
            yield (
                f"Mixed: the runs of {arm.name} differ in {_listed(names)}; their mean is of no "
                "single setting."
            )


def _other_prompts(comparison: Comparison) -> Iterator[str]:
    """Runs of one seed see the same prompts only where data and batches are set alike."""
    for arm in comparison.arms[1:]:
        pairs = paired_runs(arm, comparison.baseline)
        found = [
            f"{ours.name} and {theirs.name} at step {step}"
            for ours, theirs in pairs
            if (step := _first_other_prompts(ours, theirs)) is not None
        ]
        if found:
            yield (
                f"Prompts: {found[0]} saw different ones ({len(found)} of {len(pairs)} pairs of "
                "runs), so pairing by seed takes no common noise away."
            )


def _first_other_prompts(ours: Run, theirs: Run) -> int | None:
    """Looks at the first and the last common step: a step's samples can be large."""
    steps = [int(metrics["step"]) for metrics in ours.steps]
    for step in dict.fromkeys((*steps[:1], *steps[-1:])):
        left, right = (set(run.group_rewards(step)) for run in (ours, theirs))
        if left and right and left != right:
            return step
    return None


def _clip_rules(comparison: Comparison) -> Iterator[str]:
    rules = {
        tuple(arm.runs[0].settings.get(name) for name in _CLIP_RULES) for arm in comparison.arms
    }
    if len(rules) > 1:
        yield (
            "Clipping: the arms clip by different rules (algorithm.type, bounds or ratio), so "
            "their shares of clipped tokens do not compare; of cispo it is 0 by definition."
        )


def _devices(comparison: Comparison) -> Iterator[str]:
    devices = {run.name: _device(run) for run in comparison.runs}
    known = sorted({device for device in devices.values() if device})
    if len(known) > 1:
        yield (
            f"Devices: the runs were made on different ones ({', '.join(known)}), which speeds, "
            "times and the last bits of log-probs depend on."
        )


def _not_finite(comparison: Comparison) -> Iterator[str]:
    for run in comparison.runs:
        broken: dict[str, list[int]] = {}
        for metrics in run.steps:
            for key, value in metrics.items():
                if isinstance(value, float) and not math.isfinite(value):
                    broken.setdefault(key, []).append(int(metrics["step"]))
        if broken:
            key, steps = next(iter(broken.items()))
            more = f" and {len(broken) - 1} other metrics" if len(broken) > 1 else ""
            yield (
                f"Not finite: {run.name} has {key}{more} as NaN or infinity at step {steps[0]}"
                f"{' and later' if len(steps) > 1 else ''}; lines leave such steps out, means are "
                "NaN."
            )


def _method_differences(one: Run, other: Run) -> list[str]:
    names = one.settings.keys() | other.settings.keys()
    return [
        name
        for name in names
        if not name.startswith(_NOT_THE_METHOD)
        and one.settings.get(name) != other.settings.get(name)
    ]


def _device(run: Run) -> str | None:
    file = run.path / "environment.json"
    return json.loads(file.read_text()).get("device") if file.is_file() else None


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
