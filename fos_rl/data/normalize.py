r"""Answers in one spelling: no delimiters, markup, fonts or unit words around the mathematics."""

# Models write typographic symbols; word lists read best as text.
# ruff: noqa: RUF001, SIM905

import re
from dataclasses import dataclass
from fractions import Fraction

from fos_rl.data.answers import match_brace

_SYMBOLS = str.maketrans(
    {
        **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},
        **dict.fromkeys("−–—‐‑﹣", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2007", "\\,"),
        **dict.fromkeys("€£¥₹₩￥", "$"),
        "、": ",",
        "。": ".",
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": "/",
        "⁄": "/",
        "≈": r"\approx ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "≠": r"\neq ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∅": r"\emptyset ",
        "°": r"^\circ ",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "ℝ": r"\mathbb{R}",
    }
)
_FONTS = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mathsf|mbox|bm"
    r"|boldsymbol|displaystyle)\s*(?=\{)"
)
_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])", ""),
        (r"\\[()\[\]]|\\\$|\$", " "),
        # Thin spaces are thousands separators between groups of three digits.
        (r"(?<=\d)(?:\\[,;:!]|\{,\}|\\ )(?=\d{3}(?!\d))", ","),
        (r"\{,\}", ","),
        (r"\\!", ""),
        (r"\\(?:[,;: ~]|q?quad(?![a-zA-Z]))|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\dbinom", r"\\binom"),
        (r"\\varnothing", r"\\emptyset"),
        (r"\\(?:leqslant|le)(?![a-zA-Z])|<=", r"\\leq"),
        (r"\\(?:geqslant|ge)(?![a-zA-Z])|>=", r"\\geq"),
        (r"\\(?:lbrace)(?![a-zA-Z])", r"\\{"),
        (r"\\(?:rbrace)(?![a-zA-Z])", r"\\}"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", "°"),
        (r"\\%", "%"),
        (r"\*\*|__|`|</?(?:b|i|em|strong|code)>", ""),
        # Check marks and emoji.
        (r"[\u2600-\u27bf\ufe0f\U0001f300-\U0001faff]", ""),
        (r"\s*\^\s*", "^"),
        (r"\s+", " "),
    )
]
_ROW_BREAK = "\x1e"
_LEAD = re.compile(
    r"^(?:(?:so|thus|hence|therefore|and|then)[, ]+)?(?:(?:the|my|our|its|a|final|correct|answer|"
    r"value|result|solution|sum|number|total|it|this|that|which)\s+)*"
    r"(?:(?:is|are|equals|be)\s+(?:equal to\s+)?|=\s*|\\approx\s*|:\s*)(?:equal to\s+)?",
    re.IGNORECASE,
)
_TRAIL = re.compile(r"[.\s]*\bi hope (?:it|this) is correct\.?$", re.IGNORECASE)


def normalize_answer(text: str) -> str:
    r"""One spelling for one answer, still LaTeX.

    Example: `**$\text{x} = \dfrac12$.**` becomes `x = \frac{1}{2}`.
    """
    text = _unwrap(text.translate(_SYMBOLS))
    # The row break of a matrix is not the start of a command.
    text = text.replace("\\\\", _ROW_BREAK)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = text.replace(_ROW_BREAK, "\\\\")
    text = _TRAIL.sub("", text.strip())
    before = None
    while before != text:
        before = text
        text = text.strip(" \n\"'“”‘’*:").rstrip(".,;?").strip()
        # Words stay if nothing is behind them.
        text = _LEAD.sub("", text, count=1) or text
        if text.startswith("_") or text.endswith("_"):
            text = text.strip("_")
    return text


def _unwrap(text: str) -> str:
    r"""`\text{34}` as ` 34 `: fonts and boxes say nothing about a value."""
    for _ in range(100):
        match = _FONTS.search(text)
        if match is None:
            return text
        end = match_brace(text, match.end())
        if end < 0:
            return text[: match.start()] + text[match.end() + 1 :]
        inner = text[match.end() + 1 : end - 1]
        text = f"{text[: match.start()]} {inner} {text[end:]}"
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """An exact value. `decimals` counts digits after the point, None for a fraction."""

    value: Fraction
    decimals: int | None
    percent: bool = False
    unit: str = ""


