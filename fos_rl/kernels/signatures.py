"""What each kernel is compiled for: its launch function, typed placeholders, and constants.

One binary serves every shape: sizes are symbols, of which only divisibility is fixed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from fos_rl.kernels import amax_kernel, dequantize_kernel
from fos_rl.kernels.amax_kernel import AmaxPlan
from fos_rl.kernels.arithmetic import Encoding
from fos_rl.kernels.dequantize_kernel import Decode, Epilogue
from fos_rl.kernels.launchers import LAUNCHERS
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


def quantize(layout: str, encoding: tuple, plan: tuple, output: tuple):
    """layout is a key of LAUNCHERS; the tuples are the fields of Encoding, Plan and Output.

    x is a tensor, which fixes device and stream; other tensors are addresses, amax, codes, scales
    and operand, then what the kernel takes as a share, the stack, and CTAs.
    """
    fields = Encoding(*encoding)
    job = Job(fields, Plan(*plan), Output(*output))
    others = (*(Int64(0) for _ in range(4)), *(Int32(1) for _ in range(3)))
    return LAUNCHERS[layout], (_matrix(fields.dtype, 16, 16), *others, _stream(), job)


def partial_amax(dtype: str, threads: int):
    launch = amax_kernel.launch_partial_amax
    return launch, (
        _matrix(dtype, 16, 16),
        _vector(),
        Int32(1),
        _stream(),
        AmaxPlan(dtype, threads),
    )


def group_amax(dtype: str, threads: int):
    """Addresses are those of each row's group and of the amaxes."""
    addresses = (Int64(0), Int64(0))
    launch = amax_kernel.launch_group_amax
    return launch, (_matrix(dtype, 16, 16), *addresses, _stream(), AmaxPlan(dtype, threads))


def decode(what: str, e4m3_scale_bound: int, dtype: str, many: bool):
    launch = dequantize_kernel.launch_decode
    tensors = (
        _matrix("uint8", 8, 8), _matrix("uint8", 1, 1), _vector(), _matrix(dtype, 16, 16),
    )  # fmt: skip
    return launch, (
        *tensors,
        Int32(1),
        Int32(1),
        _stream(),
        Decode(what, e4m3_scale_bound, dtype, many),
    )


def epilogue(dtype: str, reciprocal: float, row_scaled: bool, bias: bool):
    """Columns are a multiple of 8."""
    launch = dequantize_kernel.launch_epilogue
    tensors = (
        _matrix("float32", 8, 16), _vector(), _vector(), _vector(), _matrix(dtype, 8, 16),
    )  # fmt: skip
    return launch, (*tensors, _stream(), Epilogue(dtype, reciprocal, row_scaled, bias))
