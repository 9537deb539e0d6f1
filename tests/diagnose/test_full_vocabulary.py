"""The divergence of whole distributions against its definition, term by term."""

import math

import numpy as np
import pytest

from fos_rl.diagnose.full_vocabulary import full_vocabulary_kl


def test_the_docstring_is_right():
    kl = full_vocabulary_kl(np.log([[0.75, 0.25]]), np.log([[0.5, 0.5]]))
    assert kl == pytest.approx([0.75 * math.log(1.5) - 0.25 * math.log(2)], rel=1e-14)


def test_equals_the_definition_in_both_directions():
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.full(50, 0.3), size=7) for _ in range(2))
    for a, b in ((p, q), (q, p)):
        want = [
            sum(x * math.log(x / y) for x, y in zip(*row, strict=True))
            for row in zip(a, b, strict=True)
        ]
        np.testing.assert_allclose(full_vocabulary_kl(np.log(a), np.log(b)), want, rtol=1e-12)


def test_nearly_equal_distributions_keep_their_digits():
    """p = (1 + e)/2, (1 - e)/2 against one half: KL = e^2 / 2 + e^4 / 12 + ..., from fp32 log-probs
    whose own rounding is 6e-8."""
    e = 1e-3
    log_p = np.log(np.array([[(1 + e) / 2, (1 - e) / 2]])).astype(np.float32)
    log_q = np.log(np.array([[0.5, 0.5]])).astype(np.float32)
    # A log-prob off by 6e-8 changes e by as much, and the result by 2 * 6e-8 / 1e-3.
    assert full_vocabulary_kl(log_p, log_q) == pytest.approx([e**2 / 2], rel=2e-4)
    assert full_vocabulary_kl(log_q, log_q) == [0.0]


def test_excluded_entries():
    with np.errstate(divide="ignore"):
        log = np.log(np.array([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.5, 0.5, 0.0]]))
    # Neither has the third entry; only Q has it; only P has it.
    kl = full_vocabulary_kl(log[[0, 0, 1]], log[[2, 1, 0]])
    assert kl[0] == 0.0
    assert kl[1] == pytest.approx(math.log(2), rel=1e-15)
    assert kl[2] == math.inf


def test_an_entry_that_p_almost_excludes_does_not_overflow():
    """q/p = exp(745) is beyond fp64; p log(p/q) is 0 to 300 digits."""
    log_p = np.array([[0.0, -745.0]])
    log_q = np.log([[0.5, 0.5]])
    assert full_vocabulary_kl(log_p, log_q) == pytest.approx([math.log(2)], rel=1e-15)


def test_a_token_that_is_not_finite_stays_its_own():
    log_p = np.log([[0.5, 0.5], [0.5, 0.5]])
    log_p[1, 0] = np.nan
    kl = full_vocabulary_kl(log_p, np.log([[0.5, 0.5], [0.5, 0.5]]))
    assert kl[0] == 0.0
    assert np.isnan(kl[1])


@pytest.mark.wrong_types
def test_shapes_that_differ_are_named():
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 3\)"):
        full_vocabulary_kl(np.zeros((1, 2)), np.zeros((1, 3)))
