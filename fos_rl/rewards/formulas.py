r"""Formulas read by the LaTeX parser of math-verify, and whether two of them are equal."""

import re
from functools import lru_cache
from typing import Any

from fos_rl.rewards.exact_values import is_close
from fos_rl.rewards.numerals import bare_number
from fos_rl.rewards.real_sets import as_set, intersection, sets_equal, union
from fos_rl.rewards.symbolic import trees_equal

_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|max|min|gcd|lcm"
)
_LETTER = r"(?<![\\A-Za-z])"
_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[¤€£¥₹₩]", " "),
        (r"\^\s*-\s*(\d+|[A-Za-z])", r"^{-\1}"),
        ("°", r"^\\circ "),
        (r"(?<!\\)%", r"\\%"),
        (rf"{_LETTER}pi(?![A-Za-z])", r"\\pi "),
        (rf"{_LETTER}(?:sqrt|√)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\d+|[a-z])", r"\\sqrt{\1}"),
        (rf"{_LETTER}(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (rf"{_LETTER}({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
        (r"(\d)[eE]([-+]?\d{1,6})(?![\w.])", r"\1\\cdot 10^{\2}"),
        (r"\^\s*e(?![A-Za-z])", "^{e}"),
        (r"\\mathbb\s*\{?\s*([A-Z])\s*\}?(?=\s*[_^/])", r"\\text{bb\1}"),
        (r"(?<=/)\s*\\mathbb\s*\{?\s*([A-Z])\s*\}?", r"\\text{bb\1}"),
        # Alone it is a name, and not Euler's constant as the parser has it.
        (r"\\Gamma(?!\s*[({\\]|[A-Za-z])", r"\\text{capitalgamma}"),
        (r"\\aleph", r"\\text{aleph}"),
        (r"\\top(?![a-z])", "T"),
        (r"\\(max|min|gcd|lcm)\s*\\\{(.*?)\\\}", r"\\\1(\2)"),
        # The parser takes a number before a bracket for the whole part of a mixed number.
        (r"(?<![\w^}\\])(\d+(?:\.\d+)?)\s*(?=\()", r"\1\\cdot "),
        (r"\)\s*(?=[\d(])", r")\\cdot "),
        # It leaves out primes; f' gets a name of its own.
        (r"([A-Za-z])('+)", lambda m: f"{m[1]}_{{{'q' * (3 + len(m[2]))}}}"),
    )
]
_BASE = re.compile(r"(?<![\w.}])\(?([0-9A-Za-z]+)\)?_(?:\{\s*(\d+)\s*\}|(\d))(?![\w.])")
# 2 1/2 has been read before; two numbers side by side are no product, 3 5/2 no mixed number.
_MAX_DEPTH = 25
_TOWER = re.compile(r"(?:\^[^\s^]{1,8}){12}")
_SIDE_BY_SIDE = re.compile(r"\d\s+[\d.]")
_MIXED = re.compile(r"(?<![\w^}.])\d+\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
# In \log_2 8 and \sin^2 30 the first number belongs to the function.
INDEX = re.compile(r"(?:_|\\[a-z]+\^)(?:\{[^{}]*\}|\w)")
_OR = re.compile(r"\s+or\s+|\\(?:lor|vee)(?![a-z])|\s*或\s*")
_AND = re.compile(r"\s+and\s+|\\(?:land|wedge)(?![a-z])|\s*且\s*")
_BUILDER = re.compile(
    r"\\\{\s*[a-z](?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid(?![a-z])|:|\|)\s*(?P<condition>.*?)\s*\\\}"
)
# What sympy raises on expressions that it cannot evaluate, order or compare.
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)


def formulas_equal(answer: str, gold: str) -> bool:
    """Whether two normalized formulas have the same value; False if one cannot be read."""
    answer_tree, gold_tree = parse_formula(answer), parse_formula(gold)
    if answer_tree is None or gold_tree is None:
        return False
    try:
        return (
            trees_equal(answer_tree, gold_tree)
            or _is_rounded(answer, gold_tree)
            or _is_rounded(gold, answer_tree)
        )
    except _UNREADABLE:
        return False


def _is_rounded(decimal: str, tree: Any) -> bool:
    """Whether a decimal of six places or more is an irrational number to the digits given."""
    number = bare_number(decimal)
    if number is None or number.unit or (number.decimals or 0) < 6:
        return False
    return is_close(tree, number.value, number.decimals or 0)


def descriptions_equal(answer: str, gold: str) -> bool:
    r"""Whether two normalized texts describe the same set, or are equal formulas.

    `0 < x < 1` is `(0, 1)`, `x \neq 3` is `\mathbb{R} \setminus \{3\}`.
    """
    if formulas_equal(answer, gold):
        return True
    names, gold_names = _unknowns(answer), _unknowns(gold)
    if names and gold_names and names != gold_names:
        return False
    try:
        answer_set, gold_set = _read_set(answer), _read_set(gold)
        return answer_set is not None and gold_set is not None and sets_equal(answer_set, gold_set)
    except _UNREADABLE:
        return False


def _unknowns(text: str) -> set[str]:
    """The letters of an inequality; an interval has none."""
    return set(re.findall(r"(?<![\\{A-Za-z])[A-Za-z](?![A-Za-z])", text))


def _read_set(text: str) -> Any:
    builder = _BUILDER.fullmatch(text)
    text = builder["condition"] if builder else text
    for pattern, combine in ((_OR, union), (_AND, intersection)):
        parts = pattern.split(text)
        if len(parts) > 1:
            sets = [_read_set(part.strip()) for part in parts]
            return None if None in sets else combine(sets)
    tree = parse_formula(text)
    return None if tree is None else as_set(tree)


@lru_cache(maxsize=256)
def parse_formula(text: str) -> Any:
    """The unevaluated sympy tree of a normalized formula; None if it is none.

    Letters keep their case, degrees are pi/180, and no word at the end is taken for a unit, all of
    which math-verify's own `parse` does otherwise.
    """
    from latex2sympy2_extended.latex2sympy2 import (
        ConversionConfig,
        NormalizationConfig,
        latex2sympy,
    )

    # Its time grows exponentially with the depth of brackets and exponents.
    if _depth(text) > _MAX_DEPTH or _TOWER.search(text):
        return None
    # It reads 5!! as (5!)!.
    if "!!" in text or _SIDE_BY_SIDE.search(INDEX.sub("", text)):
        return None
    if any(int(m[1]) >= int(m[2]) for m in _MIXED.finditer(text)):
        return None
    text = _BASE.sub(_in_base_ten, text)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    try:
        return latex2sympy(
            text,
            is_real=True,
            convert_degrees=True,
            normalization_config=NormalizationConfig(units=False, boxed="none"),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    # The parser raises plain Exception for every text that is not in its grammar.
    except Exception:
        return None


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _in_base_ten(match: re.Match[str]) -> str:
    base = int(match[2] or match[3])
    if not 2 <= base <= 36 or match[1][0].isalpha():
        return match[0]
    try:
        return str(int(match[1], base))
    except ValueError:
        # No number of that base: an index, and the parser would drop it.
        return rf"\text{{{match[0]}}}"
