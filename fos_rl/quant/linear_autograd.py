"""Quantized linear with autograd: forward on exact operands, three backward modes.

- quantized: dgrad and wgrad multiply quantized operands. X and W are quantized column-wise in the
  forward, from the unquantized tensors; dY is standard NVFP4 (or MXFP8) both ways.
- high_precision: plain GEMMs on the original X and W.
- dequantized: plain GEMMs on the dequantized forward operands, the derivative of what was computed.

Modes and names follow NVIDIA/TransformerEngine (transformer_engine/pytorch/module/linear.py,
backward_override). No gradient flows through amax, scales or the choice of encoding. Autocast does
not apply: x and weight are quantized in the dtype they come in.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from fos_rl.quant.gemm import (
    Gemm,
    GemmInput,
    QuantizedTensor,
    backward_gemm,
    check_gemm,
    no_autocast,
    quantized_gemm,
)
from fos_rl.quant.mxfp8 import MXFP8Tensor
from fos_rl.quant.nvfp4 import NVFP4Tensor
from fos_rl.quant.quantizers import (
    ActivationForms,
    Backward,
    QuantizedWeight,
    Quantizer,
    resolve_backward,
)
from fos_rl.quant.weight_state import WeightState

WeightArgument = QuantizedWeight | NVFP4Tensor | MXFP8Tensor | None


@dataclass(frozen=True, slots=True)
class MatmulCall:
    """The non-tensor arguments of one quantized matmul."""

    quantizer: Quantizer
    backward: Backward
    gemm: Gemm
    prepared: QuantizedWeight
    grad_enabled: bool

    def activation_forms(self, for_wgrad: bool) -> ActivationForms:
        """Codes where the tensor core or the weight gradient reads them."""
        if self.gemm == "native":
            return "codes"
        return "both" if for_wgrad and self.backward == "dequantized" else "operand"


def quantized_linear(
    x: Float[Tensor, "*lead k"],
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, "n"] | None = None,
    *,
    quantizer: Quantizer,
    gemm: Gemm = "emulated",
    backward: Backward | None = None,
    quantized_weight: WeightArgument = None,
) -> Float[Tensor, "*lead n"]:
    """Return x @ weight.T + bias with operands quantized as quantizer says, in x's dtype.

    Products are summed in fp32, then come the global scales and the bias in fp32, then one
    rounding. quantized_weight, prepared of this very weight as it is, spares quantizing it again;
    weight still receives the gradient. backward None is "quantized", or "high_precision" for
    row-scaled activations. "quantized" needs N divisible by the block (16, MXFP8 32); M is padded
    with zero rows, which enter no amax.
    """
    backward = resolve_backward(backward, quantizer.row_scaled_activation)
    check_gemm(gemm, x.device)
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; they must be "
            "[..., K] and [N, K] with one K."
        )
    check_devices(x, weight=weight, bias=bias)
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ValueError(
            f"bias is {bias.dtype} of shape {tuple(bias.shape)}; it must be floating point of "
            f"shape ({weight.shape[0]},), one number per row of weight."
        )
    check_contraction(quantizer, backward, weight)
    prepared = as_quantized_weight(quantized_weight, weight, quantizer)
    call = MatmulCall(quantizer, backward, gemm, prepared, torch.is_grad_enabled())
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    out = _QuantizedMatmul.apply(rows, weight, bias, call)
    return out.view(*x.shape[:-1], weight.shape[0])


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """Raise unless the other tensors are where x is; the kernels take addresses."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}; move it there.")


def check_contraction(quantizer: Quantizer, backward: Backward, weight: Tensor) -> None:
    """Raise unless the dims that blocks run along are divisible by the block."""
    n, k = weight.shape[-2:]
    remedy = "Exclude this layer from quantization, or pad it"
    if k % quantizer.block:
        raise ValueError(
            f"weight has K = {k}; quantized blocks run along K, so K % {quantizer.block} must be "
            f"0. {remedy}."
        )
    if getattr(quantizer, "weight_block", "1x16") == "16x16" and n % quantizer.block:
        raise ValueError(
            f"weight has N = {n}; weight_block '16x16' needs N % 16 == 0. {remedy}, or use "
            "weight_block '1x16'."
        )
    if backward == "quantized" and n % quantizer.block:
        raise ValueError(
            f"weight has N = {n}; backward 'quantized' has blocks along N, so "
            f"N % {quantizer.block} must be 0. {remedy}, or use backward "
            "'high_precision' or 'dequantized'."
        )


