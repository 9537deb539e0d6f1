"""Flipped expert choices against sets of Python."""

import numpy as np
import pytest

from fos_rl.trainer.routing_flips import routing_flip_metrics


def test_the_docstring_is_right():
    ours, theirs = np.array([[[0, 1]], [[2, 3]]]), np.array([[[1, 0]], [[2, 4]]])
    assert routing_flip_metrics(ours, theirs, [5]) == {"mismatch/routing_flip_frac/layer_5": 0.5}


def test_equals_a_loop_over_sets():
    rng = np.random.default_rng(0)
    ours = np.stack([[rng.permutation(6)[:2] for _ in range(3)] for _ in range(40)])
    theirs = np.where(rng.random((40, 3, 1)) < 0.7, ours[..., ::-1], ours[::-1])
    got = routing_flip_metrics(ours, theirs, [1, 2, 7])
    for place, layer in enumerate([1, 2, 7]):
        flips = sum(set(ours[t, place]) != set(theirs[t, place]) for t in range(40))
        assert got[f"mismatch/routing_flip_frac/layer_{layer}"] == flips / 40
        assert 0 < flips < 40
    assert len(got) == 3


def test_no_tokens_no_keys():
    assert routing_flip_metrics(np.zeros((0, 2, 2), int), np.zeros((0, 2, 2), int), [0, 1]) == {}


@pytest.mark.wrong_types
def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"\(4, 1, 2\).*\(3, 1, 2\)"):
        routing_flip_metrics(np.zeros((4, 1, 2), int), np.zeros((3, 1, 2), int), [0])
    with pytest.raises(ValueError, match="1 layers recorded, 2 numbers"):
        routing_flip_metrics(np.zeros((4, 1, 2), int), np.zeros((4, 1, 2), int), [0, 1])
