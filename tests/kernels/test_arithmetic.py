"""The kernels' short formulas against the operations they stand for, over all significands."""

import numpy as np
import pytest

from fos_rl.kernels.availability import missing_package
from tests.kernels.ptx_arithmetic import fma

pytestmark = pytest.mark.skipif(missing_package() is not None, reason=str(missing_package()))


@pytest.mark.parametrize("divisor", [6.0, 1536.0, 2688.0])
def test_division_by_a_constant_is_a_product_and_an_fma(divisor: float) -> None:
    from fos_rl.kernels.arithmetic import _reciprocal_pair

    high, low = (np.float32(part) for part in _reciprocal_pair(divisor))
    x = np.arange(2**23, 2**24, dtype=np.float32)
    short = fma(x, np.full_like(x, high), x * low)
    assert np.array_equal(short, x / np.float32(divisor))


@pytest.mark.parametrize("divisor", [6.0, 1536.0, 2688.0])
def test_division_of_any_size_is_one_fp64_product(divisor: float) -> None:
    bits = np.random.default_rng(0).integers(1, 0x7F800000, 1_000_000, dtype=np.uint32)
    for x in (bits.view(np.float32), np.arange(1, 2_000_000, dtype=np.uint32).view(np.float32)):
        product = (x.astype(np.float64) * (1.0 / divisor)).astype(np.float32)
        assert np.array_equal(product, x / np.float32(divisor))


def test_fma_model_rounds_once() -> None:
    """Against exact integers: (a * b + c) of 12-bit significands far apart in exponent."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(2**23, 2**24, 20_000).astype(np.float32) for _ in range(2))
    c = (rng.integers(-(2**24), 2**24, 20_000) * 2.0 ** rng.integers(-20, 30, 20_000)).astype(
        np.float32
    )
    found = fma(a, b, c)
    for x, y, z, got in zip(a[:2000], b[:2000], c[:2000], found[:2000], strict=True):
        exact = int(float(x)) * int(float(y)) * 2**30 + int(float(z) * 2**30)
        error = abs(exact - int(float(got) * 2**30))
        ulp = int(float(np.spacing(np.abs(got))) * 2**30)
        assert 2 * error <= ulp


def test_subtracting_from_a_shift_rounds_to_e2m1() -> None:
    """The three operations of _round_magnified for every 61st p below 7, and all near a midpoint
    or a power of two, against the nearest E2M1 value, ties to the even code."""
    from fos_rl.kernels.arithmetic import MAGNIFIED, ROUND_TO_HALF, VALUE_SCALE

    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    near = np.concatenate((midpoints, np.array([0.5, 1, 2, 4, 6], np.float32))).view(np.int32)
    first, last = (int(np.float32(p).view(np.int32)) for p in (2.0**-20, 7.0))
    bits = np.concatenate(
        (np.arange(first, last, 61), (near[:, None] + np.arange(-99, 99)).ravel())
    )
    p = np.concatenate(([0.0], bits.astype(np.int32).view(np.float32))).astype(np.float32)

    magnified = p * np.float32(MAGNIFIED * VALUE_SCALE)
    shift = np.maximum(magnified, np.float32(ROUND_TO_HALF))
    value = shift - fma(magnified, np.full_like(p, -1.0 / MAGNIFIED), shift)

    below, above = (np.searchsorted(midpoints, p, side) for side in ("left", "right"))
    code = np.where(below == above, below, below + below % 2)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32) * np.float32(VALUE_SCALE)
    assert np.array_equal(value, values[code])
