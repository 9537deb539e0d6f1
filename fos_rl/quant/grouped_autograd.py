"""Quantized grouped GEMM with autograd, for experts: rows are sorted by expert, offs marks the
ends."""

from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable

from fos_rl.exact.fixed_tiles import fixed_tile_grouped_mm
from fos_rl.quant.gemm import (
    Gemm,
    GemmInput,
    QuantizedTensor,
    apply_global_scales,
    backward_gemm,
    check_gemm,
    fp32_mm,
    gemm_operand,
    no_autocast,
    raw_gemm,
)
from fos_rl.quant.grouped_gemm import (
    check_offs,
    group_amax,
    group_of_rows,
    group_spans,
    looped_sums,
    per_row,
)
from fos_rl.quant.linear_autograd import (
    MatmulCall,
    WeightArgument,
    amax_of,
    as_quantized_weight,
    check_contraction,
    check_devices,
    pad_rows,
    quantized_grads,
    rebuild_quantized,
    tensors_of,
)
from fos_rl.quant.mxfp8 import MX_BLOCK, MXFP8Tensor
from fos_rl.quant.nvfp4 import NVFP4Operand, NVFP4Tensor
from fos_rl.quant.quantizers import (
    ActivationForms,
    Backward,
    MXFP8Quantizer,
    QuantizedWeight,
    Quantizer,
    resolve_backward,
)


def quantized_grouped_mm(
    x: Float[Tensor, "m k"],
    weight: Float[Tensor, "experts n k"],
    offs: Int32[Tensor, "experts"],
    *,
    quantizer: Quantizer,
    gemm: Gemm = "emulated",
    backward: Backward | None = None,
    quantized_weight: WeightArgument = None,
) -> Float[Tensor, "m n"]:
    """Return x[offs[e-1]:offs[e]] @ weight[e].T for every expert e, in x's dtype.

    Operands are quantized as in quantized_linear, with one amax for each expert's weight, and for
    each expert's rows if x is not row-scaled. Rows past offs[-1] enter no amax; their outputs and
    gradients are zeros, whatever they hold. An expert without rows gets a zero gradient. For
    "quantized" each group is padded with zero rows to the block.

    On CUDA the emulated forward does not read offs on the host and can be captured in a CUDA graph;
    gemm "native", backward "quantized" and every backward pass read it once.
    """
    backward = resolve_backward(backward, quantizer.row_scaled_activation)
    check_gemm(gemm, x.device)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or not len(weight):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; they must be [M, K] "
            "and [E, N, K] with one K and at least one expert."
        )
    # Meta tensors ask for shape rules, but the groups' sizes must be known: offs is on the CPU.
    check_devices(x, weight=weight, offs=None if x.device.type == "meta" else offs)
    check_offs(offs, x.shape[0], weight.shape[0])
    check_contraction(quantizer, backward, weight)
    prepared = as_quantized_weight(quantized_weight, weight, quantizer)
    call = MatmulCall(quantizer, backward, gemm, prepared, torch.is_grad_enabled())
    return _QuantizedGroupedMatmul.apply(x, weight, offs, call)


def _quantize_rows(
    x: Tensor, offs: Tensor, group: Tensor, quantizer: Quantizer, forms: ActivationForms
) -> tuple[GemmInput, QuantizedTensor | None, Tensor | None]:
    """Return activation_for_gemm of x [M, K], with rows of no group as zeros, and its distinct
    amaxes.

    Those are [M] if row-scaled, [E] if each group has one (the tensor carries it for each row), or
    None in MXFP8.
    """
    experts = offs.shape[0]
    if x.device.type != "cpu" or int(offs[-1]) < x.shape[0]:
        x = x.masked_fill((group == experts)[:, None], 0.0)
    if isinstance(quantizer, MXFP8Quantizer):
        return *quantizer.activation_for_gemm(x, forms=forms), None
    if quantizer.row_scaled_activation:
        multiplied, rows = quantizer.activation_for_gemm(x, forms=forms)
        return multiplied, rows, amax_of(multiplied)
    amax = group_amax(x, group, experts)
    pair = quantizer.activation_for_gemm(
        x, forms=forms, amax=per_row(amax, group), amax_per_row=True
    )
    return *pair, amax


def _part(t: QuantizedTensor, index: int | slice) -> QuantizedTensor:
    """Return one matrix of a stack, or some rows of a matrix that has an amax for each row."""
    if isinstance(t, NVFP4Tensor):
        return NVFP4Tensor(
            t.codes[index], t.block_scale[index], t.global_amax[index], t.e4m3_scale_bound
        )
    return MXFP8Tensor(t.data[index], t.scale[index])


