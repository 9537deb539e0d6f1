r"""Whether two answers are the same: exactly for numbers, by structure for tuples, sets and
intervals, by math-verify for what is left."""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from fos_rl.data.normalize import (
    Number,
    bare_number,
    is_unit,
    normalize_answer,
    parse_number,
    split_elements,
)

_ASSIGNMENT = re.compile(
    r"(?:[A-Za-z]|\\[a-z]+)(?:_\{?\w+\}?)?(?:\s*\(\s*[a-z]\s*\))?\s*=(?!=)\s*(?P<value>[^=]+)"
)
_POLAR_WORDS = frozenset({"yes", "no", "true", "false"})
_NEGATIONS = frozenset({"not", "never", "cannot", "can't", "isn't", "doesn't", "don't", "unless"})
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
# Two values next to each other are a product to a LaTeX parser and two answers to a reader.
_SIDE_BY_SIDE = re.compile(r"[\d}]\s+[\d.]|\d\s+\\frac")
_INDEX = re.compile(r"_(?:\{[^{}]*\}|\w)")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}\s+[A-Za-z]{2,}")


By = Literal["text or value", "value"]


def answers_equal(answer: str, gold: str, *, by: By = "text or value") -> bool:
    """Whether an answer found in a response has the gold answer's value.

    Numbers are compared exactly (34.0 is 34, 0.33 is not 1/3; six digits of a rounded decimal are
    enough). A unit, currency or percent sign on one side only is no difference; 25% is 25 and
    0.25. An answer of several values is wrong for a gold answer of one. Tuples and intervals
    compare in order with their brackets, sets in any order, words whole. Everything else goes to
    math-verify, which has no time limit of its own here.

    `by="value"` leaves out the comparison of the two as text, so a gold answer equals itself only
    if it has a value that can be read, or is a word.
    """
    return _equal(normalize_answer(answer), normalize_answer(gold), by, depth=0)


def _equal(answer: str, gold: str, by: By, depth: int) -> bool:
    if not answer or not gold or depth > 3:
        return False
    if by == "text or value" and _squeeze(answer) == _squeeze(gold):
        return True
    gold_number = bare_number(gold)
    if gold_number is not None and not _is_list(gold):
        number = parse_number(answer)
        if number is not None:
            return _numbers_equal(number, gold_number)
        if _is_several(answer) or re.search(r"[A-Za-z%]", gold.replace("\\frac", "")):
            return False
        return _formulas_equal(answer, gold)
    if re.fullmatch(r"[A-Za-z][A-Za-z' -]+", gold) and not re.fullmatch(r"[A-Za-z]{2}", gold):
        return _words_equal(answer, gold)
    if re.fullmatch(r"[A-Z]", gold):
        choice = re.match(r"(?:option |choice )?\(?([A-Z])(?:\)|[.:]\s|\)\s|$)", answer)
        return choice is not None and choice[1] == gold
    return _structures_equal(answer, gold, by, depth)


def _structures_equal(answer: str, gold: str, by: By, depth: int) -> bool:
    answer, gold = _without_unit(answer), _without_unit(gold)
    gold_assigns, answer_assigns = _ASSIGNMENT.fullmatch(gold), _ASSIGNMENT.fullmatch(answer)
    if gold_assigns and answer_assigns and _names_differ(answer, gold):
        return False
    if gold_assigns and "=" not in answer:
        return _equal(answer, gold_assigns["value"].strip(), by, depth + 1)
    if answer_assigns and "=" not in gold:
        return _equal(answer_assigns["value"].strip(), gold, by, depth + 1)
    for whole in (_plus_minus, _ratio):
        gold_parts, answer_parts = whole(gold), whole(answer)
        if gold_parts and not answer_parts and whole is _plus_minus:
            answer_parts = _Parts("{}", split_elements(_strip_braces(answer)))
        if gold_parts and answer_parts:
            return _parts_equal(answer_parts, gold_parts, by, depth)
    gold_parts, answer_parts = _bracketed(gold), _bracketed(answer)
    if gold_parts and answer_parts:
        return _parts_equal(answer_parts, gold_parts, by, depth)
    if gold_parts and not answer_parts and gold_parts.kind in ("()", "{}"):
        # (1, 2) may be written 1, 2.
        elements = split_elements(answer)
        if len(elements) == len(gold_parts.elements) > 1:
            return _parts_equal(_Parts(gold_parts.kind, elements), gold_parts, by, depth)
    if not gold_parts and _is_list(gold):
        elements = answer_parts.elements if answer_parts else split_elements(answer)
        return _parts_equal(_Parts("{}", elements), _Parts("{}", split_elements(gold)), by, depth)
    if gold_parts is None and answer_parts is not None and len(answer_parts.elements) > 1:
        return False
    if gold_parts is None and _is_several(answer):
        return False
    return _formulas_equal(answer, gold)


