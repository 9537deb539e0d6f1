"""What standard and four-over-six NVFP4 share: input checks, the two scale levels, the block
layout.

Formulas: NVIDIA/TransformerEngine transformer_engine/common/cast/nvfp4/core_nvfp4.cuh. Divisions
divide by a tensor on the same device: torch turns scalar/tensor into reciprocal * scalar
everywhere, and on CUDA also tensor/scalar, and both differ from a true division in the last bit.
"""

import functools
from collections.abc import Callable
from typing import Literal, TypeVarTuple, get_args

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from fos_rl.quant.e2m1 import pack_signs

BLOCK = 16
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max
BlockShape = Literal["1x16", "16x16"]
Arguments = TypeVarTuple("Arguments")


def check_once(check: Callable[[*Arguments], None]) -> Callable[[*Arguments], None]:
    """Run a check of hashable arguments once for equal ones: a call is as short as a kernel.

    An error is raised every time. torch.compile would look through the cache and warn.
    """
    once = functools.lru_cache(maxsize=4096)(check)

    @functools.wraps(check)
    def run(*arguments: *Arguments) -> None:
        (check if torch.compiler.is_compiling() else once)(*arguments)

    return run


def check_choice(field: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise a ValueError that lists the choices unless value is one of them."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{field} is {value!r}; it must be one of {listed}.")


def check_input(
    x: Tensor,
    block: BlockShape,
    row_scaled: bool,
    columnwise: bool,
    global_amax: Tensor | None,
) -> None:
    """Raise a ValueError unless x, the knobs and a given amax fit together."""
    amax = None if global_amax is None else (global_amax.shape, global_amax.dtype)
    _check_shapes(x.shape, x.dtype, block, row_scaled, columnwise, amax)


@check_once
def _check_shapes(
    shape: torch.Size,
    dtype: torch.dtype,
    block: BlockShape,
    row_scaled: bool,
    columnwise: bool,
    amax: tuple[torch.Size, torch.dtype] | None,
) -> None:
    check_choice("block", block, get_args(BlockShape))
    if len(shape) < 2 or not dtype.is_floating_point:
        raise ValueError(
            f"x is {dtype} of shape {tuple(shape)}; quantization needs floating point "
            "[..., rows, cols]. Flatten leading dims, or add a row dim with x.unsqueeze(0)."
        )
    if row_scaled and block == "16x16":
        raise ValueError(
            "row_scaled=True with block='16x16': a block would mix rows of different scale. "
            "Use block='1x16'."
        )
    if row_scaled and columnwise:
        raise ValueError(
            "row_scaled=True with columnwise=True: blocks along the rows would mix row scales. "
            "Quantize columnwise with one amax, or quantize x.T row-scaled."
        )
    rows, cols = shape[-2:]
    if columnwise:
        rows, cols = cols, rows
    if cols % BLOCK or (block == "16x16" and rows % BLOCK):
        side = "columnwise " if columnwise else ""
        raise ValueError(
            f"{side}block {block!r} needs dims divisible by 16 along its blocks; the matrix is "
            f"[{rows}, {cols}]. Pad with zeros, or keep this layer in bf16."
        )
    if amax is None:
        return
    expected = (*shape[:-2], rows if row_scaled else 1)
    if amax[1] != torch.float32 or tuple(amax[0]) != expected:
        raise ValueError(
            f"global_amax is {amax[1]} of shape {tuple(amax[0])}; it must be "
            f"float32 of shape {expected} ({'one a row' if row_scaled else 'one a matrix'})."
        )


def matrix_and_amax(
    x: Tensor, row_scaled: bool, columnwise: bool, global_amax: Tensor | None
) -> tuple[Float[Tensor, "*stack rows cols"], Float32[Tensor, "*stack scales"]]:
    """Return the matrix to quantize (x or its transpose) and its fp32 amax, if none is given.

    The amax is taken in x's dtype, where a maximum is exact, then widened. A matrix without
    elements has amax 0. NaN propagates.
    """
    if columnwise:
        x = x.transpose(-2, -1)
    return x, _amax(x, row_scaled) if global_amax is None else global_amax


def _amax(x: Tensor, row_scaled: bool) -> Tensor:
    if x.numel() == 0:
        lengths = (x.shape[-2] if row_scaled else 1,)
        return torch.zeros((*x.shape[:-2], *lengths), dtype=torch.float32, device=x.device)
    magnitude = x.abs()
    amax = magnitude.amax(-1) if row_scaled else magnitude.amax((-2, -1)).unsqueeze(-1)
    return amax.to(torch.float32)


def nvfp4_encode_scale(amax: Float32[Tensor, "*scales"], bound: int) -> Float32[Tensor, "*scales"]:
    """Return S_enc = min(fl(6*bound / amax), FLT_MAX), and 1 where amax is 0 or infinite."""
    scale = (torch.full_like(amax, 6.0 * bound) / amax).clamp_(max=FP32_MAX)
    return scale.masked_fill_((amax == 0) | (scale == 0), 1.0)


def split_blocks(
    x: Float[Tensor, "*stack rows cols"], block: BlockShape
) -> tuple[
    Float32[Tensor, "16 *stack rows blocks"],
    UInt8[Tensor, "8 *stack rows blocks"],
    Float32[Tensor, "*stack rows blocks"],
]:
    """Return |x| with a block's 16 elements in dim 0, the packed signs, and the amax of each row's
    block.

    With 16x16 blocks the 16 rows of a block all carry the amax of its 256 elements.
    """
    blocks = x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK)).movedim(-1, 0)
    blocks = blocks.to(torch.float32, memory_format=torch.contiguous_format)
    magnitude = blocks.abs()
    block_amax = magnitude.amax(0)
    if block == "16x16":
        block_amax = repeat_rows(group_rows(block_amax).amax(-2))
    return magnitude, pack_signs(blocks), block_amax


def group_rows(per_row: Tensor) -> Tensor:
    """View [..., R, n] as [..., R/16, 16, n]: the 16 rows of a 16x16 block are next to last."""
    return per_row.unflatten(-2, (per_row.shape[-2] // BLOCK, BLOCK))


def repeat_rows(per_block: Tensor) -> Tensor:
    """Return [..., R, n] from one row of values [..., R/16, n] for each 16 rows."""
    return per_block.repeat_interleave(BLOCK, dim=-2)


def block_multiplier(
    scale: Float[Tensor, "*stack rows blocks"], encode_scale: Float32[Tensor, "*stack scales 1"]
) -> Float32[Tensor, "*stack rows blocks"]:
    """Return m = min(fl(1 / fl(scale * S_dec)), FLT_MAX) with S_dec = fl(1 / S_enc).

    Elements are multiplied by this rounded reciprocal. A zero scale gives FLT_MAX, so zeros stay
    zero and anything else saturates.
    """
    decode_scale = torch.ones_like(encode_scale) / encode_scale
    product = scale.to(torch.float32) * decode_scale
    return (torch.ones_like(product) / product).clamp_(max=FP32_MAX)


def signed_codes(
    packed: UInt8[Tensor, "8 *stack rows blocks"],
    signs: UInt8[Tensor, "8 *stack rows blocks"],
    scale: Float[Tensor, "*stack rows blocks"],
) -> UInt8[Tensor, "*stack rows half_cols"]:
    """Return row-major codes; the elements of a NaN block become +6, as the PTX conversion makes
    them."""
    # All bits set where the scale is not NaN.
    keep = (scale.view(torch.uint8) != 0x7F).to(torch.uint8).neg_()
    return packed.bitwise_or_(signs.bitwise_and_(keep)).movedim(0, -1).flatten(-2)
