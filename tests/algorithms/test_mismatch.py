"""Mismatch statistics against closed forms, hand-worked numbers and a loop."""

import math

import numpy as np
import pytest

from fos_rl.algorithms.mismatch import MAX_LOG_RATIO, mismatch_metrics, over_floor

KEYS = {
    *(f"log_prob_abs_diff/{name}" for name in ("mean", "p50", "p90", "p99", "max")),
    *(f"{direction}kl_k{n}" for direction in ("", "reverse_") for n in (1, 2, 3)),
    *("chi2", "ess_frac", "perplexity_ratio"),
    *(f"outside_{band}_frac" for band in ("1e-6", "1pct", "5pct")),
}


def statistics(trainer: list, generator: list) -> dict[str, float]:
    """The metrics without their prefix."""
    metrics = mismatch_metrics(trainer, generator)
    return {key.removeprefix("mismatch/"): value for key, value in metrics.items()}


def ungrouped(keys) -> set[str]:
    return {key for key in keys if not key.startswith("by_")}


def test_hand_worked_differences():
    # d = +0.5, -0.5, 0, over two sequences.
    metrics = statistics(
        [np.array([-1.0, -2.0]), np.array([-3.0])], [np.array([-1.5, -1.5]), np.array([-3.0])]
    )
    assert ungrouped(metrics) == KEYS
    assert metrics["log_prob_abs_diff/mean"] == pytest.approx(1 / 3, rel=1e-15)
    assert metrics["log_prob_abs_diff/p50"] == 0.5
    assert metrics["log_prob_abs_diff/max"] == 0.5
    assert metrics["kl_k1"] == 0.0, "errors of both signs cancel in k1"
    # (e^0.5 - 1.5 + e^-0.5 - 0.5 + 0) / 3
    want = (math.exp(0.5) - 1.5 + math.exp(-0.5) - 0.5) / 3
    assert metrics["kl_k3"] == pytest.approx(want, rel=1e-12)
    # Mean of -d over a sequence is 0 in both.
    assert metrics["perplexity_ratio"] == 1.0
    assert metrics["outside_1e-6_frac"] == metrics["outside_5pct_frac"] == pytest.approx(2 / 3)


def test_the_docstring_is_right():
    """d = 0.5 on one token: every figure of the worked example."""
    metrics = statistics([np.array([-1.0])], [np.array([-1.5])])
    want = {
        **{f"log_prob_abs_diff/{name}": 0.5 for name in ("mean", "p50", "p90", "p99", "max")},
        **{"kl_k1": -0.5, "kl_k2": 0.125, "kl_k3": 0.1487},
        **{"reverse_kl_k1": 0.8244, "reverse_kl_k2": 0.2061, "reverse_kl_k3": 0.1756},
        **{"chi2": 0.4208, "ess_frac": 1.0, "perplexity_ratio": 0.6065},
        **{f"outside_{band}_frac": 1.0 for band in ("1e-6", "1pct", "5pct")},
        **{"by_probability/2": 0.5, "by_position/0": 0.5, "by_length/3": 0.5},
    }
    assert metrics.keys() == want.keys()
    for key, value in want.items():
        assert metrics[key] == pytest.approx(value, abs=5e-5), key


@pytest.mark.parametrize(
    ("p", "q"), [((3, 1), (2, 2)), ((1, 7), (4, 4)), ((5, 3), (5, 3)), ((1, 1), (1, 9))], ids=str
)
def test_estimators_are_exact_on_a_sample_in_exact_proportion(p, q):
    """Two tokens, generator P and trainer Q in parts: with each token as often as P says, a mean
    over the tokens is the expectation under P, and E_P[Q/P] = 1 makes every unbiased estimator the
    divergence itself."""
    log_p = np.log(np.array(p) / sum(p))
    log_q = np.log(np.array(q) / sum(q))
    metrics = statistics([np.repeat(log_q, p)], [np.repeat(log_p, p)])
    probability, other = np.exp(log_p), np.exp(log_q)
    forward = (probability * (log_p - log_q)).sum()
    backward = (other * (log_q - log_p)).sum()
    chi2 = (other**2 / probability).sum() - 1
    want = {
        **{"kl_k1": forward, "kl_k3": forward},
        **{"reverse_kl_k1": backward, "reverse_kl_k3": backward},
        "kl_k2": (probability * (log_p - log_q) ** 2).sum() / 2,
        "reverse_kl_k2": (other * (log_p - log_q) ** 2).sum() / 2,
        "chi2": chi2,
        # (E r)^2 / E[r^2] = 1 / (1 + chi2).
        "ess_frac": 1 / (1 + chi2),
        # One sequence: exp(E_P[log P - log Q]).
        "perplexity_ratio": math.exp(forward),
    }
    for key, value in want.items():
        assert metrics[key] == pytest.approx(value, rel=1e-12, abs=1e-15), key