@functools.cache
def check_native_shapes(quantizer: Quantizer, backward: Backward, n: int, k: int) -> None:
    """Raise what torch's scaled GEMM says against a product of a [N, K] weight, one of its three.

    Meta tensors go through the forward and the backward, so that torch checks and nothing is
    multiplied; torch has no rule for the number of rows, so one row speaks for all.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(1, k, device="meta", requires_grad=True)
        weight = torch.empty(n, k, device="meta", requires_grad=True)
        out = quantized_linear(x, weight, quantizer=quantizer, gemm="native", backward=backward)
        out.backward(torch.empty_like(out))


def as_quantized_weight(
    given: WeightArgument, weight: Tensor, quantizer: Quantizer
) -> QuantizedWeight:
    """Return the quantized weight to multiply: given, if it fits weight and quantizer, else a new
    one."""
    if given is None:
        return QuantizedWeight(quantizer.weight(weight.detach()))
    prepared = given if isinstance(given, QuantizedWeight) else QuantizedWeight(given)
    rowwise = prepared.rowwise
    if not isinstance(rowwise, quantizer.tensor_type) or rowwise.shape != weight.shape:
        raise ValueError(
            f"quantized_weight is {type(rowwise).__name__} of shape {tuple(rowwise.shape)}; weight "
            f"{tuple(weight.shape)} needs {quantizer.tensor_type.__name__} of its shape. Prepare "
            "it with prepare_weight(weight, quantizer)."
        )
    quantizer.check_prepared(rowwise)
    made_by = prepared.quantizer
    if made_by is not None and made_by.weight_encoding != quantizer.weight_encoding:
        raise ValueError(
            f"quantized_weight was prepared as {made_by.weight_encoding}, the quantizer has "
            f"{quantizer.weight_encoding}. Prepare the weight with the quantizer it is used with."
        )
    if prepared.state is not None:
        _check_state(prepared.state, weight)
    return prepared


def _check_state(state: WeightState, weight: Tensor) -> None:
    remedy = "pass quantized_weight.rowwise alone, whose codes are then the caller's to keep"
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "quantized_weight in torch.compile: a compiled graph would multiply these codes "
            f"whatever became of the weight. Leave it out, or {remedy}."
        )
    if not state.is_of(weight) and not state.has_values_of(weight):
        raise ValueError(
            "quantized_weight is stale: weight was written to since, is another one than was "
            "prepared, or is an inference tensor, whose writes PyTorch does not count. Prepare it "
            f"with prepare_weight(weight, quantizer) after each write, or {remedy}."
        )


def pad_rows(x: Float[Tensor, "rows cols"], multiple: int) -> Float[Tensor, "padded cols"]:
    """Return x with zero rows appended up to a multiple; zeros change neither an amax nor a sum."""
    return pad(x, (0, 0, 0, -x.shape[0] % multiple)) if x.shape[0] % multiple else x


def amax_of(t: GemmInput) -> Tensor | None:
    """The global amax that goes with an operand's codes, fp32; None for MXFP8, which has none."""
    return None if isinstance(t, MXFP8Tensor) else t.global_amax


def tensors_of(kept: QuantizedTensor | Tensor | None) -> tuple[Tensor, ...]:
    """Return what save_for_backward takes of a kept operand."""
    match kept:
        case NVFP4Tensor():
            return (kept.codes, kept.block_scale, kept.global_amax)
        case MXFP8Tensor():
            return (kept.data, kept.scale)
        case None:
            return ()
        case _:
            return (kept,)


def rebuild_quantized(saved: Sequence[Tensor], quantizer: Quantizer) -> QuantizedTensor | None:
    """Undo tensors_of where a quantized operand was kept, or None."""
    return quantizer.rebuild(saved) if saved else None


