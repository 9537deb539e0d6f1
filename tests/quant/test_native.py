"""gemm "native" without its GPU: torch's own shape rules, and the emulated GEMM's bits."""

import itertools

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from fos_rl.quant import (
    MXFP8Quantizer,
    NVFP4Quantizer,
    gemm,
    gemm_operand,
    grouped_autograd,
    grouped_gemm,
    linear_autograd,
    quantized_grouped_mm,
    quantized_linear,
)
from fos_rl.quant.gemm import raw_gemm
from fos_rl.quant.quantizers import Quantizer
from tests.quant.native_gemm import CheckedScaledMm, ordered_mm
from tests.quant.quant_goldens import assert_bytes

MODES = ("quantized", "high_precision", "dequantized")
QUANTIZERS = [
    pytest.param(NVFP4Quantizer("four_over_six", "1x16"), id="four_over_six"),
    pytest.param(
        NVFP4Quantizer("four_over_six", "1x16", "mae", 448, False), id="four_over_six per tensor"
    ),
    pytest.param(NVFP4Quantizer("nvfp4", row_scaled_activation=False), id="nvfp4 16x16 per tensor"),
    pytest.param(NVFP4Quantizer("nvfp4", "1x16"), id="nvfp4"),
    pytest.param(MXFP8Quantizer(), id="mxfp8"),
]
# No row, one, an odd number of blocks of 16 with its padding, more than a tile of scales.
ROWS = (0, 1, 37, 130)


def weight_shapes(quantizer: Quantizer, mode: str) -> list[tuple[int, int]]:
    """(N, K) whose packed rows are 8, 16, 24 and 40 bytes, and N that are not a multiple of 16."""
    free = mode != "quantized" and getattr(quantizer, "weight_block", "1x16") == "1x16"
    if isinstance(quantizer, MXFP8Quantizer):
        return [(32, 96), (96, 32), *([(8, 32), (40, 96)] if free else [])]
    return [(16, 48), (48, 16), (32, 80), (48, 32), *([(8, 32), (40, 48)] if free else [])]


def cases():
    for quantizer in QUANTIZERS:
        for mode in MODES:
            if not (mode == "quantized" and quantizer.values[0].row_scaled_activation):
                yield pytest.param(quantizer.values[0], mode, id=f"{quantizer.id}-{mode}")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def native(monkeypatch):
    """The tensor core's stand-in, and the emulated GEMM adding in the same order."""
    stand_in = CheckedScaledMm()
    monkeypatch.setattr(gemm, "scaled_mm", stand_in)
    for module in (gemm, grouped_autograd, grouped_gemm):
        monkeypatch.setattr(module, "fp32_mm", ordered_mm)
    for module in (linear_autograd, grouped_autograd):
        monkeypatch.setattr(module, "check_gemm", lambda gemm, device: None)
    return stand_in


@pytest.mark.parametrize(("quantizer", "mode"), cases())
def test_torch_takes_every_shape_of_a_linear(quantizer: Quantizer, mode: str) -> None:
    """On meta tensors torch's functions check what the CUDA ones would, without multiplying."""
    for (n, k), m in itertools.product(weight_shapes(quantizer, mode), ROWS):
        x = torch.empty(m, k, device="meta", requires_grad=True)
        weight = torch.empty(n, k, device="meta", requires_grad=True)
        out = quantized_linear(x, weight, quantizer=quantizer, gemm="native", backward=mode)
        assert out.shape == (m, n)
        out.sum().backward()
        assert (x.grad.shape, weight.grad.shape) == ((m, k), (n, k))


@pytest.mark.parametrize(("quantizer", "mode"), cases())
def test_torch_takes_every_shape_of_experts(quantizer: Quantizer, mode: str) -> None:
    offs = torch.tensor([0, 5, 5, 64, 70], dtype=torch.int32)
    for n, k in weight_shapes(quantizer, mode)[::3]:
        x = torch.empty(70, k, device="meta", requires_grad=True)
        weight = torch.empty(5, n, k, device="meta", requires_grad=True)
        out = quantized_grouped_mm(
            x, weight, offs, quantizer=quantizer, gemm="native", backward=mode
        )
        out.sum().backward()
        assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def test_torch_refuses_what_is_not_padded() -> None:
    """Else the test above could not fail: rows of 8 bytes, N of 8, scales of a row too many."""

    def multiply(n: int, num_bytes: int, scale_rows: int) -> None:
        data = [torch.empty(rows, num_bytes, device="meta", dtype=torch.uint8) for rows in (5, n)]
        a, b = (t.view(torch.float4_e2m1fn_x2) for t in data)
        scale = torch.empty(scale_rows * 4, device="meta", dtype=torch.float8_e4m3fn)
        scaling, swizzle = ScalingType.BlockWise1x16, SwizzleType.SWIZZLE_32_4_4
        scaled_mm(
            a,
            b.t(),
            scale,
            scaling,
            scale,
            scaling,
            swizzle,
            swizzle,
            output_dtype=torch.float32,
        )

    multiply(16, 16, 128)
    for n, num_bytes, scale_rows in ((16, 8, 128), (8, 16, 128), (16, 16, 129)):
        with pytest.raises((RuntimeError, ValueError), match=r"divisible by 16|must have"):
            multiply(n, num_bytes, scale_rows)


