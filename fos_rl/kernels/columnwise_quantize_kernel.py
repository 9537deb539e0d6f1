"""The quantizing kernel for columns: the row-wise form of x.T, reading x in place.

A thread takes two neighbouring columns over 16 rows, which are two rows of blocks of x.T (or a part
of one 16x16 block). A warp takes 64 rows of 16 columns, so that it reads and writes whole sectors.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from fos_rl.kernels import arithmetic, ptx
from fos_rl.kernels.encode import ONE_ROW, ROW_PAIRS, block_amax, read, words_per_block, write
from fos_rl.kernels.tiles import (
    addresses,
    allocate_table,
    encode_and_store,
    fill_table,
    matrix_amax,
)


def _load_columns(raw, address: Int64, pitch: Int64, encoding) -> None:
    """Fill raw with two columns of 16 elements, the first column's words first."""
    words = words_per_block(encoding)
    rows = [address + pitch * i for i in range(16)]
    if encoding.dtype == "float32":
        pairs = [ptx.load_words(row, 2) for row in rows]
        write(raw, 0, [pair[0] for pair in pairs])
        write(raw, words, [pair[1] for pair in pairs])
        return
    pairs = [ptx.load_words(row, 1)[0] for row in rows]
    for i in range(8):
        write(raw, i, [ptx.prmt(pairs[2 * i], pairs[2 * i + 1], 0x5410)])
        write(raw, words + i, [ptx.prmt(pairs[2 * i], pairs[2 * i + 1], 0x7632)])


@cute.jit
def columns_run(
    scaling: tuple,
    first: Int32,
    step: Int32,
    units: Int32,
    tiles: Int32,
    rows: Int32,
    cols: Int32,
    at: tuple,
    wild: cutlass.Constexpr,
    square: cutlass.Constexpr,
    job: cutlass.Constexpr,
):
    """Encode tiles of 64 rows and 16 columns: first, first + step, ..., units of them."""
    words = const_expr(words_per_block(job.encoding))
    element = const_expr(words // 4)
    lane = Int32(cute.arch.lane_idx())
    raw = cute.make_rmem_tensor(2 * words, Uint32)
    one = cute.make_rmem_tensor(words, Uint32)
    across, down = cols // 16, rows // 16
    tile = first
    for _ in cutlass.range(units, unroll=1):
        inside = cutlass.min(tile, tiles - 1)
        tile_row = inside // across
        row_block = tile_row * 4 + (lane >> 3)
        is_mine = (tile < tiles) & (row_block < down)
        row_block = cutlass.min(row_block, down - 1)
        column = (inside - tile_row * across) * 16 + (lane & 7) * 2
        place = Int64(row_block) * 16 * Int64(cols) + Int64(column)
        _load_columns(raw, at[0] + place * element, Int64(cols) * element, job.encoding)
        block = column * down + row_block
        if const_expr(square):
            block_max = block_amax(raw, ROW_PAIRS, job.encoding)
            encode_and_store(
                raw, scaling, block_max, block, is_mine, down, at, wild, ROW_PAIRS, job
            )
        else:
            for side in range_constexpr(2):
                write(one, 0, read(raw, side * words, words))
                side_block = block + side * down
                block_max = block_amax(one, ONE_ROW, job.encoding)
                encode_and_store(
                    one, scaling, block_max, side_block, is_mine, Int32(0), at, wild, ONE_ROW, job
                )
        tile = tile + step


@cute.kernel
def quantize_columns(
    x: cute.Tensor,
    amax: Int64,
    codes: Int64,
    scales: Int64,
    operand: Int64,
    partials: Int32,
    stack: Int32,
    square: cutlass.Constexpr,
    job: cutlass.Constexpr,
):
    """x [stack * rows, cols]; codes [stack * cols, rows / 2] and so on, one amax per matrix."""
    cta, matrix, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    table = allocate_table()
    rows, cols = Int32(x.shape[0]) // stack, Int32(x.shape[1])
    done = Int64(matrix) * Int64(rows // 16) * Int64(cols)
    at = addresses(x, codes, scales, operand, done, job.encoding)
    tiles = (cols // 16) * ((rows // 16 + 3) // 4)
    warps = const_expr(job.plan.threads // 32)
    start, step = Int32(cta) * warps, Int32(ctas) * warps
    first, units = start + Int32(cute.arch.warp_idx()), (tiles - start + step - 1) // step
    g_amax = matrix_amax(amax, cta, matrix, stack, partials, job.plan)
    fill_table(table, g_amax, job)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, job.encoding.e4m3_scale_bound)
    scaling = (table, g_amax, g.encode, g.four)
    if g.is_wild:
        columns_run(scaling, first, step, units, tiles, rows, cols, at, True, square, job)
    else:
        columns_run(scaling, first, step, units, tiles, rows, cols, at, False, square, job)
