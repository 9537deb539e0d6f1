"""What the quantizing kernels share: their constants, amaxes, the table, loading, storing."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from fos_rl.kernels import arithmetic, minifloat, ptx
from fos_rl.kernels.arithmetic import TABLE_ENTRIES, TABLE_ENTRY_BYTES, Encoding
from fos_rl.kernels.encode import encode, read, words_per_block, write
from fos_rl.kernels.packed import packing

# Of an SM's memory for shared memory, of which the tables need little; the rest is L1 cache.
SHARED_PERCENT = 20


@dataclass(frozen=True)
class Plan:
    """How a kernel is laid out.

    threads of a CTA and CTAs that share an SM (0: any number) decide the registers of a thread.
    amax: "given", "found" by this kernel for each row, or to be taken from "partials", which the
    amax kernel left behind the place of the result. load_ahead: quantize_matrix and quantize_rows
    read a block while they encode the one before. table: entries for all scales are made first, in
    shared memory.
    """

    threads: int
    amax: str = "given"
    load_ahead: str = "registers"
    ctas_per_sm: int = 0
    table: bool = True


@dataclass(frozen=True)
class Output:
    """What a kernel writes: codes and block scales, the exact bf16 operand, or both."""

    codes: bool = True
    operand: bool = False


@dataclass(frozen=True)
class Job:
    """Everything a quantizing kernel is compiled for."""

    encoding: Encoding
    plan: Plan
    output: Output


def launch_options(job: Job, stream) -> dict:
    """Keyword arguments of a launch that are the same for all layouts."""
    return {
        "block": [job.plan.threads, 1, 1],
        "stream": stream,
        "min_blocks_per_mp": job.plan.ctas_per_sm,
        "preferred_smem_carveout": SHARED_PERCENT,
    }


def allocate_table() -> Uint32:
    words = TABLE_ENTRIES * TABLE_ENTRY_BYTES // 4
    return Uint32(cute.arch.alloc_smem(Float32, words, 16).toint())


def allocate_scratch() -> Uint32:
    """A word of shared memory for each warp."""
    return Uint32(cute.arch.alloc_smem(Float32, 32, 16).toint())


@cute.jit
def fill_table(table: Uint32, amax: Float32, job: cutlass.Constexpr):
    """Write the table of every E4M3 scale for amax, by all threads of the CTA."""
    tid, _, _ = cute.arch.thread_idx()
    g = arithmetic.global_scale(amax, job.encoding.e4m3_scale_bound)
    for start in range_constexpr(0, TABLE_ENTRIES, job.plan.threads):
        index = Uint32(tid) + Uint32(start)
        if index < Uint32(TABLE_ENTRIES):
            entry = arithmetic.table_entry(index, g, job.encoding)
            ptx.shared_store(ptx.iadd(table, ptx.shl(index, 4)), *entry)


def warp_max(value: Float32) -> Float32:
    """max over the warp in every lane; NaN propagates."""
    for lanes in (16, 8, 4, 2, 1):
        value = arithmetic.larger(value, ptx.shuffle_xor(value, lanes))
    return value


def cta_max(value: Float32, scratch: Uint32, threads: int) -> Float32:
    """max over the CTA in every thread; NaN propagates. scratch has a word per warp."""
    value = warp_max(value)
    if threads == 32:
        return value
    ptx.shared_store(ptx.iadd(scratch, ptx.shl(Uint32(cute.arch.warp_idx()), 2)), value)
    cute.arch.sync_threads()
    value = ptx.shared_load(scratch, 1)
    for warp in range(1, threads // 32):
        value = arithmetic.larger(value, ptx.shared_load(ptx.iadd(scratch, 4 * warp), 1))
    return value


@cute.jit
def span_amax(
    address: Int64,
    chunks: Int32,
    tid: Int32,
    dtype: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> Float32:
    """The thread's share of max |x| over chunks of 16 bytes; NaN propagates."""
    held = cute.make_rmem_tensor(4, Uint32)
    write(held, 0, [Uint32(0)] * 4)
    for chunk in cutlass.range(tid, chunks, threads, unroll=4):
        words = ptx.load_words(address + Int64(chunk) * 16, 4)
        for i in range_constexpr(4):
            held[i] = arithmetic.larger_magnitude(held[i], words[i], dtype)
    return arithmetic.max_magnitude(read(held, 0, 4), dtype)


