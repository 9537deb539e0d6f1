"""The divergence of two next-token distributions, whole, not of a sampled token alone."""

import numpy as np
from jaxtyping import Float


def full_vocabulary_kl(
    log_p: Float[np.ndarray, "tokens vocab"], log_q: Float[np.ndarray, "tokens vocab"]
) -> Float[np.ndarray, " tokens"]:
    """KL(P || Q) of each token in nats, in fp64: sum_v p (exp(e) - 1 - e), e = log q - log p.

    Equal to sum_v p (log p - log q), as both sum to 1, but each term is at least 0: where P and Q
    nearly agree, the plain sum adds terms of size e to a result of size e^2, and the rounding of
    the two fp32 log-softmaxes alone would make it negative.

    inf where Q excludes an entry of P, NaN where a log-prob is NaN. An entry of probability 0 under
    P adds its q.

    Example: P = (3/4, 1/4), Q = (1/2, 1/2): 3/4 log(3/2) + 1/4 log(1/2) = 0.1308.

    Raises:
        ValueError: when the two shapes differ.
    """
    if np.shape(log_p) != np.shape(log_q):
        raise ValueError(f"log_p has shape {np.shape(log_p)}, log_q {np.shape(log_q)}")
    log_p, log_q = np.asarray(log_p, np.float64), np.asarray(log_q, np.float64)
    p, q = np.exp(log_p), np.exp(log_q)
    with np.errstate(invalid="ignore", over="ignore"):
        e = log_q - log_p
        # For e > 1 nothing cancels, and p exp(e) is q, where exp(e) itself may overflow.
        terms = np.where(e > 1, q - p - p * e, p * (np.expm1(np.minimum(e, 1)) - e))
    return np.where(p == 0, q, terms).sum(axis=-1)
