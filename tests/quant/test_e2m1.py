"""The E2M1 codec at and around every rounding boundary."""

import numpy as np
import pytest
import torch

from fos_rl.quant.e2m1 import (
    E2M1_MAGNITUDES,
    decode_e2m1,
    pack_magnitudes,
    pack_signs,
    round_to_e2m1_,
)
from tests.quant.numpy_nvfp4 import E2M1, nearest

MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode(values: torch.Tensor) -> torch.Tensor:
    """One code 0..15 per fp32 value, through the block layout the quantizers use."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % 16)).view(16, -1)
    packed = pack_magnitudes(round_to_e2m1_(blocks.abs())) | pack_signs(blocks)
    codes = torch.stack((packed & 15, packed >> 4), dim=1).flatten(0, 1)
    return codes.flatten()[: len(values)]


@pytest.mark.parametrize(
    ("midpoint", "even"), zip(MIDPOINTS, (0, 2, 2, 4, 4, 6, 6), strict=True), ids=str
)
def test_midpoints_and_their_neighbours(midpoint, even):
    """Ties go to the even code; one ulp away they do not. Both signs. Trap 13."""
    below = np.nextafter(np.float32(midpoint), np.float32(0))
    above = np.nextafter(np.float32(midpoint), np.float32(10))
    lower = MIDPOINTS.index(midpoint)
    values = torch.tensor([below, midpoint, above])
    assert encode(values).tolist() == [lower, even, lower + 1]
    assert encode(-values).tolist() == [lower + 8, even + 8, lower + 9]


def test_every_bf16_and_a_dense_fp32_sweep():
    """All finite bf16 values and 2^20 fp32 values, against a nearest-value search in float64."""
    bf16 = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bf16 = bf16[bf16.isfinite()].float()
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(1 << 20, generator=generator) * 14 - 7
    for values in (bf16, dense):
        expected = nearest(values.numpy(), E2M1) + 8 * np.signbit(values.numpy())
        np.testing.assert_array_equal(encode(values).numpy(), expected)


def test_special_values():
    """-0 keeps its sign, infinities saturate, values past 6 never overflow the code. Traps 14,
    15."""
    values = torch.tensor([0.0, -0.0, -1e-45, torch.inf, -torch.inf, 8.7, 7.0, 3e38, -8.7])
    assert encode(values).tolist() == [0, 8, 8, 7, 15, 7, 7, 7, 15]


def test_nan_is_code_7():
    nan = torch.full((16, 1), torch.nan)
    assert (pack_magnitudes(round_to_e2m1_(nan)) == 0x77).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_all_bytes(dtype):
    """Element 2j is the low nibble; code 8 is -0. Trap 16."""
    values = decode_e2m1(torch.arange(256, dtype=torch.uint8), dtype)
    signed = [*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)]
    codes = [code for byte in range(256) for code in (byte % 16, byte // 16)]
    assert values.dtype == dtype
    assert values.tolist() == [signed[code] for code in codes]
    assert torch.signbit(values).tolist() == [code >= 8 for code in codes]
