"""Mismatch statistics against closed forms, hand-worked numbers and a loop."""

import math

import numpy as np
import pytest

from fos_rl.trainer.mismatch import mismatch_metrics

KEYS = {
    *(f"mismatch/log_prob_abs_diff/{name}" for name in ("mean", "p50", "p99", "max")),
    "mismatch/kl_k1",
    "mismatch/kl_k3",
}


def test_hand_worked_differences():
    # d = +0.5, -0.5, 0, over two sequences.
    metrics = mismatch_metrics(
        [np.array([-1.0, -2.0]), np.array([-3.0])], [np.array([-1.5, -1.5]), np.array([-3.0])]
    )
    assert metrics.keys() == KEYS
    assert metrics["mismatch/log_prob_abs_diff/mean"] == pytest.approx(1 / 3, rel=1e-15)
    assert metrics["mismatch/log_prob_abs_diff/p50"] == 0.5
    assert metrics["mismatch/log_prob_abs_diff/max"] == 0.5
    assert metrics["mismatch/kl_k1"] == 0.0, "errors of both signs cancel in k1"
    # (e^0.5 - 1.5 + e^-0.5 - 0.5 + 0) / 3
    want = (math.exp(0.5) - 1.5 + math.exp(-0.5) - 0.5) / 3
    assert metrics["mismatch/kl_k3"] == pytest.approx(want, rel=1e-12)


def test_both_estimators_are_exact_on_a_sample_in_exact_proportion():
    """Generator P(a) = 3/4, trainer Q(a) = 1/2: of four tokens three are a, so that a mean over
    them is the expectation under P, and k1 = k3 = KL(P || Q) as E_P[Q/P] = 1."""
    generator = np.log([0.75, 0.75, 0.75, 0.25])
    trainer = np.log([0.5, 0.5, 0.5, 0.5])
    kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    metrics = mismatch_metrics([trainer], [generator])
    assert metrics["mismatch/kl_k1"] == pytest.approx(kl, rel=1e-12)
    assert metrics["mismatch/kl_k3"] == pytest.approx(kl, rel=1e-12)
    backward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert metrics["mismatch/kl_k1"] != pytest.approx(backward, rel=0.05), "the other direction"


def test_quantiles_interpolate_like_a_sorted_list():
    rng = np.random.default_rng(0)
    lengths = [13, 1, 40]
    trainer = [rng.normal(size=n).astype(np.float32) for n in lengths]
    generator = [rng.normal(size=n).astype(np.float32) for n in lengths]
    size = sorted(
        abs(float(t) - float(g))
        for ours, theirs in zip(trainer, generator, strict=True)
        for t, g in zip(ours, theirs, strict=True)
    )
    metrics = mismatch_metrics(trainer, generator)
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        place = q * (len(size) - 1)
        below = int(place)
        want = size[below] + (place - below) * (size[below + 1] - size[below])
        assert metrics[f"mismatch/log_prob_abs_diff/{name}"] == pytest.approx(want, rel=1e-12)
    assert metrics["mismatch/log_prob_abs_diff/max"] == size[-1]
    assert metrics["mismatch/log_prob_abs_diff/mean"] == pytest.approx(sum(size) / len(size))


def test_small_differences_keep_their_precision():
    """k3 is about d^2 / 2 = 5e-13; exp(d) - 1 - d in fp32 would give 0 or 6e-8."""
    metrics = mismatch_metrics([np.array([-1.0 + 1e-6])], [np.array([-1.0])])
    assert metrics["mismatch/kl_k3"] == pytest.approx(5e-13, rel=1e-2)


def test_tokens_that_are_not_finite_are_counted_and_left_out():
    trainer = np.array([-1.0, math.nan, -math.inf, -2.0])
    generator = np.array([-1.5, -1.0, -math.inf, -2.0])
    metrics = mismatch_metrics([trainer], [generator])
    assert metrics["mismatch/non_finite_frac"] == 0.5
    assert metrics["mismatch/log_prob_abs_diff/mean"] == 0.25
    assert metrics["mismatch/log_prob_abs_diff/max"] == 0.5


def test_nothing_to_measure_leaves_the_keys_out():
    assert mismatch_metrics([], []) == {}
    assert mismatch_metrics([np.zeros(0)], [np.zeros(0)]) == {}
    lost = mismatch_metrics([np.array([math.nan])], [np.array([-1.0])])
    assert lost == {"mismatch/non_finite_frac": 1.0}


def test_sides_that_disagree_about_tokens_are_named():
    with pytest.raises(ValueError, match="sequence 1"):
        mismatch_metrics([np.zeros(2), np.zeros(3)], [np.zeros(2), np.zeros(2)])
    with pytest.raises(ValueError, match="1 sequences of trainer"):
        mismatch_metrics([np.zeros(2)], [])
