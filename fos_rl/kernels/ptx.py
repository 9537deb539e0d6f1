"""PTX instructions, one function each, for code whose rounding must not depend on a compiler.

CuTe DSL turns ``a * b + c`` into one fma and may reorder or approximate; inline PTX with an
explicit ``.rn`` is neither fused nor reordered by LLVM or ptxas. Subnormals are kept everywhere
(no ``.ftz``).

Imports cutlass, so it is itself imported only when a kernel is built.
"""

import struct

from cutlass import Boolean, Float32, Int64, Uint32
from cutlass._mlir.dialects import arith, llvm
from cutlass.base_dsl.typing import Numeric

_CONSTRAINT = {Float32: "f", Uint32: "r", Int64: "l"}


def float_bits(value: float) -> int:
    """The bits of value as fp32."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def float_literal(value: float) -> str:
    """value, exact in fp32, as a PTX immediate."""
    return f"0f{float_bits(value):08X}"


def _operand(value):
    return value.ir_value() if isinstance(value, Numeric) else value


def _emit(text: str, results: tuple, args: tuple, side_effects: bool = False):
    """Emit text with operands $0.. (results) and then args; an arg that is a str is substituted
    as an immediate."""
    operands, constraints = [], [f"={_CONSTRAINT[r]}" for r in results]
    index = len(results)
    names = [f"${i}" for i in range(index)]
    for arg in args:
        if isinstance(arg, str):
            names.append(arg)
            continue
        names.append(f"${index}")
        index += 1
        constraints.append(_CONSTRAINT[type(arg)])
        operands.append(_operand(arg))
    types = [r.mlir_type for r in results]
    if not types:
        result_type = None
    elif len(types) == 1:
        result_type = types[0]
    else:
        result_type = llvm.StructType.get_literal(types)
    out = llvm.inline_asm(
        result_type,
        operands,
        text.format(*names),
        ",".join(constraints),
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if not types:
        return None
    if len(types) == 1:
        return results[0](out)
    return tuple(r(llvm.extractvalue(r.mlir_type, out, [i])) for i, r in enumerate(results))


def _f(value) -> object:
    return float_literal(value) if isinstance(value, float) else value


def _u(value) -> object:
    return f"0x{value & 0xFFFFFFFF:X}" if isinstance(value, int) else value


def mul(a, b) -> Float32:
    return _emit("mul.rn.f32 {0}, {1}, {2};", (Float32,), (_f(a), _f(b)))


def add(a, b) -> Float32:
    return _emit("add.rn.f32 {0}, {1}, {2};", (Float32,), (_f(a), _f(b)))


def sub(a, b) -> Float32:
    return _emit("sub.rn.f32 {0}, {1}, {2};", (Float32,), (_f(a), _f(b)))


def fma(a, b, c) -> Float32:
    return _emit("fma.rn.f32 {0}, {1}, {2}, {3};", (Float32,), (_f(a), _f(b), _f(c)))


def div(a, b) -> Float32:
    return _emit("div.rn.f32 {0}, {1}, {2};", (Float32,), (_f(a), _f(b)))


def rcp(a) -> Float32:
    return _emit("rcp.rn.f32 {0}, {1};", (Float32,), (a,))


def mul_as_f64(a, b: float) -> Float32:
    """fl32(fl64(a * b)) for a constant b given in fp64: no branches, unlike div.rn.f32."""
    text = (
        "{{\n.reg .f64 w;\ncvt.f64.f32 w, {1};\nmul.rn.f64 w, w, {2};\ncvt.rn.f32.f64 {0}, w;\n}}"
    )
    bits64 = struct.unpack("<Q", struct.pack("<d", b))[0]
    return _emit(text, (Float32,), (a, f"0d{bits64:016X}"))


def neg(a) -> Float32:
    return _emit("neg.f32 {0}, {1};", (Float32,), (a,))


def abs_(a) -> Float32:
    return _emit("abs.f32 {0}, {1};", (Float32,), (a,))


def max_(a, b) -> Float32:
    """The larger; a NaN operand is dropped."""
    return _emit("max.f32 {0}, {1}, {2};", (Float32,), (_f(a), _f(b)))


def max_nan(a, b) -> Float32:
    """The larger; NaN if an operand is NaN."""
    return _emit("max.NaN.f32 {0}, {1}, {2};", (Float32,), (_f(a), _f(b)))


def min_(a, b) -> Float32:
    """The smaller; a NaN operand is dropped."""
    return _emit("min.f32 {0}, {1}, {2};", (Float32,), (_f(a), _f(b)))


def min_nan(a, b) -> Float32:
    """The smaller; NaN if an operand is NaN."""
    return _emit("min.NaN.f32 {0}, {1}, {2};", (Float32,), (_f(a), _f(b)))


def max_nan_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Per half the larger; NaN if either is NaN."""
    return _emit("max.NaN.bf16x2 {0}, {1}, {2};", (Uint32,), (a, b))


