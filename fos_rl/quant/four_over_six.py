"""Four-over-six NVFP4: each block takes the better of two encodings, its amax mapped to 4 or to 6.

E2M1 has no value between 4 and 6, so a block whose amax maps to 6 rounds values near 5 badly;
mapping the amax to 4 costs range and wins where that gap hurts. Both encodings are ordinary NVFP4,
so nothing records the choice. Paper: arXiv 2512.02010. Arithmetic: NVIDIA/TransformerEngine
transformer_engine/common/cast/nvfp4/quantize_4over6_nvfp4.cuh.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from fos_rl.kernels.arguments import BLOCK, BlockShape, check_choice, check_input, check_once
from fos_rl.quant.backend import Backend, cute_quantize, use_cute
from fos_rl.quant.blocks import (
    E4M3_MAX,
    block_multiplier,
    group_rows,
    matrix_and_amax,
    nvfp4_encode_scale,
    repeat_rows,
    signed_codes,
    split_blocks,
)
from fos_rl.quant.e2m1 import pack_magnitudes, round_to_e2m1_
from fos_rl.quant.nvfp4 import NVFP4Tensor

ErrMode = Literal["mae", "mse"]
ErrDomain = Literal["input", "scaled"]
E4M3ScaleBound = Literal[256, 448]


def four_over_six_quantize(
    x: Float[Tensor, "*stack rows cols"],
    block: BlockShape = "1x16",
    err_mode: ErrMode = "mse",
    e4m3_scale_bound: E4M3ScaleBound = 256,
    row_scaled: bool = False,
    *,
    columnwise: bool = False,
    global_amax: Float[Tensor, "*stack scales"] | None = None,
    err_domain: ErrDomain = "input",
    backend: Backend = "auto",
) -> NVFP4Tensor:
    """Return x in four-over-six NVFP4: codes [..., R, C/2], block_scale [..., R, C/16],
    global_amax, e4m3_scale_bound.

    x is fp32, bf16 or fp16 [..., R, C], C % 16 == 0 (R too with 16x16 blocks), widened to fp32
    exactly; a leading stack (experts) has an amax for each matrix. With G the amax and b the
    block's amax:

        base = fl(fl(b / 6) * S_enc(G));  s6 = e4m3(min(base, 448));  s4 = e4m3(min(fl(base * 1.5),
        448))

    For each candidate scale every element is rounded to E2M1 and its error summed over the block,
    element 0 to 15 one after the other; 16x16 blocks add the 16 row sums in a tree and choose
    once. s4 is chosen only if its error is strictly smaller, so equal, infinite and NaN errors
    keep s6.

    err_domain "input" measures ``fl(fl(fl(q*s) * G) / (6*bound)) - x``; "scaled" measures
    ``fl(q*s) - fl(x * S_enc)``, cheaper and TransformerEngine's err_use_fast_math.
    columnwise=True returns the form of x.T (blocks along the rows of x). Near ties its 16x16
    choices may differ from the row-wise form's, because the sums run in another order.
    A given global_amax (of the whole tensor or the whole rows) replaces the amax of x, so that a
    shard is quantized to a slice of the whole.

    A NaN makes the amax NaN and then every block scale of that tensor (row, if row-scaled) 0x7F.
    An infinity saturates. backend "auto" takes the fused kernels (fos_rl.kernels) where they can
    run; they give the same bits.
    """
    _check_knobs(err_mode, e4m3_scale_bound, err_domain)
    check_input(x, block, row_scaled, columnwise, global_amax)
    reason = None if err_domain == "input" else f"err_domain is {err_domain!r}, needs 'input'"
    if use_cute(backend, x, reason):
        parts = cute_quantize(
            x,
            "four_over_six",
            block,
            err_mode,
            e4m3_scale_bound,
            row_scaled,
            columnwise,
            global_amax,
        )
        return NVFP4Tensor(*parts, e4m3_scale_bound)
    x, amax = matrix_and_amax(x.detach(), row_scaled, columnwise, global_amax)
    magnitude, signs, block_amax = split_blocks(x, block)
    encode_scale = nvfp4_encode_scale(amax, e4m3_scale_bound).unsqueeze(-1)
    base = (block_amax / torch.full_like(block_amax, 6.0)) * encode_scale

    def candidate(unrounded_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = unrounded_scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        values = round_to_e2m1_(magnitude * block_multiplier(scale, encode_scale))
        packed = pack_magnitudes(values)
        decoded = values.mul_(scale.to(torch.float32))
        if err_domain == "input":
            decoded.mul_(amax.unsqueeze(-1))
            decoded.div_(torch.full_like(amax, 6.0 * e4m3_scale_bound).unsqueeze(-1))
            deviation = decoded.sub_(magnitude)
        else:
            deviation = decoded.sub_(magnitude * encode_scale)
        return scale, packed, _block_error(deviation, err_mode, block)

    scale4, packed4, error4 = candidate(base * 1.5)
    scale6, packed6, error6 = candidate(base)
    # All bits set where the map-to-4 bytes are taken: three byte-wise passes beat torch.where.
    take4 = (error4 < error6).to(torch.uint8).neg_()
    packed = packed4.bitwise_xor_(packed6).bitwise_and_(take4).bitwise_xor_(packed6)
    scale4, scale6 = scale4.view(torch.uint8), scale6.view(torch.uint8)
    scale = (((scale4 ^ scale6) & take4) ^ scale6).view(torch.float8_e4m3fn)
    return NVFP4Tensor(signed_codes(packed, signs, scale), scale, amax, e4m3_scale_bound)


@check_once
def _check_knobs(
    err_mode: ErrMode, e4m3_scale_bound: E4M3ScaleBound, err_domain: ErrDomain
) -> None:
    check_choice("err_mode", err_mode, get_args(ErrMode))
    check_choice("e4m3_scale_bound", e4m3_scale_bound, get_args(E4M3ScaleBound))
    check_choice("err_domain", err_domain, get_args(ErrDomain))


def _block_error(
    deviation: Float32[Tensor, "16 *stack rows blocks"], err_mode: ErrMode, block: BlockShape
) -> Float32[Tensor, "*stack rows blocks"]:
    """Return the sum of |d| or fl(d*d) over each block, in a pinned order; overwrites deviation.

    torch.sum has no specified order, so the 16 additions are written out.
    """
    terms = deviation.abs_() if err_mode == "mae" else deviation.mul_(deviation)
    error = terms[0].clone()
    for term in terms[1:]:
        error += term
    if block == "1x16":
        return error
    rows = group_rows(error)
    half = BLOCK // 2
    while half:
        rows = rows[..., :half, :] + rows[..., half : 2 * half, :]
        half //= 2
    return repeat_rows(rows.squeeze(-2))
