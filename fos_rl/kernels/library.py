"""The kernels as torch.library ops, so that torch.compile and CUDA graphs see one opaque call.

Inductor would contract and reorder the reference's arithmetic; an op keeps the bits. Eager code
calls ``fos_rl.kernels.ops`` directly, which saves about 40 us a call.
"""

import torch
from torch import Tensor

from fos_rl.kernels import ops


@torch.library.custom_op("fos_rl::quantize_nvfp4", mutates_args=(), device_types="cuda")
def quantize(
    x: Tensor,
    method: str,
    block: str,
    err_mode: str,
    bound: int,
    row_scaled: bool,
    columnwise: bool,
    global_amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """codes, block_scale as uint8, and global_amax (a copy, if given) of ``ops.quantize``."""
    x = x if x.data_ptr() % 16 == 0 else x.clone()
    codes, scale, amax, _ = ops.quantize(
        x, method, block, err_mode, bound, row_scaled, columnwise, global_amax
    )
    # An op may return neither an argument nor a view of one of its buffers.
    return codes, scale.view(torch.uint8), amax.clone()


@quantize.register_fake
def _(x, method, block, err_mode, bound, row_scaled, columnwise, global_amax):
    *stack, rows, cols = x.shape
    if columnwise:
        rows, cols = cols, rows
    return (
        x.new_empty((*stack, rows, cols // 2), dtype=torch.uint8),
        x.new_empty((*stack, rows, cols // 16), dtype=torch.uint8),
        x.new_empty((*stack, rows if row_scaled else 1), dtype=torch.float32),
    )


@torch.library.custom_op("fos_rl::decode_nvfp4", mutates_args=(), device_types="cuda")
def decode(
    codes: Tensor,
    block_scale: Tensor,
    global_amax: Tensor,
    bound: int,
    dtype: torch.dtype,
    what: str,
) -> Tensor:
    return ops.decode(codes, block_scale, global_amax, bound, dtype, what)


@decode.register_fake
def _(codes, block_scale, global_amax, bound, dtype, what):
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)