def results(gemm_name: str, multiply, *operands: torch.Tensor) -> list[torch.Tensor]:
    x, weight, dy = operands
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = multiply(x, weight, gemm_name)
    out.backward(dy)
    return [out.detach(), x.grad, weight.grad]


@pytest.mark.parametrize(("quantizer", "mode"), cases())
def test_padding_changes_no_bit_of_a_linear(native, quantizer: Quantizer, mode: str) -> None:
    """Outputs and gradients equal those of the unpadded operands, summed in the same order."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, name) -> torch.Tensor:
        return quantized_linear(x, weight, quantizer=quantizer, gemm=name, backward=mode)

    for (n, k), m in itertools.product(weight_shapes(quantizer, mode), ROWS):
        operands = (normal(m, k), normal(n, k, seed=1), normal(m, n, seed=2))
        native.shapes.clear()
        expected = results("emulated", multiply, *operands)
        assert not native.shapes
        found = results("native", multiply, *operands)
        assert len(native.shapes) == (0 if m == 0 else 3 if mode == "quantized" else 1)
        for part, a, b in zip(("output", "dX", "dW"), found, expected, strict=True):
            assert_bytes(a, b, f"{part} of M {m} N {n} K {k}")


# Empty groups first, in the middle and last; groups that fill no block; rows of no group.
OFFSETS = [[0, 5, 5, 64, 70], [1, 49, 49], [33], [0, 0]]


@pytest.mark.parametrize("ends", OFFSETS, ids=str)
@pytest.mark.parametrize(("quantizer", "mode"), cases())
def test_padding_changes_no_bit_of_experts(native, quantizer: Quantizer, mode: str, ends) -> None:
    offs = torch.tensor(ends, dtype=torch.int32)

    def multiply(x: torch.Tensor, weight: torch.Tensor, name) -> torch.Tensor:
        return quantized_grouped_mm(x, weight, offs, quantizer=quantizer, gemm=name, backward=mode)

    for n, k in weight_shapes(quantizer, mode)[:2]:
        operands = (normal(70, k), normal(len(ends), n, k, seed=1), normal(70, n, seed=2))
        native.shapes.clear()
        expected = results("emulated", multiply, *operands)
        assert not native.shapes
        found = results("native", multiply, *operands)
        filled = len({0, *ends}) - 1
        assert len(native.shapes) == filled * (3 if mode == "quantized" else 1)
        for part, a, b in zip(("output", "dX", "dW"), found, expected, strict=True):
            assert_bytes(a, b, f"{part} of N {n} K {k}")


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_nan_stays_in_its_row(native, quantizer: Quantizer) -> None:
    """A pad is zero codes under zero scales, which multiply no NaN but their own row's."""
    k = 96 if isinstance(quantizer, MXFP8Quantizer) else 48
    x, weight = normal(5, k), normal(32, k, seed=1)
    x[2, 3] = torch.nan
    out = raw_gemm(quantizer.activation(x), quantizer.weight(weight), "native")
    wholly = getattr(quantizer, "row_scaled_activation", True) or isinstance(
        quantizer, MXFP8Quantizer
    )
    assert out[2].isnan().all()
    assert out[[0, 1, 3, 4]].isnan().any() != wholly


def test_codes_that_are_not_contiguous(native) -> None:
    """Every second row of others, and a slice whose first row lies at no multiple of 16 bytes."""
    quantizer = NVFP4Quantizer("nvfp4", "1x16")
    whole, weight = quantizer.activation(normal(9, 48)), quantizer.weight(normal(32, 48, seed=1))
    for rows in (slice(1, 5), slice(0, 9, 2)):
        parts = (t[rows] for t in (whole.codes, whole.block_scale, whole.global_amax))
        part = type(whole)(*parts, whole.e4m3_scale_bound)
        expected = ordered_mm(gemm_operand(part), gemm_operand(weight))
        assert_bytes(raw_gemm(part, weight, "native"), expected, "sums")
