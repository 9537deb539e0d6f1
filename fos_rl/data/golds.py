"""Gold answers in the shapes that data sets have: numbers, text, lists, whole solutions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

from fos_rl.data.row_text import RefusedRow, clean_text, parse_literal
from fos_rl.rewards.answers import MAX_ANSWER_CHARS, find_answer

# From here on not every integer is a 64-bit float.
_EXACT_FLOATS = 2**53
# A number of more digits is written with a power of ten.
_MAX_DIGITS = 40
# What programs write for a value that is not there.
_MISSING = frozenset({"nan", "null", "none", "n/a", "<na>", "[]"})
_QUOTED = re.compile(r"(?P<bytes>b?)(?P<quote>[\"'])(?P<inner>(?:(?!(?P=quote)).)+)(?P=quote)")
_BOX = re.compile(r"\\(?:boxed|fbox)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    r"""An answer; `taken_from` says what it stood in, "" if that was the answer itself.

    Example: `so it is \boxed{5}` gives `Gold(answer="5", taken_from="whole solutions")`.
    """

    answer: str
    taken_from: str = ""


def read_gold(value: Any) -> Gold:
    r"""The answer that a value of an answer column gives.

    Numbers keep all their digits, and 5.0 is 5; true and false are words; a list of numbers is
    `[1, 2]`. The answer is taken out of a list of one, of quotes, of bytes, and of a whole
    solution: `\boxed{5}`, `#### 5` or whatever else `find_answer` finds in a response.

    Raises:
        RefusedRow: there is no answer, or it is not clear which.
    """
    if value is None:
        raise RefusedRow("no answer")
    if isinstance(value, bool):
        return Gold(answer=str(value).lower())
    if isinstance(value, int | float | Decimal):
        return Gold(answer=_number(value))
    if isinstance(value, bytes):
        gold = read_gold(clean_text(value, "an answer"))
        return Gold(answer=gold.answer, taken_from=gold.taken_from or "bytes")
    if isinstance(value, str):
        return _read_text(clean_text(value, "an answer"))
    if isinstance(value, list | tuple):
        return _read_list(value)
    if isinstance(value, dict):
        return _refuse_object(value)
    raise RefusedRow(f"an answer of type {type(value).__name__}; store it as text")


def _refuse_object(value: dict[str, Any]) -> NoReturn:
    raise RefusedRow(
        f"an answer with the entries {', '.join(map(str, value)) or '(none)'}; name one of them "
        "with a dot in data.answer_column, as in answer.value"
    )


def read_gsm8k_gold(value: Any) -> Gold:
    """GSM8K's answer behind the `####` of a solution, which it must have.

    Raises:
        RefusedRow: there is none.
    """
    if not isinstance(value, str | bytes) or "####" not in (text := clean_text(value, "an answer")):
        raise RefusedRow("an answer without ####")
    return Gold(answer=_after_hashes(text))


def _number(value: float | Decimal) -> str:
    if isinstance(value, int):
        return str(value)
    number = value if isinstance(value, Decimal) else Decimal(repr(value))
    if not number.is_finite():
        raise RefusedRow("an answer that is NaN" if number.is_nan() else "an infinite answer")
    if isinstance(value, float) and abs(value) >= _EXACT_FLOATS and value.is_integer():
        raise RefusedRow(
            "an answer that is a floating-point number above 2^53, whose last digits are lost; "
            "store it as an integer or as text"
        )
    if number == 0:
        return "0"
    sign, digits, exponent = number.as_tuple()
    if max(len(digits), abs(number.adjusted())) > _MAX_DIGITS:
        whole = "".join(map(str, digits))
        return rf"{'-' if sign else ''}{whole} \times 10^{{{exponent}}}"
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _read_list(items: Sequence[Any]) -> Gold:
    distinct = list({repr(item): item for item in items}.values())
    if not distinct:
        raise RefusedRow("an empty list of answers")
    if len(distinct) == 1:
        return Gold(answer=read_gold(distinct[0]).answer, taken_from="lists")
    if all(isinstance(i, int | float | Decimal) and not isinstance(i, bool) for i in items):
        return Gold(answer=f"[{', '.join(_number(item) for item in items)}]")
    raise RefusedRow(
        "a list of several answers, which does not say whether each or all of them count; give one"
    )


def _read_text(text: str) -> Gold:
    if not text or text.casefold() in _MISSING:
        raise RefusedRow("no answer")
    said = parse_literal(text) if text[0] + text[-1] in ("[]", "{}") else None
    # [1, 2] as text is an interval as well as a list, and stays.
    if isinstance(said, list) and (len(said) == 1 or any(isinstance(i, str) for i in said)):
        return _read_list(said)
    if isinstance(said, dict) and said:
        _refuse_object(said)
    if quoted := _QUOTED.fullmatch(text):
        inner = parse_literal(text) if "\\\\" in text else quoted["inner"]
        if isinstance(inner, str | bytes):
            kind = "bytes" if quoted["bytes"] else "quotes"
            return Gold(answer=read_gold(inner).answer, taken_from=kind)
    answer = _in_solution(text)
    if len(answer) > MAX_ANSWER_CHARS:
        raise RefusedRow(
            rf"an answer of more than {MAX_ANSWER_CHARS:,} characters without \boxed, #### or "
            '"Answer:" that would show where it ends'
        )
    return Gold(answer=answer, taken_from="" if answer == text else "whole solutions")


def _in_solution(text: str) -> str:
    found = find_answer(text)
    if found is None and "####" in text:
        # In the middle of a line, where in a response it would not count.
        return _after_hashes(text)
    if found is None and _BOX.search(text):
        raise RefusedRow(r"a solution whose \boxed is empty or not closed")
    # A brace on one side only shows that more than the answer was cut out.
    return text if found is None or found.count("{") != found.count("}") else found


def _after_hashes(text: str) -> str:
    lines = text.rpartition("####")[2].strip().splitlines()
    if not lines:
        raise RefusedRow("a solution with nothing after its last ####")
    return lines[0].strip()
