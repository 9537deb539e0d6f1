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
from fos_rl.kernels.layouts import SMALL_BYTES, matrix_layout, num_partials, row_layout

_AMAX_THREADS, _DECODE_THREADS = 512, 256
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class _Plan(NamedTuple):
    """All of a call but its addresses. Sizes and strides of outputs are those of empty_strided."""

    launch: Callable[..., None]
    share: int
    stack: int
    ctas: int
    matrix: tuple[int, int]
    codes: tuple[tuple[int, ...], tuple[int, ...]]
    scales: tuple[tuple[int, ...], tuple[int, ...]]
    operand: tuple[tuple[int, ...], tuple[int, ...]]
    amaxes: tuple[tuple[int, ...], tuple[int, ...]]
    partial: bool


@functools.cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _dense(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and the strides of a contiguous tensor of it."""
    return shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    recipe: tuple[str, str, int],
    block: str,
    row_scaled: bool,
    columnwise: bool,
    given: bool,
    writes: tuple[bool, bool],
) -> _Plan:
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
    constants = (layout.name, (_DTYPE_NAMES[dtype], *recipe), layout.plan, writes)
    launch = compile_cache.load("quantize", constants, architecture(device))
    if columnwise:
        rows, cols = cols, rows
    return _Plan(
        launch,
        layout.share,
        stack,
        layout.ctas,
        matrix,
        _dense(*lead, rows, cols // 2),
        _dense(*lead, rows, cols // 16),
        _dense(*lead, rows, cols),
        _dense(*amaxes),
        layout.plan[1] == "partials",
    )


@functools.cache
def _amax_launcher(device: torch.device, dtype: torch.dtype) -> Callable[..., None]:
    constants = (_DTYPE_NAMES[dtype], _AMAX_THREADS)
    return compile_cache.load("partial_amax", constants, architecture(device))


@functools.cache
def _decode_launcher(
    device: torch.device, what: str, bound: int, dtype: torch.dtype, many: bool
) -> Callable[..., None]:
    constants = (what, bound, _DTYPE_NAMES[dtype], many)
    return compile_cache.load("decode", constants, architecture(device))


@functools.cache
def _epilogue_launcher(device: torch.device, constants: tuple) -> Callable[..., None]:
    return compile_cache.load("epilogue", constants, architecture(device))


def partial_amaxes(x: Tensor, stack: int) -> Tensor:
    """fp32 [stack * (1 + n)]: room for each matrix's amax, then n partial amaxes of each."""
    device = x.device
    count = num_partials(x.numel() * x.element_size() // stack, stack, _sm_count(device))
    out = torch.empty(stack * (1 + count), dtype=torch.float32, device=device)
    _amax_launcher(device, x.dtype)(x, out, stack)
    return out


def quantize(
    x: Tensor,
    method: str = "four_over_six",
    block: str = "1x16",
    err_mode: str = "mse",
    bound: int = 256,
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
    device, shape = x.device, x.shape
    given = global_amax is not None
    recipe = (method, err_mode if method == "four_over_six" else "mae", bound)
    plan = _plan(
        shape, x.dtype, device, recipe, block, row_scaled, columnwise, given, (codes, operand)
    )
    if x.requires_grad:
        x = x.detach()
    if shape != plan.matrix:
        x = x.view(plan.matrix)
    empty = torch.empty_strided
    out_codes = out_scale = out_operand = None
    codes_at = scale_at = operand_at = 0
    if codes:
        out_codes = empty(*plan.codes, dtype=torch.uint8, device=device)
        out_scale = empty(*plan.scales, dtype=torch.float8_e4m3fn, device=device)
        codes_at, scale_at = out_codes.data_ptr(), out_scale.data_ptr()
    if operand:
        out_operand = empty(*plan.operand, dtype=torch.bfloat16, device=device)
        operand_at = out_operand.data_ptr()
    if given:
        if global_amax.device != device:
            raise ValueError(
                f"global_amax is on {global_amax.device}, x on {device}; move it there."
            )
        amax = global_amax.contiguous()
    elif plan.partial:
        amax = partial_amaxes(x, plan.stack)
    else:
        amax = empty(*plan.amaxes, dtype=torch.float32, device=device)
    plan.launch(
        x, amax.data_ptr(), codes_at, scale_at, operand_at, plan.share, plan.stack, plan.ctas
    )
    if given:
        amax = global_amax
    elif plan.partial:
        amax = amax[: plan.stack].view(plan.amaxes[0])
    return out_codes, out_scale, amax, out_operand


def decode(
    codes: Tensor,
    block_scale: Tensor,
    global_amax: Tensor,
    bound: int,
    dtype: torch.dtype,
    what: str = "value",
) -> Tensor:
    """Return the values of an NVFP4 tensor in dtype, or with what="operand" its exact operand.

    block_scale may be float8_e4m3fn or its bytes.
    """
    device = codes.device
    lead, half = codes.shape[:-1], codes.shape[-1]
    out = torch.empty((*lead, 2 * half), dtype=dtype, device=device)
    flat_codes = codes.contiguous().view(-1, half)
    rows, amaxes = flat_codes.shape[0], global_amax.numel()
    launch = _decode_launcher(device, what, bound, dtype, amaxes > 1 and what == "value")
    most = _sm_count(device) * 8
    launch(
        flat_codes,
        block_scale.contiguous().view(torch.uint8).view(rows, -1),
        global_amax.reshape(-1),
        out.view(rows, -1),
        rows // amaxes,
        max(1, min(-(-out.numel() * out.element_size() // (16 * _DECODE_THREADS)), most)),
    )
    return out


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
