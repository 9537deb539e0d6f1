"""The clipped policy-gradient loss, as a weighted sum over tokens.

Weights carry the aggregation. Their normalisers are the whole batch's, so the losses of its
micro-batches add up to the loss of the batch, however it is cut.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Aggregation = Literal["sequence_mean", "token_mean", "constant"]

# exp(20) is 5e8: beyond it a token says that the two policies are unrelated, and inf would poison
# the whole batch.
MAX_LOG_RATIO = 20.0


def token_weights(
    lengths: Sequence[int],
    aggregation: Aggregation,
    *,
    num_sequences: int,
    num_tokens: int,
    max_tokens: int,
) -> Float[Tensor, " tokens"]:
    """Each response token's share of the loss, fp32 on the CPU, for sequences laid end to end.

    - `sequence_mean` (GRPO): 1 / (num_sequences * length), the mean over tokens, then sequences.
    - `token_mean` (DAPO): 1 / num_tokens, so that a long response weighs more.
    - `constant` (Dr.GRPO): 1 / (num_sequences * max_tokens), so that no token's weight depends on
      its response's length.

    Example: lengths [2, 1] as a whole batch weigh [1/4, 1/4, 1/2] under sequence_mean and
    [1/3, 1/3, 1/3] under token_mean.

    Args:
        lengths: response tokens of each sequence of this micro-batch.
        num_sequences: sequences of one optimizer update, all micro-batches and ranks together.
        num_tokens: their response tokens.
        max_tokens: the longest response that sampling allows.
    """
    if aggregation == "sequence_mean":
        shares = [1.0 / (num_sequences * length) if length else 0.0 for length in lengths]
    elif aggregation == "token_mean":
        shares = [1.0 / num_tokens if num_tokens else 0.0] * len(lengths)
    else:
        shares = [1.0 / (num_sequences * max_tokens)] * len(lengths)
    weights = torch.tensor(shares, dtype=torch.float32, device="cpu")
    return weights.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device="cpu"))


def policy_loss(
    log_probs: Float[Tensor, " tokens"],
    old_log_probs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    weights: Float[Tensor, " tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """The micro-batch's share of the loss, and sums over its tokens for metrics.

    loss = sum_t weights_t * -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), with
    r_t = exp(log_probs_t - old_log_probs_t): Schulman et al. 2017 (arXiv:1707.06347), equation 7;
    different limits on the two sides are DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476).
    Log-ratios are held within +-MAX_LOG_RATIO.

    Tokens of weight 0 and tokens whose old log-prob is not finite are left out of loss, gradient
    and sums.

    The sums, to be divided by the sum of `tokens` over all micro-batches:

    - `tokens`: how many were counted.
    - `loss/clip_frac`: tokens whose gradient the clip removed, a positive advantage above the
      ceiling or a negative one below the floor.
    - `loss/out_of_band_frac`: tokens whose ratio left the band, whatever their advantage; about
      twice as many. Both are 0 by construction where the old log-probs are the trainer's own of
      the same weights.
    - `loss/ratio_mean`: r_t.

    Args:
        log_probs: of the policy being trained, fp32; the only input that gets a gradient.
        old_log_probs: of the generator (bypass), or of the trainer before the update (decoupled).
        advantages: of each token's sequence.
        weights: from `token_weights`.
    """
    counted = (weights != 0) & old_log_probs.isfinite()
    zero = torch.zeros_like(log_probs)
    # where() before exp(): a NaN that is masked afterwards would still reach the gradient.
    log_ratio = torch.where(counted, log_probs - old_log_probs.detach(), zero)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    floor, ceiling = 1.0 - clip_low, 1.0 + clip_high
    gain = torch.minimum(ratio * advantages, ratio.clamp(floor, ceiling) * advantages)
    above, below = ratio > ceiling, ratio < floor
    clipped = (above & (advantages > 0)) | (below & (advantages < 0))
    sums = {
        "tokens": counted,
        "loss/clip_frac": clipped & counted,
        "loss/out_of_band_frac": (above | below) & counted,
        "loss/ratio_mean": torch.where(counted, ratio.detach(), zero),
    }
    loss = -(torch.where(counted, gain, zero) * weights).sum()
    return loss, {name: values.sum().float() for name, values in sums.items()}
