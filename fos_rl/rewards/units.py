"""Units of answers: one meaning for many spellings, and how many of one are in another."""

# Word lists read best as text.

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

# Dimension, size in its first unit, spellings. A plural in -s is understood. Sizes are exact;
# sources: the SI brochure, and the international yard and pound of 1959.
_TABLE = """
length 1 m meter metre 米
length 1000 km kilometer kilometre 千米 公里
length 1/10 dm decimeter decimetre 分米
length 1/100 cm centimeter centimetre 厘米
length 1/1000 mm millimeter millimetre 毫米
length 1/1000000000 nm nanometer nanometre
length 127/5000 in inch inches
length 381/1250 ft foot feet
length 1143/1250 yd yard
length 201168/125 mi mile
time 1 s sec second 秒
time 1/1000 ms millisecond
time 60 min minute 分钟
time 3600 h hr hour 小时
time 86400 day d 天
time 604800 week wk
months 1 month mo 月
months 12 year yr 年
mass 1 g gram gramme gm 克
mass 1000 kg kilogram kilo kilogramme 千克 公斤
mass 1/1000 mg milligram
mass 1000000 t tonne
mass 45359237/100000 lb lbs pound £ gbp
mass 45359237/1600000 oz ounce
volume 1/1000 L l liter litre 升
volume 1/1000000 mL ml milliliter millilitre cc 毫升
money 1 dollar usd US ¤ $ buck
money 1/100 cent ¢
euro 1 eur euro €
yen 1 jpy yen ¥ 円
yuan 1 rmb cny yuan 元
rupee 1 rs inr rupee ₹
won 1 krw won ₩
angle 1 ° deg degree 度
radian 1 rad radian
celsius 1 °C ℃ celsius C
fahrenheit 1 °F ℉ fahrenheit F
kelvin 1 K kelvin
energy 1 J joule
energy 1000 kJ kilojoule
power 1 W watt
power 1000 kW kilowatt
force 1 N newton
pressure 1 Pa pascal
voltage 1 V volt
current 1 A amp ampere
resistance 1 Ω ohm
frequency 1 Hz hertz
mile_per_hour 1 mph
kilometer_per_hour 1 kph kmph kmh
"""
_DERIVED = {
    "mile_per_hour": (Fraction(201168, 125 * 3600), (("length", 1), ("time", -1))),
    "kilometer_per_hour": (Fraction(1000, 3600), (("length", 1), ("time", -1))),
    "volume": (Fraction(1), (("length", 3),)),
}
_NAMES: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(size))
    for dimension, size, *names in (line.split() for line in _TABLE.split("\n") if line)
    for name in names
}
UNIT_NAMES = frozenset(_NAMES)
_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWER_AFTER = {"squared": 2, "cubed": 3}
_CJK_POWERS = (("平方", 2), ("立方", 3))
_TOKEN = re.compile(
    r"(?P<power>\^\s*\{?\s*(?P<exponent>-?\d)\s*\}?)|(?P<per>/|\bper\b)|(?P<name>°\s*[CF]\b|[^\W\d_]+|"
    r"[°¤$€£¥₹₩¢℃℉])|(?P<join>[\s.·*-]|\\cdot\b)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A product of powers of dimensions, and its size in their first units.

    Example: km/h has dimensions {length: 1, time: -1} and size 5/18. A word that is no unit, such
    as apples, is a dimension of its own with size 1.
    """

    size: Fraction
    dimensions: tuple[tuple[str, int], ...]


def conversion(unit: str, other: str) -> Fraction | None:
    """How many of `other` one of `unit` is; None if they measure different things.

    `hrs` and `hours` give 1, `hours` and `minutes` 60, `kg` and `m` None. Nothing on either side
    is compatible with everything: an answer without a unit is the number alone.
    """
    if not unit or not other:
        return Fraction(1)
    a, b = parse_unit(unit), parse_unit(other)
    return a.size / b.size if a.dimensions == b.dimensions else None


@lru_cache(maxsize=1024)
def parse_unit(text: str) -> Unit:
    """The unit that a text names; a text that names none is a unit of its own."""
    # "5 kg of rice" is in kg.
    text = re.split(r"\s+(?:of|old)\b", text.strip())[0].strip(" .")
    text = re.sub(r"(?i)(?<=°)\s+|\bdegrees?\s+(?=C\b|F\b|Celsius|Fahrenheit)", "", text)
    size, dimensions = Fraction(1), dict[str, int]()
    sign, before, last = 1, 1, None
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return _own(text)
        place = match.end()
        if match["per"]:
            sign = -1
        elif match["power"]:
            if last is None:
                return _own(text)
            # The first power is in already.
            size, last = _times(size, dimensions, last, int(match["exponent"]) - 1), None
        elif (name := match["name"]) and name.casefold() in _POWER_WORDS:
            before = _POWER_WORDS[name.casefold()]
        elif name and name.casefold() in _POWER_AFTER and last is not None:
            size = _times(size, dimensions, last, _POWER_AFTER[name.casefold()] - 1)
        elif name:
            found = _named(name)
            if found is None:
                return _own(text)
            base, power = found
            last = (base, sign * before * power)
            size = _times(size, dimensions, last, 1)
            before = 1
    if not dimensions:
        return _own(text)
    return Unit(size=size, dimensions=tuple(sorted((d, p) for d, p in dimensions.items() if p)))


def _times(
    size: Fraction, dimensions: dict[str, int], factor: tuple[str, int], times: int
) -> Fraction:
    """The size with a power of a unit multiplied in; its dimensions are added to `dimensions`."""
    name, power = factor
    dimension, unit_size = _NAMES[name]
    scale, parts = _DERIVED.get(dimension, (Fraction(1), ((dimension, 1),)))
    for part, exponent in parts:
        dimensions[part] = dimensions.get(part, 0) + exponent * power * times
    return size * (unit_size * scale) ** (power * times)


def _named(name: str) -> tuple[str, int] | None:
    """The unit's name in the table and its power, as in 平方米."""
    name = re.sub(r"°\s+", "°", name)
    for prefix, power in _CJK_POWERS:
        if name.startswith(prefix) and name.removeprefix(prefix) in _NAMES:
            return name.removeprefix(prefix), power
    spellings = [name, name.removesuffix("s")] if len(name) > 2 else [name]
    # Case tells m from M and s from S; a word is the same in any case.
    if len(name) > 2:
        spellings += [s.casefold() for s in spellings]
    return next(((s, 1) for s in spellings if s in _NAMES), None)


def _own(text: str) -> Unit:
    words = re.findall(r"[^\W\d_]+", text.casefold())
    # What is counted stands last: red apples are apples.
    noun = words[-1] if words else text
    return Unit(size=Fraction(1), dimensions=((noun.removesuffix("s"), 1),))
