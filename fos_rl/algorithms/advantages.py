"""Group-relative advantages: how much better a response did than the others to its prompt."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """One advantage per sequence, and which sequences belong to a group without reward variance.

    Example: rewards [1, 0, 0, 0] of one group have mean 0.25 and standard deviation 0.5, so
    advantages are [1.5, -0.5, -0.5, -0.5]; a second group of rewards [1, 1] has advantages [0, 0],
    zero_variance [True, True], and num_zero_variance_groups is 1 of num_groups 2.
    """

    advantages: Float[np.ndarray, " sequences"]
    zero_variance: Bool[np.ndarray, " sequences"]
    num_groups: int
    num_zero_variance_groups: int


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
    groups = np.unique(group_ids)
    num_zero = 0
    for group in groups:
        members = group_ids == group
        earned = rewards[members]
        if earned.min() == earned.max():
            zero_variance[members] = True
            num_zero += 1
            continue
        centred = earned - earned.mean()
        advantages[members] = centred / (earned.std(ddof=1) + eps) if normalize else centred
    return GroupAdvantages(
        advantages=advantages,
        zero_variance=zero_variance,
        num_groups=len(groups),
        num_zero_variance_groups=num_zero,
    )
