"""Quantized linear: forward, the three backward modes, what they keep, what they refuse."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fos_rl.kernels import quantize_ops
from fos_rl.quant import (
    MXFP8Quantizer,
    NVFP4Quantizer,
    exact_operand,
    four_over_six_linear,
    four_over_six_mm,
    four_over_six_quantize,
    mxfp8_dequantize,
    mxfp8_linear,
    mxfp8_mm,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_linear,
    nvfp4_mm,
    nvfp4_quantize,
    prepare_weight,
    quantized_grouped_mm,
    quantized_linear,
    quantizers,
)
from tests.quant.quant_goldens import assert_bytes

MODES = ["quantized", "high_precision", "dequantized"]
BOTH = (True, False)
PER_TENSOR = {"row_scaled_activation": False}
LINEARS = [
    pytest.param(four_over_six_linear, PER_TENSOR, id="four_over_six"),
    pytest.param(four_over_six_linear, PER_TENSOR | {"weight_block": "1x16"}, id="weights_1x16"),
    pytest.param(four_over_six_linear, PER_TENSOR | {"e4m3_scale_bound": 448}, id="bound_448"),
    pytest.param(nvfp4_linear, PER_TENSOR, id="nvfp4"),
    pytest.param(mxfp8_linear, {}, id="mxfp8"),
]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaves(m: int = 40, k: int = 64, n: int = 96, dtype: torch.dtype = torch.bfloat16):
    tensors = (normal(m, k, dtype=dtype), normal(n, k, seed=1, dtype=dtype), normal(n, seed=2))
    return tuple(t.to(dtype).requires_grad_() for t in tensors)


def operand_functions(linear, knobs):
    """(quantize x, quantize w, quantize dY, dequantize, real float64 values) of a linear's
    operands."""
    if linear is mxfp8_linear:
        quantize = mxfp8_quantize
        return (
            quantize,
            quantize,
            quantize,
            mxfp8_dequantize,
            lambda t: mxfp8_dequantize(t).double(),
        )

    def real(t):
        factor = t.global_amax.double().unsqueeze(-1) / (6 * t.e4m3_scale_bound)
        return exact_operand(t, torch.float32).double() * factor

    block = knobs.get("weight_block", "16x16")
    row = knobs.get("row_scaled_activation", True)
    if linear is nvfp4_linear:
        return (
            lambda x, **kw: nvfp4_quantize(x, row, **kw),
            lambda w, **kw: nvfp4_quantize(w, block=block, **kw),
            nvfp4_quantize,
            nvfp4_dequantize,
            real,
        )
    bound = knobs.get("e4m3_scale_bound", 256)
    return (
        lambda x, **kw: four_over_six_quantize(x, "1x16", "mse", bound, row, **kw),
        lambda w, **kw: four_over_six_quantize(w, block, "mse", bound, **kw),
        nvfp4_quantize,
        nvfp4_dequantize,
        real,
    )


def within_bf16_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """One rounding to bf16 (2^-9 relative) plus fp32 sums, which err by 1e-5 of the mean at
    most."""
    slack = 2.0**-8 * expected.abs() + 1e-5 * expected.abs().mean()
    assert ((actual.double() - expected).abs() <= slack).all()


@pytest.mark.parametrize("row", [False, True], ids=["ten", "row"])
@pytest.mark.parametrize(("linear", "knobs"), LINEARS)
def test_forward_against_float64(linear, knobs, row):
    """Traps 37, 38."""
    if linear is not mxfp8_linear:
        knobs = knobs | {"row_scaled_activation": row}
    x, w, b = leaves()
    quantize_x, quantize_w, _, _, real = operand_functions(linear, knobs)
    expected = real(quantize_x(x)) @ real(quantize_w(w)).T + b.double()
    within_bf16_rounding(linear(x, w, b, **knobs), expected)
    exact = linear(x.float(), w, b, **knobs)
    assert exact.dtype == torch.float32
    assert (exact - expected).abs().max() / expected.abs().mean() < 1e-5


@pytest.mark.parametrize(("linear", "knobs"), LINEARS)
def test_forward_does_not_depend_on_the_backward_mode(linear, knobs):
    """Trap 42; and two forwards are bitwise equal, as checkpointing needs. Trap 53."""
    x, w, b = leaves()
    outputs = [linear(x, w, b, backward=mode, **knobs) for mode in [*MODES, *MODES, None]]
    for out in outputs[1:]:
        assert_bytes(out.detach(), outputs[0].detach(), "outputs")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("row", [False, True], ids=["ten", "row"])
@pytest.mark.parametrize(("linear", "knobs"), LINEARS)
def test_override_gradients_are_plain_gemms(linear, knobs, row, dtype):
    """dequantized: on dequantized operands; high_precision: on the originals; bit for bit. Trap
    40."""
    if linear is not mxfp8_linear:
        knobs = knobs | {"row_scaled_activation": row}
    quantize_x, quantize_w, _, dequantize, _ = operand_functions(linear, knobs)
    dy = normal(40, 96, seed=3, dtype=dtype)
    for mode in ("high_precision", "dequantized"):
        x, w, b = leaves(dtype=dtype)
        linear(x, w, b, backward=mode, **knobs).backward(dy)
        x_used, w_used = x.detach(), w.detach()
        if mode == "dequantized":
            x_used, w_used = dequantize(quantize_x(x), dtype), dequantize(quantize_w(w), dtype)
        assert_bytes(x.grad, dy @ w_used, f"{mode} dX")
        assert_bytes(w.grad, dy.t() @ x_used, f"{mode} dW")
        assert_bytes(b.grad, dy.float().sum(0).to(dtype), f"{mode} bias grad")


@pytest.mark.parametrize("m", [40, 64, 1])
@pytest.mark.parametrize(("linear", "knobs"), LINEARS)
def test_quantized_gradients_against_float64(linear, knobs, m):
    """On hand-built operands: dY along N for dX, along M for dW, one amax. Traps 39, 43, 48.

    One huge column and one huge row of dY make blocks along the wrong axis visible. M is padded.
    """
    quantize_x, quantize_w, quantize_dy, _, real = operand_functions(linear, knobs)
    x, w, b = leaves(m)
    dy = normal(m, 96, seed=3)
    dy[:, 7] *= 300
    dy[m // 2] *= 1000
    linear(x, w, b, backward="quantized", **knobs).backward(dy)
    multiple = 32 if linear is mxfp8_linear else 16
    x_padded, dy_padded = (
        torch.cat([t.detach(), t.new_zeros(-m % multiple, t.shape[1])]) for t in (x, dy)
    )
    dx = real(quantize_dy(dy)) @ real(quantize_w(w, columnwise=True)).T
    dw = (
        real(quantize_dy(dy_padded, columnwise=True))
        @ real(quantize_x(x_padded, columnwise=True)).T
    )
    within_bf16_rounding(x.grad, dx)
    within_bf16_rounding(w.grad, dw)
    assert_bytes(b.grad, dy.float().sum(0).to(b.dtype), "bias grad")


@pytest.mark.parametrize(("linear", "knobs"), LINEARS)
def test_a_weight_update_before_backward(linear, knobs):
    """In-place: no effect on dequantized and quantized; an autograd error in high_precision. Trap
    40."""
    dy = normal(40, 96, seed=3)
    for mode in ("dequantized", "quantized"):
        gradients = []
        for update in (False, True):
            x, w, b = leaves()
            out = linear(x, w, b, backward=mode, **knobs)
            if update:
                with torch.no_grad():
                    w.add_(1.0)
                    x.mul_(3.0)
            out.backward(dy)
            gradients.append((x.grad, w.grad))
        for before, after in zip(*gradients, strict=True):
            assert_bytes(after, before, f"{mode} gradient")
    x, w, b = leaves()
    out = linear(x, w, b, backward="high_precision", **knobs)
    with torch.no_grad():
        w.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dy)


def saved_bytes(function) -> int:
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return total


@pytest.mark.parametrize("row", [False, True], ids=["ten", "row"])
def test_dequantized_keeps_codes_scales_and_amax_only(row):
    """0.5625 bytes per element and 4 bytes per amax. Trap 41."""
    m, k, n = 48, 64, 96
    x, w, b = leaves(m, k, n)
    knobs = {"backward": "dequantized", "row_scaled_activation": row}
    expected = 9 * m * k // 16 + 9 * n * k // 16 + 4 * (m if row else 1) + 4
    assert saved_bytes(lambda: four_over_six_linear(x, w, b, **knobs)) == expected
    assert saved_bytes(lambda: nvfp4_linear(x, w, b, **knobs)) == expected
    mxfp8 = saved_bytes(lambda: mxfp8_linear(x, w, b, backward="dequantized"))
    assert mxfp8 == 33 * (m * k + n * k) // 32


def test_only_needed_operands_are_kept():
    """Frozen X or W: None gradients and nothing kept for them; no grad mode keeps nothing. Trap
    49."""
    m, k, n = 48, 64, 96
    x, w, b = (t.detach() for t in leaves(m, k, n))
    w_bytes, x_bytes = 9 * n * k // 16 + 4, 9 * m * k // 16 + 4 * m
    knobs = {"backward": "dequantized"}
    leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    assert saved_bytes(lambda: four_over_six_linear(leaf_x, w, b, **knobs)) == w_bytes
    assert saved_bytes(lambda: four_over_six_linear(x, leaf_w, b, **knobs)) == x_bytes
    with torch.no_grad():
        assert saved_bytes(lambda: four_over_six_linear(leaf_x, leaf_w, b, **knobs)) == 0
    for mode in MODES:
        row = mode != "quantized"
        leaf_x.grad = leaf_w.grad = None
        out = four_over_six_linear(leaf_x, w, backward=mode, row_scaled_activation=row)
        out.sum().backward()
        assert leaf_x.grad is not None
        out = four_over_six_linear(x, leaf_w, backward=mode, row_scaled_activation=row)
        out.sum().backward()
        assert leaf_w.grad is not None
        assert w.grad is None
        assert x.grad is None


@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_kernels_write_codes_only_for_a_wgrad_that_reads_them(monkeypatch, grouped):
    """A stand-in for the kernels makes what they are asked for, by the reference."""
    asked = []

    def quantize(x, method, block, err_mode, bound, row_scaled, *, global_amax, codes, operand):
        assert operand
        asked.append(codes)
        t = four_over_six_quantize(
            x, block, err_mode, bound, row_scaled, global_amax=global_amax, backend="reference"
        )
        parts = (t.codes, t.block_scale) if codes else (None, None)
        return *parts, t.global_amax, exact_operand(t, torch.float32)

    x, w = (t.detach() for t in leaves(48, 64, 96)[:2])
    offs = torch.tensor([32, 48], dtype=torch.int32)
    matrices = torch.stack((w, w)) if grouped else w

    def run(backward: str, row: bool) -> list[torch.Tensor]:
        a, b = (t.clone().requires_grad_() for t in (x, matrices))
        quantizer = NVFP4Quantizer("four_over_six", row_scaled_activation=row)
        if grouped:
            out = quantized_grouped_mm(a, b, offs, quantizer=quantizer, backward=backward)
        else:
            out = quantized_linear(a, b, quantizer=quantizer, backward=backward)
        if out.requires_grad:
            out.sum().backward()
        return [t for t in (out.detach(), a.grad, b.grad) if t is not None]

    cases = [(mode, row) for mode in MODES for row in ((False,) if mode == "quantized" else BOTH)]
    expected = [run(*case) for case in cases]
    monkeypatch.setattr(quantizers, "use_cute", lambda backend, x: True)
    monkeypatch.setattr(quantize_ops, "quantize", quantize)
    for case, tensors in zip(cases, expected, strict=True):
        for found, reference in zip(run(*case), tensors, strict=True):
            assert_bytes(found, reference, str(case))
        assert asked.pop() == (case[0] == "dequantized"), case
    with torch.no_grad():
        run("dequantized", True)
    assert asked == [False]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("linear", "knobs"), LINEARS)
def test_prepared_weight(linear, knobs, mode, monkeypatch):
    """Quantized once: same outputs and gradients, and the forward quantizes it no more."""
    if linear is mxfp8_linear:
        quantizer = MXFP8Quantizer()
    else:
        scheme = "nvfp4" if linear is nvfp4_linear else "four_over_six"
        quantizer = NVFP4Quantizer(scheme, **knobs)
    dy = normal(40, 96, seed=3)
    x, w, b = leaves()
    linear(x, w, b, backward=mode, **knobs).backward(dy)
    prepared = prepare_weight(w, quantizer, columnwise=mode == "quantized")
    for given in (prepared, prepared.rowwise):
        x2, w2, b2 = leaves()
        out = linear(x2, w2, b2, backward=mode, quantized_weight=given, **knobs)
        assert_bytes(out.detach(), linear(x, w, b, backward=mode, **knobs).detach(), "outputs")
        out.backward(dy)
        assert_bytes(x2.grad, x.grad, "dX")
        assert_bytes(w2.grad, w.grad, "dW")

    def refuse(*args, **kwargs):
        raise AssertionError("the prepared weight was quantized again")

    monkeypatch.setattr(type(quantizer), "weight", refuse)
    quantized_linear(x, w, b, quantizer=quantizer, backward=mode, quantized_weight=prepared)


def test_prepared_weight_must_fit():
    x, w, b = leaves()
    other = prepare_weight(w, NVFP4Quantizer("four_over_six", e4m3_scale_bound=448))
    with pytest.raises(ValueError, match="e4m3_scale_bound 448, the quantizer 256"):
        four_over_six_linear(x, w, b, quantized_weight=other)
    with pytest.raises(ValueError, match=r"NVFP4Tensor of shape \(96, 64\); weight .* MXFP8Tensor"):
        mxfp8_linear(x, w, b, quantized_weight=other)
    with pytest.raises(ValueError, match="Prepare it with prepare_weight"):
        four_over_six_linear(x, w[:32], quantized_weight=other)


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_bias_is_added_in_fp32_before_the_one_rounding(scale):
    """Trap 48: a bias much larger than Y loses it if Y is rounded first."""
    x, w, _ = leaves()
    b = normal(96, seed=2) * scale
    exact = four_over_six_linear(x.float(), w)
    expected = (exact + b.float()).to(torch.bfloat16)
    assert_bytes(four_over_six_linear(x, w, b).detach(), expected.detach(), "outputs")
    fp32_bias = normal(96, seed=2, dtype=torch.float32) * scale
    expected = (exact + fp32_bias).to(torch.bfloat16)
    assert_bytes(four_over_six_linear(x, w, fp32_bias).detach(), expected.detach(), "outputs")


def test_bias_gradient_sums_in_fp32():
    """4096 ones sum to 4096; in bf16 they would stop at 256. Trap 48."""
    b = torch.zeros(32, dtype=torch.bfloat16, requires_grad=True)
    out = four_over_six_linear(normal(4096, 32), normal(32, 32), b)
    out.backward(torch.ones_like(out))
    assert b.grad.tolist() == [4096.0] * 32


@pytest.mark.parametrize(("linear", "knobs"), LINEARS)
@pytest.mark.parametrize("mode", MODES)
def test_leading_dims_and_expanded_gradients(linear, knobs, mode):
    """3-D and 4-D inputs are flattened; .sum() gives a stride-0 dY. Traps 46, 49."""
    flat, w, b = leaves(48)
    linear(flat, w, b, backward=mode, **knobs).sum().backward()
    expected = flat.grad.clone(), w.grad.clone(), b.grad.clone()
    for shape in ((4, 12, 64), (2, 3, 8, 64)):
        x = flat.detach().view(shape).requires_grad_()
        w.grad = b.grad = None
        out = linear(x, w, b, backward=mode, **knobs)
        assert out.shape == (*shape[:-1], 96)
        out.sum().backward()
        for actual, wanted in zip((x.grad.view(48, 64), w.grad, b.grad), expected, strict=True):
            assert_bytes(actual, wanted, "gradient")


@pytest.mark.parametrize(("linear", "knobs"), LINEARS)
@pytest.mark.parametrize("mode", MODES)
def test_no_rows(linear, knobs, mode):
    """M = 0 gives zero weight and bias gradients. Trap 49."""
    x, w, b = leaves(0)
    linear(x, w, b, backward=mode, **knobs).sum().backward()
    assert x.grad.shape == (0, 64)
    assert not w.grad.any()
    assert not b.grad.any()


def test_padding_rows_do_not_change_quantized_gradients():
    """M = 33 equals M = 48 with zero rows. Trap 30."""
    x, w, _ = leaves(33)
    dy = normal(33, 96, seed=3)
    nvfp4_mm(x, w, backward="quantized", **PER_TENSOR).backward(dy)
    padded = torch.cat([x.detach(), torch.zeros(15, 64).bfloat16()]).requires_grad_()
    w2 = w.detach().clone().requires_grad_()
    dy_padded = torch.cat([dy, torch.zeros(15, 96).bfloat16()])
    nvfp4_mm(padded, w2, backward="quantized", **PER_TENSOR).backward(dy_padded)
    assert_bytes(padded.grad[:33], x.grad, "dX")
    assert_bytes(w2.grad, w.grad, "dW")


def test_rows_do_not_depend_on_their_batch():
    """Row-scaled: a token's output is the same alone and among others; per-tensor it is not."""
    x, w, _ = (t.detach() for t in leaves())
    whole = four_over_six_mm(x, w)
    for rows in (1, 3, 17):
        assert_bytes(four_over_six_mm(x[:rows], w), whole[:rows], f"{rows} rows")
    loud = torch.cat([x[:3], 50 * x[3:]])
    tensor_wise = [four_over_six_mm(t, w, row_scaled_activation=False)[:3] for t in (x, loud)]
    assert not torch.equal(*tensor_wise)