@cute.jit
def matrix_amax(
    amax: Int64,
    cta: Int32,
    matrix: Int32,
    stack: Int32,
    partials: Int32,
    plan: cutlass.Constexpr,
) -> Float32:
    """The amax of a matrix, given or from the partial amaxes [stack, n] behind amax[stack]."""
    tid, _, _ = cute.arch.thread_idx()
    value = Float32(0.0)
    if const_expr(plan.amax == "given"):
        value = ptx.load_float(amax + Int64(matrix) * 4)
    else:
        scratch = allocate_scratch()
        start = amax + Int64(stack + matrix * partials) * 4
        for i in cutlass.range(tid, partials, plan.threads, unroll=1):
            value = arithmetic.larger(value, ptx.load_float(start + Int64(i) * 4))
        value = cta_max(value, scratch, plan.threads)
        if (tid == 0) & (cta == 0):
            ptx.store_float(amax + Int64(matrix) * 4, value)
    return value


def addresses(
    x: cute.Tensor,
    codes: Int64,
    scales: Int64,
    operand: Int64,
    first_block: Int64,
    encoding: Encoding,
) -> tuple[Int64, ...]:
    """Addresses of a block in x, codes, scales and operand."""
    sums = (
        Int64(x.iterator.toint()) + first_block * (4 * words_per_block(encoding)),
        codes + first_block * 8,
        scales + first_block,
        operand + first_block * 32,
    )
    return tuple(ptx.fresh_address(address) for address in sums)


def load_block(raw, first: int, base: Int64, block: Int32, encoding: Encoding) -> None:
    """Read the 16 elements of a block into raw."""
    address = base + Int64(block) * (4 * words_per_block(encoding))
    for i in range(0, words_per_block(encoding), 4):
        write(raw, first + i, ptx.load_words(address + 4 * i, 4))


def _store(out, row: int, rows: int, block: Int32, at: tuple, raw, job: Job) -> None:
    """Store the row-th run of 16 elements of out as block number ``block`` of the tensors."""
    _, codes, scales, operand = at
    if job.output.codes:
        ptx.store_words(codes + Int64(block) * 8, out[2 * row], out[2 * row + 1])
        ptx.store_byte(scales + Int64(block), out[2 * rows])
    if job.output.operand:
        count = words_per_block(job.encoding)
        words = arithmetic.operand_words(
            read(out, 2 * rows + 1 + packing().words * row, packing().words),
            minifloat.e4m3_to_float(ptx.and_(out[2 * rows], 0xFF)),
            read(raw, row * count, count),
            job.encoding.dtype,
        )
        address = operand + Int64(block) * 32
        ptx.store_words(address, *words[:4])
        ptx.store_words(address + 16, *words[4:])


@cute.jit
def encode_and_store(
    raw: cute.Tensor,
    scaling: tuple,
    block_max: Float32,
    block: Int32,
    is_mine: Boolean,
    stride: Int32,
    at: tuple,
    wild: cutlass.Constexpr,
    holding: cutlass.Constexpr,
    job: cutlass.Constexpr,
):
    """Encode raw and store it as block number block (16x16: and its second row, stride further).

    scaling is (table, amax, encode_scale, four), at what ``addresses`` returns.
    """
    rows = const_expr(holding.rows)
    out = cute.make_rmem_tensor((2 + packing().words) * rows + 1, Uint32)
    encode(raw, out, block_max, scaling, wild, job.plan.table, holding, job.encoding)
    if is_mine:
        for row in range_constexpr(rows):
            _store(out, row, rows, block + row * stride, at, raw, job)
