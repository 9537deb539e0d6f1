"""The GEMM seam: scales, global factors, and what native needs."""

import pytest
import torch

from fos_rl.quant import (
    NVFP4Tensor,
    exact_operand,
    four_over_six_linear,
    four_over_six_quantize,
    mxfp8_linear,
    nvfp4_quantize,
    swizzle_scales,
)
from fos_rl.quant.gemm import fp32_mm, quantized_gemm
from tests.quant.quant_goldens import assert_bytes


def real_values(t: NVFP4Tensor) -> torch.Tensor:
    """What t stands for, in float64 without any rounding."""
    factor = t.global_amax.double().unsqueeze(-1) / (6 * t.e4m3_scale_bound)
    return exact_operand(t, torch.float32).double() * factor


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("row_scaled", [False, True], ids=["ten", "row"])
@pytest.mark.parametrize("bound_a", [256, 448])
@pytest.mark.parametrize("bound_b", [256, 448])
def test_product_against_float64(row_scaled, bound_a, bound_b):
    """M 128, K 2048, N 256: within 1e-5 of mean |y|, few bf16 outputs differ. Traps 29, 37-39.

    fp32 sums of 2048 exact products err by about sqrt(2048) * 2^-24 = 2.7e-6 of their norm; a
    wrong bound is off by 1.75.
    """
    x, w = normal(128, 2048).bfloat16(), normal(256, 2048, seed=1).bfloat16()
    a = four_over_six_quantize(x, "1x16", "mse", bound_a, row_scaled)
    b = four_over_six_quantize(w, "16x16", "mse", bound_b)
    expected = real_values(a) @ real_values(b).T
    actual = quantized_gemm(a, b, torch.float32, row_scaled=row_scaled)
    assert (actual - expected).abs().max() / expected.abs().mean() < 1e-5
    rounded = quantized_gemm(a, b, torch.bfloat16, row_scaled=row_scaled)
    differ = int((rounded != expected.to(torch.bfloat16)).sum())
    # An fp32 error of 1e-7 crosses a bf16 rounding boundary about once in the 2^15 outputs.
    # Operands rounded to bf16 would make half of the outputs differ.
    assert differ <= (0 if (bound_a, bound_b) == (256, 256) else 4)


@pytest.mark.parametrize("row_scaled", [False, True], ids=["ten", "row"])
def test_global_factor_order(row_scaled):
    """The documented order of the fp32 roundings, replayed on the raw sums. Traps 38, 39."""
    a = four_over_six_quantize(normal(32, 64), row_scaled=row_scaled)
    b = nvfp4_quantize(normal(48, 64, seed=1))
    sums = fp32_mm(exact_operand(a, torch.float32), exact_operand(b, torch.float32)).numpy()
    a_amax, b_amax = a.global_amax.numpy()[:, None], b.global_amax.numpy()
    reciprocal = torch.tensor(1.0).div(36 * 256 * 448).numpy()
    if row_scaled:
        expected = (sums * reciprocal) * (a_amax * b_amax)
    else:
        expected = sums * ((a_amax * b_amax) * reciprocal)
    actual = quantized_gemm(a, b, torch.float32, row_scaled=row_scaled)
    assert_bytes(actual, torch.from_numpy(expected), "scaled sums")


@pytest.mark.parametrize("rows", range(1, 24))
def test_a_row_of_a_small_batch_equals_the_same_row_of_a_large_one(rows):
    a, b = normal(64, 128).round(), normal(96, 128, seed=1)
    assert_bytes(fp32_mm(a[:rows], b), fp32_mm(a, b)[:rows], "rows")


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 4), (130, 5), (257, 12), (48, 7)])
def test_swizzle_follows_the_published_formula(rows, cols):
    """Byte by byte, with zeros in the padding. Trap 32."""
    scale = torch.arange(rows * cols).remainder(255).add(1).to(torch.uint8).view(rows, cols)
    swizzled = swizzle_scales(scale)
    row_tiles, col_tiles = -(-rows // 128), -(-cols // 4)
    expected = [0] * (row_tiles * 128 * col_tiles * 4)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * col_tiles + c // 4
            expected[(tile * 32 + r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = int(scale[r, c])
    assert swizzled.tolist() == expected


@pytest.mark.parametrize("linear", [four_over_six_linear, mxfp8_linear])
def test_native_is_refused_with_the_reason(linear):
    with pytest.raises(RuntimeError, match=r"gemm 'native' unavailable: device is cpu, needs"):
        linear(torch.zeros(16, 32), torch.zeros(16, 32), gemm="native")


def test_native_names_the_capability(monkeypatch):
    from fos_rl.quant.gemm import check_gemm

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    message = r"gemm 'native' unavailable: compute capability 9\.0, needs 10\.0 or 10\.3"
    with pytest.raises(RuntimeError, match=message):
        check_gemm("native", torch.device("cuda"))
    for capability in ((10, 0), (10, 3)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        check_gemm("native", torch.device("cuda"))


@pytest.mark.wrong_types
def test_unknown_gemm():
    with pytest.raises(ValueError, match="gemm is 'auto'; it must be one of 'emulated', 'native'"):
        four_over_six_linear(torch.zeros(16, 32), torch.zeros(16, 32), gemm="auto")
