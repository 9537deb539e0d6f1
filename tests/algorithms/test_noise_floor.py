"""The draw of the noise floor's sample, and what is made of it."""

import numpy as np
import pytest

from fos_rl.algorithms.noise_floor import (
    MIN_TOKENS,
    TOKEN_FRACTION,
    floor_sample,
    with_floor,
)


@pytest.mark.parametrize("seed", range(5))
def test_a_bounded_share_of_the_tokens_is_scored_again(seed):
    lengths = np.random.default_rng(seed).integers(10, 60, size=2000).tolist()
    chosen = floor_sample(lengths, seed)
    assert len(set(chosen)) == len(chosen) > 1
    assert chosen == floor_sample(lengths, seed)
    assert chosen != floor_sample(lengths, seed + 1)
    tokens, budget = sum(lengths[i] for i in chosen), TOKEN_FRACTION * sum(lengths)
    # What is left of the budget is less than the next sequence.
    assert budget - 60 < tokens <= budget


def test_a_small_batch_is_scored_whole_or_up_to_the_fewest_tokens_that_show_noise():
    assert floor_sample([500], 0) == [0]
    assert floor_sample([MIN_TOKENS + 1], 0) == [0]
    assert sorted(floor_sample([50] * 20, 0)) == list(range(20))
    assert len(floor_sample([50] * 100, 0)) == MIN_TOKENS // 50


def test_the_mismatch_is_told_in_floors():
    key = "log_prob_abs_diff/mean"
    metrics = with_floor({f"mismatch/{key}": 0.03}, {f"mismatch/floor_{key}": 0.02})
    assert metrics["mismatch/over_floor"] == pytest.approx(1.5)
    assert "mismatch/over_floor" not in with_floor(
        {f"mismatch/{key}": 0.03}, {f"mismatch/floor_{key}": 0.0}
    )
