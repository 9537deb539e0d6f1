r"""Changes of gold answers whose effect on the value is known without any verifier.

`unequal` makes another value by construction: another digit of a number, another sign, entries in
another order, another bracket. `equal` writes the same value another way. Both are made of the
text alone, by rules of arithmetic and of LaTeX, so they share nothing with what is tested.
"""

import random
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

GOLDS = (Path(__file__).parent / "deepmath_golds.txt").read_text().splitlines()
"""The 889 different gold answers of 2,500 rows of DeepMath-103K."""

_NUMBER = r"-?\d+(?:\.\d+)?"
_FRACTION = re.compile(r"(?P<sign>-?)\\[dt]?frac\{(?P<top>\d+)\}\{(?P<bottom>\d+)\}")
# A rational factor before one irrational constant: another factor is another value.
_MULTIPLE = re.compile(
    r"(?P<factor>-?\d+) ?(?P<rest>\\pi|\\pi i|\\sqrt\{(?!1\})\d\}|\\ln [23]|e|i)"
)
_TUPLE = re.compile(rf"(?P<open>[(\[]){_NUMBER}(?:, ?{_NUMBER})+(?P<close>[)\]])")
_SET = re.compile(rf"\\\{{{_NUMBER}(?:, ?{_NUMBER})*\\\}}")

NUMBERS = [gold for gold in GOLDS if re.fullmatch(_NUMBER, gold)]
FRACTIONS = [gold for gold in GOLDS if _FRACTION.fullmatch(gold)]
MULTIPLES = [gold for gold in GOLDS if _MULTIPLE.fullmatch(gold)]
TUPLES = [gold for gold in GOLDS if _TUPLE.fullmatch(gold)]
SETS = [gold for gold in GOLDS if _SET.fullmatch(gold)]
INTEGERS = [gold for gold in NUMBERS if "." not in gold]

FORMS = (
    "Answer: {}",
    "Answer: ${}$",
    "So\n**Answer:** ${}$.",
    "\\boxed{{{}}}",
    "We get $\\boxed{{{}}}$.",
    "<answer>{}</answer>",
    "<think>hm</think><answer>${}$</answer>",
    "so\n#### {}",
    "Answer:\n\\[\n{}\n\\]",
)


def unequal(rng: random.Random) -> tuple[str, str]:
    """A gold answer and a response whose answer has another value."""
    gold, answer = rng.choice(_UNEQUAL)(rng)
    assert gold != answer
    return gold, rng.choice(FORMS).format(answer)


def equal(rng: random.Random) -> tuple[str, str]:
    """A gold answer and a response that writes its value another way."""
    gold = rng.choice([*GOLDS, *(matrix(rng) for _ in range(40))])
    answer = gold
    rewritings = [r for r in _EQUAL if r(gold, rng) is not None]
    for rewrite in rng.sample(rewritings, min(len(rewritings), rng.randint(1, 2))):
        answer = rewrite(answer, rng) or answer
    return gold, rng.choice(FORMS).format(answer)


def matrix(rng: random.Random) -> str:
    """Four different integers of the gold answers as a matrix or a column."""
    a, b, c, d = rng.sample(INTEGERS, 4)
    return rng.choice((_matrix([[a, b], [c, d]]), _matrix([[a], [b]]), _matrix([[a, b, c]])))


def _matrix(rows: list[list[str]], kind: str = "pmatrix") -> str:
    body = r" \\ ".join(" & ".join(row) for row in rows)
    return rf"\begin{{{kind}}} {body} \end{{{kind}}}"


def _other_digit(number: str, rng: random.Random) -> str:
    """The number with one digit changed to another, and no new zero in front."""
    places = [place for place, char in enumerate(number) if char.isdigit()]
    place = rng.choice(places)
    first = number.lstrip("-").startswith(number[place]) and place == places[0]
    digits = [d for d in "0123456789" if d != number[place] and not (first and d == "0")]
    return number[:place] + rng.choice(digits) + number[place + 1 :]


