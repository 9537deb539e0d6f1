"""How the tokens of a batch share its loss."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

Aggregation = Literal["sequence_mean", "token_mean", "sequence_sum", "constant"]


def token_weights(
    loss_masks: Sequence[Bool[np.ndarray, "_"]],
    *,
    aggregation: Aggregation,
    max_new_tokens: int,
) -> list[Float[np.ndarray, "_"]]:
    """Each token's share of the loss, 0 where the mask is False; one array per sequence.

    With N sequences that have a True token, n_i True tokens in sequence i and T in all:

    - `sequence_mean` (GRPO): 1 / (N n_i), the mean over tokens, then over sequences.
    - `token_mean` (DAPO): 1 / T, so that a long response weighs more.
    - `sequence_sum`: 1 / N, the sum over tokens, then the mean over sequences: the policy gradient
      of a whole response, without a length normaliser.
    - `constant` (Dr.GRPO): 1 / (N max_new_tokens), the same direction as `sequence_sum` at the
      scale of a mean.

    Example: masks [T, T, F] and [T] have weights [1/4, 1/4, 0] and [1/2] under sequence_mean,
    [1/3, 1/3, 0] and [1/3] under token_mean, [1/2, 1/2, 0] and [1/2] under sequence_sum.

    Args:
        loss_masks: over the whole batch of one optimizer update, all ranks and micro-batches.
            False for prompts, masked responses and tokens without a finite log-prob.
        max_new_tokens: the sampling limit; used by `constant`.
    """
    counts = [int(mask.sum()) for mask in loss_masks]
    num_sequences = sum(count > 0 for count in counts)
    num_tokens = sum(counts)

    def weight(count: int) -> float:
        if count == 0:
            return 0.0
        match aggregation:
            case "sequence_mean":
                return 1.0 / (num_sequences * count)
            case "token_mean":
                return 1.0 / num_tokens
            case "sequence_sum":
                return 1.0 / num_sequences
            case "constant":
                return 1.0 / (num_sequences * max_new_tokens)

    pairs = zip(loss_masks, counts, strict=True)
    return [mask.astype(np.float32) * np.float32(weight(count)) for mask, count in pairs]
