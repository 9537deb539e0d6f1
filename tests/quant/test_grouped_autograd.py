"""Grouped GEMM against one quantized linear per expert; empty groups, tail rows, offsets."""

import pytest
import torch

from fos_rl.quant import (
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    four_over_six_grouped_mm,
    four_over_six_linear,
    mxfp8_grouped_mm,
    mxfp8_linear,
    nvfp4_grouped_mm,
    nvfp4_linear,
    prepare_weight,
    quantized_grouped_mm,
)
from fos_rl.quant.gemm import fp32_mm, gemm_operand
from fos_rl.quant.grouped_gemm import group_amax, group_of_rows
from tests.quant.quant_goldens import assert_bytes

M, K, N = 70, 64, 96
MODES = ["quantized", "high_precision", "dequantized"]
FORMATS = [
    pytest.param(four_over_six_grouped_mm, four_over_six_linear, id="four_over_six"),
    pytest.param(nvfp4_grouped_mm, nvfp4_linear, id="nvfp4"),
    pytest.param(mxfp8_grouped_mm, mxfp8_linear, id="mxfp8"),
]
# First, middle and last group empty; ends on and off the block size; one group; nothing at all.
OFFSETS = [
    pytest.param([16, 48, 70], id="full"),
    pytest.param([0, 33, 33, 70], id="empty_first_and_middle"),
    pytest.param([5, 64, 64], id="empty_last_and_tail"),
    pytest.param([50], id="one_and_tail"),
    pytest.param([0, 0, 0], id="all_empty"),
]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def offsets(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def knobs_for(grouped, row: bool) -> dict:
    return {} if grouped is mxfp8_grouped_mm else {"row_scaled_activation": row}


def cases():
    for row in (False, True):
        for mode in MODES:
            if not (row and mode == "quantized"):
                yield pytest.param(row, mode, id=f"{'row' if row else 'ten'}-{mode}")


@pytest.mark.parametrize("ends", OFFSETS)
@pytest.mark.parametrize(("row", "mode"), cases())
@pytest.mark.parametrize(("grouped", "linear"), FORMATS)
def test_equals_one_linear_per_expert(grouped, linear, row, mode, ends):
    """Outputs and gradients, bit for bit, so each expert has its own amax. Traps 30, 44, 46, 63.

    Tail rows hold NaN and 1e30 and have garbage gradients; every group but the first is scaled.
    """
    knobs = knobs_for(grouped, row) | {"backward": mode}
    x = normal(M, K)
    for index, end in enumerate(ends[:-1]):
        x[end:] *= 3.0 * (index + 1)
    x[ends[-1] :] = torch.nan
    x[ends[-1] : ends[-1] + 2] = 1e30
    w, dy = normal(len(ends), N, K, seed=1), normal(M, N, seed=2)
    dy[ends[-1] :] = torch.nan
    x.requires_grad_()
    w.requires_grad_()
    out = grouped(x, w, offsets(ends), **knobs)
    out.backward(dy)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if start == end:
            assert not w.grad[expert].any()
            continue
        rows = x.detach()[start:end].requires_grad_()
        matrix = w.detach()[expert].requires_grad_()
        alone = linear(rows, matrix, **knobs)
        alone.backward(dy[start:end])
        assert_bytes(out.detach()[start:end], alone.detach(), f"output of expert {expert}")
        assert_bytes(x.grad[start:end], rows.grad, f"dX of expert {expert}")
        assert_bytes(w.grad[expert], matrix.grad, f"dW of expert {expert}")
    assert not out[ends[-1] :].any()
    assert not x.grad[ends[-1] :].any()


@pytest.mark.parametrize(("row", "mode"), cases())
@pytest.mark.parametrize(("grouped", "linear"), FORMATS)
def test_expanded_gradient_and_fp32(grouped, linear, row, mode):
    """out.sum() gives a stride-0 dY; fp32 stays fp32. Trap 46."""
    knobs = knobs_for(grouped, row) | {"backward": mode}
    gradients = []
    for expanded in (True, False):
        x = normal(M, K, dtype=torch.float32).requires_grad_()
        w = normal(3, N, K, seed=1, dtype=torch.float32).requires_grad_()
        out = grouped(x, w, offsets([16, 48, 70]), **knobs)
        assert out.dtype == torch.float32
        out.sum().backward() if expanded else out.backward(torch.ones(M, N))
        gradients.append((x.grad, w.grad))
    for actual, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("grouped", "linear"), FORMATS)
def test_no_rows(grouped, linear, mode):
    """M = 0: zero gradients for every expert. Trap 44."""
    x = torch.zeros(0, K, requires_grad=True)
    w = normal(2, N, K, dtype=torch.float32).requires_grad_()
    out = grouped(x, w, offsets([0, 0]), backward=mode, **knobs_for(grouped, False))
    assert out.shape == (0, N)
    out.sum().backward()
    assert not w.grad.any()
    assert x.grad.shape == (0, K)


@pytest.mark.parametrize("row", [False, True], ids=["ten", "row"])
def test_dequantized_keeps_codes_scales_and_amax_only(row):
    """Plus the offsets; a per-group amax is kept once per group. Trap 41."""
    experts = 3
    x, w = normal(M, K).requires_grad_(), normal(experts, N, K, seed=1).requires_grad_()
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        four_over_six_grouped_mm(
            x, w, offsets([16, 48, 70]), backward="dequantized", row_scaled_activation=row
        )
    elements = M * K + experts * N * K
    assert total == 9 * elements // 16 + 4 * (M if row else experts) + 4 * experts + 4 * experts


