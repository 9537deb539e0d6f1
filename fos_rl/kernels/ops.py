"""Host side of the CuTe kernels: allocation and launch.

Arguments are those that the reference in ``fos_rl.quant`` has checked; results have its bits.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fos_rl.kernels import compile_cache
from fos_rl.kernels.availability import architecture

_THREADS, _AMAX_THREADS = 128, 512
# CTAs that share an SM, and CTAs a launch has for each SM: twice that many even out the end.
_CTAS_PER_SM, _CTAS_PER_LAUNCH = 6, 12
# A CTA of the amax kernel reads at least this many bytes, and this many run on an SM.
_AMAX_BYTES, _AMAX_CTAS = 32768, 4


class Encoded(NamedTuple):
    """codes uint8 [..., R, C/2], block_scale float8_e4m3fn [..., R, C/16], global_amax fp32, and
    the operand bf16 [..., R, C]; what was not asked for is None."""

    codes: Tensor | None
    block_scale: Tensor | None
    global_amax: Tensor
    operand: Tensor | None


def _dtype_name(x: Tensor) -> str:
    return "bfloat16" if x.dtype == torch.bfloat16 else "float32"


@functools.cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _row_threads(cols: int) -> int:
    """Threads of the CTA of one row: a block each, but not more than four warps."""
    blocks = cols // 16
    return 32 if blocks <= 32 else 64 if blocks <= 96 else 128


def _ctas(blocks: int, stack: int, device: torch.device) -> int:
    """CTAs for each matrix of a stack: enough for the device, each with at least a block a thread."""
    needed = -(-blocks // _THREADS)
    return max(1, min(needed, -(-_CTAS_PER_LAUNCH * _sm_count(device) // stack)))


def partial_amaxes(x: Tensor, stack: int) -> Tensor:
    """fp32 [stack * (1 + n)]: room for each matrix's amax, then n partial amaxes of each."""
    device = x.device
    bytes_each = x.numel() * x.element_size() // stack
    most = max(1, _sm_count(device) * _AMAX_CTAS // stack)
    count = max(1, min(most, bytes_each // _AMAX_BYTES))
    out = torch.empty(stack * (1 + count), dtype=torch.float32, device=device)
    kernel = compile_cache.load(
        "partial_amax", (_dtype_name(x), _AMAX_THREADS), architecture(device)
    )
    kernel(x, out, stack)
    return out


def quantize(
    x: Tensor,
    *,
    method: str = "four_over_six",
    block: str = "1x16",
    err_mode: str = "mse",
    bound: int = 256,
    row_scaled: bool = False,
    global_amax: Tensor | None = None,
    codes: bool = True,
    operand: bool = False,
) -> Encoded:
    """Quantize x, a contiguous matrix or stack of matrices that unavailable_reason accepts."""
    device = x.device
    shape = x.shape
    cols = shape[-1]
    stack = 1
    if x.dim() > 2:
        x = x.view(-1, cols)
        stack = x.shape[0] // shape[-2]
    rows = x.shape[0]
    given = global_amax is not None
    if row_scaled:
        layout, threads, ctas = "rowwise", _row_threads(cols), rows
        amax = global_amax if given else torch.empty(rows, dtype=torch.float32, device=device)
    else:
        amax = global_amax if given else partial_amaxes(x, stack)
        layout, threads = ("square" if block == "16x16" else "flat"), _THREADS
        # A warp of the square kernel takes 16 rows of 64 elements, 32 elements a thread.
        across = -(-cols // 64) * 2 if layout == "square" else cols // 16
        ctas = _ctas(rows // stack * across, stack, device)
    if given:
        amax = amax.view(-1)
    kernel = compile_cache.load(
        "quantize",
        (
            layout,
            (_dtype_name(x), method, err_mode if method == "four_over_six" else "mse", bound),
            (threads, given, True, _CTAS_PER_SM * _THREADS // threads),
            (codes, operand),
        ),
        architecture(device),
    )
    code_bytes = torch.empty((rows, cols // 2), dtype=torch.uint8, device=device)
    scale_bytes = torch.empty((rows, cols // 16), dtype=torch.uint8, device=device)
    product = torch.empty_like(x, dtype=torch.bfloat16) if operand else x
    kernel(x, amax, code_bytes, scale_bytes, product, stack, ctas)
    if given:
        amax = global_amax
    elif not row_scaled:
        amax = amax[:stack]
    block_scale = scale_bytes.view(torch.float8_e4m3fn)
    if len(shape) > 2:
        code_bytes = code_bytes.view(*shape[:-1], cols // 2)
        block_scale = block_scale.view(*shape[:-1], cols // 16)
        product = product.view(shape)
        amax = amax.view(*shape[:-2], -1)
    return Encoded(
        code_bytes if codes else None,
        block_scale if codes else None,
        amax,
        product if operand else None,
    )
