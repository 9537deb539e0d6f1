"""What a comparison measures: every row of its tables, and how a run's steps become one number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fos_rl.compare.load import Arm, Run

Window = Literal["first", "later", "late", "all"]
Reduce = Literal["mean", "max"]
Metrics = dict[str, float]
# They say how often something went wrong; a step without them had none.
ABSENT_IS_ZERO = (
    "mismatch/non_finite_frac",
    "mismatch/non_finite_tokens",
    "mismatch/clamped_frac",
    "trainer/skipped_updates",
    "policy/uniform_frac",
)
MISMATCH_MEAN = "mismatch/log_prob_abs_diff/mean"


def late_steps(steps: Sequence[Metrics]) -> Sequence[Metrics]:
    """The last quarter of a run, at least one step: where its arm has had time to matter."""
    return steps[-max(1, round(len(steps) / 4)) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A metric over a window of steps.

    first: the first step that has it, before any update, or for a figure of the mismatch the first
    that has a mismatch at all; later: the steps after that one; late: the last quarter of the
    steps; all. Values are averaged, or their largest is taken.
    """

    section: str
    label: str
    key: str
    window: Window
    reduce: Reduce = "mean"
    format: str = "{:.3f}"
    zero: str | None = None
    """What an exact 0 says, where that is more than a number."""

    @property
    def name(self) -> str:
        """The label where no section stands above it."""
        return f"{self.label}, {self.window}" if self.window in ("first", "later") else self.label

    def of(self, run: Run) -> float | None:
        """The run's value; None when its steps do not record the metric."""
        return self._reduced(self._values(run))

    def of_arm(self, arm: Arm) -> float | None:
        """Mean over the seeds, or the largest for a maximum."""
        return self._reduced([v for run in arm.whole if (v := self.of(run)) is not None])

    def median(self, runs: Sequence[Run]) -> float | None:
        """Median of all steps of some runs, which one odd step or seed cannot move; None for a
        maximum, and where there is one value, which is its own mean."""
        values = [value for run in runs for value in self._values(run)]
        return float(np.median(values)) if self.reduce == "mean" and len(values) > 1 else None

    def show(self, value: float | None) -> str:
        """A value as tables have it; "-" where there is none."""
        if value == 0 and self.zero is not None:
            return self.zero
        return "-" if value is None else self.format.format(value)

    def _reduced(self, values: Sequence[float]) -> float | None:
        if not values:
            return None
        return float(np.max(values) if self.reduce == "max" else np.mean(values))

    def _values(self, run: Run) -> list[float]:
        values = [value_of(metrics, self.key) for metrics in self._steps(run)]
        measured = [value for value in values if value is not None]
        if self.key in ABSENT_IS_ZERO and measured:
            return [value or 0.0 for value in values]
        return measured

    def _steps(self, run: Run) -> Sequence[Metrics]:
        if self.window == "late":
            return late_steps(run.steps)
        if self.window == "all":
            return run.steps
        key = self.key
        if key.startswith("mismatch/") and any(MISMATCH_MEAN in m for m in run.steps):
            key = MISMATCH_MEAN
        measured = [m for m in run.steps if value_of(m, key) is not None]
        return measured[:1] if self.window == "first" else measured[1:]


def value_of(metrics: Metrics, key: str) -> float | None:
    """A step's metric; a key that ends in `/*` is the mean over all that begin so."""
    if not key.endswith("/*"):
        return metrics.get(key)
    values = [value for name, value in metrics.items() if name.startswith(key[:-1])]
    return float(np.mean(values)) if values else None


def _row(
    section: str,
    label: str,
    key: str,
    window: Window = "all",
    reduce: Reduce = "mean",
    form: str = "{:.3f}",
    zero: str | None = None,
) -> Quantity:
    return Quantity(
        section=section, label=label, key=key, window=window, reduce=reduce, format=form, zero=zero
    )


BELOW_FP32 = "below what fp32 shows"


# Label, end of the key, reduction over the window, format.
_MISMATCH: tuple[tuple[str, str, Reduce, str], ...] = (
    ("|d| mean", "log_prob_abs_diff/mean", "mean", "{:.2e}"),
    ("|d| p50", "log_prob_abs_diff/p50", "mean", "{:.2e}"),
    ("|d| p90", "log_prob_abs_diff/p90", "mean", "{:.2e}"),
    ("|d| p99", "log_prob_abs_diff/p99", "mean", "{:.2e}"),
    ("|d| max", "log_prob_abs_diff/max", "max", "{:.2e}"),
    ("k1", "kl_k1", "mean", "{:+.2e}"),
    ("k3", "kl_k3", "mean", "{:.2e}"),
    ("effective sample size, share", "ess_frac", "mean", "{:.4f}"),
    ("noise floor of |d| mean", "floor_log_prob_abs_diff/mean", "mean", "{:.2e}"),
    ("noise floor of |d| p50", "floor_log_prob_abs_diff/p50", "mean", "{:.2e}"),
    ("|d| mean over the floor", "over_floor", "mean", "{:.3g}x"),
    ("tokens off by over 1 %", "outside_1pct_frac", "mean", "{:.4f}"),
    ("tokens not finite", "non_finite_frac", "max", "{:.4f}"),
    ("routing flips, mean of layers", "routing_flip_frac/*", "mean", "{:.4f}"),
)


