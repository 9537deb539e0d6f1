"""The amax of each matrix of a stack, and of each group of rows (an expert's tokens).

A matrix's amax is left as partial maxima, which the quantizing kernel combines: that saves a launch
and the zeroing of an accumulator. Groups start and end where the device says, so theirs is raised
row by row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from fos_rl.kernels import ptx
from fos_rl.kernels.tiles import allocate_scratch, cta_max, span_amax, warp_max


@dataclass(frozen=True)
class AmaxPlan:
    """dtype names the element type; threads of a CTA."""

    dtype: str
    threads: int


@cute.kernel
def partial_amax(x: cute.Tensor, amax: cute.Tensor, stack: Int32, plan: cutlass.Constexpr):
    """CTA (i, e) writes the maximum of the i-th share of matrix e to amax[stack + e * n + i]."""
    tid, _, _ = cute.arch.thread_idx()
    cta, matrix, _ = cute.arch.block_idx()
    scratch = allocate_scratch()
    partials = Int32(cute.size(amax.shape)) // stack - 1
    element_bytes = const_expr(4 if plan.dtype == "float32" else 2)
    chunks = Int64(x.shape[0] // stack) * Int64(x.shape[1]) * element_bytes // 16
    share = (chunks + (partials - 1)) // Int64(partials)
    first = Int64(cta) * share
    length = cutlass.min(share, cutlass.max(chunks - first, Int64(0)))
    start = Int64(x.iterator.toint()) + (Int64(matrix) * chunks + first) * 16
    value = span_amax(start, Int32(length), tid, plan.dtype, plan.threads)
    value = cta_max(value, scratch, plan.threads)
    if tid == 0:
        address = Int64(amax.iterator.toint()) + Int64(stack + matrix * partials + cta) * 4
        ptx.store_float(address, value)


@cute.jit
def launch_partial_amax(
    x: cute.Tensor, amax: cute.Tensor, stack: Int32, stream, plan: cutlass.Constexpr
):
    partials = cute.size(amax.shape) // stack - 1
    partial_amax(x, amax, stack, plan).launch(
        grid=[partials, stack, 1], block=[plan.threads, 1, 1], stream=stream
    )


@cute.kernel
def group_amax(x: cute.Tensor, group: Int64, amax: Int64, plan: cutlass.Constexpr):
    """x [rows, cols], a warp per row; raises amax[group[row]], fp32 and 0 before, to the row's
    amax.

    group is int64 and below 2^31. Numbers that are not negative, a NaN above all, are ordered as
    their bits are. Warps without a row repeat the last one, which changes no maximum.
    """
    cta, _, _ = cute.arch.block_idx()
    lane = Int32(cute.arch.lane_idx())
    warps = const_expr(plan.threads // 32)
    row = cutlass.min(Int32(cta) * warps + Int32(cute.arch.warp_idx()), Int32(x.shape[0]) - 1)
    element_bytes = const_expr(4 if plan.dtype == "float32" else 2)
    chunks = Int32(x.shape[1]) * element_bytes // 16
    start = Int64(x.iterator.toint()) + Int64(row) * Int64(chunks) * 16
    value = warp_max(span_amax(start, chunks, lane, plan.dtype, 32))
    if lane == 0:
        index = Int64(ptx.load_words(group + Int64(row) * 8, 1)[0])
        ptx.global_max(amax + index * 4, ptx.bits(value))


@cute.jit
def launch_group_amax(x: cute.Tensor, group: Int64, amax: Int64, stream, plan: cutlass.Constexpr):
    ctas = cute.ceil_div(x.shape[0], plan.threads // 32)
    group_amax(x, group, amax, plan).launch(
        grid=[ctas, 1, 1], block=[plan.threads, 1, 1], stream=stream
    )
