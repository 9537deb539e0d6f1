"""NVFP4: the tensor, standard quantization (map-to-6), dequantization and the exact GEMM operand.

Two levels of scale: one E4M3 byte per 16 elements and one fp32 amax for the tensor or for each
row. Every operation below is one IEEE fp32 rounding in the order written, without fused
multiply-add, so results are equal on every device as long as this runs eagerly (a compiler may
contract or reorder).

Sources: NVIDIA/TransformerEngine transformer_engine/common/cast/nvfp4/core_nvfp4.cuh (scales),
dequantize_nvfp4.cuh (decode), pytorch/custom_recipes/reference_nvfp4.py (layout).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fos_rl.kernels.arguments import BLOCK, BlockShape, check_input, check_parts
from fos_rl.quant.backend import Backend, cute_decode, cute_quantize, use_cute
from fos_rl.quant.blocks import (
    E4M3_MAX,
    block_multiplier,
    matrix_and_amax,
    nvfp4_encode_scale,
    signed_codes,
    split_blocks,
)
from fos_rl.quant.e2m1 import decode_e2m1, pack_magnitudes, round_to_e2m1_


@dataclass(frozen=True, slots=True, eq=False)
class NVFP4Tensor:
    """A matrix (or a stack of matrices) in NVFP4.

    codes: uint8 [..., R, C/2], two E2M1 codes per byte, element 2j in the low nibble.
    block_scale: float8_e4m3fn [..., R, C/16], the decode multiplier of 16 consecutive elements of
    a row.
    global_amax: fp32 [..., 1] (one per matrix) or [..., R] (row-scaled), the amax itself, not a
    scale.
    e4m3_scale_bound: 448 or 256, the largest block scale that the map-to-6 encoding may use; part
    of the meaning, and "bound" in formulas.

    value = E2M1(code) * block_scale * global_amax / (6 * bound)

    Example, bound 256 and global_amax [6.0]: a block with block_scale 256 and first byte 0xD7
    holds code 7 (6.0) then code 13 (-3.0), and decodes to 6 * 256 * 6 / 1536 = 6.0 and -3 * 256 *
    6 / 1536 = -3.0.
    """

    codes: UInt8[Tensor, "*stack rows half_cols"]
    block_scale: Float[Tensor, "*stack rows blocks"]
    global_amax: Float[Tensor, "*stack scales"]
    e4m3_scale_bound: int

    def __post_init__(self) -> None:
        codes, scale = self.codes, self.block_scale
        if codes.dtype != torch.uint8 or scale.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"codes are {codes.dtype}, block_scale is {scale.dtype}; they must be uint8 and "
                "float8_e4m3fn. Reinterpret bytes with .view(dtype)."
            )
        check_parts(codes, scale, self.global_amax, self.e4m3_scale_bound)

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., R, C]."""
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    @property
    def device(self) -> torch.device:
        """Where codes, scales and amax are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and amax: 0.5625 per element plus 4 per amax."""
        return self.codes.nbytes + self.block_scale.nbytes + self.global_amax.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class NVFP4Operand:
    """A matrix in NVFP4 as a GEMM multiplies it, for a caller that needs no codes.

    operand: [R, C], what exact_operand makes of the codes: E2M1(code) * block_scale.
    global_amax, e4m3_scale_bound: those of NVFP4Tensor, so that
    value = operand * global_amax / (6 * bound).
    """

    operand: Float[Tensor, "rows cols"]
    global_amax: Float[Tensor, "scales"]
    e4m3_scale_bound: int


def nvfp4_quantize(
    x: Float[Tensor, "*stack rows cols"],
    row_scaled: bool = False,
    *,
    block: BlockShape = "1x16",
    columnwise: bool = False,
    global_amax: Float[Tensor, "*stack scales"] | None = None,
    backend: Backend = "auto",
) -> NVFP4Tensor:
    """Return x in standard NVFP4 (every block maps its amax to 6), bound 448.

    x is fp32, bf16 or fp16 and widened to fp32 exactly. With G the amax and b the block amax,
    ``scale = e4m3(min(b * (S_enc(G) * fl(1/6)), 448))``: the global multiplier is rounded first,
    unlike in four-over-six. columnwise=True returns the form of x.T. A given global_amax replaces
    the amax of x, so that a shard is quantized to a slice of the whole. No random Hadamard
    transform, no stochastic rounding.

    A NaN makes the amax NaN and then every block scale of that tensor (row, if row-scaled) 0x7F.
    """
    check_input(x, block, row_scaled, columnwise, global_amax)
    if use_cute(backend, x):
        parts = cute_quantize(x, "nvfp4", block, "mae", 448, row_scaled, columnwise, global_amax)
        return NVFP4Tensor(*parts, 448)
    x, amax = matrix_and_amax(x.detach(), row_scaled, columnwise, global_amax)
    magnitude, signs, block_amax = split_blocks(x, block)
    encode_scale = nvfp4_encode_scale(amax, 448).unsqueeze(-1)
    scale = (block_amax * (encode_scale * (1.0 / 6.0))).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    values = round_to_e2m1_(magnitude.mul_(block_multiplier(scale, encode_scale)))
    codes = signed_codes(pack_magnitudes(values), signs, scale)
    return NVFP4Tensor(codes, scale, amax, 448)


def nvfp4_dequantize(
    t: NVFP4Tensor, dtype: torch.dtype = torch.float32, *, backend: Backend = "auto"
) -> Float[Tensor, "*stack rows cols"]:
    """Return the values of t, for standard and four-over-six NVFP4 alike.

    ``f = fl(fl(scale * amax) * fl(1/(6*bound)))`` per block, ``fl(value(code) * f)`` per element,
    then one rounding to dtype. The order is TransformerEngine's: scale * amax may overflow for an
    amax above FLT_MAX/448. The sign of zero is kept and a NaN scale gives NaN.
    """
    if use_cute(backend, t.codes, dtype=dtype):
        return cute_decode(
            t.codes, t.block_scale, t.global_amax, t.e4m3_scale_bound, dtype, "value"
        )
    factor = t.block_scale.to(torch.float32) * t.global_amax.unsqueeze(-1)
    factor.mul_(1.0 / (6.0 * t.e4m3_scale_bound))
    values = decode_e2m1(t.codes).unflatten(-1, (t.block_scale.shape[-1], BLOCK))
    return values.mul_(factor.unsqueeze(-1)).flatten(-2).to(dtype)


def exact_operand(
    t: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16, *, backend: Backend = "auto"
) -> Float[Tensor, "*stack rows cols"]:
    """Return code * block_scale, what an FP4 tensor core multiplies, without the global factor.

    The product has at most 6 significant bits and lies in [2^-10, 2688], so it is exact in bf16,
    fp16 and fp32. Multiply a GEMM of two such operands by amax_a * amax_b / (36 * bound_a *
    bound_b).
    """
    if use_cute(backend, t.codes, dtype=dtype):
        return cute_decode(
            t.codes, t.block_scale, t.global_amax, t.e4m3_scale_bound, dtype, "operand"
        )
    values = decode_e2m1(t.codes, dtype).unflatten(-1, (t.block_scale.shape[-1], BLOCK))
    return values.mul_(t.block_scale.to(dtype).unsqueeze(-1)).flatten(-2)