def max_abs_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Per half the larger magnitude (its sign bit is an xor of signs), NaN if either is NaN."""
    return _emit("max.NaN.xorsign.abs.bf16x2 {0}, {1}, {2};", (Uint32,), (a, b))


def bits(a: Float32) -> Uint32:
    return Uint32(llvm.bitcast(Uint32.mlir_type, a.ir_value()))


def from_bits(a: Uint32) -> Float32:
    return Float32(llvm.bitcast(Float32.mlir_type, a.ir_value()))


def and_(a, b) -> Uint32:
    return _emit("and.b32 {0}, {1}, {2};", (Uint32,), (a, _u(b)))


def or_(a, b) -> Uint32:
    return _emit("or.b32 {0}, {1}, {2};", (Uint32,), (a, _u(b)))


def iadd(a, b) -> Uint32:
    return _emit("add.u32 {0}, {1}, {2};", (Uint32,), (a, _u(b)))


def sar(a, n: int) -> Uint32:
    """a shifted right with its sign."""
    return _emit("shr.s32 {0}, {1}, {2};", (Uint32,), (a, str(n)))


def imax(a, b) -> Uint32:
    """The larger of two signed integers."""
    return _emit("max.s32 {0}, {1}, {2};", (Uint32,), (a, _u(b)))


def umin(a, b) -> Uint32:
    return _emit("min.u32 {0}, {1}, {2};", (Uint32,), (a, _u(b)))


def shl(a, n: int) -> Uint32:
    return _emit("shl.b32 {0}, {1}, {2};", (Uint32,), (a, str(n)))


def shr(a, n: int) -> Uint32:
    return _emit("shr.u32 {0}, {1}, {2};", (Uint32,), (a, str(n)))


def lop3(a, b, c, table: int) -> Uint32:
    """Bitwise function of three operands; table is its value for a=0xF0, b=0xCC, c=0xAA."""
    args = (_u(a), _u(b), _u(c), f"0x{table:X}")
    return _emit("lop3.b32 {0}, {1}, {2}, {3}, {4};", (Uint32,), args)


def bit_select(mask: int, a, b) -> Uint32:
    """The bits of a where mask is set, else those of b."""
    return lop3(a, b, mask, (0xF0 & 0xAA) | (0xCC & ~0xAA & 0xFF))


def prmt(a, b, selector: int) -> Uint32:
    """Four bytes of the pair (a, b) by the selector's nibbles; nibble bit 3 spreads the sign."""
    return _emit("prmt.b32 {0}, {1}, {2}, {3};", (Uint32,), (a, b, f"0x{selector:X}"))


def prmt_by(a, b, selector: Uint32) -> Uint32:
    """prmt by the low four nibbles of a register."""
    return _emit("prmt.b32 {0}, {1}, {2}, {3};", (Uint32,), (a, b, selector))


def select(condition: Boolean, a, b):
    out = arith.select(condition.ir_value(), a.ir_value(), b.ir_value())
    return type(a)(out)


def e4m3_pair(low: Float32, high: Float32) -> Uint32:
    """E4M3 bytes of two fp32 (low in bits 0..7), nearest even, saturating at 448, NaN 0x7F."""
    return _emit(
        "{{\n.reg .b16 h, zero;\nmov.b16 zero, 0;\n"
        "cvt.rn.satfinite.e4m3x2.f32 h, {1}, {2};\nmov.b32 {0}, {{h, zero}};\n}}",
        (Uint32,),
        (high, low),
    )


