"""Arguments that would give a wrong number without a word are refused, by name."""

import pytest
import torch

from fos_rl.quant import (
    MXFP8Quantizer,
    NVFP4Quantizer,
    NVFP4Tensor,
    four_over_six_linear,
    four_over_six_quantize,
    gemm,
    mxfp8_linear,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_linear,
    nvfp4_quantize,
    quantized_grouped_mm,
    quantized_linear,
)

QUANTIZERS = [four_over_six_quantize, nvfp4_quantize, mxfp8_quantize]
LINEARS = [four_over_six_linear, nvfp4_linear, mxfp8_linear]
X, W = torch.randn(20, 64), torch.randn(32, 64)


@pytest.mark.wrong_types
@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_dtypes_that_fp32_does_not_hold(quantize, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"x is {dtype} of shape \(20, 64\); .*float32"):
        quantize(X.to(dtype))


@pytest.mark.parametrize("linear", LINEARS)
def test_float64_operands(linear) -> None:
    for x, w in ((X.double(), W), (X, W.double())):
        with pytest.raises(ValueError, match=r"x is torch.float64"):
            linear(x, w)


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_no_gradient_flows_through_a_quantizer(quantize) -> None:
    """Not through the amax either, which is of the input itself."""
    t = quantize(X.clone().requires_grad_())
    assert not any(
        getattr(t, name).requires_grad for name in t.__slots__ if name != "e4m3_scale_bound"
    )


@pytest.mark.wrong_types
@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize(
    "bias",
    [torch.ones(1), torch.ones(31), torch.ones(20, 32), torch.tensor(1.0), torch.ones(32).int()],
    ids=lambda b: f"{b.dtype} {tuple(b.shape)}",
)
def test_a_bias_has_one_number_per_output(linear, bias: torch.Tensor) -> None:
    """One number, or a matrix, would be broadcast; a kernel would read past it."""
    with pytest.raises(ValueError, match=r"bias is .* must be floating point of shape \(32,\)"):
        linear(X, W, bias)


def test_tensors_elsewhere() -> None:
    for name, arguments in {
        "weight": (X, W.to("meta"), None),
        "bias": (X, W, torch.ones(32, device="meta")),
    }.items():
        with pytest.raises(ValueError, match=f"{name} is on meta, x on cpu"):
            four_over_six_linear(*arguments)
    quantizer, offs = NVFP4Quantizer("nvfp4"), torch.tensor([20], dtype=torch.int32)
    with pytest.raises(ValueError, match="offs is on meta, x on cpu"):
        quantized_grouped_mm(X, W[None], offs.to("meta"), quantizer=quantizer)


def test_no_experts() -> None:
    with pytest.raises(ValueError, match="at least one expert"):
        quantized_grouped_mm(
            X, W[:0, None], torch.zeros(0, dtype=torch.int32), quantizer=MXFP8Quantizer()
        )


@pytest.mark.parametrize("square", [False, True])
def test_a_weight_has_one_amax(square: bool) -> None:
    """With as many rows as x a row-scaled one would have been broadcast over x's rows."""
    w = torch.randn(20 if square else 32, 64)
    row_scaled = nvfp4_quantize(w, True)
    with pytest.raises(ValueError, match=r"global_amax of shape .*row_scaled=False"):
        nvfp4_linear(X, w, weight_block="1x16", quantized_weight=row_scaled)
    stack = nvfp4_quantize(w[None], True)
    offs = torch.tensor([20], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"global_amax of shape .*row_scaled=False"):
        quantized_grouped_mm(
            X, w[None], offs, quantizer=NVFP4Quantizer("nvfp4", "1x16"), quantized_weight=stack
        )


def test_the_amaxes_of_a_gemm() -> None:
    per_row, per_tensor = nvfp4_quantize(X, True), nvfp4_quantize(X)
    w = nvfp4_quantize(W)
    for a, row_scaled in ((per_row, False), (per_tensor, True)):
        with pytest.raises(ValueError, match=f"amaxes with row_scaled={row_scaled}"):
            gemm.quantized_gemm(a, w, torch.float32, row_scaled=row_scaled)


def test_parts_of_an_nvfp4_tensor() -> None:
    t = nvfp4_quantize(X)
    for amax in (t.global_amax.double(), t.global_amax.bfloat16()):
        with pytest.raises(ValueError, match="global_amax is"):
            NVFP4Tensor(t.codes, t.block_scale, amax, t.e4m3_scale_bound)
    # 40 columns: two blocks and a half.
    with pytest.raises(ValueError, match="whole blocks"):
        NVFP4Tensor(t.codes[:, :20], t.block_scale[:, :2], t.global_amax, t.e4m3_scale_bound)


@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("mode", ["quantized", "high_precision", "dequantized"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 32, 64), (4, 0, 64), (4, 32, 0), (0, 0, 0)])
def test_nothing_is_multiplied_to_zeros(linear, mode: str, m: int, n: int, k: int) -> None:
    knobs = {} if linear is mxfp8_linear else {"row_scaled_activation": False}
    x, w = (torch.randn(rows, k, requires_grad=True) for rows in (m, n))
    out = linear(x, w, backward=mode, **knobs)
    out.sum().backward()
    assert (out.shape, x.grad.shape, w.grad.shape) == ((m, n), (m, k), (n, k))
    assert not out.any()
    assert not x.grad.any() or n
    assert m or not w.grad.any()


@pytest.mark.parametrize("gemm_name", ["emulated", "fixed_tile"])
@pytest.mark.parametrize("quantizer", [NVFP4Quantizer("nvfp4"), MXFP8Quantizer()])
def test_autocast_changes_no_bit(quantizer, gemm_name) -> None:
    results = []
    for enabled in (False, True):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = quantized_linear(x, w, quantizer=quantizer, gemm=gemm_name)
        out.sum().backward()
        results.append((out.detach(), x.grad, w.grad))
    for plain, autocast in zip(*results, strict=True):
        assert torch.equal(plain, autocast)


@pytest.mark.parametrize("linear", LINEARS)
def test_strides_change_no_bit(linear) -> None:
    """A transposed x, every second row, an expanded one; a transposed weight; a shifted address."""
    wide = torch.randn(64, 40)
    shifted = torch.randn(20 * 64 + 1)[1:].view(20, 64)
    for x in (wide.t(), wide.t()[::2], torch.randn(64).expand(20, 64), shifted):
        for w in (W, torch.randn(64, 32).t()):
            assert torch.equal(linear(x, w), linear(x.contiguous().clone(), w.contiguous().clone()))


def test_a_nan_or_an_infinity_is_seen_in_the_outputs() -> None:
    """Of its row in x, of all rows with one amax, of its column in an MXFP8 weight."""
    for value in (torch.nan, torch.inf, -torch.inf):
        for linear in LINEARS:
            x = X.clone()
            x[3, 5] = value
            out = linear(x, W)
            assert not out[3].isfinite().any()
            assert out[torch.arange(20) != 3].isfinite().all()
        w = W.clone()
        w[7, 5] = value
        assert not mxfp8_linear(X, w)[:, 7].isfinite().any()
        assert not four_over_six_linear(X, w)[:, 7].isfinite().any()
        decoded = nvfp4_dequantize(nvfp4_quantize(w))
        assert not decoded[7, 5].isfinite()
