"""The quantizer's arithmetic on one block, as traced device code: scales, errors, codes.

Every function states which fp32 operation of ``fos_rl.quant.four_over_six`` it reproduces and why
it may take a shorter way. E2M1 values and products are carried times the ``scale`` of the form in
which ``packed`` holds them, 2^-14 or 1.
"""

import struct
from dataclasses import dataclass

from cutlass import Boolean, Float32, Uint32

from fos_rl.kernels import minifloat, ptx, target
from fos_rl.kernels.packed import E5M2_BYTES, packing

BLOCK = 16
FP32_MAX = 3.4028234663852886e38
# Of values that are rounded here rather than by an instruction.
VALUE_SCALE = E5M2_BYTES.scale
# A value in [2, 4) times this has the quantum of E2M1 there, 1, as its ulp; so in other binades.
MAGNIFIED = 2.0**22
# Subtracting from 1.5 * 2^22 rounds to multiples of 1/2, to nearest even.
ROUND_TO_HALF = 1.5 * MAGNIFIED * VALUE_SCALE
_FIRST_NORMAL_SCALE = 0x08
_LAST_SCALE = 0x7E
_NAN_SCALE = 0x7F
# Amaxes for which no intermediate of the short formulas leaves the normal range.
AMAX_LOW, AMAX_HIGH = 2.0**-60, 2.0**60
TABLE_ENTRY_BYTES = 16
TABLE_ENTRIES = 128


@dataclass(frozen=True)
class Encoding:
    """What changes the arithmetic: dtype and err_mode are names, the bound is 256 or 448.

    scheme "nvfp4" has no second candidate; err_mode is then unused.
    """

    dtype: str
    scheme: str
    err_mode: str
    e4m3_scale_bound: int


def reciprocal(divisor: float) -> float:
    """fl32(1 / divisor)."""
    return struct.unpack("<f", struct.pack("<f", 1.0 / divisor))[0]


def _reciprocal_pair(divisor: float) -> tuple[float, float]:
    """1/divisor as a sum of two fp32: x / divisor == fma(x, high, x * low), rounded once.

    Checked over all 2^23 significands for 6, 1536 and 2688 (tests/kernels/test_arithmetic.py).
    """
    high = reciprocal(divisor)
    return high, struct.unpack("<f", struct.pack("<f", 1.0 / divisor - high))[0]


def divide_by(x: Float32, divisor: float, scale: float = 1.0) -> Float32:
    """fl(x / divisor) * scale for a power of two scale; x and the quotient in the normal range."""
    high, low = _reciprocal_pair(divisor)
    return ptx.fma(x, high * scale, ptx.mul(x, low * scale))


def divide_any(x: Float32, divisor: float) -> Float32:
    """fl(x / divisor) for any x and 6, 1536 or 2688, as fl32(fl64(x * fl64(1 / divisor))).

    Quotients by 3 or 7 stay far from midpoints of fp32, or, where the quotient is subnormal, are
    exact multiples that the fp64 product gets exactly (checked in tests/kernels).
    """
    return ptx.mul_as_f64(x, 1.0 / divisor)


@dataclass(frozen=True)
class GlobalScale:
    """One amax and what follows from it.

    four is the factor from the map-to-6 to the map-to-4 scale: 1.5, or 1 for an amax of 0 or inf,
    where errors are equal, infinite or NaN, so that map-to-6 wins as it does for equal scales.
    is_wild says that the amax is out of the range of the short formulas.
    """

    amax: Float32
    encode: Float32
    four: Float32
    is_wild: Boolean


def global_scale(amax: Float32, e4m3_scale_bound: int) -> GlobalScale:
    """S_enc = min(fl(6*bound / amax), FLT_MAX), 1 where amax is 0 or inf (nvfp4_encode_scale)."""
    full = ptx.min_nan(ptx.div(6.0 * e4m3_scale_bound, amax), FP32_MAX)
    is_zero = (amax == Float32(0.0)) | (full == Float32(0.0))
    encode = ptx.select(is_zero, Float32(1.0), full)
    outside = (amax < Float32(AMAX_LOW)) | (amax > Float32(AMAX_HIGH))
    four = ptx.select(is_zero, Float32(1.0), Float32(1.5))
    return GlobalScale(amax, encode, four, outside & ~is_zero)


