"""Group-relative advantages against hand-worked numbers and a loop."""

import math
import statistics

import numpy as np
import pytest

from fos_rl.algorithms.advantages import group_advantages


def test_hand_worked_group():
    # Mean 1/4; sample variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4.
    result = group_advantages(
        np.array([1.0, 0.0, 0.0, 0.0]), np.zeros(4, dtype=int), normalize=True, eps=0.0
    )
    np.testing.assert_allclose(result.advantages, [1.5, -0.5, -0.5, -0.5], rtol=1e-15)
    assert not result.zero_variance.any()


def test_without_normalising_only_the_mean_is_subtracted():
    result = group_advantages(np.array([3.0, 1.0]), np.array([7, 7]), normalize=False)
    assert result.advantages.tolist() == [1.0, -1.0]


def test_groups_may_interleave_and_match_a_loop():
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat([3, 11, 40, 8], [5, 2, 8, 3]))
    rewards = rng.normal(size=ids.size)
    result = group_advantages(rewards, ids, normalize=True, eps=1e-6)
    for i in range(ids.size):
        group = [rewards[j] for j in range(ids.size) if ids[j] == ids[i]]
        want = (rewards[i] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
        assert math.isclose(result.advantages[i], want, rel_tol=1e-12)
    assert not result.zero_variance.any()


def test_equal_rewards_have_no_variance_even_where_the_computed_deviation_is_not_zero():
    thirds = np.full(3, 0.1)
    assert thirds.std() > 0, "the case this test is about"
    rewards = np.concatenate([thirds, [0.0, 1.0], [5.0]])
    result = group_advantages(rewards, np.array([0, 0, 0, 1, 1, 2]), normalize=True)
    assert result.zero_variance.tolist() == [True, True, True, False, False, True]
    assert result.advantages[[0, 1, 2, 5]].tolist() == [0.0, 0.0, 0.0, 0.0]


def test_nearly_equal_rewards_do_have_variance():
    result = group_advantages(np.array([1.0, 1.0 + 1e-12]), np.zeros(2, dtype=int), normalize=True)
    assert not result.zero_variance.any()


def test_no_sequences():
    result = group_advantages(np.zeros(0), np.zeros(0, dtype=int), normalize=True)
    assert result.advantages.shape == (0,)
    assert result.zero_variance.shape == (0,)


def test_a_reward_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match="reward of sequence 1 is nan"):
        group_advantages(np.array([1.0, np.nan]), np.zeros(2, dtype=int), normalize=True)
