"""What a quantized GEMM does with its operands: one quantizer object per format.

A quantizer answers how activations, weights and output gradients are quantized; linear_autograd.py
and grouped_autograd.py hold the autograd around it. Both quantizers have the same methods, so that
those two files know no format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from fos_rl.kernels.arguments import BlockShape, check_choice
from fos_rl.quant.backend import cute_quantize_for_gemm, use_cute
from fos_rl.quant.four_over_six import E4M3ScaleBound, ErrMode, four_over_six_quantize
from fos_rl.quant.gemm import GemmInput, QuantizedTensor, gemm_operand
from fos_rl.quant.mxfp8 import MX_BLOCK, MXFP8Tensor, ScaleMode, mxfp8_dequantize, mxfp8_quantize
from fos_rl.quant.nvfp4 import NVFP4Operand, NVFP4Tensor, nvfp4_dequantize, nvfp4_quantize
from fos_rl.quant.weight_state import WeightState

Backward = Literal["quantized", "high_precision", "dequantized"]
# What is needed of a quantized activation: what is kept or what the tensor core takes, and what
# other GEMMs multiply (gemm_operand).
ActivationForms = Literal["codes", "operand", "both"]


@dataclass(frozen=True, slots=True)
class NVFP4Quantizer:
    """Four-over-six or standard NVFP4 operands; gradients are always standard NVFP4, bound 448.

    Activations are 1x16 along K with one amax per tensor or per row; weights are 16x16 or 1x16
    with one amax per matrix, never row-scaled. Example: the published RL setting is
    ``NVFP4Quantizer("four_over_six", weight_block="1x16")`` and multiplies a token's row by its own
    amax.
    """

    scheme: Literal["four_over_six", "nvfp4"]
    weight_block: BlockShape = "16x16"
    err_mode: ErrMode = "mse"
    e4m3_scale_bound: E4M3ScaleBound = 256
    row_scaled_activation: bool = True

    block = 16

    def __post_init__(self) -> None:
        check_choice("scheme", self.scheme, ("four_over_six", "nvfp4"))
        check_choice("weight_block", self.weight_block, get_args(BlockShape))
        check_choice("err_mode", self.err_mode, get_args(ErrMode))
        check_choice("e4m3_scale_bound", self.e4m3_scale_bound, get_args(E4M3ScaleBound))

    @property
    def tensor_type(self) -> type[NVFP4Tensor]:
        """What it makes."""
        return NVFP4Tensor

    def activation(
        self,
        x: Tensor,
        *,
        amax: Tensor | None = None,
        columnwise: bool = False,
        amax_per_row: bool | None = None,
    ) -> NVFP4Tensor:
        """Quantize x [M, K]; amax_per_row None follows row_scaled_activation."""
        per_row = self.row_scaled_activation if amax_per_row is None else amax_per_row
        return self._quantize(x, "1x16", per_row and not columnwise, columnwise, amax)

    def activation_for_gemm(
        self,
        x: Tensor,
        *,
        forms: ActivationForms,
        amax: Tensor | None = None,
        amax_per_row: bool | None = None,
    ) -> tuple[GemmInput, NVFP4Tensor | None]:
        """Quantize x [M, K]: what a GEMM multiplies, and the codes if forms has them.

        The kernels make one or both in a pass; the reference makes codes.
        """
        by_reference = torch.compiler.is_compiling() or not use_cute("auto", x)
        if forms == "codes" or by_reference:
            quantized = self.activation(x, amax=amax, amax_per_row=amax_per_row)
            return quantized, quantized
        per_row = self.row_scaled_activation if amax_per_row is None else amax_per_row
        operand, amax, parts = cute_quantize_for_gemm(
            x, self.scheme, self.err_mode, self._bound, per_row, amax, forms == "both"
        )
        quantized = None if parts is None else NVFP4Tensor(*parts, amax, self._bound)
        return NVFP4Operand(operand, amax, self._bound), quantized

    def weight(
        self, w: Tensor, *, amax: Tensor | None = None, columnwise: bool = False
    ) -> NVFP4Tensor:
        """Quantize w [N, K] or a stack [E, N, K]; columnwise gives the form of the transpose."""
        return self._quantize(w, self.weight_block, False, columnwise, amax)

    def gradient(
        self, dy: Tensor, *, amax: Tensor | None = None, columnwise: bool = False
    ) -> NVFP4Tensor:
        """An output gradient in standard NVFP4, bound 448; `amax` where it is known."""
        return nvfp4_quantize(dy, columnwise=columnwise, global_amax=amax)

    def _quantize(
        self, x: Tensor, block: BlockShape, per_row: bool, columnwise: bool, amax: Tensor | None
    ) -> NVFP4Tensor:
        if self.scheme == "nvfp4":
            return nvfp4_quantize(x, per_row, block=block, columnwise=columnwise, global_amax=amax)
        return four_over_six_quantize(
            x,
            block,
            self.err_mode,
            self.e4m3_scale_bound,
            per_row,
            columnwise=columnwise,
            global_amax=amax,
        )

    def amax(self, x: Float[Tensor, "rows cols"]) -> Float32[Tensor, "1"]:
        """One amax for both directions of a tensor."""
        if x.numel() == 0:
            return torch.zeros(1, dtype=torch.float32, device=x.device)
        return x.abs().amax().to(torch.float32).reshape(1)

    def dequantize(self, t: NVFP4Tensor, dtype: torch.dtype) -> Tensor:
        """Codes times scales, rounded once to dtype."""
        return nvfp4_dequantize(t, dtype)

    def rebuild(self, saved: Sequence[Tensor]) -> NVFP4Tensor:
        """Return the tensor that codes, block_scale and global_amax of this quantizer make."""
        codes, block_scale, global_amax = saved
        return NVFP4Tensor(codes, block_scale, global_amax, self._bound)

    @property
    def _bound(self) -> int:
        return self.e4m3_scale_bound if self.scheme == "four_over_six" else 448

    @property
    def weight_encoding(self) -> tuple[object, ...]:
        """What of the quantizer decides a weight's codes."""
        four_over_six = self.scheme == "four_over_six"
        return (self.scheme, self.weight_block, self._bound, self.err_mode if four_over_six else "")

    def check_prepared(self, t: QuantizedTensor) -> None:
        """ValueError unless a prepared weight is of this quantizer's e4m3_scale_bound."""
        assert isinstance(t, NVFP4Tensor)
        if t.e4m3_scale_bound != self._bound:
            raise ValueError(
                f"quantized_weight has e4m3_scale_bound {t.e4m3_scale_bound}, the quantizer "
                f"{self._bound}. Prepare the weight with the quantizer it is used with."
            )
        if t.global_amax.shape != (*t.shape[:-2], 1):
            raise ValueError(
                f"quantized_weight has global_amax of shape {tuple(t.global_amax.shape)}; a weight "
                f"has one per matrix, {(*t.shape[:-2], 1)}. Quantize it with row_scaled=False."
            )


