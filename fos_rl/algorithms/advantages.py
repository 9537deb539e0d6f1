"""Group-relative advantages: how much better a response did than the others to its prompt."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """One advantage per sequence, and which sequences belong to a group without reward variance.

    Example: rewards [1, 0, 0, 0] of one group have mean 0.25 and standard deviation 0.5, so
    advantages are [1.5, -0.5, -0.5, -0.5]; a second group of rewards [1, 1] has advantages [0, 0]
    and zero_variance [True, True].
    """

    advantages: Float[np.ndarray, " sequences"]
    zero_variance: Bool[np.ndarray, " sequences"]


def group_advantages(
    rewards: Float[np.ndarray, " sequences"],
    group_ids: Integer[np.ndarray, " sequences"],
    *,
    normalize: bool,
    eps: float = 1e-6,
) -> GroupAdvantages:
    """(reward - mean of its group), divided by (std of its group + eps) when `normalize`.

    GRPO and DAPO normalise (Shao et al. 2024, arXiv:2402.03300, section 4.1.2), Dr.GRPO does not
    (Liu et al. 2025, arXiv:2503.20783). The standard deviation is the sample's (divisor n - 1).
    Computed in fp64. A group whose rewards are all equal has advantages of exactly 0; equality is
    tested on the rewards, since a computed deviation of equal numbers need not be 0.

    Raises:
        ValueError: for a reward that is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        where = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise ValueError(
            f"reward of sequence {where} is {rewards[where]}: rewards must be finite; let the "
            "verifier score a failure 0"
        )
    advantages = np.zeros_like(rewards)
    zero_variance = np.zeros(rewards.shape, dtype=bool)
    for group in np.unique(group_ids):
        members = group_ids == group
        earned = rewards[members]
        if earned.min() == earned.max():
            zero_variance[members] = True
            continue
        centred = earned - earned.mean()
        advantages[members] = centred / (earned.std(ddof=1) + eps) if normalize else centred
    return GroupAdvantages(advantages=advantages, zero_variance=zero_variance)
