"""The draw of the noise floor's sample: another batch each time, a bounded share of the tokens."""

import numpy as np
import pytest

from fos_rl.trainer.noise_floor import TOKEN_FRACTION, floor_batches


def test_the_docstring_is_right():
    lengths, groups = [30, 30, 40], [[0, 1], [2]]
    draws = [floor_batches(lengths, groups, seed) for seed in range(40)]
    assert {str(draw) for draw in draws} == {"[[0]]", "[[1]]", "[[2, 2]]"}
    assert draws[7] == floor_batches(lengths, groups, 7), "a function of the seed"


@pytest.mark.parametrize("seed", range(5))
def test_no_batch_is_the_one_of_the_first_scoring_and_the_cost_is_bounded(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(10, 60, size=200).tolist()
    cuts = np.sort(rng.choice(np.arange(1, 200), size=120, replace=False))
    groups = [part.tolist() for part in np.split(np.arange(200), cuts)]
    assert any(len(group) == 1 for group in groups)
    batches = floor_batches(lengths, groups, seed)
    sampled = [batch[0] for batch in batches]
    assert len(set(sampled)) == len(sampled) > 1
    for batch in batches:
        assert batch not in groups
        assert set(batch) == {batch[0]}
    tokens = sum(lengths[i] for batch in batches for i in batch)
    # What is left of the budget is less than the next sequence with its copy.
    assert TOKEN_FRACTION * sum(lengths) - 2 * 60 < tokens <= TOKEN_FRACTION * sum(lengths)


def test_a_small_batch_still_has_one():
    assert floor_batches([500], [[0]], 0) == [[0, 0]]