def e5m2_quad(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """E5M2 bytes of four fp32, a lowest."""
    return _emit(
        "{{\n.reg .b16 lo, hi;\n"
        "cvt.rn.satfinite.e5m2x2.f32 lo, {2}, {1};\n"
        "cvt.rn.satfinite.e5m2x2.f32 hi, {4}, {3};\n"
        "mov.b32 {0}, {{lo, hi}};\n}}",
        (Uint32,),
        (a, b, c, d),
    )


def e2m1_word(*values: Float32) -> Uint32:
    """E2M1 codes of eight fp32, the first lowest: nearest even, saturating at 6, NaN 7."""
    return _emit(
        "{{\n.reg .b8 b0, b1, b2, b3;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b0, {2}, {1};\n"
        "cvt.rn.satfinite.e2m1x2.f32 b1, {4}, {3};\n"
        "cvt.rn.satfinite.e2m1x2.f32 b2, {6}, {5};\n"
        "cvt.rn.satfinite.e2m1x2.f32 b3, {8}, {7};\n"
        "mov.b32 {0}, {{b0, b1, b2, b3}};\n}}",
        (Uint32,),
        values,
    )


def e2m1_to_halves(word: Uint32, i: int) -> Uint32:
    """The two fp16 of the E2M1 codes in byte i of word, low nibble first.

    Not by ``mov.b32 {b0, b1, b2, b3}``, of which the ptxas in nvidia-cutlass-dsl 4.8.1 crashes
    where word was loaded as two bytes.
    """
    return _emit(
        "{{\n.reg .b8 byte;\n.reg .b32 low;\n"
        f"shr.u32 low, {{1}}, {8 * i};\n"
        "cvt.u8.u32 byte, low;\ncvt.rn.f16x2.e2m1x2 {0}, byte;\n}}",
        (Uint32,),
        (word,),
    )


def bf16_pair(low: Float32, high: Float32) -> Uint32:
    """bf16 of two fp32, nearest even, low in bits 0..15."""
    return _emit("cvt.rn.bf16x2.f32 {0}, {1}, {2};", (Uint32,), (high, low))


def half_pair(low: Float32, high: Float32) -> Uint32:
    """fp16 of two fp32, nearest even, low in bits 0..15."""
    return _emit("cvt.rn.f16x2.f32 {0}, {1}, {2};", (Uint32,), (high, low))


def mul_f16x2(a: Uint32, b: Uint32) -> Uint32:
    return _emit("mul.rn.f16x2 {0}, {1}, {2};", (Uint32,), (a, b))


def mul_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """a * b rounded once: -0 added, because sm_89 has the fma alone."""
    return _emit("fma.rn.bf16x2 {0}, {1}, {2}, {3};", (Uint32,), (a, b, Uint32(0x80008000)))


def halves_to_float(pair: Uint32) -> tuple[Float32, Float32]:
    """The two fp16 of a word as fp32, low first."""
    return _emit(
        "{{\n.reg .b16 lo, hi;\nmov.b32 {{lo, hi}}, {2};\n"
        "cvt.f32.f16 {0}, lo;\ncvt.f32.f16 {1}, hi;\n}}",
        (Float32, Float32),
        (pair,),
    )


def e4m3_to_float(byte: Uint32) -> Float32:
    """fp32 of the E4M3 in bits 0..7."""
    return _emit(
        "{{\n.reg .b16 h, lo, hi;\n.reg .b32 pair;\ncvt.u16.u32 h, {1};\n"
        "cvt.rn.f16x2.e4m3x2 pair, h;\nmov.b32 {{lo, hi}}, pair;\ncvt.f32.f16 {0}, lo;\n}}",
        (Float32,),
        (byte,),
    )


def shuffle_xor(a, lanes: int):
    """a of the lane whose index differs in the bits of lanes; all 32 lanes take part."""
    kind = type(a)
    text = "shfl.sync.bfly.b32 {0}, {1}, {2}, 0x1F, 0xFFFFFFFF;"
    return _emit(text, (kind,), (a, f"0x{lanes:X}"), side_effects=True)


def shuffle_down(a, lanes: int):
    """a of the lane lanes above, this lane's own where there is none; all 32 lanes take part."""
    kind = type(a)
    text = "shfl.sync.down.b32 {0}, {1}, {2}, 0x1F, 0xFFFFFFFF;"
    return _emit(text, (kind,), (a, f"0x{lanes:X}"), side_effects=True)


def load_words(address: Int64, count: int) -> tuple[Uint32, ...]:
    """1, 2 or 4 words of read-only global memory at an address aligned to their size."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[count]
    names = ", ".join(f"{{{i}}}" for i in range(count))
    target = names if count == 1 else f"{{{{{names}}}}}"
    text = f"ld.global.nc{vector}.u32 {target}, [{{{count}}}];"
    out = _emit(text, (Uint32,) * count, (address,), side_effects=True)
    return (out,) if count == 1 else out


def store_words(address: Int64, *words: Uint32) -> None:
    """1, 2 or 4 words to global memory at an address aligned to their size."""
    count = len(words)
    vector = {1: "", 2: ".v2", 4: ".v4"}[count]
    names = ", ".join(f"{{{i + 1}}}" for i in range(count))
    source = names if count == 1 else f"{{{{{names}}}}}"
    _emit(f"st.global{vector}.u32 [{{0}}], {source};", (), (address, *words), side_effects=True)


def store_byte(address: Int64, value: Uint32) -> None:
    _emit("st.global.u8 [{0}], {1};", (), (address, value), side_effects=True)


def load_byte(address: Int64) -> Uint32:
    return _emit("ld.global.nc.u8 {0}, [{1}];", (Uint32,), (address,), side_effects=True)


def load_codes(address: Int64, count: int) -> Uint32:
    """2 or 4 bytes of read-only global memory."""
    text = f"ld.global.nc.u{8 * count} {{0}}, [{{1}}];"
    return _emit(text, (Uint32,), (address,), side_effects=True)


def load_float(address: Int64) -> Float32:
    return _emit("ld.global.nc.f32 {0}, [{1}];", (Float32,), (address,))


def store_float(address: Int64, value: Float32) -> None:
    _emit("st.global.f32 [{0}], {1};", (), (address, value), side_effects=True)


def shared_load(address: Uint32, count: int):
    """1, 2 or 4 fp32 of shared memory at a 32-bit shared address."""
    vector = {1: "", 2: ".v2", 4: ".v4"}[count]
    names = ", ".join(f"{{{i}}}" for i in range(count))
    target = names if count == 1 else f"{{{{{names}}}}}"
    text = f"ld.shared{vector}.f32 {target}, [{{{count}}}];"
    return _emit(text, (Float32,) * count, (address,), side_effects=True)


def shared_store(address: Uint32, *values: Float32) -> None:
    count = len(values)
    vector = {1: "", 2: ".v2", 4: ".v4"}[count]
    names = ", ".join(f"{{{i + 1}}}" for i in range(count))
    source = names if count == 1 else f"{{{{{names}}}}}"
    _emit(f"st.shared{vector}.f32 [{{0}}], {source};", (), (address, *values), side_effects=True)


def shared_max(address: Uint32, value: Uint32) -> None:
    """Raise a word of shared memory to value, atomically in the CTA."""
    _emit("red.shared.max.u32 [{0}], {1};", (), (address, value), side_effects=True)


def global_max(address: Int64, value: Uint32) -> None:
    """Raise a word of global memory to value, atomically on the device."""
    _emit("red.global.max.u32 [{0}], {1};", (), (address, value), side_effects=True)


def fresh(a: Uint32) -> Uint32:
    """a, as a value that no compiler merges with what was computed from a before.

    Recomputing is cheaper than keeping it in registers across a branch.
    """
    return _emit("mov.b32 {0}, {1};", (Uint32,), (a,), side_effects=True)


def fresh_address(a: Int64) -> Int64:
    """a, as a value that no compiler takes apart: one register pair, not a sum made anew."""
    return _emit("mov.b64 {0}, {1};", (Int64,), (a,), side_effects=True)


def prefetch(address: Int64) -> None:
    """Bring the sector at address to the L1 cache."""
    _emit("prefetch.global.L1 [{0}];", (), (address,), side_effects=True)


def keep_branch() -> None:
    """Make the surrounding branch a real one.

    ptxas 12.9 and 13.x turn even branches of hundreds of instructions into predicated code, whose
    cost is that of both sides. A performance-monitor trigger cannot be predicated away.
    """
    _emit("pmevent 0;", (), (), side_effects=True)
