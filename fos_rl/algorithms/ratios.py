"""Ratios of two policies' probabilities, of tokens and of packed sequences."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fos_rl.algorithms.mismatch import MAX_LOG_RATIO


def bounded_exp(log_ratio: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """exp of the log-ratio held within +-MAX_LOG_RATIO, so that no token poisons a whole batch."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sums(
    values: Float[Tensor, " tokens"], lengths: Sequence[int]
) -> Float[Tensor, " tokens"]:
    """Each token's sequence's sum; differentiable, and added in the tokens' order.

    Example: values [1, 2, 5] of lengths [2, 1] give [3, 3, 5].
    """
    if not lengths:
        return values
    sums = torch.stack([part.sum() for part in values.split(list(lengths))])
    return sums.repeat_interleave(torch.tensor(lengths, device=values.device))


def sequence_means(
    values: Float[Tensor, " tokens"], counted: Bool[Tensor, " tokens"], lengths: Sequence[int]
) -> Float[Tensor, " tokens"]:
    """Each token's sequence's mean over its counted tokens, 0 for a sequence without any."""
    numbers = sequence_sums(counted.to(values.dtype), lengths).clamp(min=1)
    return sequence_sums(torch.where(counted, values, 0), lengths) / numbers
