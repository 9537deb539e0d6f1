"""Token weights against hand-worked shares."""

import numpy as np
import pytest

from fos_rl.algorithms.aggregation import token_weights


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("sequence_mean", [[1 / 4, 1 / 4, 0], [1 / 2], [0]]),
        ("token_mean", [[1 / 3, 1 / 3, 0], [1 / 3], [0]]),
        ("sequence_sum", [[1 / 2, 1 / 2, 0], [1 / 2], [0]]),
        ("constant", [[1 / 8, 1 / 8, 0], [1 / 8], [0]]),
    ],
    ids=str,
)
def test_hand_worked_weights(aggregation, want):
    masks = [np.array([True, True, False]), np.array([True]), np.array([False])]
    got = token_weights(masks, aggregation=aggregation, max_new_tokens=4)
    for weights, row in zip(got, want, strict=True):
        np.testing.assert_array_equal(weights, np.array(row, dtype=np.float32))


def test_no_sequences():
    assert token_weights([], aggregation="token_mean", max_new_tokens=8) == []
