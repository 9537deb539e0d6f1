"""E4M3, E5M2 and the larger of bf16 magnitudes where an architecture may lack the instruction.

Before compute capability 8.9 (8.6 for the magnitudes) exact arithmetic gives the instruction's
bits.
"""

from cutlass import Float32, Uint32

from fos_rl.kernels import ptx, target

E4M3_MAX = 448.0
# A value of E4M3 times this has its code in the exponent and the first three bits of fp32.
_TO_CODE = 2.0**-120


def e4m3_pair(low: Float32, high: Float32) -> Uint32:
    """E4M3 bytes of two fp32 >= 0 (low in bits 0..7), nearest even, saturating, NaN 0x7F."""
    if target.has_fp8():
        return ptx.e4m3_pair(low, high)
    return ptx.or_(_to_e4m3(low), ptx.shl(_to_e4m3(high), 8))


def _to_e4m3(x: Float32) -> Uint32:
    """Adding a shift whose ulp is E4M3's quantum at x rounds x; a NaN stays one to the end."""
    clamped = ptx.min_nan(x, E4M3_MAX)
    power = ptx.from_bits(ptx.and_(ptx.bits(clamped), 0x7F800000))
    # Below 2^-6 the quantum is 2^-9.
    shift = ptx.max_(ptx.mul(power, 2.0**20), 2.0**14)
    rounded = ptx.sub(ptx.add(clamped, shift), shift)
    return ptx.umin(ptx.shr(ptx.bits(ptx.mul(rounded, _TO_CODE)), 20), 0x7F)


def e4m3_to_float(byte: Uint32) -> Float32:
    """fp32 of the E4M3 in bits 0..7."""
    if target.has_fp8():
        return ptx.e4m3_to_float(byte)
    # The sign to bit 31, the rest to bits 20..26.
    word = ptx.and_(ptx.sar(ptx.shl(byte, 24), 4), 0x87F00000)
    value = ptx.mul(ptx.from_bits(word), 1.0 / _TO_CODE)
    is_nan = ptx.and_(word, 0x07F00000) == Uint32(0x07F00000)
    return ptx.select(is_nan, ptx.from_bits(Uint32(0x7FFFFFFF)), value)


def e5m2_quad(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """E5M2 bytes of four fp32 that are values of E5M2, a lowest."""
    if target.has_fp8():
        return ptx.e5m2_quad(a, b, c, d)
    # High bytes of fp16.
    return ptx.prmt(ptx.half_pair(a, b), ptx.half_pair(c, d), 0x7531)


def larger_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Per half the larger magnitude, whose sign bit means nothing; NaN if either is NaN."""
    if target.has_xorsign():
        return ptx.max_abs_bf16x2(a, b)
    return ptx.max_nan_bf16x2(ptx.and_(a, 0x7FFF7FFF), ptx.and_(b, 0x7FFF7FFF))