def _grouped_sums(x: GemmInput, prepared: QuantizedWeight, offs: Tensor, gemm: Gemm) -> Tensor:
    """Return the fp32 sums [M, N] before global scales; rows of no group are 0."""
    w = prepared.rowwise
    if gemm == "native":
        assert not isinstance(x, NVFP4Operand)
        sums = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float32, device=x.device)
        for expert, (start, end) in enumerate(group_spans(offs.tolist())):
            if end > start:
                rows = _part(x, slice(start, end))
                sums[start:end] = raw_gemm(rows, _part(w, expert), gemm)
        return sums
    w_operand = gemm_operand(w) if prepared.operand is None else prepared.operand
    if gemm == "fixed_tile" or offs.is_cuda:
        # On CUDA the one kernel that reads offs there, as a graph must, and sums in fp32:
        # torch's grouped_mm rounds to bf16 before the global scales.
        return fixed_tile_grouped_mm(gemm_operand(x), w_operand, offs)
    return looped_sums(gemm_operand(x), w_operand, offs.tolist())


class _QuantizedGroupedMatmul(torch.autograd.Function):
    """x [M, K], weight [E, N, K], offs [E] -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor, call: MatmulCall) -> Tensor:
        quantizer, prepared, w = call.quantizer, call.prepared, call.prepared.rowwise
        group = group_of_rows(offs, x.shape[0]).to(x.device)
        for_dgrad, for_wgrad = (call.grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        forms = call.activation_forms(for_wgrad)
        multiplied, quantized_x, amax = _quantize_rows(x, offs, group, quantizer, forms)
        out = _grouped_sums(multiplied, prepared, offs, call.gemm)
        if not isinstance(multiplied, MXFP8Tensor):
            assert isinstance(w, NVFP4Tensor)
            w_amax = per_row(w.global_amax[:, 0], group)
            bounds = (multiplied.e4m3_scale_bound, w.e4m3_scale_bound)
            row_scaled = quantizer.row_scaled_activation
            out = apply_global_scales(out, multiplied.global_amax, w_amax, bounds, row_scaled)
        kept_x: tuple[Tensor, ...] = ()
        kept_w = None
        if call.backward == "high_precision":
            kept_x, kept_w = (x,), weight
        elif call.backward == "dequantized":
            kept_x, kept_w = tensors_of(quantized_x), prepared.rowwise
            # One amax per group is kept once, not once per row.
            kept_x = kept_x if amax is None else (*kept_x[:2], amax)
        else:
            if for_wgrad:
                kept_x = _columnwise_groups(x, offs, amax, quantizer)
            if for_dgrad:
                kept_w = prepared.columnwise or quantizer.weight(
                    weight, columnwise=True, amax=amax_of(w)
                )
        kept_x = kept_x if for_wgrad else ()
        kept_w = kept_w if for_dgrad else None
        ctx.save_for_backward(offs, *kept_x, *tensors_of(kept_w))
        ctx.num_x = len(kept_x)
        ctx.quantizer, ctx.mode, ctx.gemm = quantizer, call.backward, backward_gemm(call.gemm)
        ctx.x_shape, ctx.w_shape = x.shape, weight.shape
        ctx.dtypes = x.dtype, weight.dtype
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        x_dtype, w_dtype = ctx.dtypes
        offs, *saved = ctx.saved_tensors
        spans = group_spans(offs.tolist())
        saved_x, saved_w = saved[: ctx.num_x], saved[ctx.num_x :]
        with no_autocast(dy.device):
            if ctx.mode == "quantized" and isinstance(ctx.quantizer, MXFP8Quantizer):
                return *_mxfp8_grads(dy, offs, saved_x, saved_w, ctx), None, None
            dx = dy.new_zeros(ctx.x_shape, dtype=x_dtype) if needs_dx else None
            dw = dy.new_zeros(ctx.w_shape, dtype=w_dtype) if needs_dw else None
            if ctx.mode == "quantized":
                columns = _rebuild_groups(saved_x, spans, ctx.quantizer)
                w = rebuild_quantized(saved_w, ctx.quantizer)
                for expert, (start, end) in enumerate(spans):
                    if end > start:
                        group_dx, group_dw = quantized_grads(
                            dy[start:end],
                            columns.get(expert),
                            None if w is None else _part(w, expert),
                            ctx.quantizer,
                            ctx.gemm,
                            ctx.dtypes,
                        )
                        _store(dx, slice(start, end), group_dx)
                        _store(dw, expert, group_dw)
                return dx, dw, None, None
            x = saved_x[0] if saved_x else None
            w = saved_w[0] if saved_w else None
            if ctx.mode == "dequantized":
                x = _dequantize_rows(saved_x, offs, ctx) if saved_x else None
                w = (
                    ctx.quantizer.dequantize(ctx.quantizer.rebuild(saved_w), x_dtype)
                    if saved_w
                    else None
                )
            for expert, (start, end) in enumerate(spans):
                if end > start:
                    rows = dy[start:end]
                    if w is not None:
                        _store(dx, slice(start, end), rows @ w[expert].to(dy.dtype))
                    if x is not None:
                        _store(dw, expert, rows.t() @ x[start:end])
        return dx, dw, None, None


def _store(target: Tensor | None, index: int | slice, value: Tensor | None) -> None:
    if target is not None:
        assert value is not None
        target[index] = value


def _columnwise_groups(
    x: Tensor, offs: Tensor, amax: Tensor | None, quantizer: Quantizer
) -> tuple[Tensor, ...]:
    """Return the saved tensors of each non-empty group's X^T [K, rows padded], one group after
    another; without amaxes, of one matrix that holds them side by side."""
    spans = group_spans(offs.tolist())
    if amax is None:
        return tensors_of(quantizer.activation(_padded_groups(x, spans), columnwise=True))
    kept: list[Tensor] = []
    for expert, (start, end) in enumerate(spans):
        if end > start:
            rows = pad_rows(x[start:end], quantizer.block)
            one = amax[expert : expert + 1]
            kept.extend(tensors_of(quantizer.activation(rows, columnwise=True, amax=one)))
    return tuple(kept)


def _padded_groups(x: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Return the groups' rows, each group padded with zero rows to whole MXFP8 blocks."""
    return torch.cat([x[:0], *(pad_rows(x[start:end], MX_BLOCK) for start, end in spans)])


