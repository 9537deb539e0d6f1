"""Standard NVFP4, the tensor type, dequantize and the exact operand."""

import numpy as np
import pytest
import torch

from fos_rl.quant import (
    NVFP4Tensor,
    exact_operand,
    four_over_six_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from tests.quant.numpy_nvfp4 import quantize as numpy_quantize
from tests.quant.quant_goldens import assert_bytes


def sample(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 64, generator=generator)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-40, 40, x.shape, generator=generator).float())
    elif kind == "grid":
        x = (x * 8).round() / 4
    elif kind == "tiny":
        x *= 2.0**-120
    return x


@pytest.mark.parametrize("kind", ["normal", "wide", "grid", "tiny"])
@pytest.mark.parametrize(
    ("row", "columnwise"), [(False, False), (True, False), (False, True)], ids=["ten", "row", "col"]
)
def test_standard_against_numpy(kind, row, columnwise):
    """The base formula is b * (S_enc * fl(1/6)), not four-over-six's. Trap 3."""
    x = sample(kind)
    actual = nvfp4_quantize(x, row, columnwise=columnwise)
    source = x.T if columnwise else x
    amax = source.abs().amax(1) if row else x.abs().amax().reshape(1)
    codes, scales = numpy_quantize(np.ascontiguousarray(source.numpy()), amax.numpy(), 448, None)
    unpacked = torch.stack((actual.codes & 15, actual.codes >> 4), dim=-1).flatten(-2)
    assert_bytes(actual.block_scale, torch.from_numpy(scales), "scales")
    assert_bytes(unpacked, torch.from_numpy(codes), "codes")
    assert_bytes(actual.global_amax, amax, "amax")
    assert actual.e4m3_scale_bound == 448


def test_standard_16x16_against_numpy():
    x = sample("normal")
    actual = nvfp4_quantize(x, block="16x16")
    amax = x.abs().amax().reshape(1).numpy()
    codes, scales = numpy_quantize(x.numpy(), amax, 448, None, "16x16")
    unpacked = torch.stack((actual.codes & 15, actual.codes >> 4), dim=-1).flatten(-2)
    assert_bytes(actual.block_scale, torch.from_numpy(scales), "scales")
    assert_bytes(unpacked, torch.from_numpy(codes), "codes")


@pytest.mark.parametrize("bound", [256, 448])
def test_the_largest_element_survives_a_round_trip(bound):
    """A tensor's bound is part of its meaning: read with the other one it is off by 1.75. Trap
    28."""
    x = sample("normal")
    t = four_over_six_quantize(x, e4m3_scale_bound=bound)
    index = x.abs().argmax()
    # 4 and 6 are on the grid and the amax block's scale is exact up to fp32 roundings.
    restored = nvfp4_dequantize(t).flatten()[index]
    assert torch.isclose(restored, x.flatten()[index], rtol=2.0**-20)
    other = NVFP4Tensor(t.codes, t.block_scale, t.global_amax, 704 - bound)
    ratio = nvfp4_dequantize(other).flatten()[index] / restored
    assert torch.isclose(ratio, torch.tensor(bound / (704 - bound)), rtol=2.0**-20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_operand_is_exact_for_every_code_and_scale(dtype):
    """16 codes x 127 finite scale bytes. Trap 37."""
    scale = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(127, 1)
    operand = exact_operand(NVFP4Tensor(packed, scale, torch.ones(1), 256), dtype)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    expected = torch.cat([magnitudes, -magnitudes]) * scale.double()
    assert operand.dtype == dtype
    assert torch.equal(operand.double(), expected)


def test_dequantize_factor_is_the_rounded_reciprocal():
    """fl(1/2688) and fl(1/1536), not a division: they differ in the last bit. Trap 21."""
    for bound, bits in ((448, 0x39C30C31), (256, 0x3A2AAAAB)):
        t = NVFP4Tensor(
            torch.full((1, 8), 0x22, dtype=torch.uint8),
            torch.ones(1, 1).to(torch.float8_e4m3fn),
            torch.ones(1),
            bound,
        )
        assert (nvfp4_dequantize(t).view(torch.int32) == bits).all()


@pytest.mark.wrong_types
def test_tensor_properties_and_errors():
    t = four_over_six_quantize(torch.randn(32, 64))
    assert t.shape == (32, 64)
    assert t.nbytes == 32 * 64 // 2 + 32 * 4 + 4
    with pytest.raises(ValueError, match="bound is 384"):
        NVFP4Tensor(t.codes, t.block_scale, t.global_amax, 384)
    with pytest.raises(ValueError, match=r"block_scale has shape \(32, 3\)"):
        NVFP4Tensor(t.codes, t.block_scale[:, :3], t.global_amax, 256)
    with pytest.raises(ValueError, match=r"global_amax has shape \(2,\)"):
        NVFP4Tensor(t.codes, t.block_scale, torch.ones(2), 256)
    with pytest.raises(ValueError, match="uint8 and float8_e4m3fn"):
        NVFP4Tensor(t.codes, t.block_scale.view(torch.uint8), t.global_amax, 256)
    with pytest.raises(AttributeError):
        t.e4m3_scale_bound = 448
