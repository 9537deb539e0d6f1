"""What each kernel is compiled for: its launch function, typed placeholders, and constants.

One binary serves every shape: sizes are symbols, of which only divisibility is fixed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from fos_rl.kernels import amax_kernel, columnwise_kernel, dequantize_kernel, quantize_kernel
from fos_rl.kernels.amax_kernel import AmaxPlan
from fos_rl.kernels.arithmetic import Recipe
from fos_rl.kernels.dequantize_kernel import Decode, Epilogue
from fos_rl.kernels.tiles import Job, Output, Plan

ELEMENTS = {
    "bfloat16": cutlass.BFloat16,
    "float32": cutlass.Float32,
    "uint8": cutlass.Uint8,
}


def _matrix(dtype: str, divisibility: int, alignment: int):
    shape = (cute.sym_int(), cute.sym_int(divisibility=divisibility))
    return make_fake_compact_tensor(
        ELEMENTS[dtype], shape, stride_order=(1, 0), assumed_align=alignment
    )


def _vector():
    return make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=4)


def _stream():
    return make_fake_stream(use_tvm_ffi_env_stream=True)


def quantize(layout: str, recipe: tuple, plan: tuple, output: tuple):
    """layout is flat, square, rowwise, columnwise or columnwise_square.

    The tuples are the fields of Recipe, Plan and Output.
    """
    fields = Recipe(*recipe)
    module = columnwise_kernel if layout.startswith("columnwise") else quantize_kernel
    launch = getattr(module, f"launch_{layout}")
    writes = Output(*output)
    tensors = (
        _matrix(fields.dtype, 16, 16),
        _vector(),
        _matrix("uint8", 8, 8),
        _matrix("uint8", 1, 1),
        _matrix("bfloat16" if writes.operand else fields.dtype, 16, 16),
    )
    return launch, (*tensors, Int32(1), Int32(1), _stream(), Job(fields, Plan(*plan), writes))


def partial_amax(dtype: str, threads: int):
    launch = amax_kernel.launch_partial_amax
    return launch, (
        _matrix(dtype, 16, 16),
        _vector(),
        Int32(1),
        _stream(),
        AmaxPlan(dtype, threads),
    )


def decode(what: str, bound: int, dtype: str, many: bool):
    launch = dequantize_kernel.launch_decode
    tensors = (
        _matrix("uint8", 8, 8), _matrix("uint8", 1, 1), _vector(), _matrix(dtype, 16, 16),
    )  # fmt: skip
    return launch, (*tensors, Int32(1), Int32(1), _stream(), Decode(what, bound, dtype, many))


def epilogue(dtype: str, reciprocal: float, row_scaled: bool, bias: bool):
    """Columns are a multiple of 8."""
    launch = dequantize_kernel.launch_epilogue
    tensors = (
        _matrix("float32", 8, 16), _vector(), _vector(), _vector(), _matrix(dtype, 8, 16),
    )  # fmt: skip
    return launch, (*tensors, _stream(), Epilogue(dtype, reciprocal, row_scaled, bias))