def _names_differ(answer: str, gold: str) -> bool:
    """Whether two assignments give numbers to different names, as `x = 0` and `y = 0` do."""
    (name, _, value), (gold_name, _, gold_value) = answer.partition("="), gold.partition("=")
    numbers = bare_number(value.strip()) and bare_number(gold_value.strip())
    return numbers is not None and _squeeze(name) != _squeeze(gold_name)


class _Parts:
    """A tuple, set or interval: its outer brackets and its elements."""

    def __init__(self, kind: str, elements: list[str]) -> None:
        self.kind = kind
        self.elements = elements


def _parts_equal(answer: _Parts, gold: _Parts, by: By, depth: int) -> bool:
    if answer.kind != gold.kind or len(answer.elements) != len(gold.elements):
        return False
    if gold.kind != "{}":
        pairs = zip(answer.elements, gold.elements, strict=True)
        return all(_equal(a, g, by, depth + 1) for a, g in pairs)
    left = list(gold.elements)
    for element in answer.elements:
        match = next((g for g in left if _equal(element, g, by, depth + 1)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _strip_braces(text: str) -> str:
    return re.sub(r"^\\?\{(.*)\\?\}$", r"\1", text).removesuffix("\\").strip()


def _bracketed(text: str) -> _Parts | None:
    r"""`(1, 2)`, `[0, \infty)`, `\{1, 23\}` as parts, if the brackets enclose all of it."""
    text = text.strip().replace("\\{", "{").replace("\\}", "}")
    if len(text) < 2 or text[0] not in _BRACKETS or text[-1] not in ")]}":
        return None
    depth = 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and place < len(text) - 1:
            return None
    elements = split_elements(text[1:-1])
    if len(elements) < 2 and text[0] != "{":
        return None
    if "|" in text or "\\mid" in text:
        return None
    return _Parts(text[0] + text[-1], elements)


def _plus_minus(text: str) -> _Parts | None:
    match = re.fullmatch(r"(?:[A-Za-z]\s*=\s*)?\\pm\s*(?P<value>[^,;=]+)", text)
    if match is None:
        return None
    return _Parts("{}", [match["value"], f"-{match['value']}"])


def _ratio(text: str) -> _Parts | None:
    parts = text.split(":")
    return _Parts("::", parts) if len(parts) > 1 and all(p.strip() for p in parts) else None


def _is_list(text: str) -> bool:
    return _bracketed(text) is None and len(split_elements(text)) > 1 and not _thousands(text)


def _thousands(text: str) -> bool:
    number = parse_number(text)
    return number is not None


def _is_several(answer: str) -> bool:
    """Whether a reader sees more than one value, or a sentence instead of a value."""
    if r"\begin{" in answer:
        return False
    return bool(
        len(split_elements(answer)) > 1
        or _SIDE_BY_SIDE.search(_INDEX.sub("", answer))
        or _PROSE.search(answer)
    )


def _squeeze(text: str) -> str:
    # A space between two digits is a difference.
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text)
    return re.sub(r"\s+", "", text)


def _numbers_equal(answer: Number, gold: Number) -> bool:
    if gold.unit and answer.unit and _singular(gold.unit) != _singular(answer.unit):
        return False
    if answer.percent == gold.percent:
        return _values_equal(answer, gold)
    percent, plain = (answer, gold) if answer.percent else (gold, answer)
    as_ratio = Number(value=percent.value / 100, decimals=percent.decimals)
    # 25% for a gold 25 is an answer in percent; 0.25% for 0.25 is one of another size.
    same_size = percent.value == plain.value and abs(plain.value) >= 1
    return same_size or _values_equal(as_ratio, plain)


def _singular(unit: str) -> str:
    unit = {"degrees": "°", "degree": "°"}.get(unit, unit)
    return unit.removesuffix("s") if len(unit) > 2 else unit


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


def _words_equal(answer: str, gold: str) -> bool:
    answer, gold = answer.casefold(), gold.casefold()
    words = re.findall(r"[a-z']+", answer)
    if " ".join(words) == " ".join(re.findall(r"[a-z']+", gold)):
        return not re.search(r"[\d\\=]", answer)
    if gold not in _POLAR_WORDS:
        return bool(re.match(rf"{re.escape(gold)}\s*[.,;:]", answer)) and len(words) < 30
    if _NEGATIONS & set(words) or re.search(r"\b(?:or|maybe|perhaps)\b", answer):
        return False
    return _POLAR_WORDS & set(words) == {gold} and len(words) < 30


def _without_unit(text: str) -> str:
    match = re.search(r"(?<=[\d})°a-z])\s+(?P<unit>[A-Za-z][A-Za-z. /^{}\d]*)$", text)
    if match and is_unit(match["unit"], spaced=True) and "\\" in text[: match.start()]:
        return text[: match.start()]
    return text.removesuffix("°").strip()


def _formulas_equal(answer: str, gold: str) -> bool:
    """What math-verify says of two formulas, without its known mistakes."""
    if _PROSE.search(answer) or answer.count("'") != gold.count("'"):
        # It reads words as products of letters, and f' as f.
        return False
    if (_letters(answer) - _letters(gold)) & {c.swapcase() for c in _letters(gold)}:
        # It is blind to case.
        return False
    parsed_answer, parsed_gold = _parse(answer), _parse(gold)
    if parsed_answer is None or parsed_gold is None:
        return False
    if _says_nothing(parsed_answer) or _says_nothing(parsed_gold):
        # AB = BA is true of numbers, and so equal to 1 = 1.
        return False
    if str(parsed_answer) == str(parsed_gold):
        return True
    from math_verify import verify

    if not verify(parsed_gold, parsed_answer, timeout_seconds=0):
        return False
    return _not_only_rounded(parsed_answer, parsed_gold)


def _letters(formula: str) -> set[str]:
    return set("".join(re.findall(r"(?<![\\A-Za-z])[A-Za-z]+", formula)))


@lru_cache(maxsize=256)
def _parse(formula: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    formula = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi", formula)
    formula = re.sub(r"(?<![\\A-Za-z])(?:sqrt|√)\s*\(([^()]*)\)", r"\\sqrt{\1}", formula)
    formula = re.sub(r"√\s*(\d+|[a-z])", r"\\sqrt{\1}", formula)
    formula = re.sub(r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty", formula)
    found = parse(f"${formula}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=0)
    # The string form follows when parsing went well; alone it says that it did not.
    return found[0] if found and not isinstance(found[0], str) else None


def _says_nothing(parsed: Any) -> bool:
    from sympy import Eq
    from sympy.logic.boolalg import BooleanAtom

    return isinstance(parsed, BooleanAtom) or (
        isinstance(parsed, Eq) and bool(parsed.lhs == parsed.rhs)
    )


def _not_only_rounded(answer: Any, gold: Any) -> bool:
    """False if two numbers agree only after rounding to six places, as 3e-31 and 0 do."""
    try:
        a, g = complex(answer.evalf(20)), complex(gold.evalf(20))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return True
    return abs(a - g) <= 5e-6 * abs(g)
