"""The quantizing kernels: one amax for a matrix (1x16 and 16x16 blocks), and one amax a row.

``flat`` gives a thread one 1x16 block at a time, ``square`` a warp four 16x16 blocks, ``rowwise`` a CTA
one row, read twice of which the second read hits the L1 cache.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from fos_rl.kernels import arithmetic, ptx
from fos_rl.kernels.arithmetic import TABLE_ENTRIES, TABLE_ENTRY_BYTES
from fos_rl.kernels.encode import (
    ONE_ROW,
    ROWS_APART,
    block_amax,
    encode,
    read,
    words_per_block,
    write,
)

# Of an SM's memory for shared memory, of which the tables need little; the rest is L1 cache.
SHARED_PERCENT = 20


@dataclass(frozen=True)
class Output:
    """What a kernel writes: codes and block scales, the exact bf16 operand, or both."""

    codes: bool = True
    operand: bool = False


@dataclass(frozen=True)
class Plan:
    """threads of a CTA; load_ahead: flat and rowwise read a block while they encode the one before.
    held: the blocks of a row that a thread of rowwise keeps in registers, 0 for reading them twice.

    Unless given_amax, the amax is still to be found: rowwise takes it of its row, flat and square of
    the partial amaxes that the amax kernel left behind the place of the result.
    """

    threads: int
    given_amax: bool = True
    load_ahead: bool = True
    ctas_per_sm: int = 0
    held: int = 0


@cute.jit
def fill_table(
    table: Uint32, amax: Float32, recipe: cutlass.Constexpr, threads: cutlass.Constexpr
):
    """Write the table of every E4M3 scale for amax, by all threads of the CTA."""
    tid, _, _ = cute.arch.thread_idx()
    g = arithmetic.global_scale(amax, recipe.bound)
    for start in range_constexpr(0, TABLE_ENTRIES, threads):
        index = Uint32(tid) + Uint32(start)
        if index < Uint32(TABLE_ENTRIES):
            entry = arithmetic.table_entry(index, g, recipe)
            ptx.shared_store(ptx.iadd(table, ptx.shl(index, 4)), *entry)


def allocate_table() -> Uint32:
    words = TABLE_ENTRIES * TABLE_ENTRY_BYTES // 4
    return Uint32(cute.arch.alloc_smem(Float32, words, 16).toint())


def allocate_scratch() -> Uint32:
    """A word of shared memory for each warp."""
    return Uint32(cute.arch.alloc_smem(Float32, 32, 16).toint())


def cta_max(value: Float32, scratch: Uint32, threads: int) -> Float32:
    """max over the CTA in every thread; NaN propagates. scratch has a word per warp."""
    for lanes in (16, 8, 4, 2, 1):
        value = ptx.max_nan(value, ptx.shuffle_xor(value, lanes))
    if threads == 32:
        return value
    ptx.shared_store(ptx.iadd(scratch, ptx.shl(Uint32(cute.arch.warp_idx()), 2)), value)
    cute.arch.sync_threads()
    value = ptx.shared_load(scratch, 1)
    for warp in range(1, threads // 32):
        value = ptx.max_nan(value, ptx.shared_load(ptx.iadd(scratch, 4 * warp), 1))
    return value


@cute.jit
def span_amax(
    address: Int64,
    chunks: Int32,
    tid: Int32,
    dtype: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> Float32:
    """This thread's share of max |x| over chunks of 16 bytes; NaN propagates."""
    held = cute.make_rmem_tensor(4, Uint32)
    write(held, 0, [Uint32(0)] * 4)
    for chunk in cutlass.range(tid, chunks, threads, unroll=4):
        words = ptx.load_words(address + Int64(chunk) * 16, 4)
        for i in range_constexpr(4):
            held[i] = arithmetic.larger_magnitude(held[i], words[i], dtype)
    return arithmetic.max_magnitude(read(held, 0, 4), dtype)


@cute.jit
def matrix_amax(
    amax: cute.Tensor, cta: Int32, matrix: Int32, stack: Int32, plan: cutlass.Constexpr
) -> Float32:
    """The amax of a matrix, given or from the partial amaxes [stack, n] behind amax[stack]."""
    tid, _, _ = cute.arch.thread_idx()
    base = Int64(amax.iterator.toint())
    value = Float32(0.0)
    if const_expr(plan.given_amax):
        value = ptx.load_float(base + Int64(matrix) * 4)
    else:
        scratch = allocate_scratch()
        partials = Int32(cute.size(amax.shape)) // stack - 1
        start = base + Int64(stack + matrix * partials) * 4
        for i in cutlass.range(tid, partials, plan.threads, unroll=1):
            value = ptx.max_nan(value, ptx.load_float(start + Int64(i) * 4))
        value = cta_max(value, scratch, plan.threads)
        if (tid == 0) & (cta == 0):
            ptx.store_float(base + Int64(matrix) * 4, value)
    return value


