"""The quantizing kernels: one amax for a matrix (1x16 and 16x16 blocks), and one amax per row.

``quantize_matrix`` gives a thread one 1x16 block at a time, ``quantize_squares`` a warp four 16x16
blocks, ``quantize_rows`` a CTA one row, which it reads twice, the second time from the L1 cache.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from fos_rl.kernels import arithmetic, ptx
from fos_rl.kernels.encode import ONE_ROW, ROWS_APART, block_amax, read, words_per_block, write
from fos_rl.kernels.tiles import (
    addresses,
    allocate_scratch,
    allocate_table,
    cta_max,
    encode_and_store,
    fill_table,
    load_block,
    matrix_amax,
    span_amax,
)


@cute.jit
def matrix_run(
    scaling: tuple,
    first: Int32,
    step: Int32,
    end: Int32,
    units: Int32,
    at: tuple,
    wild: cutlass.Constexpr,
    job: cutlass.Constexpr,
):
    """Encode 1x16 blocks first, first + step, ... below end, units of them."""
    words = const_expr(words_per_block(job.encoding))
    raw = cute.make_rmem_tensor(words, Uint32)
    ahead = cute.make_rmem_tensor(words, Uint32)
    block = first
    # An out-of-range amax is rare, and its code needs the registers.
    load_ahead = const_expr("" if wild else job.plan.load_ahead)
    if const_expr(load_ahead == "registers"):
        load_block(ahead, 0, at[0], cutlass.min(first, end - 1), job.encoding)
    for _ in cutlass.range(units, unroll=1):
        if const_expr(load_ahead == "registers"):
            write(raw, 0, read(ahead, 0, words))
            load_block(ahead, 0, at[0], cutlass.min(block + step, end - 1), job.encoding)
        else:
            load_block(raw, 0, at[0], cutlass.min(block, end - 1), job.encoding)
        if const_expr(load_ahead == "cache"):
            following = Int64(cutlass.min(block + step, end - 1))
            ptx.prefetch(at[0] + following * (4 * words))
        block_max = block_amax(raw, ONE_ROW, job.encoding)
        encode_and_store(
            raw, scaling, block_max, block, block < end, Int32(0), at, wild, ONE_ROW, job
        )
        block = block + step


@cute.kernel
def quantize_matrix(
    x: cute.Tensor,
    amax: Int64,
    codes: Int64,
    scales: Int64,
    operand: Int64,
    partials: Int32,
    stack: Int32,
    job: cutlass.Constexpr,
):
    """x [stack * rows, cols], one amax per matrix; the CTAs of grid column e share matrix e."""
    tid, _, _ = cute.arch.thread_idx()
    cta, matrix, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    table = allocate_table()
    count = (Int32(x.shape[1]) // 16) * (Int32(x.shape[0]) // stack)
    at = addresses(x, codes, scales, operand, Int64(matrix) * Int64(count), job.encoding)
    g_amax = matrix_amax(amax, cta, matrix, stack, partials, job.plan)
    fill_table(table, g_amax, job)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, job.encoding.e4m3_scale_bound)
    scaling = (table, g_amax, g.encode, g.four)
    start, step = Int32(cta) * job.plan.threads, Int32(ctas) * job.plan.threads
    units = (count - start + step - 1) // step
    if g.is_wild:
        matrix_run(scaling, start + Int32(tid), step, count, units, at, True, job)
    else:
        matrix_run(scaling, start + Int32(tid), step, count, units, at, False, job)


@cute.kernel
def quantize_rows(
    x: cute.Tensor,
    amax: Int64,
    codes: Int64,
    scales: Int64,
    operand: Int64,
    job: cutlass.Constexpr,
):
    """x [rows, cols] with one amax per row, found here unless given; a CTA per row."""
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    encoding, plan = job.encoding, job.plan
    table, scratch = allocate_table(), allocate_scratch()
    row_blocks = Int32(x.shape[1]) // 16
    at = addresses(x, codes, scales, operand, Int64(row) * Int64(row_blocks), encoding)
    amax_at = amax + Int64(row) * 4
    g_amax = Float32(0.0)
    if const_expr(plan.amax == "given"):
        g_amax = ptx.load_float(amax_at)
    else:
        chunks = row_blocks * (words_per_block(encoding) // 4)
        share = span_amax(at[0], chunks, tid, encoding.dtype, plan.threads)
        g_amax = cta_max(share, scratch, plan.threads)
        if tid == 0:
            ptx.store_float(amax_at, g_amax)
    fill_table(table, g_amax, job)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, encoding.e4m3_scale_bound)
    scaling = (table, g_amax, g.encode, g.four)
    units = (row_blocks + (plan.threads - 1)) // plan.threads
    first, step = Int32(tid), Int32(plan.threads)
    if g.is_wild:
        matrix_run(scaling, first, step, row_blocks, units, at, True, job)
    else:
        matrix_run(scaling, first, step, row_blocks, units, at, False, job)


@cute.jit
def squares_run(
    scaling: tuple,
    first: Int32,
    step: Int32,
    units: Int32,
    across: Int32,
    tiles: Int32,
    row_blocks: Int32,
    at: tuple,
    wild: cutlass.Constexpr,
    job: cutlass.Constexpr,
):
    """Encode tiles of 16 rows and four blocks: first, first + step, ..., units of them."""
    words = const_expr(words_per_block(job.encoding))
    lane = Int32(cute.arch.lane_idx())
    raw = cute.make_rmem_tensor(2 * words, Uint32)
    tile = first
    stride = row_blocks * 8
    for _ in cutlass.range(units, unroll=1):
        inside = cutlass.min(tile, tiles - 1)
        tile_row = inside // across
        column = (inside - tile_row * across) * 4 + (lane & 3)
        row = tile_row * 16 + (lane >> 2)
        block = row * row_blocks + cutlass.min(column, row_blocks - 1)
        load_block(raw, 0, at[0], block, job.encoding)
        load_block(raw, words, at[0], block + stride, job.encoding)
        is_mine = (tile < tiles) & (column < row_blocks)
        block_max = block_amax(raw, ROWS_APART, job.encoding)
        encode_and_store(raw, scaling, block_max, block, is_mine, stride, at, wild, ROWS_APART, job)
        tile = tile + step


@cute.kernel
def quantize_squares(
    x: cute.Tensor,
    amax: Int64,
    codes: Int64,
    scales: Int64,
    operand: Int64,
    partials: Int32,
    stack: Int32,
    job: cutlass.Constexpr,
):
    """x [stack * rows, cols] in 16x16 blocks with one amax per matrix."""
    cta, matrix, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    table = allocate_table()
    row_blocks, rows = Int32(x.shape[1]) // 16, Int32(x.shape[0]) // stack
    done = Int64(matrix) * Int64(rows * row_blocks)
    at = addresses(x, codes, scales, operand, done, job.encoding)
    across = (row_blocks + 3) // 4
    tiles = across * (rows // 16)
    warps = const_expr(job.plan.threads // 32)
    start, step = Int32(cta) * warps, Int32(ctas) * warps
    first, units = start + Int32(cute.arch.warp_idx()), (tiles - start + step - 1) // step
    g_amax = matrix_amax(amax, cta, matrix, stack, partials, job.plan)
    fill_table(table, g_amax, job)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, job.encoding.e4m3_scale_bound)
    scaling = (table, g_amax, g.encode, g.four)
    if g.is_wild:
        squares_run(scaling, first, step, units, across, tiles, row_blocks, at, True, job)
    else:
        squares_run(scaling, first, step, units, across, tiles, row_blocks, at, False, job)
