"""The kernels as torch.library ops, so that torch.compile and CUDA graphs see one opaque call.

Inductor would contract and reorder the reference's arithmetic; an op keeps the bits. Eager code
calls ``fos_rl.kernels.quantize_ops`` directly, which saves about 40 us per call. An op is public by
its name, so both it and its fake check what the Python entries check, and what they refuse to a
kernel.
"""

import torch
from torch import Tensor

from fos_rl.kernels import quantize_ops
from fos_rl.kernels.arguments import check_decoding, check_encoding, check_input, check_parts
from fos_rl.kernels.availability import layout_reason, shape_reason


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise RuntimeError(f"quantizer 'cute' unavailable: {reason}")


def _aligned(x: Tensor, num_bytes: int) -> Tensor:
    """x, or a copy if its address is not a multiple of num_bytes; a graph may pass any slice."""
    return x if x.data_ptr() % num_bytes == 0 else x.clone()


def _check_quantize(
    x: Tensor,
    scheme: str,
    block: str,
    err_mode: str,
    e4m3_scale_bound: int,
    row_scaled: bool,
    columnwise: bool,
    global_amax: Tensor | None,
) -> None:
    check_encoding(scheme, err_mode, e4m3_scale_bound)
    check_input(x, block, row_scaled, columnwise, global_amax, once=False)
    _refuse(shape_reason(x.shape, x.dtype, False) or layout_reason(x))


@torch.library.custom_op("fos_rl::quantize_nvfp4", mutates_args=(), device_types="cuda")
def quantize(
    x: Tensor,
    scheme: str,
    block: str,
    err_mode: str,
    e4m3_scale_bound: int,
    row_scaled: bool,
    columnwise: bool,
    global_amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """codes, block_scale as uint8, and global_amax (a copy, if given) of ``ops.quantize``.

    Raises:
        ValueError: for arguments that fos_rl.quant refuses.
        RuntimeError: for an input that no kernel takes: empty, float16, not contiguous.
    """
    _check_quantize(
        x, scheme, block, err_mode, e4m3_scale_bound, row_scaled, columnwise, global_amax
    )
    codes, scale, amax, _ = quantize_ops.quantize(
        _aligned(x, 16),
        scheme,
        block,
        err_mode,
        e4m3_scale_bound,
        row_scaled,
        columnwise,
        global_amax,
    )
    # An op may return neither an argument nor a view of one of its buffers.
    amax = amax.clone(memory_format=torch.contiguous_format)
    return codes, scale.view(torch.uint8), amax


@quantize.register_fake
def _(x, scheme, block, err_mode, e4m3_scale_bound, row_scaled, columnwise, global_amax):
    _check_quantize(
        x, scheme, block, err_mode, e4m3_scale_bound, row_scaled, columnwise, global_amax
    )
    *stack, rows, cols = x.shape
    if columnwise:
        rows, cols = cols, rows
    return (
        x.new_empty((*stack, rows, cols // 2), dtype=torch.uint8),
        x.new_empty((*stack, rows, cols // 16), dtype=torch.uint8),
        x.new_empty((*stack, rows if row_scaled else 1), dtype=torch.float32),
    )


def _check_decode(
    codes: Tensor,
    block_scale: Tensor,
    global_amax: Tensor,
    e4m3_scale_bound: int,
    dtype: torch.dtype,
    what: str,
) -> None:
    check_decoding(e4m3_scale_bound, dtype, what)
    check_parts(codes, block_scale, global_amax, e4m3_scale_bound, once=False)
    _refuse(shape_reason(codes.shape, dtype, True))


@torch.library.custom_op("fos_rl::decode_nvfp4", mutates_args=(), device_types="cuda")
def decode(
    codes: Tensor,
    block_scale: Tensor,
    global_amax: Tensor,
    e4m3_scale_bound: int,
    dtype: torch.dtype,
    what: str,
) -> Tensor:
    """``ops.decode``, of block scales as float8_e4m3fn or as bytes.

    Raises:
        ValueError: for parts that do not belong together, or an unknown bound, dtype or what.
        RuntimeError: for no codes at all.
    """
    _check_decode(codes, block_scale, global_amax, e4m3_scale_bound, dtype, what)
    return quantize_ops.decode(
        _aligned(codes, 8), block_scale, global_amax, e4m3_scale_bound, dtype, what
    )


@decode.register_fake
def _(codes, block_scale, global_amax, e4m3_scale_bound, dtype, what):
    _check_decode(codes, block_scale, global_amax, e4m3_scale_bound, dtype, what)
    return codes.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype)
