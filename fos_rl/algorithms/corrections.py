"""Corrections of the trainer-generator mismatch: a factor for each token of the loss.

The tokens were sampled by the generator and the gradient is taken on the trainer, whose policy
differs by the mismatch: rho_t = exp(trainer_t - generator_t), both before the step's update. The
trainer's log-probs are its own of the weights that the step starts from, whatever the loss's ratio
is taken to. A factor that weights by rho belongs to `algorithm.ratio = "decoupled"`, where the
loss's ratio is (policy / trainer before the step) and rho the missing rest; under "bypass" the
ratio already is policy / generator. A factor that only drops sequences fits both.

A dropped token still counts in the loss's denominators: the batch's weights are made before any
forward, so that micro-batches add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fos_rl.algorithms.ratios import bounded_exp, sequence_means, sequence_sums
from fos_rl.config.algorithm import Correction, GeometricMask, MaskedWeights, TruncatedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionFactors:
    """A factor per token, without gradient, and where the correction limited it or made it 0.

    `truncated` and `masked` are None for a correction that does no such thing.

    Example: rho [0.9, 3.0] truncated at 2 has weights [0.9, 2.0] and truncated [False, True].
    """

    weights: Float[Tensor, " tokens"]
    truncated: Bool[Tensor, " tokens"] | None = None
    masked: Bool[Tensor, " tokens"] | None = None

    @property
    def changes(self) -> bool:
        """Whether there is a correction at all."""
        return self.truncated is not None or self.masked is not None


def correct(
    config: Correction,
    trainer_log_probs: Float[Tensor, " tokens"],
    generator_log_probs: Float[Tensor, " tokens"],
    counted: Bool[Tensor, " tokens"],
    lengths: Sequence[int],
) -> CorrectionFactors:
    """The factors of the correction that `algorithm.correction.type` names.

    Args:
        trainer_log_probs: of the trainer before the step's first update.
        counted: tokens of the loss; the others are left out of every sequence's sum and mean.
        lengths: response tokens of each packed sequence, whole sequences only.
    """
    difference = trainer_log_probs.detach() - generator_log_probs
    log_rho = torch.where(counted, difference, torch.zeros_like(difference))
    match config:
        case TruncatedWeights(level="token"):
            return truncate(log_rho, config.max_weight)
        case TruncatedWeights():
            return truncate(sequence_sums(log_rho, lengths), config.max_weight)
        case MaskedWeights():
            return mask_outside(log_rho, config.low, config.high)
        case GeometricMask():
            log_mean = sequence_means(log_rho, counted, lengths)
            return drop_outside(log_mean, config.low, config.high)
        case _:
            return CorrectionFactors(weights=torch.ones_like(log_rho))


def truncate(log_rho: Float[Tensor, " tokens"], max_weight: float) -> CorrectionFactors:
    """min(rho, max_weight): truncated importance sampling (Yao et al. 2025,
    https://fengyao.notion.site/off-policy-rl; the truncation is Ionides 2008).

    With one rho per token it corrects each token given its prefix. With a sequence's rho, the
    product over its tokens, it corrects the whole response, prefixes included; that product's
    variance grows with the length.
    """
    rho = bounded_exp(log_rho)
    return CorrectionFactors(weights=rho.clamp(max=max_weight), truncated=rho > max_weight)


def mask_outside(log_rho: Float[Tensor, " tokens"], low: float, high: float) -> CorrectionFactors:
    """rho where it is in [low, high], else 0: IcePop (https://ringtech.notion.site/icepop).

    A token about which trainer and generator disagree so much carries no gradient at all, where
    truncation would keep it at the limit.
    """
    rho = bounded_exp(log_rho)
    outside = (rho < low) | (rho > high)
    return CorrectionFactors(weights=rho.masked_fill(outside, 0.0), masked=outside)


def drop_outside(log_mean: Float[Tensor, " tokens"], low: float, high: float) -> CorrectionFactors:
    """1, or 0 for every token of a sequence whose geometric mean of rho is outside [low, high].

    Liu et al. 2025, "When Speed Kills Stability" (https://richardli.xyz/rl-collapse), the
    geometric sequence mask. The mean does not drift with the length as the product does.
    """
    mean = bounded_exp(log_mean)
    outside = (mean < low) | (mean > high)
    return CorrectionFactors(weights=(~outside).to(mean.dtype), masked=outside)
