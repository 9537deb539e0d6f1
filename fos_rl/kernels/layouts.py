"""Which kernel quantizes a shape, and how its work is laid out over a GPU."""

from typing import NamedTuple

import torch

# For bf16 and fp32: threads of a CTA, CTAs that share an SM (which decides the registers of a
# thread), what is loaded ahead, and CTAs of a launch for each SM, more than run at once to even out
# the end. Measured on an H200 (benchmarks/quantize.py); fp32 has no registers to load ahead.
_SHAPES = {
    ("quantize_matrix", torch.bfloat16): (256, 3, "registers", 12),
    ("quantize_matrix", torch.float32): (128, 6, "", 6),
    ("quantize_squares", torch.bfloat16): (128, 4, "", 12),
    ("quantize_squares", torch.float32): (128, 4, "", 12),
    ("quantize_columns", torch.bfloat16): (128, 6, "", 12),
    ("quantize_columns", torch.float32): (128, 5, "", 12),
    ("quantize_column_squares", torch.bfloat16): (128, 3, "", 12),
    ("quantize_column_squares", torch.float32): (128, 3, "", 12),
}
# A CTA of the amax kernel reads at least this many bytes, and this many run on an SM.
_AMAX_BYTES, _AMAX_CTAS = 32768, 4
# Threads of a CTA where each holds a block; more such CTAs for each SM are not little work.
_HELD_THREADS, _HELD_CTAS = 128, 8
# Blocks of a row up to which several rows share a CTA.
_SHORT_BLOCKS = 96
# A matrix of at most so many bytes is read by every CTA rather than by an amax kernel before: on an
# H200 that takes 3.4 us instead of 4.2 at 64 KiB, and 5.1 instead of 4.4 at 128 KiB.
SMALL_BYTES = 81920


class Layout(NamedTuple):
    """A kernel, the fields of its Plan, the argument it calls a share, and its CTAs."""

    name: str
    plan: tuple[int, str, str, int, bool]
    share: int
    ctas: int


def _held(name: str, threads: int, amax: str, share: int, ctas: int, per_sm: int = 1) -> Layout:
    return Layout(name, (threads, amax, "", per_sm, False), share, ctas)


def row_layout(rows: int, blocks: int, dtype: torch.dtype, sms: int, given: bool) -> Layout:
    """The kernel for one amax per row of so many blocks.

    Little work: a thread for each block and CTAs enough for all SMs. Short rows: a thread for each
    block. Else small CTAs, which wait least for each other and find a row they read twice in the L1
    cache; larger ones where rows are too few for all SMs.
    """
    most = _HELD_CTAS * sms
    if given and (blocks <= _HELD_THREADS or rows * blocks <= most * _HELD_THREADS):
        return _held("quantize_blocks", 128, "given", 0, -(-rows * blocks // 128))
    parts = -(-blocks // _HELD_THREADS)
    if not given and rows * parts <= most:
        threads = min(_HELD_THREADS, -(-blocks // 32) * 32)
        return _held("quantize_split_rows", threads, "found", parts, rows * parts)
    if not given and blocks <= _SHORT_BLOCKS:
        together = 256 // blocks
        return _held("quantize_short_rows", 256, "found", together, -(-rows // together), 4)
    threads, ctas_per_sm, ahead = (64, 12, "registers")
    if rows <= 2 * sms:
        threads, ctas_per_sm, ahead = 512, 1, ""
    elif dtype == torch.float32:
        threads, ctas_per_sm, ahead = 128, 5, ""
    amax = "given" if given else "found"
    return Layout("quantize_rows", (threads, amax, ahead, ctas_per_sm, True), 0, 1)


def matrix_layout(
    rows: int,
    cols: int,
    stack: int,
    square: bool,
    columnwise: bool,
    dtype: torch.dtype,
    sms: int,
    given: bool,
) -> Layout:
    """The kernel for one amax per matrix [rows, cols] of a stack."""
    amax, partials = "given", 0
    if not given:
        amax, partials = "partials", num_partials(rows * cols * dtype.itemsize, stack, sms)
    if columnwise:
        name = "quantize_column_squares" if square else "quantize_columns"
        warps = (cols // 16) * -(-rows // 64)
    elif square:
        name, warps = "quantize_squares", (rows // 16) * -(-cols // 64)
    else:
        name, warps = "quantize_matrix", -(-rows * cols // 512)
        ctas = -(-warps * 32 * stack // _HELD_THREADS)
        if ctas <= _HELD_CTAS * sms and (given or stack == 1):
            return _held("quantize_blocks", _HELD_THREADS, amax, partials, ctas)
    threads, ctas_per_sm, ahead, per_sm = _SHAPES[name, dtype]
    ctas = max(1, min(-(-warps * 32 // threads), -(-per_sm * sms // stack)))
    return Layout(name, (threads, amax, ahead, ctas_per_sm, True), partials, ctas)


def num_partials(bytes_each: int, stack: int, sms: int) -> int:
    """Partial amaxes of each matrix of a stack."""
    return max(1, min(max(1, sms * _AMAX_CTAS // stack), bytes_each // _AMAX_BYTES))