def rebuild_kept(saved: Sequence[Tensor], quantizer: Quantizer) -> QuantizedTensor | Tensor | None:
    """Undo tensors_of: no tensor was None, one is a plain tensor, more are a quantized one."""
    return saved[0] if len(saved) == 1 else rebuild_quantized(saved, quantizer)


class _QuantizedMatmul(torch.autograd.Function):
    """x [M, K], weight [N, K], bias [N] -> [M, N]; keeps for backward only what the mode
    multiplies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: MatmulCall
    ) -> Tensor:
        quantizer, prepared = call.quantizer, call.prepared
        for_dgrad, for_wgrad = (call.grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        forms = call.activation_forms(for_wgrad)
        multiplied, quantized_x = quantizer.activation_for_gemm(x, forms=forms)
        out = quantized_gemm(
            multiplied,
            prepared.rowwise,
            x.dtype,
            gemm=call.gemm,
            row_scaled=quantizer.row_scaled_activation,
            bias=bias,
            b_operand=prepared.operand,
        )
        kept_x = kept_w = None
        match call.backward:
            case "high_precision":
                kept_x, kept_w = x, weight
            case "dequantized":
                kept_x, kept_w = quantized_x, prepared.rowwise
            case "quantized":
                if for_wgrad:
                    rows = pad_rows(x, quantizer.block)
                    kept_x = quantizer.activation(rows, columnwise=True, amax=amax_of(multiplied))
                if for_dgrad:
                    kept_w = prepared.columnwise or quantizer.weight(
                        weight, columnwise=True, amax=amax_of(prepared.rowwise)
                    )
        kept_x = kept_x if for_wgrad else None
        kept_w = kept_w if for_dgrad else None
        saved_x = tensors_of(kept_x)
        ctx.save_for_backward(*saved_x, *tensors_of(kept_w))
        ctx.num_x = len(saved_x)
        ctx.quantizer, ctx.mode, ctx.gemm = quantizer, call.backward, backward_gemm(call.gemm)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing refuses to unpack a saved tensor twice.
        saved = ctx.saved_tensors
        saved_x, saved_w = saved[: ctx.num_x], saved[ctx.num_x :]
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        with no_autocast(dy.device):
            if ctx.mode == "quantized":
                x = rebuild_quantized(saved_x, ctx.quantizer)
                w = rebuild_quantized(saved_w, ctx.quantizer)
                dx, dw = quantized_grads(dy, x, w, ctx.quantizer, ctx.gemm, (x_dtype, w_dtype))
            else:
                x, w = rebuild_kept(saved_x, ctx.quantizer), rebuild_kept(saved_w, ctx.quantizer)
                if ctx.mode == "dequantized":
                    x = None if x is None else ctx.quantizer.dequantize(x, x_dtype)
                    w = None if w is None else ctx.quantizer.dequantize(w, x_dtype)
                assert not isinstance(x, QuantizedTensor)
                assert not isinstance(w, QuantizedTensor)
                dx = None if w is None else dy @ w.to(dy.dtype)
                dw = None if x is None else (dy.t() @ x).to(w_dtype)
            dbias = dy.to(torch.float32).sum(0).to(bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, dbias, None


def quantized_grads(
    dy: Float[Tensor, "m n"],
    x_columnwise: QuantizedTensor | None,
    w_columnwise: QuantizedTensor | None,
    quantizer: Quantizer,
    gemm: Gemm,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Float[Tensor, "m k"] | None, Float[Tensor, "n k"] | None]:
    """Return dX = dY W with blocks along N and dW = dY^T X with blocks along M, from one amax of
    dY.

    x_columnwise is the form of X^T [K, M padded], w_columnwise of W^T [K, N]; None skips that
    gradient.
    """
    amax = quantizer.amax(dy)
    dx = dw = None
    if w_columnwise is not None:
        dx = quantized_gemm(quantizer.gradient(dy, amax=amax), w_columnwise, dtypes[0], gemm=gemm)
    if x_columnwise is not None:
        rows = pad_rows(dy, quantizer.block)
        dy_columnwise = quantizer.gradient(rows, amax=amax, columnwise=True)
        dw = quantized_gemm(dy_columnwise, x_columnwise, dtypes[1], gemm=gemm)
    return dx, dw