def table_entry(
    scale_byte: Uint32, g: GlobalScale, encoding: Encoding
) -> tuple[Float32, Float32, Float32, Float32]:
    """What depends on one E4M3 scale and the amax: m and m * 2^22, both times the packed form's
    scale, the weight of an estimated error, and the largest block amax for which the short
    candidate applies.

    m = min(fl(1 / fl(scale * fl(1 / S_enc))), FLT_MAX) as in block_multiplier; for an amax out of
    range the first number is m itself. The short candidate is out for subnormal and NaN scales, and
    for a saturated scale whose products pass 6.2; a block of zeros is always easy. The weight of
    scale 0 is 1: careful_sums decides such blocks.
    """
    scale = minifloat.e4m3_to_float(scale_byte)
    decode = ptx.rcp(g.encode)
    multiplier = ptx.min_nan(ptx.rcp(ptx.mul(scale, decode)), FP32_MAX)
    weight = scale if encoding.err_mode == "mae" else ptx.mul(scale, scale)
    weight = ptx.select(scale_byte == Uint32(0), Float32(1.0), weight)
    weight = ptx.select(scale_byte == Uint32(_NAN_SCALE), Float32(0.0), weight)
    careful = (scale_byte < Uint32(_FIRST_NORMAL_SCALE)) | (scale_byte == Uint32(_NAN_SCALE))
    limit = ptx.select(
        scale_byte == Uint32(_LAST_SCALE), ptx.mul(decode, 6.0 * 464.0), Float32(FP32_MAX)
    )
    limit = ptx.select(careful, Float32(-1.0), limit)
    limit = ptx.select(scale_byte == Uint32(0), Float32(0.0), limit)
    form = packing()
    first = ptx.select(g.is_wild, multiplier, ptx.mul(multiplier, form.scale))
    # Finite, for the sake of 0 * m in a block of zeros.
    magnified = ptx.min_(ptx.mul(multiplier, form.scale * MAGNIFIED), FP32_MAX)
    return first, magnified, weight, limit


def unrounded_scale(block_amax: Float32, g: GlobalScale, encoding: Encoding, wild: bool) -> Float32:
    """The fp32 map-to-6 scale: fl(fl(b/6) * S_enc), or standard fl(b * fl(S_enc * fl(1/6))).

    Without wild the division is short; it is off only for a b so small that the scale is 0.
    """
    high, low = _reciprocal_pair(6.0)
    if encoding.scheme == "nvfp4":
        return ptx.mul(block_amax, ptx.mul(g.encode, high))
    if wild:
        return ptx.mul(divide_any(block_amax, 6.0), g.encode)
    # The minimum keeps an infinite b from making inf - inf.
    rest = ptx.mul(ptx.min_nan(block_amax, FP32_MAX), low)
    return ptx.mul(ptx.fma(block_amax, high, rest), g.encode)


def _round_magnified(magnified: Float32) -> Float32:
    """E2M1 value of p times 2^-14, from p * 2^8 for 0 <= p < 7, in three operations.

    The shift max(p * 2^22, 1.5 * 2^22) * 2^-14 has E2M1's quantum at p as its ulp, so subtracting p
    from it rounds p. Where the difference falls below a power of two, p is next to 2 or 4, and the
    finer quantum gives that too. A tie goes to the even code, because at a midpoint of E2M1 the
    shift is an even multiple of the quantum. Checked over p in tests/kernels/test_arithmetic.py.
    """
    shift = ptx.max_(magnified, ROUND_TO_HALF)
    return ptx.sub(shift, ptx.fma(magnified, -1.0 / MAGNIFIED, shift))


def candidate_kind(wild: bool, dtype: str) -> str:
    """Which of the functions below makes a candidate, "short" where no block needs "careful"."""
    if packing().rounds:
        return "converted"
    return "literal" if wild else "careful" if dtype == "float32" else "short"


