"""The amax of each matrix of a stack, as partial maxima that the quantizing kernel combines.

Leaving the last step to the reader saves a launch and the zeroing of an accumulator.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fos_rl.kernels import ptx
from fos_rl.kernels.tiles import allocate_scratch, cta_max, span_amax


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
    element_bytes = cutlass.const_expr(4 if plan.dtype == "float32" else 2)
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