@dataclass(frozen=True, slots=True)
class MXFP8Quantizer:
    """MXFP8 operands in all three GEMMs. No global scale, so a row never depends on its batch.

    Methods take amax and amax_per_row because those of NVFP4Quantizer do, and use neither.
    """

    scale_mode: ScaleMode = "rceil"

    block = MX_BLOCK
    row_scaled_activation = False

    def __post_init__(self) -> None:
        check_choice("scale_mode", self.scale_mode, get_args(ScaleMode))

    @property
    def tensor_type(self) -> type[MXFP8Tensor]:
        """What it makes."""
        return MXFP8Tensor

    def activation(
        self,
        x: Tensor,
        *,
        amax: Tensor | None = None,
        columnwise: bool = False,
        amax_per_row: bool | None = None,
    ) -> MXFP8Tensor:
        """An activation in blocks along K, or along rows if columnwise; there is no amax."""
        return mxfp8_quantize(x, self.scale_mode, columnwise=columnwise)

    def activation_for_gemm(
        self,
        x: Tensor,
        *,
        forms: ActivationForms,
        amax: Tensor | None = None,
        amax_per_row: bool | None = None,
    ) -> tuple[GemmInput, MXFP8Tensor]:
        """What a GEMM takes and what can be kept: the same tensor."""
        quantized = self.activation(x)
        return quantized, quantized

    def weight(
        self, w: Tensor, *, amax: Tensor | None = None, columnwise: bool = False
    ) -> MXFP8Tensor:
        """A weight in blocks along K, or along N if columnwise."""
        return mxfp8_quantize(w, self.scale_mode, columnwise=columnwise)

    def gradient(
        self, dy: Tensor, *, amax: Tensor | None = None, columnwise: bool = False
    ) -> MXFP8Tensor:
        """An output gradient in blocks along N, or along rows if columnwise."""
        return mxfp8_quantize(dy, self.scale_mode, columnwise=columnwise)

    def amax(self, x: Tensor) -> None:
        """None: every block has its own scale."""
        return None

    def dequantize(self, t: MXFP8Tensor, dtype: torch.dtype) -> Tensor:
        """Elements times scales, rounded once to dtype."""
        return mxfp8_dequantize(t, dtype)

    def rebuild(self, saved: Sequence[Tensor]) -> MXFP8Tensor:
        """The tensor of what `tensors_of` took apart."""
        return MXFP8Tensor(*saved)

    @property
    def weight_encoding(self) -> tuple[object, ...]:
        """What of the quantizer decides a weight's codes."""
        return ("mxfp8", self.scale_mode)

    def check_prepared(self, t: QuantizedTensor) -> None:
        """MXFP8 carries no parameter that could disagree."""