def _other_number(number: str, rng: random.Random) -> str:
    """Another digit, another sign, a digit more, or one added far behind the point."""
    changed = [
        _other_digit(number, rng),
        number.removeprefix("-") if number.startswith("-") else f"-{number}",
        number + rng.choice("123456789") if "." in number else number + rng.choice("0123456789"),
        f"{number}{'' if '.' in number else '.'}{'0' * rng.randint(0, 20)}1",
        rf"{number} + 10^{{-{rng.randint(1, 900)}}}",
    ]
    if Fraction(number) == 0:
        changed = [rf"{rng.randint(2, 9)}^{{-{rng.randint(1, 2000)}}}", changed[0], changed[3]]
    return rng.choice(changed)


def _unequal_number(rng: random.Random) -> tuple[str, str]:
    gold = rng.choice(NUMBERS)
    return gold, _other_number(gold, rng)


def _unequal_fraction(rng: random.Random) -> tuple[str, str]:
    gold = rng.choice(FRACTIONS)
    sign, top, bottom = _FRACTION.fullmatch(gold).groups()
    other_top, other_bottom = rng.choice(
        [(_other_digit(top, rng), bottom), (top, _other_digit(bottom, rng)), (bottom, top)]
    )
    if Fraction(int(other_top), int(other_bottom)) == Fraction(int(top), int(bottom)):
        sign = "" if sign else "-"
    return gold, rf"{sign}\frac{{{other_top}}}{{{other_bottom}}}"


def _unequal_multiple(rng: random.Random) -> tuple[str, str]:
    gold = rng.choice(MULTIPLES)
    factor, rest = _MULTIPLE.fullmatch(gold).groups()
    return gold, f"{_other_digit(factor, rng) if rng.random() < 0.6 else str(-int(factor))}{rest}"


def _entries(text: str) -> list[str]:
    return re.findall(_NUMBER, text)


def _unequal_tuple(rng: random.Random) -> tuple[str, str]:
    gold = rng.choice(TUPLES)
    entries = _entries(gold)
    if rng.random() < 0.5 and len(set(entries)) == len(entries):
        others = entries[1:] + entries[:1] if rng.random() < 0.5 else entries[::-1]
        if others == entries:
            others = entries[1:] + entries[:1]
    else:
        place = rng.randrange(len(entries))
        others = [*entries]
        others[place] = _other_number(entries[place], rng)
    return gold, f"{gold[0]}{', '.join(others)}{gold[-1]}"


def _unequal_interval(rng: random.Random) -> tuple[str, str]:
    gold = rng.choice([t for t in TUPLES if len(_entries(t)) == 2])
    open_, close = rng.choice([p for p in ("()", "[]", "(]", "[)") if p != gold[0] + gold[-1]])
    return gold, f"{open_}{', '.join(_entries(gold))}{close}"


def _unequal_set(rng: random.Random) -> tuple[str, str]:
    gold = rng.choice(SETS)
    entries = _entries(gold)
    place = rng.randrange(len(entries))
    others = [*entries]
    others[place] = str(1000 + rng.randint(0, 999))
    return gold, rf"\{{{', '.join(others)}\}}"


def _unequal_matrix(rng: random.Random) -> tuple[str, str]:
    a, b, c, d = rng.sample(INTEGERS, 4)
    gold = _matrix([[a, b], [c, d]])
    others = [
        _matrix([[a, c], [b, d]]),
        _matrix([[c, d], [a, b]]),
        _matrix([[b, a], [d, c]], "bmatrix"),
        _matrix([[a, b, c, d]]),
        _matrix([[a], [b], [c], [d]]),
        _matrix([[_other_number(a, rng), b], [c, d]]),
        _matrix([[a, b], [c, _other_number(d, rng)]], "bmatrix"),
        str(int(a) + int(b) + int(c) + int(d)),
        f"({a}, {b}, {c}, {d})",
    ]
    return gold, rng.choice(others)


def _unequal_column(rng: random.Random) -> tuple[str, str]:
    entries = rng.sample(INTEGERS, 3)
    gold = _matrix([[entry] for entry in entries])
    turned = entries[1:] + entries[:1]
    return gold, rng.choice(
        [_matrix([[e] for e in turned]), _matrix([entries]), f"({', '.join(turned)})"]
    )