def test_square_weight_is_not_transposed():
    """N == K with asymmetric data. Trap 47."""
    x, w = normal(32, 64, dtype=torch.float32), normal(64, 64, seed=1, dtype=torch.float32)
    w[:, 0] = 40
    for function in (four_over_six_mm, nvfp4_mm, mxfp8_mm):
        error = (function(x, w) - x @ w.T).abs().mean() / (x @ w.T).abs().mean()
        assert error < 0.15


def test_dequantized_is_the_derivative_of_the_straight_through_forward():
    """Against a float64 finite difference of y = deq(X) deq(W)^T contracted with dY."""
    x, w, _ = leaves(dtype=torch.float32)
    dy = normal(40, 96, seed=3, dtype=torch.float32)
    four_over_six_mm(x, w, backward="dequantized").backward(dy)
    x_q = nvfp4_dequantize(four_over_six_quantize(x.detach(), row_scaled=True)).double()
    w_q = nvfp4_dequantize(four_over_six_quantize(w.detach(), "16x16")).double()

    def loss(xs: torch.Tensor, ws: torch.Tensor) -> torch.Tensor:
        return ((xs @ ws.T) * dy.double()).sum()

    for index in ((0, 0), (7, 13), (39, 63)):
        step = torch.zeros_like(x_q)
        step[index] = 0.5
        slope = loss(x_q + step, w_q) - loss(x_q - step, w_q)
        # The loss is bilinear, so the central difference is exact up to fp32 GEMM error.
        torch.testing.assert_close(x.grad[index].double(), slope, rtol=1e-4, atol=1e-4)
        step = torch.zeros_like(w_q)
        step[index] = 0.5
        slope = loss(x_q, w_q + step) - loss(x_q, w_q - step)
        torch.testing.assert_close(w.grad[index].double(), slope, rtol=1e-4, atol=1e-4)