# Powers of ten and digits beyond these cost time and occur in no answer.
_MAX_EXPONENT = 400
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?:(?P<sign>[-+])\s*)?(?:(?P<whole>\d+)\s*(?=\\frac))?(?:"
    rf"\\frac\s*\{{\s*(?P<a>-?(?:{_DECIMAL}))\s*\}}\s*\{{\s*(?P<b>-?(?:{_DECIMAL}))\s*\}}"
    rf"|(?P<c>{_DECIMAL})\s*/\s*(?P<d>{_DECIMAL})"
    rf"|(?P<m>{_DECIMAL})(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?P<e>\{{\s*[-+]?\d+\s*\}}|-?\d+)"
    rf"|[eE](?P<f>[-+]?\d+))?)"
)
_PERCENT = re.compile(r"\s*(?:%|percent\b|per cent\b|pct\b)", re.IGNORECASE)
_KNOWN_UNITS = frozenset(
    "m cm mm km dm nm in ft yd mi g kg mg t lb lbs oz s ms min h hr hrs l L ml mL mph kph km/h m/s "
    "W kW J kJ V A N Pa K C F Hz GB MB USD EUR GBP RMB AM PM am pm degrees degree deg rad".split()
)
# Words that make another statement of a number than that it is the answer.
_DENIED = frozenset(
    "or nor and but not no never cannot can't isn't wrong incorrect false maybe perhaps possibly "
    "probably either neither between from to than least most more less greater fewer over under "
    "above below almost nearly plus minus times divided half third quarter twice double hundred "
    "thousand million billion trillion dozen squared cubed root pi unless if except instead wait "
    "sure unknown undefined infinity infinite step question problem option choice through until "
    "mod modulo doesn't don't didn't won't hundreds thousands millions billions dozens up sqrt e i "
    "sin cos tan log ln".split()
)
_DENIED_CJK = set("或和到至万億亿百千十不非除约减加乘")
_WORD = re.compile(r"[A-Za-zµΩ][A-Za-zµΩ'’]*")
_PLAIN_WORDS = re.compile(r"(?:[A-Za-z]+(?:['’-][A-Za-z]+)*|[\s,.;:!?()\"]|[\u4e00-\u9fff])*")
_UNIT = re.compile(
    r"[A-Za-zµΩ][A-Za-zµΩ'’]*\.?(?:\^?\{?[-]?[1-4]\}?)?"
    r"(?:(?:\s*/\s*|\s*\\cdot\s*|[\s-]+)[A-Za-zµΩ][A-Za-zµΩ'’]*\.?(?:\^?\{?[-]?[1-4]\}?)?){0,5}"
)


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
    text = re.sub(r"^(?:US|USD|EUR|Rs\.?|RMB)\s*(?=[\d-])", "", text)
    match = _NUMBER.match(text)
    if match is None or (number := _number_of(match)) is None:
        return None
    rest = text[match.end() :]
    percent = _PERCENT.match(rest)
    if percent is not None:
        number = Number(value=number.value, decimals=number.decimals, percent=True)
        rest = rest[percent.end() :]
    unit = rest.strip().removesuffix(".")
    if not is_unit(unit, spaced=rest[:1].isspace()):
        return None
    return Number(
        value=number.value, decimals=number.decimals, percent=number.percent, unit=unit.casefold()
    )


def is_unit(text: str, *, spaced: bool) -> bool:
    """Whether words after a value are a unit or name what is counted. Nothing at all is fine."""
    if text in ("", "°"):
        return True
    if text.startswith("°") and text[1:] in ("C", "F"):
        return True
    if re.fullmatch(r"[\u4e00-\u9fff]{1,4}", text):
        return not _DENIED_CJK & set(text)
    if text in _KNOWN_UNITS:
        return True
    if not _UNIT.fullmatch(text):
        return False
    words = _WORD.findall(text)
    if not _harmless(words):
        return False
    if not spaced and words[0] not in _KNOWN_UNITS:
        return False
    # A letter or two is a product of variables unless it is a known unit.
    return all(word in _KNOWN_UNITS or len(word) > 2 or word in ("of", "in", "a") for word in words)


def _harmless(words: list[str]) -> bool:
    return not any(word.casefold().replace("’", "'") in _DENIED for word in words)


def _number_of(match: re.Match[str]) -> Number | None:
    sign = -1 if match["sign"] == "-" else 1
    texts = [match[name] for name in "abcdm"]
    if any(text is not None and len(text) > _MAX_EXPONENT for text in texts):
        return None
    a, b, c, d, m = [None if t is None else Fraction(t.replace(",", "")) for t in texts]
    whole = int(match["whole"] or 0)
    if m is None:
        top, bottom = (a, b) if a is not None else (c, d)
        if not bottom or top is None:
            return None
        return Number(value=sign * (whole + top / bottom), decimals=None)
    exponent = int((match["e"] or match["f"] or "0").strip("{} "))
    if abs(exponent) > _MAX_EXPONENT:
        return None
    decimals = len(match["m"].partition(".")[2]) - exponent
    return Number(value=sign * m * Fraction(10) ** exponent, decimals=max(decimals, 0))


def _equation_value(text: str) -> Number | None:
    """The right side of `x = 5` and of `3 + 4 = 7`; of one equation only."""
    left, equals, right = re.sub(r"\\approx", "=", text).rpartition("=")
    if not equals or re.search(r"[!<>,;]\s*$|\\neq|\\[lg]eq|[,;]", left):
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
    if before[-1:].isalnum() or (first_after and first_after[0] not in _KNOWN_UNITS):
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
    return Number(value=number.value, decimals=number.decimals, percent=percent is not None)


def split_elements(text: str) -> list[str]:
    """The parts of a list: at commas, semicolons, `or` and `and` outside of brackets."""
    text = re.sub(r"\s*,?\s+(?:or|and)\s+|[或和]", ",", text)
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char in ",;" and depth <= 0:
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]
