"""Which single cause explains recorded log-probs: every hypothesis scored, ranked, put in words."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fos_rl.diagnose import architecture, numerics, readouts, weight_versions
from fos_rl.diagnose.flips import (
    NOISE,
    Differences,
    Flips,
    differences,
    find_flips,
    is_noise,
    nudge_size,
    what_flips,
)
from fos_rl.diagnose.hypotheses import Hypothesis, Question, Untested, remaining
from fos_rl.diagnose.numerics import other_kernels
from fos_rl.diagnose.scorer import Forward, run_forward

# A cause that leaves less than this share, or only noise, explains the difference.
EXPLAINED = 0.1
# One that leaves less than this explains it in part.
PARTLY = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One hypothesis, tested."""

    cause: str
    detail: str
    remaining: float
    """Mean |recorded - hypothesis|, nats."""
    typical: float
    """Of the median response, nats."""
    explained: float
    """1 - remaining / difference; negative where it makes things worse."""
    noise: float | None = None
    """For a hypothesis that brings rounding noise of its own: how much other kernels alone make
    under it, mean |d|."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Why one actor's recorded log-probs are not those of the configured arm."""

    actor: str
    """trainer or generator."""
    tokens: int
    found: Differences
    """|recorded - trainer's forward under the configured arm|."""
    noise: Differences
    """|log-prob difference| that other kernels and another order of additions make."""
    findings: list[Finding]
    """Best first."""
    untested: list[Untested]
    flips: Flips | None = None
    """Of a difference that is flipped codes and nothing else."""

    @property
    def difference(self) -> float:
        """Mean |d|, nats."""
        return self.found.mean

    @property
    def kernel_noise(self) -> float:
        """Mean |d| of the noise, nats."""
        return self.noise.mean

    @property
    def cause(self) -> str | None:
        """The named cause; None where nothing explains the difference."""
        if is_noise(self.found, self.noise):
            return "kernel and batch noise"
        if self.best and self.explains(self.best):
            return self.best.cause
        return self.flips.what if self.flips else None

    def explains(self, finding: Finding) -> bool:
        """Whether a hypothesis leaves nothing, by mean and by typical token, but noise or a small
        share of the difference; or brings noise of the difference's size."""
        mean = max(EXPLAINED * self.found.mean, NOISE * self.noise.mean)
        typical = max(EXPLAINED * self.found.typical, NOISE * self.noise.typical)
        rest = finding.remaining <= mean and finding.typical <= typical
        return rest or self._is_of_its_size(finding)

    def _is_of_its_size(self, finding: Finding) -> bool:
        """Whether the difference is the noise that the hypothesis brings: neither can be predicted
        token by token, but their sizes can be compared."""
        if finding.noise is None:
            return False
        sizes = (self.difference, finding.remaining)
        return all(finding.noise / NOISE <= size <= finding.noise * NOISE for size in sizes)

    @property
    def best(self) -> Finding | None:
        """The finding that leaves least; of a cause that is noise, the one of the right size."""
        if not self.findings:
            return None
        first = self.findings[0]
        if not self.explains(first):
            return next(filter(self._is_of_its_size, self.findings), first)
        return first

    @property
    def verdict(self) -> str:
        """In words, with the figures that support it."""
        amount = f"mean |d| {self.difference:.2e}"
        if self.difference == 0:
            return "no difference: every log-prob is that of the configured arm, to the last bit"
        if self.cause == "kernel and batch noise":
            return (
                f"kernel and batch noise: {amount} is within it; other kernels alone make "
                f"{self.kernel_noise:.2e}"
            )
        best = self.best
        if self.flips and not (best and self.explains(best)):
            return self.flips.verdict
        if best is None:
            return f"not explained: {amount}, and nothing could be tested"
        if self._is_of_its_size(best) and best.explained < 1 - EXPLAINED:
            return (
                f"{best.cause}: {best.detail}; {amount} is of the size of the rounding that this "
                f"brings ({best.noise:.2e} between kernels), and the configured arm's is "
                f"{self.kernel_noise:.2e}"
            )
        left = f"{best.explained:.1%} of the difference ({amount}, left {best.remaining:.2e})"
        if self.explains(best):
            as_good = [
                f"{f.cause} ({f.detail})"
                for f in self.findings
                if f.cause != best.cause and f.remaining <= 1.05 * best.remaining
            ]
            also = f"; these tokens cannot tell it from {', '.join(as_good[:3])}" if as_good else ""
            return f"{best.cause}: {best.detail}; {left}{also}"
        if best.explained >= 1 - PARTLY:
            return f"partly {best.cause}: {best.detail}; {left}. More than one cause is likely"
        times = self.difference / max(self.kernel_noise, 1e-300)
        return (
            f"not explained: {amount} is {times:.0f} times the kernel noise, and the best of "
            f"{len(self.findings)} hypotheses ({best.detail}) leaves {best.remaining:.2e}"
        )


