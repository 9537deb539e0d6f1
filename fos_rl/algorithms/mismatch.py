"""How far the trainer's log-probs are from the generator's, on the tokens the generator sampled.

With one forward in both this is the numerics' own noise, and the subject of the study.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer

# exp(20) is 5e8: such a ratio says that the two policies are unrelated, and inf would hide the
# other tokens.
MAX_LOG_RATIO = 20.0

BANDS = {"1e-6": 1e-6, "1pct": 0.01, "5pct": 0.05}


def mismatch_metrics(
    trainer_log_probs: Sequence[Float[np.ndarray, "_"]],
    generator_log_probs: Sequence[Float[np.ndarray, "_"]],
    prefix: str = "mismatch/",
) -> dict[str, float]:
    """Statistics of d = trainer - generator log-prob and of the ratio r = exp(d), in fp64.

    Formulas, and the names they have elsewhere, are in `fos_rl.config.metrics`. Three choices:

    - A token whose d is not finite leaves every numerator and denominator; their share is
      `non_finite_frac`, only when there are any.
    - d above MAX_LOG_RATIO counts as that in everything that exponentiates it, so that nothing
      overflows; the share of such tokens is `clamped_frac`, only when there are any. |d|, k1 and k2
      take d as it is. Below, exp(d) goes to 0 and needs no limit.
    - A group without a token (a tenth of the probabilities, a quarter of the lengths) is absent.

    Pass response tokens only, one array per sequence.

    Example: trainer [-1.0], generator [-1.5] have d = 0.5 and r = 1.6487: |d| = 0.5 throughout,
    k1 = -0.5, k2 = 0.125, k3 = r - 1 - d = 0.1487; the other direction, weighted by r, has
    k1 = r d = 0.8244, k2 = r d^2 / 2 = 0.2061, k3 = r d - (r - 1) = 0.1756; chi2 = (r - 1)^2
    = 0.4208, ess_frac = 1, perplexity_ratio = exp(-0.5) = 0.6065; by_probability/2, as
    exp(-1.5) = 0.22 is in [0.2, 0.3); by_position/0 and by_length/3.

    Raises:
        ValueError: when the two sides disagree about the number of sequences or of tokens.
    """
    tokens = _sampled_tokens(trainer_log_probs, generator_log_probs)
    finite = np.isfinite(tokens.d)
    metrics: dict[str, float] = {}
    if not finite.all():
        metrics["non_finite_frac"] = float(1.0 - finite.mean())
    if finite.any():
        tokens = tokens.where(finite)
        metrics |= _difference_metrics(tokens.d)
        metrics |= _ratio_metrics(tokens)
        metrics |= _grouped("by_probability", tokens.probability_tenth, np.abs(tokens.d))
        metrics |= _grouped("by_position", tokens.position_tenth, np.abs(tokens.d))
        metrics |= _grouped("by_length", tokens.length_quarter, np.abs(tokens.d))
    return {prefix + name: value for name, value in metrics.items()}


def num_non_finite(
    trainer_log_probs: Sequence[Float[np.ndarray, "_"]],
    generator_log_probs: Sequence[Float[np.ndarray, "_"]],
) -> int:
    """Tokens of which trainer or generator gives no finite log-prob."""
    pairs = zip(trainer_log_probs, generator_log_probs, strict=True)
    return sum(int((~(np.isfinite(a) & np.isfinite(b))).sum()) for a, b in pairs)


def over_floor(metrics: dict[str, float]) -> dict[str, float]:
    """`mismatch/over_floor` from the means of |d| and of the noise floor; absent when that is 0."""
    floor = metrics.get("mismatch/floor_log_prob_abs_diff/mean", 0.0)
    if floor == 0.0 or "mismatch/log_prob_abs_diff/mean" not in metrics:
        return {}
    return {"mismatch/over_floor": metrics["mismatch/log_prob_abs_diff/mean"] / floor}


def _difference_metrics(d: Float[np.ndarray, " tokens"]) -> dict[str, float]:
    """A signed mean hides errors that cancel, hence |d|. Quantiles interpolate linearly."""
    size = np.abs(d)
    quantiles = {f"p{q}": np.quantile(size, q / 100) for q in (50, 90, 99)}
    shares = {"mean": size.mean(), **quantiles, "max": size.max()}
    return {f"log_prob_abs_diff/{name}": float(value) for name, value in shares.items()}


def _ratio_metrics(tokens: "_Tokens") -> dict[str, float]:
    """Divergences from samples (Schulman 2020, http://joschu.net/blog/kl-approx.html).

    exp(d) - 1 is expm1(d) throughout: in k3 two terms of size d leave d^2 / 2.
    """
    d = tokens.d
    held = np.minimum(d, MAX_LOG_RATIO)
    r, r_minus_1 = np.exp(held), np.expm1(held)
    values = {
        "kl_k1": np.mean(-d),
        "kl_k2": np.mean(d**2 / 2),
        "kl_k3": np.mean(r_minus_1 - held),
        "reverse_kl_k1": np.mean(r * d),
        "reverse_kl_k2": np.mean(r * d**2 / 2),
        "reverse_kl_k3": np.mean(r * held - r_minus_1),
        "chi2": np.mean(r_minus_1**2),
        "ess_frac": r.sum() ** 2 / (r.size * (r**2).sum()),
        "perplexity_ratio": _perplexity_ratio(tokens),
        **{f"outside_{name}_frac": np.mean(np.abs(r_minus_1) > b) for name, b in BANDS.items()},
    }
    if (d > MAX_LOG_RATIO).any():
        values["clamped_frac"] = np.mean(d > MAX_LOG_RATIO)
    return {name: float(value) for name, value in values.items()}


def _perplexity_ratio(tokens: "_Tokens") -> np.floating:
    """Mean over sequences of exp(mean of -d over the sequence)."""
    _, sequence, counts = np.unique(tokens.sequence, return_inverse=True, return_counts=True)
    log_ratio = np.bincount(sequence, weights=-tokens.d) / counts
    return np.exp(np.minimum(log_ratio, MAX_LOG_RATIO)).mean()


def _grouped(
    name: str, group: Integer[np.ndarray, " tokens"], values: Float[np.ndarray, " tokens"]
) -> dict[str, float]:
    return {f"{name}/{g}": float(values[group == g].mean()) for g in np.unique(group)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """All sampled tokens in a row, and where each belongs."""

    d: Float[np.ndarray, " tokens"]
    sequence: Integer[np.ndarray, " tokens"]
    probability_tenth: Integer[np.ndarray, " tokens"]
    position_tenth: Integer[np.ndarray, " tokens"]
    length_quarter: Integer[np.ndarray, " tokens"]

    def where(self, kept: Bool[np.ndarray, " tokens"]) -> "_Tokens":
        return _Tokens(**{name: getattr(self, name)[kept] for name in self.__slots__})


def _sampled_tokens(
    trainer: Sequence[Float[np.ndarray, "_"]], generator: Sequence[Float[np.ndarray, "_"]]
) -> _Tokens:
    if len(trainer) != len(generator):
        raise ValueError(
            f"{len(trainer)} sequences of trainer log-probs, {len(generator)} of the generator's"
        )
    for number, (ours, theirs) in enumerate(zip(trainer, generator, strict=True)):
        if np.shape(ours) != np.shape(theirs):
            raise ValueError(
                f"sequence {number}: {np.shape(ours)} trainer log-probs, {np.shape(theirs)} of the "
                "generator's"
            )
    lengths = [len(values) for values in generator]
    longest = max(lengths, default=0)

    def joined(dtype: type, array_of: Callable[[int, int], np.ndarray]) -> np.ndarray:
        parts = [array_of(number, length) for number, length in enumerate(lengths)]
        # Without sequences, too, it is of that type.
        return np.concatenate([np.zeros(0, dtype), *parts])

    ours = joined(np.float64, lambda i, _: np.asarray(trainer[i], np.float64))
    theirs = joined(np.float64, lambda i, _: np.asarray(generator[i], np.float64))
    # -inf - -inf is NaN, and counted as such.
    with np.errstate(invalid="ignore"):
        d = ours - theirs
        probability = np.nan_to_num(np.exp(np.minimum(theirs, 0.0)))
    return _Tokens(
        d=d,
        sequence=joined(int, lambda i, n: np.full(n, i)),
        probability_tenth=np.minimum(probability * 10, 9).astype(int),
        position_tenth=joined(int, lambda _, n: np.arange(n) * 10 // max(n, 1)),
        length_quarter=joined(int, lambda _, n: np.full(n, (n * 4 - 1) // max(longest, 1))),
    )
