"""The host functions of the quantizing kernels, which all take the same arguments.

``cute.compile`` reads types from a signature, so it is written out here, once for all kernels.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fos_rl.kernels.columnwise_quantize_kernel import columnwise
from fos_rl.kernels.quantize_kernel import flat, rowwise, square
from fos_rl.kernels.small_quantize_kernel import blocks, parts, rows
from fos_rl.kernels.tiles import launch_options


def _launcher(call: Callable, grid: Callable) -> Callable:
    """call is of x, the four addresses, share, stack and job; grid of x, stack and CTAs."""

    @cute.jit
    def launch(
        x: cute.Tensor,
        amax: Int64,
        codes: Int64,
        scales: Int64,
        operand: Int64,
        share: Int32,
        stack: Int32,
        ctas: Int32,
        stream,
        job: cutlass.Constexpr,
    ):
        kernel = call(x, (amax, codes, scales, operand), share, stack, job)
        kernel.launch(grid=grid(x, stack, ctas), **launch_options(job, stream))

    return launch


def _for_all(x, stack, ctas):
    return [ctas, 1, 1]


def _for_each_matrix(x, stack, ctas):
    return [ctas, stack, 1]


def _for_each_row(x, stack, ctas):
    return [x.shape[0], 1, 1]


LAUNCHERS = {
    "flat": _launcher(
        lambda x, at, share, stack, job: flat(x, *at, share, stack, job), _for_each_matrix
    ),
    "square": _launcher(
        lambda x, at, share, stack, job: square(x, *at, share, stack, job), _for_each_matrix
    ),
    "columnwise": _launcher(
        lambda x, at, share, stack, job: columnwise(x, *at, share, stack, False, job),
        _for_each_matrix,
    ),
    "columnwise_square": _launcher(
        lambda x, at, share, stack, job: columnwise(x, *at, share, stack, True, job),
        _for_each_matrix,
    ),
    "rowwise": _launcher(lambda x, at, share, stack, job: rowwise(x, *at, job), _for_each_row),
    "blocks": _launcher(
        lambda x, at, share, stack, job: blocks(x, *at, share, stack, job), _for_all
    ),
    "rows": _launcher(lambda x, at, share, stack, job: rows(x, *at, share, job), _for_all),
    "parts": _launcher(lambda x, at, share, stack, job: parts(x, *at, share, job), _for_all),
}
"""By the name of the layout (layouts.py)."""
