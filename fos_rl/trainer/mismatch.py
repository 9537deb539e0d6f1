"""How far the trainer's log-probs are from the generator's, on the tokens the generator sampled.

With one forward on both hosts this is the numerics' own noise, and the subject of the study.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

PREFIX = "mismatch/"


def mismatch_metrics(
    trainer_log_probs: Sequence[Float[np.ndarray, "_"]],
    generator_log_probs: Sequence[Float[np.ndarray, "_"]],
) -> dict[str, float]:
    """Statistics of d = trainer - generator log-prob over all tokens, in fp64.

    - `mismatch/log_prob_abs_diff/mean|p50|p99|max`: of |d|. A signed mean hides errors that
      cancel. Quantiles interpolate linearly.
    - `mismatch/kl_k1`, `mismatch/kl_k3`: two estimates of KL(generator || trainer), valid because
      the generator sampled the tokens: mean(-d), unbiased but of either sign, and
      mean(exp(d) - 1 - d), unbiased and never negative (Schulman 2020,
      http://joschu.net/blog/kl-approx.html).
    - `mismatch/non_finite_frac`: share of tokens whose d is not finite, only when there are any.
      They leave the other statistics' numerator and denominator.

    Without tokens to measure a key is absent. Pass response tokens only, one array a sequence.

    Example: trainer [-1.0], generator [-1.5] have d = 0.5: |d| = 0.5 throughout, k1 = -0.5 and
    k3 = exp(0.5) - 1.5 = 0.1487.

    Raises:
        ValueError: when the two sides disagree about the number of sequences or of tokens.
    """
    d = _differences(trainer_log_probs, generator_log_probs)
    finite = np.isfinite(d)
    metrics: dict[str, float] = {}
    if not finite.all():
        metrics[PREFIX + "non_finite_frac"] = float(1.0 - finite.mean())
    d = d[finite]
    if d.size == 0:
        return metrics
    size = np.abs(d)
    with np.errstate(over="ignore"):
        k3 = np.expm1(d) - d
    metrics |= {
        PREFIX + "log_prob_abs_diff/mean": float(size.mean()),
        PREFIX + "log_prob_abs_diff/p50": float(np.quantile(size, 0.5)),
        PREFIX + "log_prob_abs_diff/p99": float(np.quantile(size, 0.99)),
        PREFIX + "log_prob_abs_diff/max": float(size.max()),
        PREFIX + "kl_k1": float(-d.mean()),
        PREFIX + "kl_k3": float(k3.mean()),
    }
    return metrics


def _differences(
    trainer: Sequence[Float[np.ndarray, "_"]],
    generator: Sequence[Float[np.ndarray, "_"]],
) -> Float[np.ndarray, " all_tokens"]:
    if len(trainer) != len(generator):
        raise ValueError(
            f"{len(trainer)} sequences of trainer log-probs, {len(generator)} of the generator's"
        )
    parts = [np.zeros(0)]
    for number, (ours, theirs) in enumerate(zip(trainer, generator, strict=True)):
        if np.shape(ours) != np.shape(theirs):
            raise ValueError(
                f"sequence {number}: {np.shape(ours)} trainer log-probs, {np.shape(theirs)} of the "
                "generator's"
            )
        # -inf - -inf is NaN, and counted as such.
        with np.errstate(invalid="ignore"):
            parts.append(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
    return np.concatenate(parts)
