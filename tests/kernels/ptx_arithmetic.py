"""PTX instructions as functions of arrays of register bits, defined as in the PTX ISA."""

from collections.abc import Callable

import numpy as np

OPERATIONS: dict[str, Callable[..., np.ndarray]] = {}


def _as(dtype: type, value: np.ndarray) -> np.ndarray:
    """Reinterpret bits as dtype, after cutting them to its size."""
    word = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]
    return value.astype(word).view(dtype)


def _bits(value: np.ndarray) -> np.ndarray:
    return value.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[value.dtype.itemsize])


def _typed(name: str, dtype: type, function: Callable) -> None:
    def operation(*arguments: np.ndarray) -> np.ndarray:
        out = function(*(_as(dtype, argument) for argument in arguments))
        if out.dtype == bool:
            return out
        bits = _bits(np.ascontiguousarray(out))
        # Arithmetic gives the canonical NaN; only sign changes keep a payload.
        if dtype is np.float32 and name not in ("abs.f32", "neg.f32"):
            bits = np.where(np.isnan(out), np.uint32(0x7FFFFFFF), bits)
        return bits

    OPERATIONS[name] = operation


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in fp32, rounded once.

    The product is exact in fp64. Its sum with c is made odd where it was inexact, so that the
    second rounding sees on which side the exact sum lies.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    word = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (word % 2 == 0)
    away = (error > 0) == (total > 0)
    odd = np.where(inexact, word + np.where(away, 1, -1), word)
    return odd.view(np.float64).astype(np.float32)


def _drop_nan(pick: Callable) -> Callable:
    def operation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(a), b, np.where(np.isnan(b), a, pick(a, b)))

    return operation


def _keep_nan(pick: Callable) -> Callable:
    nan = np.array([0x7FFFFFFF], np.uint32).view(np.float32)

    def operation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(a) | np.isnan(b), nan, pick(a, b))

    return operation