def converted_candidate(x: list[Float32], multiplier) -> tuple[list[Uint32], list[Float32]]:
    """Packed E2M1 magnitudes and deviations ``value - fl(|x|*m)`` times the packed form's scale.

    For every scale and input: a product beyond 6 or NaN becomes 6.
    """
    products = [ptx.mul(ptx.abs_(element), multiplier) for element in x]
    packed = packing().pack(products)
    # Values kept for a rare exact comparison would fill the registers.
    values = unpack_values([ptx.fresh(word) for word in packed])
    return packed, [ptx.sub(v, p) for v, p in zip(values, products, strict=True)]


def short_candidate(x: list[Float32], magnifier) -> tuple[list[Uint32], list[Float32]]:
    """The same in five operations per element, rounded here; needs products below 7."""
    values, deviations = [], []
    for element in x:
        magnified = ptx.mul(ptx.abs_(element), magnifier)
        value = _round_magnified(magnified)
        values.append(value)
        deviations.append(ptx.fma(magnified, -1.0 / MAGNIFIED, value))
    return packing().pack(values), deviations


def careful_candidate(x: list[Float32], multiplier) -> tuple[list[Uint32], list[Float32]]:
    """The same for every scale and input: products are clamped to 6 (a NaN too) and rounded."""
    values, deviations = [], []
    for element in x:
        product = ptx.mul(ptx.abs_(element), multiplier)
        value = _round_magnified(ptx.mul(ptx.min_(product, 6.0 * VALUE_SCALE), MAGNIFIED))
        values.append(value)
        deviations.append(ptx.sub(value, product))
    return packing().pack(values), deviations


def literal_candidate(x: list[Float32], multiplier) -> tuple[list[Uint32], None]:
    """The same without deviations, for an unscaled multiplier of any size."""
    values = []
    for element in x:
        clamped = ptx.min_(ptx.mul(ptx.abs_(element), multiplier), 6.0)
        values.append(_round_magnified(ptx.mul(clamped, VALUE_SCALE * MAGNIFIED)))
    return packing().pack(values), None


def sum_in_order(deviations: list[Float32], err_mode: str) -> Float32:
    """|d| or d*d summed from the first to the last, each operation rounded once."""
    total = None
    for deviation in deviations:
        term = ptx.abs_(deviation) if err_mode == "mae" else ptx.mul(deviation, deviation)
        total = term if total is None else ptx.add(total, term)
    return total


def estimate(deviations: list[Float32], err_mode: str) -> Float32:
    """The same sum for an estimate: squares by fma."""
    if err_mode == "mae":
        return sum_in_order(deviations, err_mode)
    total = ptx.mul(deviations[0], deviations[0])
    for deviation in deviations[1:]:
        total = ptx.fma(deviation, deviation, total)
    return total


def error_bound(weighted: Float32, base: Float32, err_mode: str, rows: int) -> Float32:
    """How far apart two weighted estimates must be to order the reference's errors.

    weighted is one of the two estimates times its weight (scale, or scale squared for squares), so
    in units of 1 / S_enc, and base the unrounded scale. Per element reference and estimate differ
    by at most 55 * 2^-24 * base plus a few rounding steps relative to the deviation, and each sum
    by 17 * 2^-24 relative: for two |d| sums 34 * 2^-24 * (sum of both) + 1760 * 2^-24 * base. For
    squares, with 2|d|e <= k d^2 + e^2 / k and k = 2^-17: 162 * 2^-24 * (sum of both) + 760 * 2^-24
    * base^2. Estimates this close have a sum of twice either. 16x16 blocks (rows 2) have 16 times
    the elements and a few more additions: 48 and 176 instead of 34 and 162. The constants below
    are larger than all that.
    """
    many, scale = 1.0 if rows == 1 else 16.0, packing().scale
    if err_mode == "mae":
        return ptx.fma(base, many * scale * 2.0**-13, ptx.mul(weighted, 2.0**-17))
    square = ptx.mul(base, base)
    return ptx.fma(square, many * scale**2 * 2.0**-14, ptx.mul(weighted, 2.0**-15))


def unpack_values(packed: list[Uint32]) -> list[Float32]:
    """The 16 values that were packed."""
    form, values = packing(), [None] * BLOCK
    for i, (low, high) in enumerate(form.elements):
        values[low], values[high] = ptx.halves_to_float(form.halves(packed, i))
    return values


