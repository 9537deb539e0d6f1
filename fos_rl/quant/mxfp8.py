"""MXFP8: E4M3 elements with one E8M0 (power of two) scale per 32 consecutive elements of a row.

Sources: OCP Microscaling Formats v1.0; NVIDIA/TransformerEngine
transformer_engine/common/util/ptx.cuh and pytorch/ao torchao/prototype/mx_formats/mx_tensor.py for
the two ways of choosing the scale.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, Float32, Int32, UInt8
from torch import Tensor

from fos_rl.kernels.arguments import check_choice, check_matrix
from fos_rl.quant.blocks import E4M3_MAX

MX_BLOCK = 32
ScaleMode = Literal["rceil", "floor"]
_E4M3_MAX_EXPONENT = 8
_E8M0_NAN = 255


@dataclass(frozen=True, slots=True, eq=False)
class MXFP8Tensor:
    """A matrix (or a stack of matrices) in MXFP8.

    data: float8_e4m3fn [..., R, C].
    scale: uint8 [..., R, C/32], the exponent byte e of 2^(e - 127); 255 is NaN.

    value = data * 2^(scale - 127)

    Example: a block whose amax is 3.0 has fl(3 / 448) = 0.0067 in (2^-8, 2^-7], so rceil stores
    scale 127 - 7 = 120, the element 3.0 as 3 * 2^7 = 384, and decodes to 384 * 2^-7 = 3.0.
    """

    data: Float[Tensor, "*stack rows cols"]
    scale: UInt8[Tensor, "*stack rows blocks"]

    def __post_init__(self) -> None:
        if self.data.dtype != torch.float8_e4m3fn or self.scale.dtype != torch.uint8:
            raise ValueError(
                f"data is {self.data.dtype}, scale is {self.scale.dtype}; they must be "
                "float8_e4m3fn and uint8. Reinterpret bytes with .view(dtype)."
            )
        *lead, cols = self.data.shape
        if cols % MX_BLOCK or tuple(self.scale.shape) != (*lead, cols // MX_BLOCK):
            raise ValueError(
                f"scale has shape {tuple(self.scale.shape)}; data of shape "
                f"{tuple(self.data.shape)} needs one byte per 32 columns."
            )

    @property
    def shape(self) -> torch.Size:
        """Logical shape [..., R, C]."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Where data and scales are."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales: 1.03125 per element."""
        return self.data.nbytes + self.scale.nbytes


def mxfp8_quantize(
    x: Float[Tensor, "*stack rows cols"],
    scale_mode: ScaleMode = "rceil",
    *,
    columnwise: bool = False,
) -> MXFP8Tensor:
    """Return x in MXFP8: data [..., R, C] and scale [..., R, C/32], blocks along the last dim.

    x is fp32, bf16 or fp16, widened to fp32 exactly; b is the block's largest magnitude.

        rceil: the power of two at or above fl(b * fl(1/448)): nothing saturates
        floor: the power of two at or below b, over 2^8: magnitudes in (448, 512) * 2^k saturate

    Elements are ``e4m3(clamp(fl(x * 2^(127 - scale)), -448, 448))``, ties to even. Data of any
    size fits: scale bytes 0 and 254 have exact fp32 reciprocals. A block with an infinity or NaN
    gets scale 255 and NaN elements. columnwise=True returns the form of x.T.
    """
    check_choice("scale_mode", scale_mode, get_args(ScaleMode))
    check_matrix(x.shape, x.dtype)
    x = x.detach().transpose(-2, -1) if columnwise else x.detach()
    if x.shape[-1] % MX_BLOCK:
        raise ValueError(
            f"MXFP8 blocks need a dim divisible by 32; the matrix is {tuple(x.shape)}"
            f"{' after transposing for columnwise' if columnwise else ''}. Pad with zeros, or "
            "keep this layer in bf16."
        )
    blocks = x.to(torch.float32, memory_format=torch.contiguous_format)
    blocks = blocks.unflatten(-1, (x.shape[-1] // MX_BLOCK, MX_BLOCK))
    scale = _scale_byte(blocks.abs().amax(-1), scale_mode)
    # 254 - e is the exponent byte of the reciprocal; 255 wraps to itself and stays NaN.
    scaled = blocks * decode_e8m0(254 - scale).unsqueeze(-1)
    data = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return MXFP8Tensor(data.flatten(-2), scale)


def mxfp8_dequantize(
    t: MXFP8Tensor, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*stack rows cols"]:
    """Return fl(data * 2^(scale - 127)) in fp32, then rounded once to dtype.

    A 4-bit significand times a power of two: exact in fp32, and in bf16 down to its smallest
    subnormal.
    """
    blocks = t.data.to(torch.float32).unflatten(-1, (t.scale.shape[-1], MX_BLOCK))
    return blocks.mul_(decode_e8m0(t.scale).unsqueeze(-1)).flatten(-2).to(dtype)


def decode_e8m0(scale: UInt8[Tensor, "*dims"]) -> Float32[Tensor, "*dims"]:
    """Return 2^(scale - 127); byte 0 is the subnormal 2^-127 and byte 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).to(torch.float32)


def _scale_byte(
    amax: Float32[Tensor, "*blocks"], scale_mode: ScaleMode
) -> UInt8[Tensor, "*blocks"]:
    if scale_mode == "rceil":
        exponent = _ceil_exponent(amax * (1.0 / E4M3_MAX))
    else:
        exponent = ((amax.view(torch.int32) >> 23) - _E4M3_MAX_EXPONENT).clamp_(0, 254)
    return exponent.masked_fill_(~amax.isfinite(), _E8M0_NAN).to(torch.uint8)


def _ceil_exponent(value: Float32[Tensor, "*blocks"]) -> Int32[Tensor, "*blocks"]:
    """Return the exponent byte of the least power of two, at least 2^-127, that is >= value."""
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 2^-127 itself is the subnormal with mantissa 2^22; byte 0 stands for it.
    threshold = torch.where(exponent == 0, 0x400000, 0)
    return exponent + (mantissa > threshold).to(torch.int32)
