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
from fos_rl.kernels.encode import block_amax, encode, read, words_per_block, write


@dataclass(frozen=True)
class Output:
    """What a kernel writes: codes and block scales, the exact bf16 operand, or both."""

    codes: bool = True
    operand: bool = False


@dataclass(frozen=True)
class Plan:
    """threads of a CTA, and how many blocks a thread takes one after the other in flat and square.

    Unless given_amax, the amax is still to be found: rowwise takes it of its row, flat and square of
    the partial amaxes that the amax kernel left behind the place of the result.
    """

    threads: int
    units: int = 1
    given_amax: bool = True


@cute.jit
def fill_table(table: Uint32, amax: Float32, bound: cutlass.Constexpr, threads: cutlass.Constexpr):
    """Write the table of every E4M3 scale for amax, by all threads of the CTA."""
    tid, _, _ = cute.arch.thread_idx()
    g = arithmetic.global_scale(amax, bound)
    for start in range_constexpr(0, TABLE_ENTRIES, threads):
        index = Uint32(tid) + Uint32(start)
        if index < Uint32(TABLE_ENTRIES):
            entry = arithmetic.table_entry(index, g)
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
    address: Int64, chunks: Int32, tid: Int32, dtype: cutlass.Constexpr,
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


def load_block(raw, first: int, address: Int64, recipe) -> None:
    for i in range(0, words_per_block(recipe), 4):
        write(raw, first + i, ptx.load_words(address + 4 * i, 4))


def _store(out, row: int, rows: int, block: Int64, codes, scales, operand, output, raw, recipe):
    """Store the row-th run of 16 elements of out as block number ``block`` of the tensors."""
    if output.codes:
        ptx.store_words(codes + block * 8, out[2 * row], out[2 * row + 1])
        ptx.store_byte(scales + block, out[2 * rows])
    if output.operand:
        count = words_per_block(recipe)
        words = arithmetic.operand_words(
            read(out, 2 * rows + 1 + 4 * row, 4),
            ptx.from_bits(out[6 * rows + 1]),
            read(raw, row * count, count),
            recipe.dtype,
        )
        ptx.store_words(operand + block * 32, *words[:4])
        ptx.store_words(operand + block * 32 + 16, *words[4:])


