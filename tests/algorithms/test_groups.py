"""Rewards, truncation policy, advantages and collation, on hand-made rollouts."""

import numpy as np
import pytest

from fos_rl.algorithms.groups import collate, rollout_metrics, score_groups, trainable
from fos_rl.config import RunConfig, parse_config
from fos_rl.types import FinishReason, Prompt, Rollout


class FixedVerifier:
    """Scores each rollout by its text, `right` or anything else."""

    def score(self, rollouts, answers):
        assert [r.prompt_id for r in rollouts] == list(answers)
        return np.array([float(r.text == "right") for r in rollouts]), {"reward/timeouts": 1.0}


def _config(truncated: str = "keep", **algorithm: object) -> RunConfig:
    return parse_config(
        {
            "model": {"path": "x"},
            "data": {"type": "arithmetic"},
            "rollout": {"truncated": truncated},
            "algorithm": algorithm,
        }
    )


def _rollout(prompt: str, text: str, finish: FinishReason = "stop", length: int = 2) -> Rollout:
    return Rollout(
        prompt_id=prompt,
        prompt_ids=[1, 2],
        response_ids=list(range(3, 3 + length)),
        log_probs=[-0.5] * length,
        finish_reason=finish,
        policy_version=0,
        text=text,
    )


def _score(groups: list[list[Rollout]], config: RunConfig):
    prompts = [
        Prompt(id=g[0].prompt_id, token_ids=[1, 2], text="", answer=g[0].prompt_id) for g in groups
    ]
    return score_groups(prompts, groups, FixedVerifier(), config)


GROUPS = [
    [_rollout("a", "right"), _rollout("a", "wrong"), _rollout("a", "right", "length")],
    [_rollout("b", "right"), _rollout("b", "right"), _rollout("b", "right")],
]


def test_advantages_and_skipped_groups() -> None:
    samples, metrics = _score(GROUPS, _config(normalize_advantages=False))
    assert metrics == {"reward/timeouts": 1.0}
    third = 1 / 3
    assert [s.advantage for s in samples] == pytest.approx([third, -2 * third, third, 0, 0, 0])
    assert [s.group for s in samples] == [0, 0, 0, 1, 1, 1]
    assert trainable(samples) == samples[:3]
    shown = rollout_metrics(samples)
    assert shown["reward/mean"] == pytest.approx(5 / 6)
    assert shown["rollout/zero_variance_groups"] == 1
    assert shown["rollout/truncated_frac"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("policy", "rewards", "masked"),
    [
        ("keep", [1, 0, 1], [False, False, False]),
        ("mask", [1, 0, 1], [False, False, True]),
        ("zero_reward", [1, 0, 0], [False, False, False]),
    ],
)
def test_truncation_policy(policy: str, rewards: list, masked: list) -> None:
    samples, _ = _score(GROUPS[:1], _config(policy))
    assert [s.reward for s in samples] == rewards
    assert [s.masked for s in samples] == masked
    assert len(trainable(samples)) == 3 - sum(masked)


def test_a_rollout_the_engine_gave_up_on_is_masked() -> None:
    group = [_rollout("a", "right"), _rollout("a", "wrong", "abort"), _rollout("a", "", "stop", 0)]
    samples, _ = _score([group], _config())
    assert [s.masked for s in samples] == [False, True, True]


def test_collate_keeps_the_sampled_ids() -> None:
    samples, _ = _score(GROUPS[:1], _config())
    batch = collate(samples)
    assert batch.num_sequences == 3
    assert [ids.tolist() for ids in batch.token_ids] == [[1, 2, 3, 4]] * 3
    assert batch.prompt_lengths == [2, 2, 2]
    assert batch.generator_log_probs[0].tolist() == [-0.5, -0.5]
    assert batch.advantages.dtype == np.float32


class GivenRewards:
    """A user's verifier that returns what it is given."""

    def __init__(self, rewards: object) -> None:
        self.rewards = rewards

    def score(self, rollouts, answers):
        return self.rewards, {}


@pytest.mark.parametrize("policy", ["keep", "mask", "zero_reward"])
@pytest.mark.parametrize("index", [0, 2], ids=["finished", "truncated"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e19])
def test_a_reward_that_is_no_usable_number_is_refused(
    policy: str, index: int, value: float
) -> None:
    """Also of a response that the truncation policy would give another one."""
    prompts = [Prompt(id="a", token_ids=[1, 2], text="", answer="a")]
    rewards = np.array([0.0, 1.0, 0.0])
    rewards[index] = value
    with pytest.raises(ValueError, match=rf"the reward of response {index} \(prompt 'a'\) is"):
        score_groups(prompts, GROUPS[:1], GivenRewards(rewards), _config(policy))


@pytest.mark.wrong_types
@pytest.mark.parametrize("rewards", [np.zeros(2), np.zeros(1), np.zeros((3, 1)), np.float64(1.0)])
def test_rewards_that_are_not_one_per_response_are_refused(rewards: np.ndarray) -> None:
    """One of them would be spread over all."""
    prompts = [Prompt(id="a", token_ids=[1, 2], text="", answer="a")]
    with pytest.raises(ValueError, match=r"rewards of shape .* for 3 responses; return one number"):
        score_groups(prompts, GROUPS[:1], GivenRewards(rewards), _config("zero_reward"))


def test_the_largest_reward_leaves_finite_fp32_advantages() -> None:
    prompts = [Prompt(id="a", token_ids=[1, 2], text="", answer="a")]
    rewards = GivenRewards(np.array([1e18, -1e18, 0.0]))
    for normalize in (True, False):
        config = _config(normalize_advantages=normalize)
        samples, _ = score_groups(prompts, GROUPS[:1], rewards, config)
        squares = collate(samples).advantages ** 2
        assert np.isfinite(squares).all()
        assert squares.max() > 0