def kernel_noise_of(forward: Forward, log_probs: np.ndarray) -> Differences:
    """|difference| between an arm's log-probs and the same arm's with other kernels.

    At least one unit of the log-prob's last place in float32: on some arms these two kernels agree
    to the bit, which a third need not. Exact mode has one kernel and no noise. (Of the generator
    alone and its batches, a run's own mismatch/floor_* tells.)
    """
    lengths = response_lengths(forward)
    if forward.spec.consistency == "exact":
        return differences(log_probs, log_probs, lengths)
    noise = np.abs(run_forward(other_kernels(forward)).log_probs - log_probs)
    unit = np.spacing(np.abs(log_probs).astype(np.float32)).astype(np.float64)
    return differences(np.zeros_like(noise), np.maximum(noise, unit), lengths)


def response_lengths(forward: Forward) -> list[int]:
    """Tokens of each response."""
    return [len(values) for values in forward.batch.generator_log_probs]


def attribute(
    actor: str,
    question: Question,
    noise: Differences,
    versions: weight_versions.WeightVersions,
    version: int,
) -> Attribution:
    """Test every hypothesis about one actor's log-probs; none where they are kernel noise."""
    forward, log_probs = question.forward, question.scored.log_probs
    lengths = response_lengths(forward)
    found = differences(log_probs, question.recorded, lengths)
    flips: Flips | None = None
    findings: list[Finding] = []
    untested: list[Untested] = []
    if not is_noise(found, noise):
        flips = find_flips(
            found, noise, what_flips(forward), lambda: nudge_size(forward, log_probs, lengths)
        )
        for idea in _hypotheses(question, versions, version):
            if isinstance(idea, Untested):
                untested.append(idea)
                continue
            findings.append(_test(idea, question, found.mean, lengths))
        findings.sort(key=lambda finding: finding.remaining)
    return Attribution(
        actor=actor,
        tokens=int(np.isfinite(question.recorded).sum()),
        found=found,
        noise=noise,
        findings=findings,
        untested=untested,
        flips=flips,
    )


def _test(
    idea: Hypothesis, question: Question, difference: float, lengths: Sequence[int]
) -> Finding:
    log_probs = idea.log_probs()
    left = remaining(log_probs, question.recorded)
    return Finding(
        cause=idea.cause,
        detail=idea.detail,
        remaining=left,
        typical=typical_of(log_probs, question.recorded, lengths),
        explained=1 - left / difference,
        noise=idea.noise() if idea.noise else None,
    )


def typical_of(log_probs: np.ndarray, recorded: np.ndarray, lengths: Sequence[int]) -> float:
    """What a hypothesis leaves of the median response; silence counts 1 nat, as in `remaining`."""
    spoken = np.where(np.isfinite(log_probs), log_probs, recorded + 1.0)
    return differences(spoken, recorded, lengths).typical


def _hypotheses(
    question: Question, versions: weight_versions.WeightVersions, version: int
) -> Iterator[Hypothesis | Untested]:
    kinds: Sequence[Callable[[Question], Iterator[Hypothesis | Untested]]] = (
        *readouts.KINDS,
        *numerics.KINDS,
        *architecture.KINDS,
        weight_versions.mixed_up_tensors,
    )
    for kind in kinds:
        yield from kind(question)
    yield from weight_versions.stale_weights(question, versions, version)
