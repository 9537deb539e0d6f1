r"""Numbers that stand in an answer, exactly, with the percent sign or unit beside them."""

# Word lists read best as text.
# ruff: noqa: RUF001, SIM905

import re
from dataclasses import dataclass
from fractions import Fraction

from fos_rl.rewards.units import UNIT_NAMES, conversion


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """An exact value. `decimals` counts digits after the point, None for a fraction.

    Example: `2 1/2 hrs` is value 5/2, decimals None, unit "hrs".
    """

    value: Fraction
    decimals: int | None
    percent: bool = False
    unit: str = ""


# Powers of ten and digits beyond these are left to `exact_values`, which has a limit of its own.
_MAX_EXPONENT = 400
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?:(?P<sign>[-+])\s*)?(?:(?P<whole>\d+)(?:\s*(?=\\frac)|\s+(?:and\s+)?(?=\d+\s*/\s*\d)))?(?:"
    rf"\\frac\s*\{{\s*(?P<a>-?(?:{_DECIMAL}))\s*\}}\s*\{{\s*(?P<b>-?(?:{_DECIMAL}))\s*\}}"
    rf"|(?P<c>{_DECIMAL})\s*/\s*(?P<d>{_DECIMAL})"
    rf"|(?P<m>{_DECIMAL})(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?P<e>\{{\s*[-+]?\d+\s*\}}|-?\d+)"
    rf"|[eE](?P<f>[-+]?\d+))?)"
)
_PERCENT = re.compile(r"\s*(?:%|percent\b|per cent\b|pct\b)", re.IGNORECASE)
_CURRENCY = re.compile(
    r"(?P<sign>-?)\s*(?:US\s*(?=¤))?(?P<unit>[¤€£¥₹₩]|(?:USD|US|EUR|Rs\.?|RMB)(?=\s*\d))\s*(?=[\d.-])"
)
_KNOWN_UNITS = UNIT_NAMES | {"GB", "MB", "AM", "PM", "am", "pm", "m/s", "km/h", "degrees"}
# Without a space before it, a letter or two is more often a product of variables.
_JOINED_UNITS = frozenset("km cm mm dm nm kg lb lbs ft mL ml Hz kJ kW GB MB am pm AM PM".split())
# Words that make another statement of a number than that it is the answer.
_DENIED = frozenset(
    "or nor and but not no never cannot can't isn't wrong incorrect false maybe perhaps possibly "
    "probably either neither between from to than least most more less greater fewer over under "
    "above below almost nearly plus minus times divided half third quarter twice double hundred "
    "thousand million billion trillion dozen squared cubed root pi unless if except instead wait "
    "sure unknown undefined infinity infinite step question problem option choice through until "
    "mod modulo doesn't don't didn't won't hundreds thousands millions billions dozens up sqrt e i "
    "sin cos tan log ln since because".split()
)
_DENIED_CJK = set("或和到至万億亿百千十不非除约减加乘")
_NO_NOUNS = frozenset("in of at on per when for is are each total altogether left by with".split())
_WORD = re.compile(r"[A-Za-zµΩ][A-Za-zµΩ'’]*")
_PLAIN_WORDS = re.compile(r"(?:[A-Za-z]+(?:['’-][A-Za-z]+)*|[\s,.;:!?()\"]|[\u4e00-\u9fff])*")
_UNIT_PART = r"[A-Za-zµΩ][A-Za-zµΩ'’]*\.?(?:\^?\{?[-]?[1-4]\}?)?"
_UNIT = re.compile(rf"{_UNIT_PART}(?:(?:\s*/\s*|\s*\\cdot\s*|[\s-]+){_UNIT_PART}){{0,5}}")
_SQUARED = re.compile(r"(?<=[a-z])\s+(?:squared|cubed)\b")


def parse_number(text: str) -> Number | None:
    r"""The number that a normalized answer states, or None if it states none or more than one.

    Integers, decimals with or without thousands separators, fractions, mixed numbers and powers of
    ten, exactly; a percent sign, a currency or a unit may stand around them, and words that say no
    more than that this is the answer: `x = 5`, `5 km`, `\frac{68}{2}`, `There are 34 apples`.
    """
    text = text.strip().strip("()") if re.fullmatch(r"\([^(),]*\)", text.strip()) else text.strip()
    return bare_number(text) or _equation_value(text) or _number_in_words(text)


def bare_number(text: str) -> Number | None:
    """As `parse_number`, without equations and sentences."""
    currency = _CURRENCY.match(text)
    if currency is not None:
        text = currency["sign"] + text[currency.end() :]
    match = _NUMBER.match(text)
    if match is None or (number := _number_of(match)) is None:
        return None
    rest = text[match.end() :]
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else rest
    unit = re.sub(r"^\(\s*(.*?)\s*\)$", r"\1", rest.strip().removesuffix("."))
    if not is_unit(unit, spaced=rest[:1].isspace()):
        return None
    if currency is not None:
        unit = unit or currency["unit"].removesuffix(".")
    return Number(
        value=number.value, decimals=number.decimals, percent=percent is not None, unit=unit
    )


