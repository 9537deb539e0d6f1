"""Conversions to and from small formats against torch's, and their models on numpy."""

import numpy as np
import pytest
import torch

from fos_rl.kernels.availability import missing_package
from tests.kernels.ptx_arithmetic import OPERATIONS

# With instructions, and with arithmetic in their place.
ARCHS = ("sm_90a", "sm_80")


@pytest.fixture(scope="module", params=ARCHS)
def converted(request, tmp_path_factory):
    """A function from words a and b to the probe's results."""
    if missing_package() is not None:
        pytest.skip(str(missing_package()))
    from tests.kernels.minifloat_probe import compile_probe, run_probe

    text = compile_probe(request.param, tmp_path_factory.mktemp("probe"))
    has_instruction = "cvt.rn.satfinite.e4m3x2" in text
    assert has_instruction == (request.param == "sm_90a")
    return lambda a, b: run_probe(text, a, b)


def _as_words(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int32).numpy().view(np.uint32)


def test_e4m3_of_fp32(converted) -> None:
    """Every 4999th fp32 >= 0, and all near a code, a midpoint or the end of the range."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[1:] + codes[:-1]) / 2
    special = torch.tensor([464.0, 480.0, 512.0, 3.4e38, float("inf"), float("nan")])
    near = _as_words(torch.cat((codes[1:], midpoints, special[:3]))).astype(np.int64)
    a = np.concatenate(
        (
            np.arange(0, 0x7F800000, 4999),
            (near[:, None] + np.arange(-50, 51)).ravel(),
            np.arange(0, 99),
            _as_words(special).astype(np.int64),
        )
    ).astype(np.uint32)
    b = a[::-1].copy()
    found = converted(a, b)[0]
    # torch does not saturate.
    expected = [
        torch.from_numpy(word.view(np.float32)).clamp(max=448.0).to(torch.float8_e4m3fn)
        for word in (a, b)
    ]
    for i, codes in enumerate(expected):
        wrong = ((found >> 8 * i) & 0xFF) != codes.view(torch.uint8).numpy()
        assert not wrong.any(), f"{wrong.sum()} of {len(a)}"


def test_fp32_of_e4m3(converted) -> None:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    # Only byte 0 counts.
    a = bytes_.numpy().astype(np.uint32) | np.uint32(0xA5A5A500)
    found = torch.from_numpy(converted(a, a)[1].view(np.float32))
    expected = bytes_.view(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(777.0), expected.nan_to_num(777.0))
    assert torch.equal(found.signbit()[:127], expected.signbit()[:127])
    assert torch.equal(found.signbit()[128:255], expected.signbit()[128:255])


def test_e5m2_of_its_own_values(converted) -> None:
    bytes_ = np.array([b for b in range(256) if b & 0x7F < 0x7C], np.uint32)
    values = torch.from_numpy(bytes_.astype(np.uint8)).view(torch.float8_e5m2).float()
    a, b, other = _as_words(values), _as_words(values.flip(0)), bytes_[::-1]
    found = converted(a, b)[2]
    assert np.array_equal(found, bytes_ | other << 8 | other << 16 | bytes_ << 24)


def test_larger_magnitude_of_bf16_pairs(converted) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2**32, 100_000, dtype=np.uint32) for _ in range(2))
    # Halves with an exponent in common, equal magnitudes, NaN and infinity.
    b[:50_000] = a[:50_000] ^ rng.integers(0, 0x80, 50_000, dtype=np.uint32) * np.uint32(0x10001)
    b[:9] = a[:9] ^ np.uint32(0x80008000)
    a[9:13] = [0x7F80FF80, 0x7FC10000, 0x0000FFC1, 0x80000000]
    found = converted(a, b)[3]
    halves = [
        torch.from_numpy(word.view(np.int16)).view(torch.bfloat16).float() for word in (a, b, found)
    ]
    expected = torch.maximum(halves[0].abs(), halves[1].abs())
    same = (halves[2].abs() == expected) | (halves[2].isnan() & expected.isnan())
    assert same.all()


def _e2m1_of(x: float) -> int:
    """By the seven midpoints, whose ties go to the even code."""
    code = sum(
        abs(x) > midpoint or (abs(x) == midpoint and is_odd)
        for midpoint, is_odd in zip(
            (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0, 1, 0, 1, 0, 1, 0), strict=True
        )
    )
    return code | (8 if np.signbit(x) else 0)


def test_model_of_the_e2m1_instructions() -> None:
    """PTX ISA, cvt: the first operand in the high nibble; beyond 6 is 6, NaN is +6."""
    midpoints = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0], np.float32)
    some = np.concatenate(
        (
            midpoints,
            np.nextafter(midpoints, np.float32(9)),
            np.nextafter(midpoints, np.float32(0)),
            np.linspace(0, 6.5, 200, dtype=np.float32),
            np.array([1e-45, 3e38, np.inf], np.float32),
        )
    )
    x = np.concatenate((some, -some))
    high, low = x.view(np.uint32), x[::-1].copy().view(np.uint32)
    pack = OPERATIONS["cvt.rn.satfinite.e2m1x2.f32"]
    expected = np.array([_e2m1_of(v) for v in x])
    assert np.array_equal(pack(high, low), expected << 4 | expected[::-1])
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32)
    assert pack(nan, nan).tolist() == [0x77, 0x77]

    codes = np.arange(256, dtype=np.uint8)
    halves = OPERATIONS["cvt.rn.f16x2.e2m1x2"](codes).astype(np.uint32).view(np.float16)
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = np.array(table + [-v for v in table], np.float16)
    expected = np.stack((values[codes & 15], values[codes >> 4]), 1).ravel()
    assert np.array_equal(halves.view(np.uint16), expected.view(np.uint16))
