"""The host functions of the quantizing kernels, which all take the same arguments.

``cute.compile`` reads types from a signature, so it is written out here, once for all kernels.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fos_rl.kernels.columnwise_quantize_kernel import quantize_columns
from fos_rl.kernels.quantize_kernel import quantize_matrix, quantize_rows, quantize_squares
from fos_rl.kernels.small_quantize_kernel import (
    quantize_blocks,
    quantize_short_rows,
    quantize_split_rows,
)
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
    "quantize_matrix": _launcher(
        lambda x, at, share, stack, job: quantize_matrix(x, *at, share, stack, job),
        _for_each_matrix,
    ),
    "quantize_squares": _launcher(
        lambda x, at, share, stack, job: quantize_squares(x, *at, share, stack, job),
        _for_each_matrix,
    ),
    "quantize_columns": _launcher(
        lambda x, at, share, stack, job: quantize_columns(x, *at, share, stack, False, job),
        _for_each_matrix,
    ),
    "quantize_column_squares": _launcher(
        lambda x, at, share, stack, job: quantize_columns(x, *at, share, stack, True, job),
        _for_each_matrix,
    ),
    "quantize_rows": _launcher(
        lambda x, at, share, stack, job: quantize_rows(x, *at, job), _for_each_row
    ),
    "quantize_blocks": _launcher(
        lambda x, at, share, stack, job: quantize_blocks(x, *at, share, stack, job), _for_all
    ),
    "quantize_short_rows": _launcher(
        lambda x, at, share, stack, job: quantize_short_rows(x, *at, share, job), _for_all
    ),
    "quantize_split_rows": _launcher(
        lambda x, at, share, stack, job: quantize_split_rows(x, *at, share, job), _for_all
    ),
}
"""By the name of the layout (layouts.py)."""