def decoded_difference(packed6: list[Uint32], packed4: list[Uint32], scale6, scale4) -> Uint32:
    """0 if both candidates decode to the same numbers, as in blocks of one magnitude.

    Their errors are then equal. A value (2 bits) times a scale (4 bits) is exact in fp16.
    """
    pairs = [ptx.half_pair(scale, scale) for scale in (scale6, scale4)]
    form, differing = packing(), Uint32(0)
    rows = len(packed6) // form.words
    for i in range(rows * len(form.elements)):
        products = [
            ptx.mul_f16x2(ptx.and_(form.halves(packed, i), 0x7FFF7FFF), pair)
            for packed, pair in zip((packed6, packed4), pairs, strict=True)
        ]
        # differing | (a ^ b)
        differing = ptx.lop3(differing, *products, 0xF6)
    return differing


def short_decode(scale: Float32, g: GlobalScale, encoding: Encoding) -> tuple[Float32, Boolean]:
    """What a packed value is multiplied by to decode it, and whether that is exact.

    If u = fl(fl(scale * G) / (6 * bound)) has two bits to spare and the decoded 1.5 is 1.5 * u,
    then fl(fl(fl(q*s) * G) / (6*bound)) is q * u for every q, without rounding.
    """
    unit = divide_by(ptx.mul(scale, g.amax), 6.0 * encoding.e4m3_scale_bound)
    half_more = divide_by(ptx.mul(ptx.mul(scale, 1.5), g.amax), 6.0 * encoding.e4m3_scale_bound)
    spare = ptx.and_(ptx.bits(unit), 3) == Uint32(0)
    return ptx.mul(unit, 1.0 / packing().scale), spare & (half_more == ptx.mul(unit, 1.5))


def short_error(x: list[Float32], values: list[Float32], unit: Float32, err_mode: str) -> Float32:
    """exact_error where short_decode says that decoding is exact."""
    deviations = []
    for element, value in zip(x, values, strict=True):
        deviations.append(ptx.fma(ptx.abs_(value), unit, ptx.neg(ptx.abs_(element))))
    return sum_in_order(deviations, err_mode)


def exact_error(
    x: list[Float32],
    values: list[Float32],
    scale: Float32,
    g: GlobalScale,
    encoding: Encoding,
    wild: bool,
) -> Float32:
    """The reference's error: sum over elements of ``fl(fl(fl(fl(q*s) * G) / (6*bound)) - |x|)``.

    fl(q*s) is exact, and the factor of packed values passes through it and through the product
    with G, which stays in the normal range unless wild.
    """
    divisor, unscale = 6.0 * encoding.e4m3_scale_bound, 1.0 / packing().scale
    deviations = []
    for element, value in zip(x, values, strict=True):
        if wild:
            product = ptx.mul(ptx.mul(ptx.mul(value, unscale), scale), g.amax)
            decoded = divide_any(product, divisor)
        else:
            product = ptx.mul(ptx.mul(value, scale), g.amax)
            decoded = divide_by(product, divisor, unscale)
        deviations.append(ptx.sub(ptx.abs_(decoded), ptx.abs_(element)))
    return sum_in_order(deviations, encoding.err_mode)


def signed_codes(magnitudes: Uint32, signs: Uint32, sign_mask: Uint32) -> Uint32:
    """Eight E2M1 codes from their magnitudes and the signs in bits 3 and 7 that the mask keeps."""
    return ptx.lop3(magnitudes, signs, sign_mask, 0xF8)


def decode_codes(word: Uint32) -> list[Float32]:
    """The 8 values of a word of codes, exact.

    Without an instruction for it: code bits are those of fp16 times 2^-14.
    """
    if target.has_e2m1():
        return [v for i in range(4) for v in ptx.halves_to_float(ptx.e2m1_to_halves(word, i))]
    values = [None] * 8
    for i in range(4):
        magnitudes = ptx.shl(word, 9 - 4 * i) if i < 3 else ptx.shr(word, 3)
        signs = ptx.shl(word, 12 - 4 * i)
        halves = ptx.and_(ptx.bit_select(0x0E000E00, magnitudes, signs), 0x8E008E00)
        scaled = ptx.mul_f16x2(halves, Uint32(0x74007400))  # 2^14
        values[i], values[i + 4] = ptx.halves_to_float(scaled)
    return values