_UNEQUAL: list[Callable[[random.Random], tuple[str, str]]] = [
    *(_unequal_number, _unequal_number, _unequal_fraction, _unequal_multiple, _unequal_tuple),
    *(_unequal_interval, _unequal_set, _unequal_matrix, _unequal_column),
]


def _rewriting(pattern: str, replacement: str) -> Callable[[str, random.Random], str | None]:
    compiled = re.compile(pattern)

    def rewrite(text: str, rng: random.Random) -> str | None:
        changed = compiled.sub(replacement, text)
        return changed if changed != text else None

    return rewrite


def _reordered_set(text: str, rng: random.Random) -> str | None:
    if not _SET.fullmatch(text):
        return None
    entries = _entries(text)
    rng.shuffle(entries)
    return rf"\{{{', '.join(entries)}\}}"


def _as_decimal(text: str, rng: random.Random) -> str | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    value = Fraction(int(match["top"]), int(match["bottom"]))
    # Only twos and fives below: the decimal ends.
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    places = 20
    if bottom != 1 or 10**places % value.denominator:
        return None
    digits = str(value.numerator * 10**places // value.denominator).rjust(places + 1, "0")
    return match["sign"] + f"{digits[:-places]}.{digits[-places:]}".rstrip("0").rstrip(".")


def _scaled(text: str, rng: random.Random) -> str | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    factor = rng.randint(2, 30)
    top, bottom = (factor * int(match[name]) for name in ("top", "bottom"))
    return rf"{match['sign']}\frac{{{top}}}{{{bottom}}}"


def _thousands(text: str, rng: random.Random) -> str | None:
    if not re.fullmatch(r"-?\d{4,}", text):
        return None
    return rng.choice((f"{int(text):,}", f"{int(text):,}".replace(",", "{,}")))


def _words(text: str, rng: random.Random) -> str | None:
    if not re.fullmatch(r"Yes|No|True|False|Infinite|Finite", text):
        return None
    return rng.choice((rf"\text{{{text}}}", text.lower(), f"**{text}**"))


_EQUAL: list[Callable[[str, random.Random], str | None]] = [
    # Spacing.
    _rewriting(r"(?<=[\w)}])([+=])(?=[\w({\\])", r" \1 "),
    _rewriting(r" ([-+=<>]) ", r"\1"),
    _rewriting(r", ?", r",\\ "),
    _rewriting(r"^(?=[-\w\\(])(.*)$", r"\\, \1 "),
    # Fractions and brackets.
    _rewriting(r"\\[dt]?frac", r"\\dfrac"),
    _rewriting(r"\\[dt]frac", r"\\frac"),
    _rewriting(r"\\[dt]?frac\{(\d)\}\{(\d)\}", r"\\frac\1\2"),
    _rewriting(r"^(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3"),
    _rewriting(r"^\(([^()]*)\)$", r"\\left(\1\\right)"),
    _rewriting(r"^\[([^()\[\]]*)\]$", r"\\left[\1\\right]"),
    _rewriting(r"\\sqrt\{(\d)\}", r"\\sqrt\1"),
    _rewriting(r"\^(\w)(?!\w)", r"^{\1}"),
    _rewriting(r"\\dbinom", r"\\binom"),
    _rewriting(r"\{pmatrix\}", r"{bmatrix}"),
    # Numbers.
    _rewriting(r"^(-?\d+)$", r"\1.0"),
    _rewriting(r"^(-?\d+\.\d+)$", r"\g<1>00"),
    _rewriting(r"^(\d+)$", r"+\1"),
    _rewriting(r"^(-?\d+(?:\.\d+)?)$", r"x = \1"),
    _rewriting(r"(?<=[\d{ ])\\pi(?![a-z])", "π"),
    _rewriting(r"^-(?=\d)", "−"),  # noqa: RUF001
    *(_as_decimal, _scaled, _thousands, _reordered_set, _words),
]
