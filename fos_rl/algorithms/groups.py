"""From rollouts to a training batch: rewards, truncation policy, advantages, collation. Pure."""

from collections.abc import Sequence

import numpy as np

from fos_rl.algorithms.advantages import group_advantages
from fos_rl.config import RunConfig
from fos_rl.types import Prompt, Rollout, Sample, TrainBatch, Verifier

MAX_REWARD = 1e18
"""The square of an advantage must fit fp32, in which the loss and its gradient are computed."""


def score_groups(
    prompts: Sequence[Prompt],
    groups: Sequence[Sequence[Rollout]],
    verifier: Verifier,
    config: RunConfig,
) -> tuple[list[Sample], dict[str, float]]:
    """One Sample a rollout, in order, with the verifier's own counts.

    `rollout.truncated` decides what a response cut by max_new_tokens earns: its score as it
    stands, 0, or nothing at all (masked out of the loss).
    """
    rollouts = [rollout for group in groups for rollout in group]
    answers = [p.answer for p, group in zip(prompts, groups, strict=True) for _ in group]
    rewards, metrics = verifier.score(rollouts, answers)
    check_rewards(rewards, rollouts)
    truncated = np.array([r.finish_reason == "length" for r in rollouts])
    if config.rollout.truncated == "zero_reward":
        rewards = np.where(truncated, 0.0, rewards)
    # A rollout the engine gave up on says nothing about the policy.
    masked = np.array([r.finish_reason == "abort" or not r.response_ids for r in rollouts])
    if config.rollout.truncated == "mask":
        masked |= truncated
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    relative = group_advantages(rewards, group_of, normalize=config.algorithm.normalize_advantages)
    samples = [
        Sample(
            rollout=rollout,
            answer=answer,
            group=int(group),
            reward=float(reward),
            advantage=float(advantage),
            zero_variance=bool(equal),
            masked=bool(mask),
        )
        for rollout, answer, group, reward, advantage, equal, mask in zip(
            rollouts,
            answers,
            group_of,
            rewards,
            relative.advantages,
            relative.zero_variance,
            masked,
            strict=True,
        )
    ]
    return samples, metrics


def check_rewards(rewards: np.ndarray, rollouts: Sequence[Rollout]) -> None:
    """ValueError unless there is a usable reward for every rollout, masked ones too."""
    if np.shape(rewards) != (len(rollouts),):
        raise ValueError(
            f"the verifier gave rewards of shape {np.shape(rewards)} for {len(rollouts)} "
            "responses; return one number for each, in order"
        )
    # Not above: infinities and NaN are refused too.
    usable = np.abs(np.asarray(rewards, dtype=np.float64)) <= MAX_REWARD
    for index in np.flatnonzero(~usable)[:1]:
        rollout = rollouts[index]
        raise ValueError(
            f"the reward of response {index} (prompt {rollout.prompt_id!r}) is {rewards[index]}: "
            f"rewards must be finite, and at most {MAX_REWARD:g} in size; score a failure 0. The "
            f"response ends with {rollout.text[-80:]!r}"
        )


def trainable(samples: Sequence[Sample]) -> list[Sample]:
    """Samples that carry a gradient: not masked, in a group whose rewards differ."""
    return [s for s in samples if not (s.zero_variance or s.masked)]


def unmasked(samples: Sequence[Sample]) -> list[Sample]:
    """Samples whose tokens say something about the policy, learnable or not."""
    return [s for s in samples if not s.masked]


def collate(samples: Sequence[Sample]) -> TrainBatch:
    """The trainer's batch: the sampled ids themselves, never re-tokenized text."""
    rollouts = [s.rollout for s in samples]
    experts = [r.experts for r in rollouts if r.experts is not None]
    return TrainBatch(
        token_ids=[np.array(r.prompt_ids + r.response_ids, dtype=np.int64) for r in rollouts],
        prompt_lengths=[len(r.prompt_ids) for r in rollouts],
        generator_log_probs=[np.array(r.log_probs, dtype=np.float32) for r in rollouts],
        advantages=np.array([s.advantage for s in samples], dtype=np.float32),
        experts=experts if len(experts) == len(rollouts) else None,
    )


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, lengths, truncation and groups without variance, over all samples of the step."""
    rewards = np.array([s.reward for s in samples])
    lengths = np.array([len(s.rollout.response_ids) for s in samples])
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "rollout/response_length/mean": lengths.mean(),
        "rollout/response_length/max": lengths.max(),
        "rollout/truncated_frac": np.mean([s.rollout.finish_reason == "length" for s in samples]),
        "rollout/masked_frac": np.mean([s.masked for s in samples]),
        "rollout/zero_variance_groups": len({s.group for s in samples if s.zero_variance}),
        "rollout/groups": len({s.group for s in samples}),
    }
    return {name: float(value) for name, value in metrics.items()}