def sign_word(raw: list[Uint32], dtype: str) -> Uint32:
    """Signs of 8 elements: low nibble of byte j of element 2j, high nibble of element 2j+1.

    raw is 4 words of bf16 pairs or 8 words of fp32.
    """
    if dtype == "float32":
        pairs = [ptx.prmt(raw[i], raw[i + 2], 0x00FB) for i in (0, 1, 4, 5)]
        even = ptx.prmt(pairs[0], pairs[2], 0x5410)
        odd = ptx.prmt(pairs[1], pairs[3], 0x5410)
    else:
        pairs = [ptx.prmt(raw[0], raw[1], 0xFBD9), ptx.prmt(raw[2], raw[3], 0xFBD9)]
        even = ptx.prmt(pairs[0], pairs[1], 0x5410)
        odd = ptx.prmt(pairs[0], pairs[1], 0x7632)
    return ptx.bit_select(0x0F0F0F0F, even, odd)


def widen(raw: list[Uint32], dtype: str) -> list[Float32]:
    """fp32 elements of raw words."""
    if dtype == "float32":
        return [ptx.from_bits(word) for word in raw]
    out = []
    for word in raw:
        out.append(ptx.from_bits(ptx.shl(word, 16)))
        out.append(ptx.from_bits(ptx.and_(word, 0xFFFF0000)))
    return out


def larger(a: Float32, b: Float32) -> Float32:
    """The larger of two non-negative numbers by their bits: a NaN is largest and stays as it is."""
    return ptx.from_bits(ptx.imax(ptx.bits(a), ptx.bits(b)))


def larger_magnitude(a: Uint32, b: Uint32, dtype: str) -> Uint32:
    """Per element the larger magnitude of two words; NaN propagates, signs are not meaningful."""
    if dtype == "float32":
        larger = ptx.max_nan(ptx.abs_(ptx.from_bits(a)), ptx.abs_(ptx.from_bits(b)))
        return ptx.bits(larger)
    return minifloat.larger_bf16x2(a, b)


def max_magnitude(raw: list[Uint32], dtype: str) -> Float32:
    """max |x| as fp32; NaN if there is one."""
    level = list(raw)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [larger_magnitude(a, b, dtype) for a, b in pairs]
    if dtype == "float32":
        return ptx.from_bits(level[0])
    magnitudes = ptx.and_(level[0], 0x7FFF7FFF)
    low, high = ptx.shl(magnitudes, 16), ptx.and_(magnitudes, 0x7FFF0000)
    return larger(ptx.from_bits(low), ptx.from_bits(high))


# Bytes of bf16 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, lowest first: low bytes, then high ones.
_LOW_BYTES, _HIGH_BYTES = (0xC0800000, 0xC0804000), (0x3F3F3F00, 0x40404040)


def bf16_of_codes(magnitudes: Uint32) -> list[Uint32]:
    """Two words, elements 0 1 and 2 3, of bf16 E2M1 values from the low four nibbles of a word.

    prmt looks four codes up in eight bytes.
    """
    low, high = (
        ptx.prmt_by(Uint32(first), Uint32(second), magnitudes)
        for first, second in (_LOW_BYTES, _HIGH_BYTES)
    )
    return [ptx.prmt(low, high, 0x5140), ptx.prmt(low, high, 0x7362)]


def operand_words(
    packed: list[Uint32], scale: Float32, raw: list[Uint32], dtype: str
) -> list[Uint32]:
    """Eight words of bf16 code * scale (exact) from packed values and x's signs.

    A NaN scale makes every element NaN, as code 7 times NaN is.
    """
    decode = ptx.bf16_pair(scale, scale)
    form, values = packing(), []
    for side in range(2):
        magnitudes = form.codes(packed, side)
        values += bf16_of_codes(magnitudes) + bf16_of_codes(ptx.shr(magnitudes, 16))
    words = []
    for i, value in enumerate(values):
        product = ptx.mul_bf16x2(value, decode)
        signs = ptx.prmt(raw[2 * i], raw[2 * i + 1], 0x7632) if dtype == "float32" else raw[i]
        # (product & 0x7FFF7FFF) | (signs & 0x80008000)
        words.append(ptx.bit_select(0x7FFF7FFF, product, signs))
    return words
