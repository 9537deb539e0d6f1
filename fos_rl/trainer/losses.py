"""The clipped policy-gradient loss, as a weighted sum over tokens.

Weights carry the aggregation and the mask. They are made once from the whole batch, so the losses
of its micro-batches add up to the loss of the batch, however it is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

Aggregation = Literal["sequence_mean", "token_mean", "constant"]

# exp(20) is 5e8: beyond it a token says that the two policies are unrelated, and inf would poison
# the whole batch.
MAX_LOG_RATIO = 20.0


def token_weights(
    loss_masks: Sequence[Bool[np.ndarray, "_"]],
    *,
    aggregation: Aggregation,
    max_new_tokens: int,
) -> list[Float[np.ndarray, "_"]]:
    """Each token's share of the loss, 0 where the mask is False; one array a sequence.

    With N sequences that have a True token, n_i True tokens in sequence i and T in all:

    - `sequence_mean` (GRPO): 1 / (N n_i), the mean over tokens, then over sequences.
    - `token_mean` (DAPO): 1 / T, so that a long response weighs more.
    - `constant` (Dr.GRPO): 1 / (N max_new_tokens), so that length changes no token's weight.

    Example: masks [T, T, F] and [T] have weights [1/4, 1/4, 0] and [1/2] under sequence_mean, and
    [1/3, 1/3, 0] and [1/3] under token_mean.

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
        if aggregation == "sequence_mean":
            return 1.0 / (num_sequences * count)
        if aggregation == "token_mean":
            return 1.0 / num_tokens
        return 1.0 / (num_sequences * max_new_tokens)

    pairs = zip(loss_masks, counts, strict=True)
    return [mask.astype(np.float32) * np.float32(weight(count)) for mask, count in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A micro-batch's share of the loss, and sums for metrics: 0-d tensors on the loss's device.

    The two clip counts answer different questions and differ by about 2x. `num_clipped`: tokens
    whose gradient the clip removed (positive advantage above the ceiling, negative below the
    floor). `num_out_of_band`: tokens whose ratio left the band, whatever their advantage. When the
    old log-probs are the trainer's own of the same weights, both are 0 by construction.
    """

    loss: Float[Tensor, ""]
    num_tokens: Float[Tensor, ""]
    num_clipped: Float[Tensor, ""]
    num_out_of_band: Float[Tensor, ""]
    ratio_sum: Float[Tensor, ""]


def policy_loss(
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    weights: Float[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """sum_t weights_t * -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), with
    r_t = exp(log_probs_t - old_log_probs_t).

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; different limits on the two sides are
    DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476). Tokens of weight 0 are left out of loss,
    gradient and sums even where their log-probs are not finite. Log-ratios are held within
    +-MAX_LOG_RATIO.

    Args:
        log_probs: of the policy being trained, fp32; the only input that needs a gradient.
        old_log_probs: of the policy that sampled (bypass), or of the trainer before the update.
        advantages: each token's sequence's advantage.
        weights: from `token_weights`.
    """
    counted = weights != 0
    zero = torch.zeros_like(log_probs)
    log_ratio = torch.where(counted, log_probs - old_log_probs.detach(), zero)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    floor, ceiling = 1.0 - clip_low, 1.0 + clip_high
    gain = torch.minimum(ratio * advantages, ratio.clamp(floor, ceiling) * advantages)
    above, below = ratio > ceiling, ratio < floor
    clipped = (above & (advantages > 0)) | (below & (advantages < 0))
    return PolicyLoss(
        loss=-(torch.where(counted, gain, zero) * weights).sum(),
        num_tokens=counted.sum().float(),
        num_clipped=(clipped & counted).sum().float(),
        num_out_of_band=((above | below) & counted).sum().float(),
        ratio_sum=torch.where(counted, ratio.detach(), zero).sum(),
    )
