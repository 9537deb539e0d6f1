"""Host side of the CuTe kernels: allocation and launch.

Arguments are those that the reference in ``fos_rl.quant`` has checked and unavailable_reason
accepts; results have the reference's bits. A call costs a few microseconds, so what follows from
shapes and constants is looked up in one step (``_plan``), outputs are allocated in their final
shape and dtype and passed as addresses, and eager code comes here without a torch.library op.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fos_rl.kernels import compile_cache
from fos_rl.kernels.availability import architecture
from fos_rl.kernels.layouts import SMALL_BYTES, matrix_layout, row_layout

_AMAX_THREADS, _GROUP_AMAX_THREADS, _DECODE_THREADS = 512, 256, 256
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class _Plan(NamedTuple):
    """All of a call but its addresses; outputs are allocated like their stand-ins.

    launch_amax is None where no partial amaxes are needed; else room, for an amax of each matrix
    and its share of partial ones, is more than amaxes, which says their sizes and strides.
    """

    launch: Callable[..., None]
    launch_amax: Callable[..., None] | None
    share: int
    stack: int
    ctas: int
    matrix: tuple[int, int]
    codes: Tensor
    scales: Tensor
    operand: Tensor
    room: Tensor
    amaxes: tuple[tuple[int, ...], tuple[int, ...]]


@functools.cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device)


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element of which empty_like makes a contiguous tensor of shape.

    That takes four fifths of the time of empty_strided, which has sizes and a device to parse.
    """
    element = _element(dtype, device)
    return element.view(shape) if math.prod(shape) == 1 else element.expand(shape)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    scheme: str,
    block: str,
    err_mode: str,
    e4m3_scale_bound: int,
    row_scaled: bool,
    columnwise: bool,
    amax_device: torch.device | None,
    codes: bool,
    operand: bool,
) -> _Plan:
    """The plan of a call; amax_device is that of an amax that is given."""
    given = amax_device is not None
    if given and amax_device != device:
        raise ValueError(f"global_amax is on {amax_device}, x on {device}; move it there.")
    *lead, rows, cols = shape
    stack = math.prod(lead)
    matrix, amaxes = (stack * rows, cols), (*lead, 1)
    sms = _sm_count(device)
    if row_scaled:
        layout = row_layout(stack * rows, cols // 16, dtype, sms, given)
        stack, amaxes = stack * rows, (*lead, rows)
    elif (
        not given
        and stack == 1
        and block == "1x16"
        and not columnwise
        and rows * cols * dtype.itemsize <= SMALL_BYTES
    ):
        matrix = (1, rows * cols)
        layout = row_layout(1, rows * cols // 16, dtype, sms, False)
    else:
        layout = matrix_layout(rows, cols, stack, block == "16x16", columnwise, dtype, sms, given)
    encoding = (
        _DTYPE_NAMES[dtype],
        scheme,
        err_mode if scheme == "four_over_six" else "mae",
        e4m3_scale_bound,
    )
    constants = (layout.name, encoding, layout.plan, (codes, operand))
    launch = compile_cache.load("quantize", constants, architecture(device))
    room, launch_amax = amaxes, None
    if layout.plan[1] == "partials":
        room, launch_amax = (stack * (1 + layout.share),), amax_launcher(device, dtype)
    if columnwise:
        rows, cols = cols, rows
    return _Plan(
        launch,
        launch_amax,
        layout.share,
        stack,
        layout.ctas,
        matrix,
        stand_in((*lead, rows, cols // 2), torch.uint8, device),
        stand_in((*lead, rows, cols // 16), torch.float8_e4m3fn, device),
        stand_in((*lead, rows, cols), torch.bfloat16, device),
        stand_in(room, torch.float32, device),
        (amaxes, torch.empty(amaxes, device="meta").stride()),
    )


@functools.cache
def amax_launcher(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    constants = (_DTYPE_NAMES[dtype], _AMAX_THREADS)
    return compile_cache.load("partial_amax", constants, architecture(device))


@functools.cache
def _group_amax_launcher(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    constants = (_DTYPE_NAMES[dtype], _GROUP_AMAX_THREADS)
    return compile_cache.load("group_amax", constants, architecture(device))


@functools.cache
def _decode_launcher(
    device: torch.device, what: str, e4m3_scale_bound: int, dtype: torch.dtype, many: bool
) -> Callable[..., None]:
    constants = (what, e4m3_scale_bound, _DTYPE_NAMES[dtype], many)
    return compile_cache.load("decode", constants, architecture(device))


@functools.cache
def _epilogue_launcher(device: torch.device, constants: tuple) -> Callable[..., None]:
    return compile_cache.load("epilogue", constants, architecture(device))


def quantize(
    x: Tensor,
    scheme: str = "four_over_six",
    block: str = "1x16",
    err_mode: str = "mse",
    e4m3_scale_bound: int = 256,
    row_scaled: bool = False,
    columnwise: bool = False,
    global_amax: Tensor | None = None,
    *,
    codes: bool = True,
    operand: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Return codes, block_scale, global_amax and the exact bf16 operand of x.

    x is a contiguous matrix or stack of matrices. What codes and operand do not ask for is None.
    """
    shape = x.shape
    amax_device = None if global_amax is None else global_amax.device
    plan = _plan(
        shape,
        x.dtype,
        x.device,
        scheme,
        block,
        err_mode,
        e4m3_scale_bound,
        row_scaled,
        columnwise,
        amax_device,
        codes,
        operand,
    )
    if x.requires_grad:
        x = x.detach()
    if shape != plan.matrix:
        x = x.view(plan.matrix)
    out_codes = out_scale = out_operand = None
    codes_at = scale_at = operand_at = 0
    if codes:
        out_codes, out_scale = torch.empty_like(plan.codes), torch.empty_like(plan.scales)
        codes_at, scale_at = out_codes.data_ptr(), out_scale.data_ptr()
    if operand:
        out_operand = torch.empty_like(plan.operand)
        operand_at = out_operand.data_ptr()
    if global_amax is not None:
        amax = global_amax.contiguous()
    else:
        amax = torch.empty_like(plan.room)
        if plan.launch_amax is not None:
            plan.launch_amax(x, amax, plan.stack)
    plan.launch(
        x, amax.data_ptr(), codes_at, scale_at, operand_at, plan.share, plan.stack, plan.ctas
    )
    if global_amax is not None:
        amax = global_amax
    elif plan.launch_amax is not None:
        amax = amax.as_strided(*plan.amaxes)
    return out_codes, out_scale, amax, out_operand


def group_amax(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the fp32 amax of each group's rows, 0 without rows; NaN propagates.

    x is a contiguous matrix; group, int64 [rows] of 0 to groups, the last being no group, stays on
    the device.
    """
    amax = torch.zeros(groups + 1, dtype=torch.float32, device=x.device)
    launch = _group_amax_launcher(x.device, x.dtype)
    launch(x.detach(), group.contiguous().data_ptr(), amax.data_ptr())
    return amax[:groups]


def decode(
    codes: Tensor,
    block_scale: Tensor,
    global_amax: Tensor,
    e4m3_scale_bound: int,
    dtype: torch.dtype,
    what: str = "value",
) -> Tensor:
    """Return the values of an NVFP4 tensor in dtype, or with what="operand" its exact operand.

    block_scale may be float8_e4m3fn or its bytes.
    """
    device = codes.device
    *lead, half = codes.shape
    rows, amaxes = math.prod(lead), global_amax.numel()
    launch = _decode_launcher(device, what, e4m3_scale_bound, dtype, amaxes > 1 and what == "value")
    ctas = -(-rows * 2 * half * dtype.itemsize // (16 * _DECODE_THREADS))
    out = torch.empty_strided((rows, 2 * half), (2 * half, 1), dtype=dtype, device=device)
    block_scale = block_scale.contiguous().view(torch.uint8)
    codes, global_amax = codes.contiguous(), global_amax.contiguous()
    if len(lead) > 1:
        codes, block_scale = codes.view(rows, half), block_scale.view(rows, half // 8)
        global_amax = global_amax.view(amaxes)
    launch(
        codes,
        block_scale,
        global_amax,
        out,
        rows // amaxes,
        max(1, min(ctas, _sm_count(device) * 8)),
    )
    return out if len(lead) == 1 else out.view(*lead, 2 * half)


def scale_sums(
    sums: Tensor,
    a_amax: Tensor,
    b_amax: Tensor,
    bounds: tuple[int, int],
    row_scaled: bool,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the fp32 sums [M, N] of a GEMM times their global scales plus bias [N], in dtype.

    The same roundings as apply_global_scales and quantized_gemm, in one pass; N % 8 == 0.
    """
    out = torch.empty(sums.shape, dtype=dtype, device=sums.device)
    reciprocal = 1.0 / (36.0 * bounds[0] * bounds[1])
    constants = (_DTYPE_NAMES[dtype], reciprocal, row_scaled, bias is not None)
    addend = a_amax if bias is None else bias.to(torch.float32)
    _epilogue_launcher(sums.device, constants)(sums, a_amax, b_amax, addend, out)
    return out