def to_minifloat(x: np.ndarray, mantissa: int, bias: int, largest: float) -> np.ndarray:
    """Bytes of x in E4M3 or E5M2: to nearest even, saturating, NaN as 0x7F."""
    wide = np.minimum(np.abs(x.astype(np.float64)), 2.0 * largest)
    exponent = np.floor(np.log2(np.maximum(wide, 2.0**-40)))
    # log2 may round up to the next integer.
    exponent -= 2.0**exponent > wide
    exponent = np.maximum(exponent, 1 - bias)
    quantum = 2.0 ** (exponent - mantissa)
    rounded = np.minimum(np.rint(wide / quantum) * quantum, largest)
    power = np.floor(np.log2(np.maximum(rounded, 2.0 ** (1 - bias))))
    fraction = rounded / 2.0 ** (power - mantissa)
    normal = rounded >= 2.0 ** (1 - bias)
    code = np.where(normal, (power + bias - 1) * 2.0**mantissa + fraction,
                    rounded / 2.0 ** (1 - bias - mantissa))  # fmt: skip
    code = np.where(np.isnan(x), 0, code).astype(np.uint8) | (np.signbit(x) << 7).astype(np.uint8)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def _minifloat_pair(mantissa: int, bias: int, largest: float) -> Callable:
    def operation(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        parts = [to_minifloat(_as(np.float32, x), mantissa, bias, largest) for x in (low, high)]
        return parts[0].astype(np.uint16) | (parts[1].astype(np.uint16) << 8)

    return operation


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes of x in E2M1: to nearest even, saturating, NaN as 7."""
    magnitude = to_minifloat(np.abs(x), 1, 1, 6.0) & 7
    return magnitude | (np.signbit(x) & ~np.isnan(x)).astype(np.uint8) << 3


def _e2m1_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return to_e2m1(_as(np.float32, high)) << 4 | to_e2m1(_as(np.float32, low))


def _e2m1_pair_to_halves(pair: np.ndarray) -> np.ndarray:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float16)
    words = np.concatenate((values, -values)).view(np.uint16).astype(np.uint32)
    return words[pair & 15] | words[pair >> 4 & 15] << np.uint32(16)


def from_e4m3(byte: np.ndarray) -> np.ndarray:
    exponent, fraction = (byte >> 3) & 15, (byte & 7).astype(np.float64)
    value = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    value = np.where((byte & 0x7F) == 0x7F, np.nan, value)
    return np.where(byte & 0x80, -value, value)


def _e4m3_pair_to_halves(pair: np.ndarray) -> np.ndarray:
    pair = pair.astype(np.uint16)
    low, high = (from_e4m3((pair >> s).astype(np.uint8)).astype(np.float16) for s in (0, 8))
    return low.view(np.uint16).astype(np.uint32) | (high.view(np.uint16).astype(np.uint32) << 16)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bits of fp32, to nearest even; NaN as 0x7FFF."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint32)


def _bf16_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return to_bf16(_as(np.float32, low)) | (to_bf16(_as(np.float32, high)) << np.uint32(16))


def _half_pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    parts = [_as(np.float32, x).astype(np.float16).view(np.uint16) for x in (low, high)]
    return parts[0].astype(np.uint32) | (parts[1].astype(np.uint32) << 16)


def _multiply_half_pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (np.ascontiguousarray(v.astype(np.uint32)).view(np.float16) for v in (a, b))
    return (a * b).view(np.uint32)


def _fma_bf16_pairs(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma.rn.bf16x2 where the sum is exact in fp32, as in a product of bf16 and a zero."""
    out = np.zeros(len(a), np.uint32)
    for shift in (0, 16):
        parts = (((v.astype(np.uint32) >> shift) << 16).view(np.float32) for v in (a, b, c))
        x, y, z = (np.ascontiguousarray(part) for part in parts)
        assert not z.any()
        out |= to_bf16(x * y + z) << np.uint32(shift)
    return out


def _max_bf16_pair(by_magnitude: bool) -> Callable:
    """Halves of larger value; or of larger magnitude, with the xor of both signs."""

    def operation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = np.zeros(len(a), np.uint32)
        for shift in (0, 16):
            x, y = ((v.astype(np.uint32) >> shift) & 0xFFFF for v in (a, b))
            sign = (x ^ y) & 0x8000 if by_magnitude else 0
            if by_magnitude:
                x, y = x & 0x7FFF, y & 0x7FFF
            # Negative bits ordered as their values are, -0 below 0.
            keys = (np.where(v & 0x8000, 0x7FFF - v.astype(np.int64), v) for v in (x, y))
            half = np.where(np.greater(*keys), x, y) | sign
            is_nan = (x & 0x7FFF > 0x7F80) | (y & 0x7FFF > 0x7F80)
            out |= np.where(is_nan, 0x7FFF, half).astype(np.uint32) << np.uint32(shift)
        return out

    return operation


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(len(a), np.uint64)
    for i in range(4):
        nibble = (selector.astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        spread = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        byte = np.where(nibble & np.uint64(8), spread, byte)
        out |= byte << np.uint64(8 * i)
    return out


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    a, b, c = (v.astype(np.uint32) for v in (a, b, c))
    out, lookup = np.zeros(len(a), np.uint32), int(table[0])
    for i in range(8):
        if lookup >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _truncating_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


def _bool(value: np.ndarray) -> np.ndarray:
    return value.astype(bool)


def _register() -> None:
    f32, f64 = np.float32, np.float64
    _typed("add.rn.f32", f32, np.add)
    _typed("sub.rn.f32", f32, np.subtract)
    _typed("mul.rn.f32", f32, np.multiply)
    _typed("div.rn.f32", f32, np.divide)
    _typed("fma.rn.f32", f32, fma)
    _typed("rcp.rn.f32", f32, lambda a: np.float32(1.0) / a)
    _typed("mul.rn.f64", f64, np.multiply)
    _typed("abs.f32", f32, np.abs)
    _typed("neg.f32", f32, np.negative)
    _typed("max.f32", f32, _drop_nan(np.maximum))
    _typed("min.f32", f32, _drop_nan(np.minimum))
    _typed("max.NaN.f32", f32, _keep_nan(np.maximum))
    _typed("min.NaN.f32", f32, _keep_nan(np.minimum))
    ordered = {"eq": np.equal, "lt": np.less, "gt": np.greater, "le": np.less_equal,
               "ge": np.greater_equal}  # fmt: skip
    for name, function in {**ordered, "ne": np.not_equal}.items():
        for kind, dtype in (("s32", np.int32), ("u32", np.uint32), ("b32", np.uint32),
                            ("s64", np.int64), ("u64", np.uint64), ("b64", np.uint64)):  # fmt: skip
            _typed(f"setp.{name}.{kind}", dtype, function)
    for name, function in ordered.items():
        _typed(f"setp.{name}.f32", f32, function)
        _typed(f"setp.{name}u.f32", f32,
               lambda a, b, f=function: f(a, b) | np.isnan(a) | np.isnan(b))  # fmt: skip
    _typed("setp.ne.f32", f32, lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b))
    _typed("setp.neu.f32", f32, np.not_equal)
    for bits, signed, unsigned in ((32, np.int32, np.uint32), (64, np.int64, np.uint64)):
        for letter, dtype in (("s", signed), ("u", unsigned)):
            kind = f"{letter}{bits}"
            _typed(f"add.{kind}", dtype, np.add)
            _typed(f"sub.{kind}", dtype, np.subtract)
            _typed(f"min.{kind}", dtype, np.minimum)
            _typed(f"max.{kind}", dtype, np.maximum)
            _typed(f"mul.lo.{kind}", dtype, np.multiply)
            _typed(f"mad.lo.{kind}", dtype, lambda a, b, c: a * b + c)
            _typed(f"div.{kind}", dtype, _truncating_division)
            _typed(f"rem.{kind}", dtype, lambda a, b: a - _truncating_division(a, b) * b)
            OPERATIONS[f"shr.{kind}"] = lambda a, n, d=dtype: _bits(_as(d, a) >> n.astype(d))
        _typed(f"neg.s{bits}", signed, np.negative)
        _typed(f"and.b{bits}", unsigned, np.bitwise_and)
        _typed(f"or.b{bits}", unsigned, np.bitwise_or)
        _typed(f"xor.b{bits}", unsigned, np.bitwise_xor)
        _typed(f"not.b{bits}", unsigned, np.bitwise_not)
        OPERATIONS[f"shl.b{bits}"] = lambda a, n, d=unsigned: _as(d, a) << n.astype(d)
        for name in (f"b{bits}", f"u{bits}", f"s{bits}", f"f{bits}"):
            OPERATIONS[f"mov.{name}"] = lambda a: a
            OPERATIONS[f"selp.{name}"] = lambda a, b, p: np.where(p, a, b)
    OPERATIONS["mul.wide.s32"] = lambda a, b: (
        _as(np.int32, a).astype(np.int64) * _as(np.int32, b).astype(np.int64)
    )
    OPERATIONS["mul.wide.u32"] = lambda a, b: (
        a.astype(np.uint32).astype(np.uint64) * b.astype(np.uint32).astype(np.uint64)
    )
    OPERATIONS["and.pred"] = lambda a, b: _bool(a) & _bool(b)
    OPERATIONS["or.pred"] = lambda a, b: _bool(a) | _bool(b)
    OPERATIONS["xor.pred"] = lambda a, b: _bool(a) ^ _bool(b)
    OPERATIONS["not.pred"] = lambda a: ~_bool(a)
    OPERATIONS["mov.pred"] = _bool
    OPERATIONS["mov.b16"] = lambda a: a
    OPERATIONS["lop3.b32"] = _lop3
    OPERATIONS["prmt.b32"] = _prmt
    OPERATIONS["cvt.s64.s32"] = lambda a: _as(np.int32, a).astype(np.int64)
    OPERATIONS["cvt.u64.u32"] = lambda a: a.astype(np.uint32).astype(np.uint64)
    OPERATIONS["cvt.u32.u64"] = lambda a: a.astype(np.uint32)
    OPERATIONS["cvt.u32.u16"] = lambda a: a.astype(np.uint16).astype(np.uint32)
    OPERATIONS["cvt.u8.u32"] = lambda a: a.astype(np.uint8)
    OPERATIONS["cvt.u16.u32"] = lambda a: a.astype(np.uint16)
    OPERATIONS["cvt.f64.f32"] = lambda a: _bits(_as(f32, a).astype(f64))
    OPERATIONS["cvt.rn.f32.f64"] = lambda a: _bits(_as(f64, a).astype(f32))
    OPERATIONS["cvt.f32.f16"] = lambda a: _bits(_as(np.float16, a).astype(f32))
    OPERATIONS["cvt.rn.bf16x2.f32"] = _bf16_pair
    OPERATIONS["cvt.rn.f16x2.f32"] = _half_pair
    OPERATIONS["mul.rn.f16x2"] = _multiply_half_pairs
    OPERATIONS["fma.rn.bf16x2"] = _fma_bf16_pairs
    OPERATIONS["cvt.rn.satfinite.e4m3x2.f32"] = _minifloat_pair(3, 7, 448.0)
    OPERATIONS["cvt.rn.satfinite.e5m2x2.f32"] = _minifloat_pair(2, 15, 57344.0)
    OPERATIONS["cvt.rn.satfinite.e2m1x2.f32"] = _e2m1_pair
    OPERATIONS["cvt.rn.f16x2.e2m1x2"] = _e2m1_pair_to_halves
    OPERATIONS["cvt.rn.f16x2.e4m3x2"] = _e4m3_pair_to_halves
    OPERATIONS["max.NaN.bf16x2"] = _max_bf16_pair(by_magnitude=False)
    OPERATIONS["max.NaN.xorsign.abs.bf16x2"] = _max_bf16_pair(by_magnitude=True)


_register()
