"""A hypothesis: one thing that trainer or generator may have done differently, and the log-probs
that it makes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fos_rl.diagnose.scorer import Forward, Readout, Scored, run_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """Log-probs under one changed thing.

    Example: cause "temperature", detail "the log-probs are those of temperature 0.7".
    """

    cause: str
    """The kind of cause, which several hypotheses may share."""
    detail: str
    log_probs: Callable[[], np.ndarray]
    """fp64, one per recorded token in order; NaN where it says nothing."""
    noise: Callable[[], float] | None = None
    """For one that brings rounding noise, which nothing else repeats bit for bit: how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Untested:
    """A cause that these records cannot tell about, and why."""

    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a hypothesis may look at: the arm as configured, and the log-probs to explain."""

    forward: Forward
    scored: Scored
    recorded: np.ndarray


def from_forward(cause: str, detail: str, forward: Forward) -> Hypothesis:
    """A hypothesis that takes a forward of its own."""
    return Hypothesis(cause=cause, detail=detail, log_probs=lambda: run_forward(forward).log_probs)


def from_readout(cause: str, detail: str, scored: Scored, readout: Readout) -> Hypothesis:
    """A hypothesis about the same forward's hidden states, read out in another way."""
    return Hypothesis(cause=cause, detail=detail, log_probs=lambda: scored.read(readout))


def remaining(log_probs: np.ndarray, recorded: np.ndarray) -> float:
    """Mean |recorded - hypothesis|; a token on which the hypothesis is silent counts 1 nat.

    Tokens whose recorded log-prob is not finite are left out: no hypothesis speaks for them.
    """
    finite = np.isfinite(recorded)
    with np.errstate(invalid="ignore"):
        d = np.abs(recorded[finite] - log_probs[finite])
    return float(np.where(np.isfinite(d), d, 1.0).mean()) if d.size else np.nan


Family = Callable[[Question], Iterator[Hypothesis | Untested]]