def test_both_directions_meet_the_paper_definitions_token_by_token():
    rng = np.random.default_rng(1)
    lengths = [3, 17, 8]
    generator = [-rng.exponential(size=n) for n in lengths]
    trainer = [g + rng.normal(scale=0.3, size=len(g)) for g in generator]
    metrics = statistics(trainer, generator)
    rows = list(zip(*(np.concatenate(x).tolist() for x in (trainer, generator)), strict=True))
    sums = dict.fromkeys(KEYS, 0.0)
    ratio_sum = square_sum = 0.0
    for t, g in rows:
        forward, backward = math.exp(t - g), math.exp(g - t)
        sums["kl_k1"] += -math.log(forward)
        sums["kl_k2"] += math.log(forward) ** 2 / 2
        sums["kl_k3"] += forward - 1 - math.log(forward)
        sums["reverse_kl_k1"] += forward * -math.log(backward)
        sums["reverse_kl_k2"] += forward * math.log(backward) ** 2 / 2
        sums["reverse_kl_k3"] += forward * (backward - 1 - math.log(backward))
        sums["chi2"] += (forward - 1) ** 2
        sums["outside_1pct_frac"] += abs(forward - 1) > 0.01
        sums["outside_5pct_frac"] += abs(forward - 1) > 0.05
        ratio_sum, square_sum = ratio_sum + forward, square_sum + forward**2
    for key in [*(k for k in KEYS if "kl_" in k), "chi2", "outside_1pct_frac", "outside_5pct_frac"]:
        assert metrics[key] == pytest.approx(sums[key] / len(rows), rel=1e-12), key
    assert metrics["ess_frac"] == pytest.approx(ratio_sum**2 / square_sum / len(rows), rel=1e-12)
    perplexities = [
        math.exp(-float(t.mean())) / math.exp(-float(g.mean()))
        for t, g in zip(trainer, generator, strict=True)
    ]
    assert metrics["perplexity_ratio"] == pytest.approx(sum(perplexities) / 3, rel=1e-12)


def test_groups_are_means_over_their_own_tokens():
    rng = np.random.default_rng(2)
    lengths = [1, 4, 40, 23, 10, 11]
    generator = [-rng.exponential(size=n) for n in lengths]
    generator[2][0], generator[2][1] = 0.0, -30.0
    trainer = [g + rng.normal(scale=0.3, size=len(g)) for g in generator]
    groups: dict[str, list[float]] = {}
    for ours, theirs in zip(trainer, generator, strict=True):
        n = len(ours)
        quarter = next(k for k in range(4) if n <= (k + 1) * 40 / 4)
        for t in range(n):
            tenth = next(k for k in reversed(range(10)) if math.exp(theirs[t]) >= k / 10)
            where = next(k for k in reversed(range(10)) if t / n >= k / 10)
            for key in (f"by_probability/{tenth}", f"by_position/{where}", f"by_length/{quarter}"):
                groups.setdefault(key, []).append(abs(ours[t] - theirs[t]))
    metrics = statistics(trainer, generator)
    assert {key for key in metrics if key.startswith("by_")} == groups.keys()
    for key, values in groups.items():
        assert metrics[key] == pytest.approx(sum(values) / len(values), rel=1e-12), key
    # 10 of 40 tokens are still the first quarter, 11 are not.
    assert {"by_length/0", "by_length/1", "by_length/2", "by_length/3"} <= groups.keys()


@pytest.mark.parametrize("d", [60.0, 800.0, -800.0], ids=str)
def test_unrelated_policies_overflow_nowhere_and_are_counted(d):
    """One token of d, far out of exp's range, beside three that agree."""
    metrics = statistics([np.array([d - 900, -1, -1, -1])], [np.array([-900.0, -1, -1, -1])])
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["log_prob_abs_diff/max"] == abs(d)
    assert metrics["kl_k1"] == -d / 4
    if d > 0:
        assert metrics["clamped_frac"] == 0.25
        ceiling = math.exp(MAX_LOG_RATIO)
        assert metrics["kl_k3"] == pytest.approx((ceiling - 1 - MAX_LOG_RATIO) / 4, rel=1e-12)
        assert metrics["chi2"] == pytest.approx((ceiling - 1) ** 2 / 4, rel=1e-12)
        # All weight is on one of four tokens.
        assert metrics["ess_frac"] == pytest.approx(0.25, rel=1e-6)
    else:
        assert "clamped_frac" not in metrics
        assert metrics["kl_k3"] == (-1 - d) / 4, "exp(-800) is 0, and needs no limit"
        assert metrics["ess_frac"] == 0.75


def test_the_prefix_separates_the_floor_and_over_floor_is_the_ratio_of_means():
    trainer, generator = [np.array([-1.0, -2.0])], [np.array([-1.3, -2.1])]
    again = [np.array([-1.0, -2.1])]
    metrics = mismatch_metrics(trainer, generator)
    floor = mismatch_metrics(again, trainer, prefix="mismatch/floor_")
    assert {key.replace("/floor_", "/") for key in floor} >= {"mismatch/" + key for key in KEYS}
    # Means 0.2 and 0.05.
    assert over_floor(metrics | floor) == {"mismatch/over_floor": pytest.approx(4.0)}
    exact = mismatch_metrics(trainer, trainer, prefix="mismatch/floor_")
    assert over_floor(metrics | exact) == {}, "nothing can be said in units of a floor of 0"
    assert over_floor(floor) == over_floor(metrics) == {}


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
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
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