Quantizer = NVFP4Quantizer | MXFP8Quantizer


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight quantized once and multiplied many times.

    rowwise: [N, K] or [E, N, K], what the forward multiplies. columnwise: the form of the
    transpose, for backward "quantized"; None where no such backward runs. operand: the exact
    operand of rowwise (gemm_operand), for speed; None decodes it in every forward. state and
    quantizer say what it was made of, so that it is not multiplied in another's place; None, as for
    codes from elsewhere, leaves that to the caller.
    """

    rowwise: QuantizedTensor
    columnwise: QuantizedTensor | None = None
    operand: Tensor | None = None
    state: WeightState | None = None
    quantizer: Quantizer | None = None

    def is_of(self, weight: Tensor) -> bool:
        """Whether it was made of weight as it is now, as far as is known."""
        return self.state is None or self.state.is_of(weight)


def prepare_weight(
    weight: Float[Tensor, "*experts n k"],
    quantizer: Quantizer,
    *,
    columnwise: bool = False,
    global_amax: Float32[Tensor, "*experts 1"] | None = None,
) -> QuantizedWeight:
    """Return the weight quantized as quantizer says, to pass as quantized_weight with this weight.

    The values of weight are quantized as they are: cast a master weight to the synced dtype first.
    After a write to weight, prepare it again; with stale codes quantized_linear raises.
    global_amax is the full weight's, where weight is a shard.
    """
    rowwise = quantizer.weight(weight.detach(), amax=global_amax)
    transposed = (
        quantizer.weight(weight.detach(), amax=global_amax, columnwise=True) if columnwise else None
    )
    operand = gemm_operand(rowwise)
    return QuantizedWeight(rowwise, transposed, operand, WeightState.of(weight), quantizer)


def resolve_backward(backward: Backward | None, row_scaled_activation: bool) -> Backward:
    """Return the backward mode; None is "quantized", or "high_precision" for row-scaled
    activations.

    Row-scaled with "quantized" is refused: the weight gradient sums over rows, and a factor that
    differs from row to row cannot be taken out of that sum.
    """
    check_choice("backward", backward, (None, *get_args(Backward)))
    if backward is None:
        return "high_precision" if row_scaled_activation else "quantized"
    if backward == "quantized" and row_scaled_activation:
        raise ValueError(
            "backward is 'quantized' with row_scaled_activation=True: the weight gradient sums "
            "over rows that have different scales. Use 'high_precision' or 'dequantized', or "
            "row_scaled_activation=False."
        )
    return backward
