"""Policy-gradient losses, each a weighted sum over tokens.

Weights carry the aggregation and the mask. They are made once from the whole batch, so the losses
of its micro-batches add up to the loss of the batch, however it is cut between sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fos_rl.algorithms.corrections import CorrectionFactors
from fos_rl.algorithms.ratios import bounded_exp, sequence_means
from fos_rl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """The response tokens of a micro-batch, whole sequences in a row.

    Example: two sequences of 2 and 1 tokens have lengths [2, 1] and per token arrays of 3.
    """

    log_probs: Float[Tensor, " tokens"]
    """Of the policy being trained, fp32; the only ones that need a gradient."""
    old_log_probs: Float[Tensor, " tokens"]
    """The ratio's denominator: the generator's (`algorithm.ratio = "bypass"`), or the trainer's
    own before the step (`"decoupled"`)."""
    advantages: Float[Tensor, " tokens"]
    """Each token's sequence's advantage."""
    weights: Float[Tensor, " tokens"]
    """Share of the loss, from `token_weights`. Tokens of weight 0 are left out of loss, gradient
    and sums, even where their log-probs are not finite."""
    correction: CorrectionFactors
    """Further factors of the loss; a token that they zero is still counted."""
    lengths: Sequence[int]

    @property
    def counted(self) -> Bool[Tensor, " tokens"]:
        """Which tokens the loss is made of: those of weight other than 0."""
        return self.weights != 0

    def log_ratio(self) -> Float[Tensor, " tokens"]:
        """log(policy / old policy), 0 for tokens that do not count."""
        difference = self.log_probs - self.old_log_probs.detach()
        return torch.where(self.counted, difference, torch.zeros_like(difference))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A micro-batch's share of the loss, and sums for metrics: 0-d tensors on the loss's device.

    The two clip counts answer different questions and differ by about 2x. `num_clipped`: tokens
    whose gradient the clip removed (positive advantage above the ceiling, negative below the
    floor). `num_out_of_band`: tokens whose ratio left the band, whatever their advantage. When the
    old log-probs are the trainer's own of the same weights, both are 0 by construction.
    `num_dual_clipped`: tokens whose gradient the second clip of negative advantages removed; None
    without one.
    """

    loss: Float[Tensor, ""]
    num_tokens: Float[Tensor, ""]
    num_clipped: Float[Tensor, ""]
    num_out_of_band: Float[Tensor, ""]
    ratio_sum: Float[Tensor, ""]
    num_dual_clipped: Float[Tensor, ""] | None = None


def policy_loss(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> PolicyLoss:
    """The loss that `algorithm.type` names."""
    band = (1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
    if algorithm.type == "cispo":
        return cispo_loss(tokens, band)
    if algorithm.type == "gspo":
        return gspo_loss(tokens, band, algorithm.dual_clip)
    return ppo_clip_loss(tokens, band, algorithm.dual_clip)


def ppo_clip_loss(
    tokens: PolicyTokens, band: tuple[float, float], dual_clip: float | None = None
) -> PolicyLoss:
    """sum_t w_t * -min(r_t A_t, clip(r_t, band) A_t), with r_t = exp(log_probs_t - old_t).

    Schulman et al. 2017 (arXiv:1707.06347), equation 7; the loss of GRPO and Dr.GRPO, and with
    different limits on the two sides DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476).
    """
    return _clipped(tokens, tokens.log_ratio(), band, dual_clip)


def gspo_loss(
    tokens: PolicyTokens, band: tuple[float, float], dual_clip: float | None = None
) -> PolicyLoss:
    """The clipped loss of one ratio per sequence: s = exp(mean_t log r_t), its tokens' geometric
    mean.

    Zheng et al. 2025 (arXiv:2507.18071), equations 5 and 7. A sequence is clipped as a whole, and
    since s is within a few 1e-4 of 1, so is the band.
    """
    log_ratio = sequence_means(tokens.log_ratio(), tokens.counted, tokens.lengths)
    return _clipped(tokens, log_ratio, band, dual_clip)


def cispo_loss(tokens: PolicyTokens, band: tuple[float, float]) -> PolicyLoss:
    """sum_t w_t * -clip(r_t, band) A_t log_probs_t, without a gradient through the ratio.

    MiniMax-M1 (arXiv:2506.13585), equation 4: the clip limits a token's weight and never takes its
    gradient, so num_clipped is 0 and num_out_of_band counts the limited weights.
    """
    ratio = bounded_exp(tokens.log_ratio().detach())
    log_probs = torch.where(tokens.counted, tokens.log_probs, torch.zeros_like(tokens.log_probs))
    gain = ratio.clamp(*band) * tokens.advantages * log_probs
    return _summed(tokens, gain, ratio, band, clipped=torch.zeros_like(tokens.counted))


def _clipped(
    tokens: PolicyTokens,
    log_ratio: Float[Tensor, " tokens"],
    band: tuple[float, float],
    dual_clip: float | None,
) -> PolicyLoss:
    """-min(r A, clip(r, band) A), for negative A no lower than dual_clip * A.

    The second clip is Ye et al. 2019 (arXiv:1912.09729), section 4.4: without it a token that the
    policy has made much likelier than the old one, and that was bad, has a gradient without bound.
    """
    ratio, advantages = bounded_exp(log_ratio), tokens.advantages
    gain = torch.minimum(ratio * advantages, ratio.clamp(*band) * advantages)
    bad = advantages < 0
    dual_clipped = None
    if dual_clip is not None:
        dual_clipped = bad & (ratio > dual_clip)
        gain = torch.where(bad, torch.maximum(gain, dual_clip * advantages), gain)
    floor, ceiling = band
    clipped = ((ratio > ceiling) & (advantages > 0)) | ((ratio < floor) & bad)
    return _summed(tokens, gain, ratio, band, clipped=clipped, dual_clipped=dual_clipped)


def _summed(
    tokens: PolicyTokens,
    gain: Float[Tensor, " tokens"],
    ratio: Float[Tensor, " tokens"],
    band: tuple[float, float],
    *,
    clipped: Bool[Tensor, " tokens"],
    dual_clipped: Bool[Tensor, " tokens"] | None = None,
) -> PolicyLoss:
    counted = tokens.counted
    zero = torch.zeros_like(gain)
    outside = (ratio < band[0]) | (ratio > band[1])
    return PolicyLoss(
        loss=-(torch.where(counted, gain * tokens.correction.weights, zero) * tokens.weights).sum(),
        num_tokens=counted.sum().float(),
        num_clipped=(clipped & counted).sum().float(),
        num_out_of_band=(outside & counted).sum().float(),
        ratio_sum=torch.where(counted, ratio.detach(), zero).sum(),
        num_dual_clipped=None if dual_clipped is None else (dual_clipped & counted).sum().float(),
    )
