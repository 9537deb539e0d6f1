"""Decoding kernels: NVFP4 to numbers or to the exact operand of a GEMM, and a GEMM's epilogue."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from fos_rl.kernels import arithmetic, minifloat, ptx

THREADS = 256


@dataclass(frozen=True)
class Decode:
    """What to write: value (code * scale * amax / (6 * bound)) or operand (code * scale).

    many says that there is more than one amax.
    """

    what: str
    e4m3_scale_bound: int
    dtype: str
    many: bool


def _decode_and_store(address: Int64, word: Uint32, scale: Float32, dtype: str) -> None:
    """Store the low codes of word times scale as 16 bytes of dtype, each rounded once."""
    values = [ptx.mul(value, scale) for value in arithmetic.decode_codes(word)]
    if dtype == "float32":
        ptx.store_words(address, *(ptx.bits(value) for value in values[:4]))
    else:
        pairs = (ptx.bf16_pair(values[i], values[i + 1]) for i in range(0, 8, 2))
        ptx.store_words(address, *pairs)


@cute.kernel
def decode(
    codes: cute.Tensor,
    scales: cute.Tensor,
    amax: cute.Tensor,
    out: cute.Tensor,
    rows_each: Int32,
    plan: cutlass.Constexpr,
):
    """out [rows, cols]; amax i belongs to rows i * rows_each and following. A thread 16 bytes."""
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    # Pieces of 16 bytes in a block, and their number in all and for each amax.
    pieces = const_expr(4 if plan.dtype == "float32" else 2)
    row_pieces = Int64(Int32(out.shape[1]) // 16) * pieces
    count, count_each = row_pieces * Int64(out.shape[0]), row_pieces * Int64(rows_each)
    codes_at, scales_at = Int64(codes.iterator.toint()), Int64(scales.iterator.toint())
    out_at, amax_at = Int64(out.iterator.toint()), Int64(amax.iterator.toint())
    piece = Int64(cta) * THREADS + Int64(tid)
    step = Int64(ctas) * THREADS
    while piece < count:
        word = ptx.load_codes(codes_at + piece * (8 // pieces), 8 // pieces)
        scale = minifloat.e4m3_to_float(ptx.load_byte(scales_at + piece // pieces))
        if const_expr(plan.what == "value"):
            group = Int64(0)
            if const_expr(plan.many):
                group = piece // count_each
            product = ptx.mul(scale, ptx.load_float(amax_at + group * 4))
            scale = ptx.mul(product, arithmetic.reciprocal(6.0 * plan.e4m3_scale_bound))
        _decode_and_store(out_at + piece * 16, word, scale, plan.dtype)
        piece = piece + step


@cute.jit
def launch_decode(
    codes: cute.Tensor,
    scales: cute.Tensor,
    amax: cute.Tensor,
    out: cute.Tensor,
    rows_each: Int32,
    ctas: Int32,
    stream,
    plan: cutlass.Constexpr,
):
    decode(codes, scales, amax, out, rows_each, plan).launch(
        grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


@dataclass(frozen=True)
class Epilogue:
    """The fp32 sums of a GEMM to dtype; reciprocal is fl(1 / (36 * bound_a * bound_b))."""

    dtype: str
    reciprocal: float
    row_scaled: bool
    bias: bool


@cute.kernel
def epilogue(
    sums: cute.Tensor,
    a_amax: cute.Tensor,
    b_amax: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """out = sums * scales + bias as apply_global_scales and quantized_gemm order it; a CTA per row.

    The last rows come first: the GEMM wrote them last, so they are in the L2 cache.
    """
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    row = Int32(out.shape[0]) - 1 - Int32(cta)
    cols = Int32(out.shape[1])
    a_index = Int64(row) if const_expr(plan.row_scaled) else Int64(0)
    a = ptx.load_float(Int64(a_amax.iterator.toint()) + a_index * 4)
    scale = ptx.mul(a, ptx.load_float(Int64(b_amax.iterator.toint())))
    if const_expr(not plan.row_scaled):
        scale = ptx.mul(scale, plan.reciprocal)
    sums_at = Int64(sums.iterator.toint()) + Int64(row) * Int64(cols) * 4
    size = const_expr(4 if plan.dtype == "float32" else 2)
    out_at = Int64(out.iterator.toint()) + Int64(row) * Int64(cols) * size
    bias_at = Int64(bias.iterator.toint())
    for column in cutlass.range(tid * 8, cols, THREADS * 8, unroll=1):
        words = [
            *ptx.load_words(sums_at + Int64(column) * 4, 4),
            *ptx.load_words(sums_at + Int64(column) * 4 + 16, 4),
        ]
        values = []
        for i in range_constexpr(8):
            value = ptx.from_bits(words[i])
            if const_expr(plan.row_scaled):
                value = ptx.mul(value, plan.reciprocal)
            value = ptx.mul(value, scale)
            if const_expr(plan.bias):
                value = ptx.add(value, ptx.load_float(bias_at + Int64(column + i) * 4))
            values.append(value)
        if const_expr(plan.dtype == "float32"):
            for i in range_constexpr(0, 8, 4):
                address = out_at + Int64(column + i) * 4
                ptx.store_words(address, *(ptx.bits(v) for v in values[i : i + 4]))
        else:
            pairs = [ptx.bf16_pair(values[i], values[i + 1]) for i in range(0, 8, 2)]
            ptx.store_words(out_at + Int64(column) * 2, *pairs)


@cute.jit
def launch_epilogue(
    sums: cute.Tensor,
    a_amax: cute.Tensor,
    b_amax: cute.Tensor,
    bias: cute.Tensor,
    out: cute.Tensor,
    stream,
    plan: cutlass.Constexpr,
):
    epilogue(sums, a_amax, b_amax, bias, out, plan).launch(
        grid=[out.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream
    )