@pytest.mark.parametrize("mode", ["dequantized", "quantized"])
def test_an_update_before_backward_changes_nothing(mode):
    """Trap 40."""
    gradients = []
    for update in (False, True):
        x, w = normal(M, K).requires_grad_(), normal(3, N, K, seed=1).requires_grad_()
        out = nvfp4_grouped_mm(
            x, w, offsets([16, 48, 70]), backward=mode, row_scaled_activation=False
        )
        if update:
            with torch.no_grad():
                w.mul_(2)
        out.backward(normal(M, N, seed=2))
        gradients.append((x.grad, w.grad))
    for before, after in zip(*gradients, strict=True):
        assert_bytes(after, before, "gradient")


@pytest.mark.parametrize("mode", MODES)
def test_frozen_operands(mode):
    """Trap 49."""
    x, w = normal(M, K), normal(3, N, K, seed=1)
    for leaf in (x, w):
        leaf.requires_grad_()
        out = four_over_six_grouped_mm(
            x, w, offsets([16, 48, 60]), backward=mode, row_scaled_activation=False
        )
        out.sum().backward()
        assert leaf.grad is not None
        leaf.requires_grad_(False)
        leaf.grad = None
    assert x.grad is None
    assert w.grad is None


@pytest.mark.parametrize(
    ("quantizer", "mode"),
    [
        pytest.param(NVFP4Quantizer("four_over_six"), "dequantized", id="row"),
        pytest.param(
            NVFP4Quantizer("four_over_six", row_scaled_activation=False), "quantized", id="ten"
        ),
        pytest.param(MXFP8Quantizer(), "quantized", id="mxfp8"),
    ],
)
def test_prepared_weight(quantizer, mode):
    x, w = normal(M, K).requires_grad_(), normal(3, N, K, seed=1).requires_grad_()
    results = []
    prepared = prepare_weight(w, quantizer, columnwise=mode == "quantized")
    for given in (None, prepared, prepared.rowwise):
        x.grad = w.grad = None
        out = quantized_grouped_mm(
            x, w, offsets([16, 48, 60]), quantizer=quantizer, backward=mode, quantized_weight=given
        )
        out.backward(normal(M, N, seed=2))
        results.append((out.detach(), x.grad, w.grad))
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert_bytes(actual, expected, "outputs and gradients")


def test_row_scaled_rows_do_not_depend_on_the_grouping():
    """A token's output is a function of the token and its expert."""
    x, w = normal(M, K), normal(2, N, K, seed=1)
    w[1] = w[0]
    one = four_over_six_grouped_mm(x, w, offsets([70, 70]))
    other = four_over_six_grouped_mm(x, w, offsets([3, 70]))
    assert_bytes(one, other, "outputs")


def test_group_of_rows_and_amax():
    offs = offsets([0, 2, 2, 5])
    group = group_of_rows(offs, 7)
    assert group.tolist() == [1, 1, 3, 3, 3, 4, 4]
    x = torch.tensor([[1.0], [-9], [2], [3], [-4], [100], [torch.nan]])
    assert group_amax(x, group, 4).tolist() == [0.0, 9.0, 0.0, 4.0]
    x[3] = torch.nan
    assert group_amax(x, group, 4).isnan().tolist() == [False, False, False, True]


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("offs", "message"),
    [
        (torch.tensor([16, 48, 70]), r"offs is torch.int64 of shape \(3,\); it must be int32"),
        (offsets([16, 70]), r"of shape \(3,\)"),
        (offsets([48, 16, 70]), "must not decrease"),
        (offsets([-1, 16, 70]), "must not decrease"),
        (offsets([16, 48, 71]), r"for 70 rows.*0\.\.rows"),
    ],
    ids=["int64", "length", "decreasing", "negative", "past_the_end"],
)
def test_bad_offsets(offs, message):
    """Trap 45."""
    with pytest.raises(ValueError, match=message):
        four_over_six_grouped_mm(normal(M, K), normal(3, N, K), offs)


@pytest.mark.wrong_types
def test_bad_shapes_and_modes():
    with pytest.raises(ValueError, match=r"must be \[M, K\]"):
        four_over_six_grouped_mm(normal(M, K), normal(3, K, N), offsets([16, 48, 70]))
    with pytest.raises(ValueError, match="row_scaled_activation=True"):
        four_over_six_grouped_mm(
            normal(M, K), normal(3, N, K), offsets([16, 48, 70]), backward="quantized"
        )
    with pytest.raises(RuntimeError, match="gemm 'native' unavailable"):
        four_over_six_grouped_mm(
            normal(M, K), normal(3, N, K), offsets([16, 48, 70]), gemm="native"
        )


def test_mxfp8_groups_reach_the_tensor_core_whole(monkeypatch):
    """backward "quantized" hands "native" each group's own codes and scales, contiguous."""

    def decoded(a: MXFP8Tensor, b: MXFP8Tensor) -> torch.Tensor:
        assert all(t.is_contiguous() for m in (a, b) for t in (m.data, m.scale))
        return fp32_mm(gemm_operand(a), gemm_operand(b))

    monkeypatch.setattr("fos_rl.quant.grouped_autograd.check_gemm", lambda gemm, device: None)
    monkeypatch.setattr("fos_rl.quant.gemm._native_gemm", decoded)
    results = []
    for gemm in ("emulated", "native"):
        x, w = normal(M, K).requires_grad_(), normal(3, N, K, seed=1).requires_grad_()
        out = mxfp8_grouped_mm(x, w, offsets([5, 5, 64]), gemm=gemm, backward="quantized")
        out.backward(normal(M, N, seed=2))
        results.append((out.detach(), x.grad, w.grad))
    for actual, expected in zip(*results, strict=True):
        assert_bytes(actual, expected, "outputs and gradients")