def _mxfp8_grads(
    dy: Tensor, offs: Tensor, saved_x: list[Tensor], saved_w: list[Tensor], ctx: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx and dw. No operand has an amax, so that one call quantizes all groups: a dozen
    launches instead of a dozen per group."""
    dx = dw = None
    if saved_w:
        w = QuantizedWeight(ctx.quantizer.rebuild(saved_w))
        dx = _grouped_sums(ctx.quantizer.gradient(dy), w, offs, ctx.gemm).to(ctx.dtypes[0])
    if saved_x:
        spans = group_spans(offs.tolist())
        experts = [expert for expert, (start, end) in enumerate(spans) if end > start]
        widths = [-(-(end - start) // MX_BLOCK) * MX_BLOCK for start, end in spans if end > start]
        columns = ctx.quantizer.gradient(_padded_groups(dy, spans), columnwise=True)
        operands = (columns, ctx.quantizer.rebuild(saved_x))
        if ctx.gemm == "native":
            groups = zip(*(_split_columns(t, widths) for t in operands), strict=True)
            products = (raw_gemm(a, b, "native") for a, b in groups)
        else:
            groups = zip(*(gemm_operand(t).split(widths, 1) for t in operands), strict=True)
            products = (fp32_mm(a, b) for a, b in groups)
        dw = dy.new_zeros(ctx.w_shape, dtype=ctx.dtypes[1])
        for expert, product in zip(experts, products, strict=True):
            dw[expert] = product
    return dx, dw


def _split_columns(t: MXFP8Tensor, widths: list[int]) -> list[MXFP8Tensor]:
    """Return matrices of so many columns, each contiguous, as the tensor core reads them."""
    data, scale = t.data.split(widths, 1), t.scale.split([w // MX_BLOCK for w in widths], 1)
    return [MXFP8Tensor(d.contiguous(), s.contiguous()) for d, s in zip(data, scale, strict=True)]


def _rebuild_groups(
    saved: list[Tensor], spans: list[tuple[int, int]], quantizer: Quantizer
) -> dict[int, QuantizedTensor]:
    """Undo _columnwise_groups of a quantizer with amaxes: each non-empty group's X^T, by expert."""
    if not saved:
        return {}
    experts = [expert for expert, (start, end) in enumerate(spans) if end > start]
    count = len(saved) // len(experts)
    groups = (saved[i : i + count] for i in range(0, len(saved), count))
    return {expert: quantizer.rebuild(group) for expert, group in zip(experts, groups, strict=True)}


def _dequantize_rows(saved: list[Tensor], offs: Tensor, ctx: Any) -> Tensor:
    if len(saved) == 3 and not ctx.quantizer.row_scaled_activation:
        group = group_of_rows(offs, ctx.x_shape[0]).to(saved[0].device)
        saved = [*saved[:2], per_row(saved[2], group)]
    return ctx.quantizer.dequantize(ctx.quantizer.rebuild(saved), ctx.dtypes[0])