def load_block(raw, first: int, base: Int64, block: Int32, recipe) -> None:
    """Read the 16 elements of a block into raw."""
    address = base + Int64(block) * (4 * words_per_block(recipe))
    for i in range(0, words_per_block(recipe), 4):
        write(raw, first + i, ptx.load_words(address + 4 * i, 4))


def _store(out, row: int, rows: int, block: Int32, codes, scales, operand, output, raw, recipe):
    """Store the row-th run of 16 elements of out as block number ``block`` of the tensors."""
    if output.codes:
        ptx.store_words(codes + Int64(block) * 8, out[2 * row], out[2 * row + 1])
        ptx.store_byte(scales + Int64(block), out[2 * rows])
    if output.operand:
        count = words_per_block(recipe)
        words = arithmetic.operand_words(
            read(out, 2 * rows + 1 + 4 * row, 4),
            ptx.e4m3_to_float(ptx.and_(out[2 * rows], 0xFF)),
            read(raw, row * count, count),
            recipe.dtype,
        )
        address = operand + Int64(block) * 32
        ptx.store_words(address, *words[:4])
        ptx.store_words(address + 16, *words[4:])


@cute.jit
def encode_and_store(
    raw: cute.Tensor, table: Uint32, amax: Float32, encode_scale: Float32, four: Float32,
    block_max: Float32, block: Int32, is_mine: Boolean, stride: Int32, codes: Int64, scales: Int64,
    operand: Int64, wild: cutlass.Constexpr, holding: cutlass.Constexpr, recipe: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """Encode raw and store it as block number block (16x16: and its second row, stride further)."""
    rows = const_expr(holding.rows)
    out = cute.make_rmem_tensor(6 * rows + 1, Uint32)
    encode(raw, out, block_max, amax, encode_scale, four, table, wild, holding, recipe)
    if is_mine:
        for row in range_constexpr(rows):
            _store(
                out, row, rows, block + row * stride, codes, scales, operand, output, raw, recipe
            )


@cute.jit
def flat_run(
    x: Int64, table: Uint32, amax: Float32, encode_scale: Float32, four: Float32,
    first: Int32, step: Int32, end: Int32, units: Int32, codes: Int64, scales: Int64,
    operand: Int64, wild: cutlass.Constexpr, recipe: cutlass.Constexpr,
    plan: cutlass.Constexpr, output: cutlass.Constexpr,
):
    """Encode 1x16 blocks first, first + step, ... below end, units of them."""
    words = const_expr(words_per_block(recipe))
    raw = cute.make_rmem_tensor(words, Uint32)
    ahead = cute.make_rmem_tensor(words, Uint32)
    block = first
    # An out-of-range amax is rare and its code needs the registers.
    load_ahead = const_expr(plan.load_ahead and not wild)
    if const_expr(load_ahead):
        load_block(ahead, 0, x, cutlass.min(first, end - 1), recipe)
    for _ in cutlass.range(units, unroll=1):
        if const_expr(load_ahead):
            write(raw, 0, read(ahead, 0, words))
            load_block(ahead, 0, x, cutlass.min(block + step, end - 1), recipe)
        else:
            load_block(raw, 0, x, cutlass.min(block, end - 1), recipe)
        encode_and_store(
            raw, table, amax, encode_scale, four, block_amax(raw, ONE_ROW, recipe), block,
            block < end, Int32(0), codes, scales, operand, wild, ONE_ROW, recipe, output,
        )
        block = block + step


def bases(x, codes, scales, operand, first_block: Int64, recipe) -> tuple[Int64, ...]:
    """Addresses of a block in each tensor."""
    return (
        Int64(x.iterator.toint()) + first_block * (4 * words_per_block(recipe)),
        Int64(codes.iterator.toint()) + first_block * 8,
        Int64(scales.iterator.toint()) + first_block,
        Int64(operand.iterator.toint()) + first_block * 32,
    )


@cute.kernel
def flat(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """x [stack * rows, cols] with one amax a matrix; the CTAs of grid column e share matrix e."""
    tid, _, _ = cute.arch.thread_idx()
    cta, matrix, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    table = allocate_table()
    count = (Int32(x.shape[1]) // 16) * (Int32(x.shape[0]) // stack)
    x_at, codes_at, scales_at, operand_at = bases(
        x, codes, scales, operand, Int64(matrix) * Int64(count), recipe
    )
    g_amax = matrix_amax(amax, cta, matrix, stack, plan)
    fill_table(table, g_amax, recipe, plan.threads)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, recipe.bound)
    encode_scale, four = g.encode, g.four
    start, step = Int32(cta) * plan.threads, Int32(ctas) * plan.threads
    units = (count - start + step - 1) // step
    if g.is_wild:
        flat_run(
            x_at, table, g_amax, encode_scale, four, start + Int32(tid), step, count, units,
            codes_at, scales_at, operand_at, True, recipe, plan, output,
        )
    else:
        flat_run(
            x_at, table, g_amax, encode_scale, four, start + Int32(tid), step, count, units,
            codes_at, scales_at, operand_at, False, recipe, plan, output,
        )


@cute.jit
def launch_flat(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, ctas: Int32, stream, recipe: cutlass.Constexpr,
    plan: cutlass.Constexpr, output: cutlass.Constexpr,
):
    flat(x, amax, codes, scales, operand, stack, recipe, plan, output).launch(
        grid=[ctas, stack, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=plan.ctas_per_sm,
        preferred_smem_carveout=SHARED_PERCENT,
    )


@cute.jit
def held_run(
    held: cute.Tensor, maxima: cute.Tensor, table: Uint32, amax: Float32, encode_scale: Float32,
    four: Float32, first: Int32, end: Int32, codes: Int64, scales: Int64, operand: Int64,
    wild: cutlass.Constexpr, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """Encode the plan.held blocks whose words and amaxes held and maxima have."""
    words = const_expr(words_per_block(recipe))
    raw = cute.make_rmem_tensor(words, Uint32)
    block = first
    for _ in cutlass.range(plan.held, unroll=1):
        write(raw, 0, read(held, 0, words))
        encode_and_store(
            raw, table, amax, encode_scale, four, maxima[0], block, block < end, Int32(0),
            codes, scales, operand, wild, ONE_ROW, recipe, output,
        )
        # The next block moves to the front: registers have no run-time index.
        write(held, 0, read(held, words, (plan.held - 1) * words))
        write(maxima, 0, read(maxima, 1, plan.held - 1))
        block = block + plan.threads


@cute.kernel
def rowwise(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """x [rows, cols] with one amax a row, found here unless given; a CTA a row."""
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    table = allocate_table()
    scratch = allocate_scratch()
    row_blocks = Int32(x.shape[1]) // 16
    x_at, codes_at, scales_at, operand_at = bases(
        x, codes, scales, operand, Int64(row) * Int64(row_blocks), recipe
    )
    amax_at = Int64(amax.iterator.toint()) + Int64(row) * 4
    g_amax = Float32(0.0)
    words = const_expr(words_per_block(recipe))
    held = cute.make_rmem_tensor(max(plan.held, 1) * words, Uint32)
    maxima = cute.make_rmem_tensor(max(plan.held, 1), Float32)
    if const_expr(plan.held > 0):
        for unit in range_constexpr(plan.held):
            inside = cutlass.min(Int32(tid) + unit * plan.threads, row_blocks - 1)
            load_block(held, unit * words, x_at, inside, recipe)
        share = Float32(0.0)
        for unit in range_constexpr(plan.held):
            mine = read(held, unit * words, words)
            maxima[unit] = arithmetic.max_magnitude(mine, recipe.dtype)
            share = ptx.max_nan(share, maxima[unit])
        g_amax = share
    if const_expr(plan.given_amax):
        g_amax = ptx.load_float(amax_at)
    elif const_expr(plan.held > 0):
        g_amax = cta_max(g_amax, scratch, plan.threads)
        if tid == 0:
            ptx.store_float(amax_at, g_amax)
    else:
        chunks = row_blocks * (words_per_block(recipe) // 4)
        share = span_amax(x_at, chunks, tid, recipe.dtype, plan.threads)
        g_amax = cta_max(share, scratch, plan.threads)
        if tid == 0:
            ptx.store_float(amax_at, g_amax)
    fill_table(table, g_amax, recipe, plan.threads)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, recipe.bound)
    encode_scale, four = g.encode, g.four
    units = (row_blocks + (plan.threads - 1)) // plan.threads
    if const_expr(plan.held > 0):
        if g.is_wild:
            held_run(
                held, maxima, table, g_amax, encode_scale, four, Int32(tid), row_blocks, codes_at,
                scales_at, operand_at, True, recipe, plan, output,
            )
        else:
            held_run(
                held, maxima, table, g_amax, encode_scale, four, Int32(tid), row_blocks, codes_at,
                scales_at, operand_at, False, recipe, plan, output,
            )
    elif g.is_wild:
        flat_run(
            x_at, table, g_amax, encode_scale, four, Int32(tid), Int32(plan.threads), row_blocks,
            units, codes_at, scales_at, operand_at, True, recipe, plan, output,
        )
    else:
        flat_run(
            x_at, table, g_amax, encode_scale, four, Int32(tid), Int32(plan.threads), row_blocks,
            units, codes_at, scales_at, operand_at, False, recipe, plan, output,
        )


@cute.jit
def launch_rowwise(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, ctas: Int32, stream, recipe: cutlass.Constexpr,
    plan: cutlass.Constexpr, output: cutlass.Constexpr,
):
    rowwise(x, amax, codes, scales, operand, recipe, plan, output).launch(
        grid=[x.shape[0], 1, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=plan.ctas_per_sm,
        preferred_smem_carveout=SHARED_PERCENT,
    )


@cute.jit
def square_run(
    x: Int64, table: Uint32, amax: Float32, encode_scale: Float32, four: Float32,
    first: Int32, step: Int32, units: Int32, tiles_across: Int32, tiles: Int32,
    row_blocks: Int32, codes: Int64, scales: Int64, operand: Int64, wild: cutlass.Constexpr,
    recipe: cutlass.Constexpr, output: cutlass.Constexpr,
):
    """Encode tiles of 16 rows and four blocks: first, first + step, ..., units of them."""
    words = const_expr(words_per_block(recipe))
    lane = Int32(cute.arch.lane_idx())
    raw = cute.make_rmem_tensor(2 * words, Uint32)
    tile = first
    stride = row_blocks * 8
    for _ in cutlass.range(units, unroll=1):
        inside = cutlass.min(tile, tiles - 1)
        tile_row = inside // tiles_across
        column = (inside - tile_row * tiles_across) * 4 + (lane & 3)
        row = tile_row * 16 + (lane >> 2)
        block = row * row_blocks + cutlass.min(column, row_blocks - 1)
        load_block(raw, 0, x, block, recipe)
        load_block(raw, words, x, block + stride, recipe)
        is_mine = (tile < tiles) & (column < row_blocks)
        encode_and_store(
            raw, table, amax, encode_scale, four, block_amax(raw, ROWS_APART, recipe), block,
            is_mine, stride, codes, scales, operand, wild, ROWS_APART, recipe, output,
        )
        tile = tile + step


@cute.kernel
def square(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """x [stack * rows, cols] in 16x16 blocks with one amax a matrix."""
    cta, matrix, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    table = allocate_table()
    row_blocks, rows = Int32(x.shape[1]) // 16, Int32(x.shape[0]) // stack
    x_at, codes_at, scales_at, operand_at = bases(
        x, codes, scales, operand, Int64(matrix) * Int64(rows * row_blocks), recipe
    )
    tiles_across = (row_blocks + 3) // 4
    tiles = tiles_across * (rows // 16)
    warps = const_expr(plan.threads // 32)
    start, step = Int32(cta) * warps, Int32(ctas) * warps
    first, units = start + Int32(cute.arch.warp_idx()), (tiles - start + step - 1) // step
    g_amax = matrix_amax(amax, cta, matrix, stack, plan)
    fill_table(table, g_amax, recipe, plan.threads)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, recipe.bound)
    encode_scale, four = g.encode, g.four
    if g.is_wild:
        square_run(
            x_at, table, g_amax, encode_scale, four, first, step, units, tiles_across, tiles,
            row_blocks, codes_at, scales_at, operand_at, True, recipe, output,
        )
    else:
        square_run(
            x_at, table, g_amax, encode_scale, four, first, step, units, tiles_across, tiles,
            row_blocks, codes_at, scales_at, operand_at, False, recipe, output,
        )


@cute.jit
def launch_square(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, ctas: Int32, stream, recipe: cutlass.Constexpr,
    plan: cutlass.Constexpr, output: cutlass.Constexpr,
):
    square(x, amax, codes, scales, operand, stack, recipe, plan, output).launch(
        grid=[ctas, stack, 1],
        block=[plan.threads, 1, 1],
        stream=stream,
        min_blocks_per_mp=plan.ctas_per_sm,
        preferred_smem_carveout=SHARED_PERCENT,
    )