def test_modes_give_different_gradients():
    gradients = []
    for mode in MODES:
        x, w, _ = leaves()
        four_over_six_mm(x, w, backward=mode, **PER_TENSOR).backward(normal(40, 96, seed=3))
        gradients.append(w.grad)
    assert not torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[1], gradients[2])
    assert not torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize(
    ("row", "mode"), [(True, "high_precision"), (False, "quantized")], ids=["row", "ten"]
)
def test_default_backward(row, mode):
    """None resolves to high_precision for row-scaled and quantized for per-tensor. Trap 50."""
    dy = normal(40, 96, seed=3)
    gradients = []
    for backward in (None, mode):
        x, w, _ = leaves()
        four_over_six_mm(x, w, backward=backward, row_scaled_activation=row).backward(dy)
        gradients.append((x.grad, w.grad))
    assert_bytes(gradients[0][0], gradients[1][0], "dX")
    assert_bytes(gradients[0][1], gradients[1][1], "dW")


def test_weight_is_quantized_in_the_dtype_it_comes_in():
    """An fp32 master gives other codes than its bf16 copy, autocast or not. Trap 51."""
    x, w = normal(32, 64), normal(96, 64, seed=1, dtype=torch.float32)
    from_fp32, from_bf16 = four_over_six_mm(x, w), four_over_six_mm(x, w.bfloat16())
    assert not torch.equal(from_fp32, from_bf16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_bytes(four_over_six_mm(x, w), from_fp32, "outputs under autocast")
        under = four_over_six_mm(x.float(), w)
    assert_bytes(under, four_over_six_mm(x.float(), w), "fp32 outputs under autocast")


def test_mixed_dtypes_give_gradients_in_each_dtype():
    for mode in MODES:
        x = normal(32, 64).requires_grad_()
        w = normal(96, 64, seed=1, dtype=torch.float32).requires_grad_()
        four_over_six_mm(x, w, backward=mode, **PER_TENSOR).sum().backward()
        assert x.grad.dtype == torch.bfloat16
        assert w.grad.dtype == torch.float32


@pytest.mark.parametrize("rows", [3, 40])
def test_outputs_may_be_changed_in_place(rows):
    """A residual add in place, also for few rows."""
    x, w, _ = leaves(rows, dtype=torch.float32)
    out = four_over_six_mm(x, w)
    out.add_(1.0)
    out.sum().backward()
    assert w.grad is not None


def test_double_backward_is_refused():
    """Trap 54."""
    x, w, _ = leaves(dtype=torch.float32)
    out = four_over_six_mm(x, w)
    (gradient,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("linear", "knobs", "shapes", "message"),
    [
        (
            four_over_six_linear,
            {"backward": "quantized"},
            (32, 64, 96),
            "row_scaled_activation=True",
        ),
        (
            four_over_six_linear,
            {"backward": "Dequantized"},
            (32, 64, 96),
            "backward is 'Dequantized'",
        ),
        (four_over_six_linear, {"weight_block": "16x1"}, (32, 64, 96), "weight_block is '16x1'"),
        (four_over_six_linear, {"err_mode": "max"}, (32, 64, 96), "err_mode is 'max'"),
        (four_over_six_linear, {"e4m3_scale_bound": 6}, (32, 64, 96), "e4m3_scale_bound is 6"),
        (four_over_six_linear, {}, (32, 40, 96), "weight has K = 40"),
        (four_over_six_linear, {}, (32, 64, 100), "weight has N = 100; weight_block '16x16'"),
        (
            four_over_six_linear,
            {"weight_block": "1x16", "backward": "quantized", **PER_TENSOR},
            (32, 64, 100),
            "weight has N = 100; backward 'quantized'",
        ),
        (mxfp8_linear, {}, (32, 64, 48), "N % 32 must be 0"),
        (mxfp8_linear, {}, (32, 48, 96), "K % 32 must be 0"),
        (mxfp8_linear, {"scale_mode": "even"}, (32, 64, 96), "scale_mode is 'even'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(linear, knobs, shapes, message):
    """Traps 49, 50."""
    m, k, n = shapes
    with pytest.raises(ValueError, match=message):
        linear(torch.zeros(m, k), torch.zeros(n, k), **knobs)


@pytest.mark.wrong_types
def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"x has shape \(4, 32\) and weight \(96, 64\)"):
        four_over_six_linear(torch.zeros(4, 32), torch.zeros(96, 64))


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    """Non-reentrant checkpointing unpacks every saved tensor exactly once."""
    torch.manual_seed(0)
    x = torch.randn(32, 64, requires_grad=True)
    weight = torch.randn(48, 64, requires_grad=True)

    def run(t: torch.Tensor) -> torch.Tensor:
        return four_over_six_linear(t, weight, backward="dequantized").square().sum()

    plain = torch.autograd.grad(run(x), [x, weight])
    again = torch.autograd.grad(checkpoint(run, x, use_reentrant=False), [x, weight])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