@cute.jit
def encode_and_store(
    raw: cute.Tensor, table: Uint32, amax: Float32, encode_scale: Float32, keep_six: Boolean,
    block: Int64, is_mine: Boolean, stride: Int64, codes: Int64, scales: Int64, operand: Int64,
    wild: cutlass.Constexpr, rows: cutlass.Constexpr, recipe: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """Encode raw and store it as block number block (16x16: and its second row, stride further)."""
    out = cute.make_rmem_tensor(6 * rows + 2, Uint32)
    block_max = block_amax(raw, rows, recipe)
    encode(raw, out, block_max, amax, encode_scale, keep_six, table, wild, rows, recipe)
    if is_mine:
        for row in range_constexpr(rows):
            _store(
                out, row, rows, block + row * stride, codes, scales, operand, output, raw, recipe
            )


@cute.jit
def flat_run(
    x: Int64, table: Uint32, amax: Float32, encode_scale: Float32, keep_six: Boolean,
    first: Int64, step: Int64, end: Int64, units: Int32, codes: Int64, scales: Int64,
    operand: Int64, wild: cutlass.Constexpr, recipe: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """Encode 1x16 blocks first, first + step, ... below end, units of them, loading one ahead."""
    words = const_expr(words_per_block(recipe))
    raw = cute.make_rmem_tensor(words, Uint32)
    ahead = cute.make_rmem_tensor(words, Uint32)
    load_block(ahead, 0, x + cutlass.min(first, end - 1) * (4 * words), recipe)
    block = first
    for _ in cutlass.range(units, unroll=1):
        write(raw, 0, read(ahead, 0, words))
        load_block(ahead, 0, x + cutlass.min(block + step, end - 1) * (4 * words), recipe)
        encode_and_store(
            raw, table, amax, encode_scale, keep_six, block, block < end, Int64(0), codes, scales,
            operand, wild, 1, recipe, output,
        )
        block = block + step


@cute.kernel
def flat(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """x [stack * rows, cols] with one amax a matrix; CTA (i, e) takes a run of matrix e's blocks."""
    tid, _, _ = cute.arch.thread_idx()
    cta, matrix, _ = cute.arch.block_idx()
    table = allocate_table()
    count = (Int64(x.shape[1]) // 16) * Int64(x.shape[0] // stack)
    done = Int64(matrix) * count
    first = done + Int64(cta) * (plan.units * plan.threads) + Int64(tid)
    x_base, codes_base = Int64(x.iterator.toint()), Int64(codes.iterator.toint())
    scales_base, operand_base = Int64(scales.iterator.toint()), Int64(operand.iterator.toint())
    g_amax = matrix_amax(amax, cta, matrix, stack, plan)
    fill_table(table, g_amax, recipe.bound, plan.threads)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, recipe.bound)
    encode_scale, keep_six, step = g.encode, g.keep_six, Int64(plan.threads)
    if g.is_wild:
        flat_run(
            x_base, table, g_amax, encode_scale, keep_six, first, step, done + count,
            Int32(plan.units), codes_base, scales_base, operand_base, True, recipe, output,
        )
    else:
        flat_run(
            x_base, table, g_amax, encode_scale, keep_six, first, step, done + count,
            Int32(plan.units), codes_base, scales_base, operand_base, False, recipe, output,
        )


@cute.jit
def launch_flat(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, stream, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    count = (x.shape[0] // stack) * (x.shape[1] // 16)
    grid = [cute.ceil_div(count, plan.units * plan.threads), stack, 1]
    flat(x, amax, codes, scales, operand, stack, recipe, plan, output).launch(
        grid=grid, block=[plan.threads, 1, 1], stream=stream
    )


@cute.kernel
def rowwise(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """x [rows, cols] with one amax a row, found here unless given; a CTA a row."""
    tid, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    table = allocate_table()
    scratch = allocate_scratch()
    block_bytes = const_expr(4 * words_per_block(recipe))
    row_blocks = Int64(x.shape[1]) // 16
    start = Int64(row) * row_blocks
    x_base, codes_base = Int64(x.iterator.toint()), Int64(codes.iterator.toint())
    scales_base, operand_base = Int64(scales.iterator.toint()), Int64(operand.iterator.toint())
    amax_address = Int64(amax.iterator.toint()) + Int64(row) * 4
    g_amax = Float32(0.0)
    if const_expr(plan.given_amax):
        g_amax = ptx.load_float(amax_address)
    else:
        chunks = Int32(row_blocks) * (block_bytes // 16)
        share = span_amax(
            x_base + start * block_bytes, chunks, tid, recipe.dtype, plan.threads
        )
        g_amax = cta_max(share, scratch, plan.threads)
        if tid == 0:
            ptx.store_float(amax_address, g_amax)
    fill_table(table, g_amax, recipe.bound, plan.threads)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, recipe.bound)
    encode_scale, keep_six, step = g.encode, g.keep_six, Int64(plan.threads)
    first, end = start + Int64(tid), start + row_blocks
    units = (Int32(row_blocks) + (plan.threads - 1)) // plan.threads
    if g.is_wild:
        flat_run(
            x_base, table, g_amax, encode_scale, keep_six, first, step, end, units, codes_base,
            scales_base, operand_base, True, recipe, output,
        )
    else:
        flat_run(
            x_base, table, g_amax, encode_scale, keep_six, first, step, end, units, codes_base,
            scales_base, operand_base, False, recipe, output,
        )


@cute.jit
def launch_rowwise(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, stream, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    rowwise(x, amax, codes, scales, operand, stack, recipe, plan, output).launch(
        grid=[x.shape[0], 1, 1], block=[plan.threads, 1, 1], stream=stream
    )


@cute.jit
def square_run(
    x: Int64, table: Uint32, amax: Float32, encode_scale: Float32, keep_six: Boolean,
    first: Int32, units: Int32, tiles_across: Int32, tiles: Int32, row_blocks: Int32, done: Int64,
    codes: Int64, scales: Int64, operand: Int64, wild: cutlass.Constexpr,
    recipe: cutlass.Constexpr, plan: cutlass.Constexpr, output: cutlass.Constexpr,
):
    """Encode units tiles of 16 rows and four blocks, tile first + k * warps for the k-th."""
    words = const_expr(words_per_block(recipe))
    lane = Int32(cute.arch.lane_idx())
    raw = cute.make_rmem_tensor(2 * words, Uint32)
    tile = first
    stride = Int64(row_blocks) * 8
    for _ in cutlass.range(units, unroll=1):
        inside = cutlass.min(tile, tiles - 1)
        tile_row = inside // tiles_across
        column = (inside - tile_row * tiles_across) * 4 + (lane & 3)
        row = tile_row * 16 + (lane >> 2)
        block = done + Int64(row) * Int64(row_blocks) + Int64(cutlass.min(column, row_blocks - 1))
        load_block(raw, 0, x + block * (4 * words), recipe)
        load_block(raw, words, x + (block + stride) * (4 * words), recipe)
        is_mine = (tile < tiles) & (column < row_blocks)
        encode_and_store(
            raw, table, amax, encode_scale, keep_six, block, is_mine, stride, codes, scales,
            operand, wild, 2, recipe, output,
        )
        tile = tile + plan.threads // 32


@cute.kernel
def square(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    """x [stack * rows, cols] in 16x16 blocks with one amax a matrix."""
    cta, matrix, _ = cute.arch.block_idx()
    table = allocate_table()
    row_blocks, rows = Int32(x.shape[1]) // 16, Int32(x.shape[0]) // stack
    done = Int64(matrix) * Int64(rows) * Int64(row_blocks)
    tiles_across = (row_blocks + 3) // 4
    tiles = tiles_across * (rows // 16)
    first = Int32(cta) * (plan.units * plan.threads // 32) + Int32(cute.arch.warp_idx())
    x_base, codes_base = Int64(x.iterator.toint()), Int64(codes.iterator.toint())
    scales_base, operand_base = Int64(scales.iterator.toint()), Int64(operand.iterator.toint())
    g_amax = matrix_amax(amax, cta, matrix, stack, plan)
    fill_table(table, g_amax, recipe.bound, plan.threads)
    cute.arch.sync_threads()
    g = arithmetic.global_scale(g_amax, recipe.bound)
    encode_scale, keep_six = g.encode, g.keep_six
    if g.is_wild:
        square_run(
            x_base, table, g_amax, encode_scale, keep_six, first, Int32(plan.units), tiles_across,
            tiles, row_blocks, done, codes_base, scales_base, operand_base, True, recipe, plan,
            output,
        )
    else:
        square_run(
            x_base, table, g_amax, encode_scale, keep_six, first, Int32(plan.units), tiles_across,
            tiles, row_blocks, done, codes_base, scales_base, operand_base, False, recipe, plan,
            output,
        )


@cute.jit
def launch_square(
    x: cute.Tensor, amax: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor,
    operand: cute.Tensor, stack: Int32, stream, recipe: cutlass.Constexpr, plan: cutlass.Constexpr,
    output: cutlass.Constexpr,
):
    tiles = cute.ceil_div(x.shape[1] // 16, 4) * (x.shape[0] // stack // 16)
    grid = [cute.ceil_div(tiles, plan.units * plan.threads // 32), stack, 1]
    square(x, amax, codes, scales, operand, stack, recipe, plan, output).launch(
        grid=grid, block=[plan.threads, 1, 1], stream=stream
    )
