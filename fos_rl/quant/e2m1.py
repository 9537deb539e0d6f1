"""The 4-bit E2M1 element: rounding, codes, packing.

A code is sign (bit 3) and magnitude index (bits 0..2) of 0, .5, 1, 1.5, 2, 3, 4, 6. Two codes
share a byte, element 2j in the low nibble. Rounding is to nearest, ties to the even code,
saturating at 6, as PTX ``cvt.rn.satfinite.e2m1x2.f32`` does (PTX ISA, section cvt); NaN becomes
+6.

The quantizers hold a block's 16 elements in dim 0 (``[16, ..., blocks]``), so that every block-wise
quantity broadcasts over contiguous memory.
"""

import functools

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP32_EXPONENT_MASK = 0x7F800000
_ROUND_TO_HALF_ULP = 1.5 * 2.0**22


def round_to_e2m1_(magnitude: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """Round each non-negative fp32 element to the nearest E2M1 value, in place, and return it.

    With p the power of two of the element (at least 1), E2M1 is spaced p/2 there, which is the
    fp32 spacing at 1.5 * 2^22 * p: adding and subtracting that constant is one IEEE rounding onto
    the E2M1 grid, and an even fp32 significand there is an even code. NaN stays NaN.
    """
    magnitude.clamp_(max=E2M1_MAX)
    power = (magnitude.view(torch.int32) & _FP32_EXPONENT_MASK).view(torch.float32)
    shift = power.clamp_(min=1.0).mul_(_ROUND_TO_HALF_ULP)
    return magnitude.add_(shift).sub_(shift)


def pack_magnitudes(values: Float[Tensor, "16 *blocks"]) -> UInt8[Tensor, "8 *blocks"]:
    """Return the packed codes (sign bits clear) of fp32 values on the non-negative E2M1
    grid.

    2^-14 maps the E2M1 grid onto the lowest fp16 numbers, subnormals included, whose bits are the
    code shifted left by 9: exact. NaN gives code 7.
    """
    halves = values.to(torch.float16).mul_(2.0**-14).view(torch.int16)
    codes = halves.bitwise_right_shift_(9).bitwise_and_(7).to(torch.uint8)
    return codes[0::2] | (codes[1::2] << 4)


def pack_signs(blocks: Float[Tensor, "16 *blocks"]) -> UInt8[Tensor, "8 *blocks"]:
    """Return the packed sign bits (0x08 and 0x80) of fp32 elements; -0 and negative NaN count as
    negative."""
    bits = blocks.view(torch.int32)
    return (((bits[0::2] >> 28) & 0x08) | ((bits[1::2] >> 24) & 0x80)).to(torch.uint8)


@functools.cache
def _byte_to_pair(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256] integers, entry b holding the two decoded elements of byte b side by side in memory."""
    with torch.inference_mode(False):
        one_code = torch.tensor((*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)), dtype=dtype)
        byte = torch.arange(256)
        pairs = torch.stack((one_code[byte & 15], one_code[byte >> 4]), dim=-1)
        packed = pairs.view(torch.int64 if dtype == torch.float32 else torch.int32)
        return packed.flatten().to(device)


def decode_e2m1(
    codes: UInt8[Tensor, "*dims half"], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*dims full"]:
    """Return the values [..., 2 * half] of packed codes, exact in fp32, bf16 and fp16; code 8 is
    -0."""
    pairs = _byte_to_pair(dtype, codes.device).index_select(0, codes.reshape(-1).to(torch.int32))
    return pairs.view(dtype).view(*codes.shape[:-1], 2 * codes.shape[-1])