def numbers_equal(answer: Number, gold: Number) -> bool:
    """Exact equality; a unit or percent sign on one side only is no difference, 25% is 0.25 too.

    Two units must measure the same thing, and the numbers agree in one of them: 3 hours is 180
    minutes and not 3 minutes. Six decimals of a fraction that has no end are enough.
    """
    factor = conversion(answer.unit, gold.unit)
    if factor is None:
        return False
    if factor != 1:
        return answer.percent == gold.percent and answer.value * factor == gold.value
    if answer.percent == gold.percent:
        return _values_equal(answer, gold)
    percent, plain = (answer, gold) if answer.percent else (gold, answer)
    as_ratio = Number(value=percent.value / 100, decimals=percent.decimals)
    # 25% for a gold 25 is an answer in percent; 0.25% for 0.25 is one of another size.
    same_size = percent.value == plain.value and abs(plain.value) >= 1
    return same_size or _values_equal(as_ratio, plain)


def _values_equal(a: Number, b: Number) -> bool:
    if a.value == b.value:
        return True
    for decimal, other in ((a, b), (b, a)):
        if decimal.decimals is None or other.decimals is not None or decimal.decimals < 6:
            continue
        # The fraction has no finite decimal, and this is it to the digits given.
        if abs(decimal.value - other.value) < Fraction(1, 10**decimal.decimals):
            return abs(other.value) >= Fraction(1, 10)
    return False


def is_unit(text: str, *, spaced: bool) -> bool:
    """Whether words after a value are a unit or name what is counted. Nothing at all is fine."""
    if text in ("", "°", "°C", "°F") or re.fullmatch(r"[¤€£¥₹₩¢℃℉]", text):
        return True
    if re.fullmatch(r"[\u4e00-\u9fff]{1,4}", text):
        return not _DENIED_CJK & set(text)
    if text in _KNOWN_UNITS:
        return spaced or len(text) > 2 or text in _JOINED_UNITS
    if not _UNIT.fullmatch(text):
        return False
    words = _WORD.findall(_SQUARED.sub("", text))
    if not _harmless(words):
        return False
    if (
        not spaced
        and words[0] not in _JOINED_UNITS
        and not (len(words[0]) > 2 and words[0] in _KNOWN_UNITS)
    ):
        return False
    # A letter or two is a product of variables unless it is a known unit.
    short = ("of", "in", "a", "sq", "cu")
    return all(word in _KNOWN_UNITS or len(word) > 2 or word in short for word in words)


def _harmless(words: list[str]) -> bool:
    return not any(word.casefold().replace("’", "'") in _DENIED for word in words)


def _number_of(match: re.Match[str]) -> Number | None:
    sign = -1 if match["sign"] == "-" else 1
    texts = [match[name] for name in ("a", "b", "c", "d", "m", "whole")]
    if any(text is not None and len(text) > _MAX_EXPONENT for text in texts):
        return None
    a, b, c, d, m, whole = [None if t is None else Fraction(t.replace(",", "")) for t in texts]
    if m is None:
        top, bottom = (a, b) if a is not None else (c, d)
        if not bottom or top is None:
            return None
        # 3 5/2 is no mixed number, and no product to a reader either.
        if whole is not None and not 0 < top < bottom:
            return None
        return Number(value=sign * ((whole or 0) + top / bottom), decimals=None)
    exponent = int((match["e"] or match["f"] or "0").strip("{} "))
    if abs(exponent) > _MAX_EXPONENT:
        return None
    decimals = len(match["m"].partition(".")[2]) - exponent
    return Number(value=sign * m * Fraction(10) ** exponent, decimals=max(decimals, 0))


def _equation_value(text: str) -> Number | None:
    """The right side of `x = 5` and of `3 + 4 = 7`; of one equation only."""
    left, equals, right = re.sub(r"\\approx", "=", text).rpartition("=")
    if not equals or re.search(r"[!<>,;]\s*$|\\neq|\\[lg]eq|[,;<>]|\\(?:in|equiv)\b", left):
        return None
    if re.fullmatch(r"[A-Za-z](?:_\{?\w+\}?)?", right.strip()):
        right = left
    return bare_number(right.strip()) if _harmless(_WORD.findall(left)) else None


def _number_in_words(text: str) -> Number | None:
    """The only number of a sentence in plain words, as in `She sold 34 clips`."""
    matches = list(_NUMBER.finditer(text))
    if len(matches) != 1:
        return None
    match = matches[0]
    before, after = text[: match.start()], text[match.end() :]
    percent = _PERCENT.match(after)
    after = after[percent.end() :] if percent else after
    if not _PLAIN_WORDS.fullmatch(before) or not _PLAIN_WORDS.fullmatch(after):
        return None
    first_after = _WORD.match(after)
    if before[-1:].isalnum() or (first_after and first_after[0] not in _JOINED_UNITS):
        return None
    words_after = _WORD.findall(after)
    words = _WORD.findall(before) + words_after
    if not 0 < len(words) <= 15 or not _harmless(words) or _DENIED_CJK & set(text):
        return None
    # A lone letter after a number is a variable.
    if any(len(word) < 2 and word != "a" and word not in _KNOWN_UNITS for word in words_after):
        return None
    number = _number_of(match)
    if number is None:
        return None
    return Number(
        value=number.value,
        decimals=number.decimals,
        percent=percent is not None,
        unit=_noun(after),
    )


def _noun(after: str) -> str:
    """What is counted or measured, by the words after a number, as in `square meters of cloth.`."""
    phrase = re.match(r"\s*((?:sq(?:uare)?|cu(?:bic)?)\s+)?([A-Za-z]+)", after)
    if phrase is None or phrase[2].casefold() in _NO_NOUNS:
        return ""
    return (phrase[1] or "") + phrase[2]
