"""Host side of the CuTe kernels: allocation and launch.

Arguments are those that the reference in ``fos_rl.quant`` has checked and unavailable_reason
accepts; results have the reference's bits. A call costs a few microseconds, so what depends on the
arguments alone is looked up once (``_launcher``), and eager code comes here without a
torch.library op.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fos_rl.kernels import compile_cache
from fos_rl.kernels.availability import architecture

_AMAX_THREADS, _DECODE_THREADS = 512, 256
# For bf16 and fp32: threads of a CTA, CTAs that share an SM (which decides the registers of a
# thread), what is loaded ahead, and CTAs of a launch for each SM, more than run at once to even out
# the end. Measured on an H200 (benchmarks/quantize.py); fp32 has no registers to load ahead.
_SHAPES = {
    ("flat", torch.bfloat16): (256, 3, "registers", 12),
    ("flat", torch.float32): (128, 6, "", 6),
    ("square", torch.bfloat16): (128, 4, "", 12),
    ("square", torch.float32): (128, 4, "", 12),
    ("columnwise", torch.bfloat16): (128, 6, "", 12),
    ("columnwise", torch.float32): (128, 5, "", 12),
    ("columnwise_square", torch.bfloat16): (128, 3, "", 12),
    ("columnwise_square", torch.float32): (128, 3, "", 12),
}
# A CTA of the amax kernel reads at least this many bytes, and this many run on an SM.
_AMAX_BYTES, _AMAX_CTAS = 32768, 4
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@functools.cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _row_plan(
    rows: int, cols: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, int, str, int]:
    """Threads of a row's CTA, CTAs that share an SM, what is loaded ahead, blocks a thread keeps.

    Many rows: small CTAs wait least for each other, and find a row they read twice in the L1
    cache. Few or short rows: a thread for each block, so that a row is done soon.
    """
    blocks = cols // 16
    if rows > 2 * _sm_count(device):
        if blocks <= 64:
            threads = -(-blocks // 32) * 32
            return threads, 640 // threads, "", 1
        return (128, 5, "", 0) if dtype == torch.float32 else (64, 12, "registers", 0)
    threads = 128
    while threads < 512 and threads < blocks:
        threads *= 2
    held = -(-blocks // threads)
    return threads, 1, "", held if held <= 2 else 0


@functools.cache
def _launcher(
    layout: str,
    device: torch.device,
    dtype: torch.dtype,
    recipe: tuple,
    plan: tuple[int, bool, str, int, int],
    writes: tuple[bool, bool],
) -> Callable[..., None]:
    constants = (layout, (_DTYPE_NAMES[dtype], *recipe), plan, writes)
    return compile_cache.load("quantize", constants, architecture(device))


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


def _empty(rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised matrix; torch.empty takes a microsecond longer."""
    return torch.empty_strided((rows, cols), (cols, 1), dtype=dtype, device=device)


def partial_amaxes(x: Tensor, stack: int) -> Tensor:
    """fp32 [stack * (1 + n)]: room for each matrix's amax, then n partial amaxes of each."""
    device = x.device
    bytes_each = x.numel() * x.element_size() // stack
    most = max(1, _sm_count(device) * _AMAX_CTAS // stack)
    count = max(1, min(most, bytes_each // _AMAX_BYTES))
    out = torch.empty(stack * (1 + count), dtype=torch.float32, device=device)
    _amax_launcher(device, x.dtype)(x, out, stack)
    return out


@functools.cache
def _layout(
    rows: int,
    cols: int,
    stack: int,
    square: bool,
    columnwise: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[str, int, int, int, str]:
    """The kernel for one amax a matrix, its CTAs for each matrix, and the rest of its plan."""
    if columnwise:
        layout = "columnwise_square" if square else "columnwise"
        warps = (cols // 16) * -(-rows // stack // 64)
    elif square:
        layout, warps = "square", (rows // stack // 16) * -(-cols // 64)
    else:
        layout, warps = "flat", -(-(rows // stack) * cols // 512)
    threads, ctas_per_sm, ahead, per_sm = _SHAPES[layout, dtype]
    most = -(-per_sm * _sm_count(device) // stack)
    ctas = max(1, min(-(-warps * 32 // threads), most))
    return layout, ctas, threads, ctas_per_sm, ahead


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
    device, dtype, shape = x.device, x.dtype, x.shape
    cols = shape[-1]
    if x.requires_grad:
        x = x.detach()
    stack = 1
    if len(shape) > 2:
        x = x.view(-1, cols)
        stack = x.shape[0] // shape[-2]
    rows = x.shape[0]
    given = global_amax is not None
    amax = global_amax
    if row_scaled:
        layout, ctas = "rowwise", 1
        threads, ctas_per_sm, ahead, held = _row_plan(rows, cols, dtype, device)
        if not given:
            amax = torch.empty(rows, dtype=torch.float32, device=device)
    else:
        layout, ctas, threads, ctas_per_sm, ahead = _layout(
            rows, cols, stack, block == "16x16", columnwise, dtype, device
        )
        held = 0
        if not given:
            amax = partial_amaxes(x, stack)
    recipe = (method, err_mode if method == "four_over_six" else "mae", bound)
    plan = (threads, given, ahead, ctas_per_sm, held)
    launch = _launcher(layout, device, dtype, recipe, plan, (codes, operand))
    out_rows, out_cols = (stack * cols, rows // stack) if columnwise else (rows, cols)
    code_bytes = _empty(out_rows, out_cols // 2, torch.uint8, device)
    scale_bytes = _empty(out_rows, out_cols // 16, torch.uint8, device)
    product = _empty(out_rows, out_cols, torch.bfloat16, device) if operand else x
    flat_amax = amax if amax.dim() == 1 else amax.reshape(-1)
    launch(x, flat_amax, code_bytes, scale_bytes, product, stack, ctas)
    if not given and not row_scaled:
        amax = amax[:stack]
    scale = scale_bytes.view(torch.float8_e4m3fn)
    if len(shape) > 2:
        lead = (*shape[:-2], out_rows // stack)
        code_bytes = code_bytes.view(*lead, -1)
        scale = scale.view(*lead, -1)
        product = product.view(*lead, -1) if operand else product
        amax = amax.view(*shape[:-2], -1)
    if codes:
        return code_bytes, scale, amax, product if operand else None
    return None, None, amax, product


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
