"""The quantizing kernel for columns: the row-wise form of x.T, reading x where it lies.

A thread takes two neighbouring columns over 16 rows, which are two rows of a block of x.T (or a part
of one 16x16 block). A warp takes 64 rows of 16 columns, so that it reads and writes whole sectors.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from fos_rl.kernels import arithmetic, ptx
from fos_rl.kernels.encode import ONE_ROW, ROW_PAIRS, block_amax, words_per_block, write
from fos_rl.kernels.quantize_kernel import (
    SHARED_PERCENT,
    allocate_table,
    encode_and_store,
    fill_table,
    matrix_amax,
)


def _load_columns(raw, address: Int64, pitch: Int64, recipe) -> None:
    """Fill raw with two columns of 16 elements, the first column's words first."""
    words = words_per_block(recipe)
    rows = [address + pitch * i for i in range(16)]
    if recipe.dtype == "float32":
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
    x: Int64, table: Uint32, amax: Float32, encode_scale: Float32, four: Float32,
    first: Int32, step: Int32, units: Int32, tiles: Int32, rows: Int32, cols: Int32,
    codes: Int64, scales: Int64, operand: Int64, wild: cutlass.Constexpr,
    square: cutlass.Constexpr, recipe: cutlass.Constexpr, output: cutlass.Constexpr,
):
    """Encode tiles of 64 rows and 16 columns: first, first + step, ..., units of them."""
    words = const_expr(words_per_block(recipe))
    element = const_expr(words // 4 if recipe.dtype == "float32" else 2)
    lane = Int32(cute.arch.lane_idx())
    raw = cute.make_rmem_tensor(2 * words, Uint32)
    one = cute.make_rmem_tensor(words, Uint32)
    across, down = cols // 16, rows // 16
    tile = first
    for _ in cutlass.range(units, unroll=1):
        inside = cutlass.min(tile, tiles - 1)
        tile_row = inside // across
        row_block = tile_row * 4 + (lane >> 3)
        column = (inside - tile_row * across) * 16 + (lane & 7) * 2
        at = Int64(cutlass.min(row_block, down - 1)) * 16 * Int64(cols) + Int64(column)
        _load_columns(raw, x + at * element, Int64(cols) * element, recipe)
        block = column * down + cutlass.min(row_block, down - 1)
        is_mine = (tile < tiles) & (row_block < down)
        if const_expr(square):
            encode_and_store(
                raw, table, amax, encode_scale, four, block_amax(raw, ROW_PAIRS, recipe), block,
                is_mine, down, codes, scales, operand, wild, ROW_PAIRS, recipe, output,
            )
        else:
            for side in cutlass.range_constexpr(2):
                write(one, 0, [raw[side * words + i] for i in range(words)])
                encode_and_store(
                    one, table, amax, encode_scale, four, block_amax(one, ONE_ROW, recipe),
                    block + side * down, is_mine, Int32(0), codes, scales, operand, wild, ONE_ROW, recipe, output,
                )
        tile = tile + step


@cute.kernel
def columnwise(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, square: cutlass.Constexpr, recipe: cutlass.Constexpr,
    plan: cutlass.Constexpr, output: cutlass.Constexpr,
):
    """x [stack * rows, cols]; codes [stack * cols, rows / 2] and so on, one amax a matrix."""
    cta, matrix, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    table = allocate_table()
    rows, cols = Int32(x.shape[0]) // stack, Int32(x.shape[1])
    done = Int64(matrix) * Int64(rows) * Int64(cols)
    element = const_expr(4 if recipe.dtype == "float32" else 2)
    tiles = (cols // 16) * ((rows // 16 + 3) // 4)
    warps = const_expr(plan.threads // 32)
    start, step = Int32(cta) * warps, Int32(ctas) * warps
    first, units = start + Int32(cute.arch.warp_idx()), (tiles - start + step - 1) // step
    g_amax = matrix_amax(amax, cta, matrix, stack, plan)
    fill_table(table, g_amax, recipe, plan.threads)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, recipe.bound)
    encode_scale, four = g.encode, g.four
    x_at = Int64(x.iterator.toint()) + done * element
    codes_at = Int64(codes.iterator.toint()) + done // 2
    scales_at = Int64(scales.iterator.toint()) + done // 16
    operand_at = Int64(operand.iterator.toint()) + done * 2
    if g.is_wild:
        columns_run(
            x_at, table, g_amax, encode_scale, four, first, step, units, tiles, rows, cols,
            codes_at, scales_at, operand_at, True, square, recipe, output,
        )
    else:
        columns_run(
            x_at, table, g_amax, encode_scale, four, first, step, units, tiles, rows, cols,
            codes_at, scales_at, operand_at, False, square, recipe, output,
        )


@cute.jit
def launch_columnwise(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, ctas: Int32, stream, recipe: cutlass.Constexpr,
    plan: cutlass.Constexpr, output: cutlass.Constexpr,
):
    columnwise(x, amax, codes, scales, operand, stack, False, recipe, plan, output).launch(
        grid=[ctas, stack, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=plan.ctas_per_sm,
        preferred_smem_carveout=SHARED_PERCENT,
    )


@cute.jit
def launch_columnwise_square(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, ctas: Int32, stream, recipe: cutlass.Constexpr,
    plan: cutlass.Constexpr, output: cutlass.Constexpr,
):
    columnwise(x, amax, codes, scales, operand, stack, True, recipe, plan, output).launch(
        grid=[ctas, stack, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=plan.ctas_per_sm,
        preferred_smem_carveout=SHARED_PERCENT,
    )
