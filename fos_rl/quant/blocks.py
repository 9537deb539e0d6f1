"""What standard and four-over-six NVFP4 share: the two scale levels and the block layout.

Formulas: NVIDIA/TransformerEngine transformer_engine/common/cast/nvfp4/core_nvfp4.cuh. Divisions
divide by a tensor on the same device: torch turns scalar/tensor into reciprocal * scalar
everywhere, and on CUDA also tensor/scalar, and both differ from a true division in the last bit.
"""

import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from fos_rl.kernels.arguments import BLOCK, BlockShape
from fos_rl.quant.e2m1 import pack_signs

E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max


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
