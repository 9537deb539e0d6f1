"""Quantizing kernels for little work and short rows: a thread encodes one block, which it holds.

Nothing is shared but an amax: no table, since two entries of it are less work than all.
``quantize_blocks`` takes amaxes as given, ``quantize_short_rows`` finds those of a few whole rows
in a CTA, and ``quantize_split_rows`` has several CTAs find the amax of the same row, of which each
encodes a part.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from fos_rl.kernels import arithmetic, ptx
from fos_rl.kernels.encode import ONE_ROW, block_amax, words_per_block
from fos_rl.kernels.tiles import (
    addresses,
    allocate_scratch,
    cta_max,
    encode_and_store,
    load_block,
    matrix_amax,
    span_amax,
)


@cute.jit
def encode_held(
    raw: cute.Tensor,
    block_max: Float32,
    g_amax: Float32,
    block: Int32,
    is_mine: Boolean,
    at: tuple,
    job: cutlass.Constexpr,
):
    """Encode and store one block; a warp with one amax out of range takes the code for all."""
    g = arithmetic.global_scale(g_amax, job.encoding.e4m3_scale_bound)
    scaling = (Uint32(0), g_amax, g.encode, g.four)
    if cute.arch.vote_any_sync(g.is_wild):
        encode_and_store(raw, scaling, block_max, block, is_mine, Int32(0), at, True, ONE_ROW, job)
    else:
        encode_and_store(raw, scaling, block_max, block, is_mine, Int32(0), at, False, ONE_ROW, job)


@cute.kernel
def quantize_blocks(
    x: cute.Tensor,
    amax: Int64,
    codes: Int64,
    scales: Int64,
    operand: Int64,
    share: Int32,
    stack: Int32,
    job: cutlass.Constexpr,
):
    """x [stack * rows, cols] with an amax for each of the stack (a row can be one)."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    count = Int32(x.shape[0]) * (Int32(x.shape[1]) // 16)
    at = addresses(x, codes, scales, operand, Int64(0), job.encoding)
    raw = cute.make_rmem_tensor(words_per_block(job.encoding), Uint32)
    block = Int32(cta) * job.plan.threads + Int32(tid)
    inside = cutlass.min(block, count - 1)
    load_block(raw, 0, at[0], inside, job.encoding)
    if const_expr(job.plan.amax == "partials"):
        g_amax = matrix_amax(amax, cta, Int32(0), stack, share, job.plan)
    else:
        g_amax = ptx.load_float(amax + Int64(inside // (count // stack)) * 4)
    block_max = block_amax(raw, ONE_ROW, job.encoding)
    encode_held(raw, block_max, g_amax, block, block < count, at, job)


@cute.kernel
def quantize_short_rows(
    x: cute.Tensor,
    amax: Int64,
    codes: Int64,
    scales: Int64,
    operand: Int64,
    share: Int32,
    job: cutlass.Constexpr,
):
    """x [rows, cols], `share` whole rows per CTA; neighbouring threads hold neighbouring blocks."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    row_blocks, row_count = Int32(x.shape[1]) // 16, Int32(x.shape[0])
    at = addresses(x, codes, scales, operand, Int64(0), job.encoding)
    raw = cute.make_rmem_tensor(words_per_block(job.encoding), Uint32)
    local = Int32(tid) // row_blocks
    column = Int32(tid) - local * row_blocks
    row = Int32(cta) * share + local
    is_mine = (local < share) & (row < row_count)
    block = row * row_blocks + column
    load_block(raw, 0, at[0], cutlass.min(block, row_count * row_blocks - 1), job.encoding)
    slots = Uint32(cute.arch.alloc_smem(Float32, job.plan.threads, 16).toint())
    ptx.shared_store(ptx.iadd(slots, ptx.shl(Uint32(tid), 2)), Float32(0.0))
    cute.arch.sync_threads()
    block_max = block_amax(raw, ONE_ROW, job.encoding)
    # The maximum of a row's lanes at and above this one, then of its warps.
    row_max = block_max
    for lanes in (1, 2, 4, 8, 16):
        above = ptx.shuffle_down(row_max, lanes)
        same_row = column + lanes < row_blocks
        row_max = ptx.select(same_row, arithmetic.larger(row_max, above), row_max)
    slot = ptx.iadd(slots, ptx.shl(Uint32(local), 2))
    if is_mine & ((column == 0) | (cute.arch.lane_idx() == 0)):
        ptx.shared_max(slot, ptx.bits(row_max))
    cute.arch.sync_threads()
    g_amax = ptx.shared_load(slot, 1)
    if is_mine & (column == 0):
        ptx.store_float(amax + Int64(row) * 4, g_amax)
    encode_held(raw, block_max, g_amax, block, is_mine, at, job)


@cute.kernel
def quantize_split_rows(
    x: cute.Tensor,
    amax: Int64,
    codes: Int64,
    scales: Int64,
    operand: Int64,
    share: Int32,
    job: cutlass.Constexpr,
):
    """x [rows, cols], `share` CTAs per row; each reads all of the row for its amax."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    row = Int32(cta) // share
    part = Int32(cta) - row * share
    row_blocks = Int32(x.shape[1]) // 16
    first_block = Int64(row) * Int64(row_blocks)
    at = addresses(x, codes, scales, operand, first_block, job.encoding)
    words = const_expr(words_per_block(job.encoding))
    raw = cute.make_rmem_tensor(words, Uint32)
    block = part * job.plan.threads + Int32(tid)
    load_block(raw, 0, at[0], cutlass.min(block, row_blocks - 1), job.encoding)
    chunks = row_blocks * (words // 4)
    row_max = span_amax(at[0], chunks, tid, job.encoding.dtype, job.plan.threads)
    g_amax = cta_max(row_max, allocate_scratch(), job.plan.threads)
    if (tid == 0) & (part == 0):
        ptx.store_float(amax + Int64(row) * 4, g_amax)
    block_max = block_amax(raw, ONE_ROW, job.encoding)
    encode_held(raw, block_max, g_amax, block, block < row_blocks, at, job)