def _mismatch(section: str, window: Window) -> dict[str, Quantity]:
    return {
        label: _row(
            section,
            label,
            f"mismatch/{key}",
            window,
            reduce,
            form,
            zero=BELOW_FP32 if key.startswith("floor_") else None,
        )
        for label, key, reduce, form in _MISMATCH
    }


_FIRST = _mismatch("Mismatch, first step", "first")
_LATER = _mismatch("Mismatch, later steps", "later")
FIRST_DIFFERENCE = _FIRST["|d| mean"]
FIRST_P50 = _FIRST["|d| p50"]
FIRST_P99 = _FIRST["|d| p99"]
FIRST_MAX = _FIRST["|d| max"]
FIRST_FLOOR = _FIRST["noise floor of |d| mean"]
FIRST_FLOOR_P50 = _FIRST["noise floor of |d| p50"]
OVER_FLOOR = _FIRST["|d| mean over the floor"]
LATER_K3 = _LATER["k3"]
CLIPPED = _row("Clipping", "clipped tokens", "loss/clip_frac", form="{:.4f}")
REWARD = _row("Reward", "reward, late", "reward/mean", "late")
ENTROPY = _row("Policy", "entropy, late (nats per token)", "policy/entropy", "late")
GRAD_NORM = _row("Policy", "gradient norm, mean", "trainer/grad_norm", form="{:.3g}")
LENGTH = _row(
    "Responses", "length, late (tokens)", "rollout/response_length/mean", "late", form="{:.1f}"
)
# Speed is of the later steps: the first one also compiles and warms up.
GENERATE_SPEED = _row(
    "Speed", "generate (tokens/s)", "throughput/generate_tokens_per_s", "later", form="{:,.0f}"
)
TRAIN_SPEED = _row(
    "Speed", "train (tokens/s)", "throughput/train_tokens_per_s", "later", form="{:,.0f}"
)
PHASES = tuple(
    _row("Seconds per step", phase, f"time/{phase}_s", "later", form="{:.2f}")
    for phase in ("generate", "reward", "train", "sync", "step")
)

QUANTITIES: tuple[Quantity, ...] = (
    *_FIRST.values(),
    *_LATER.values(),
    CLIPPED,
    _row("Clipping", "tokens outside the band", "loss/out_of_band_frac", form="{:.4f}"),
    _row("Reward", "reward, first step", "reward/mean", "first"),
    REWARD,
    _row("Policy", "entropy, first step (nats per token)", "policy/entropy", "first"),
    ENTROPY,
    GRAD_NORM,
    _row("Policy", "gradient norm, max", "trainer/grad_norm", "all", "max", "{:.3g}"),
    _row("Policy", "updates skipped per step", "trainer/skipped_updates", form="{:.2f}"),
    LENGTH,
    _row("Responses", "truncated, late", "rollout/truncated_frac", "late"),
    GENERATE_SPEED,
    TRAIN_SPEED,
    *PHASES,
    *(
        _row("Peak memory (GiB)", actor, f"memory/{actor}_peak_gib", "all", "max", "{:.2f}")
        for actor in ("trainer", "generator")
    ),
)

# Rows that only runs with such a setting have.
_CORRECTIONS = (
    _row("Corrections", "weights limited", "correction/truncated_frac", form="{:.4f}"),
    _row("Corrections", "tokens dropped", "correction/masked_frac", form="{:.4f}"),
    _row("Corrections", "weight, mean", "correction/weight/mean"),
)

# Compared with the baseline, pair by pair.
DIFFERENCES = (REWARD, FIRST_DIFFERENCE, LATER_K3, CLIPPED, ENTROPY, GRAD_NORM, LENGTH)


def recorded_quantities(runs: Sequence[Run]) -> list[Quantity]:
    """QUANTITIES, and the rows that only some runs have: corrections and evaluations."""
    keys = sorted({key for run in runs for metrics in run.steps for key in metrics})
    corrections = [row for row in _CORRECTIONS if row.key in keys]
    evaluations = [
        _row("Evaluation, late", key.removeprefix("eval/"), key, "late")
        for key in keys
        if key.startswith("eval/")
    ]
    return [*QUANTITIES, *corrections, *evaluations]
