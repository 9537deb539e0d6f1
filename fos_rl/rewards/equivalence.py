r"""Whether two answers are the same: exactly for numbers, by structure for tuples, sets and
matrices, by words for words, by the value of formulas for what is left."""

import re
from typing import Literal

from fos_rl.rewards.normalize import normalize_answer
from fos_rl.rewards.numerals import bare_number, is_unit, numbers_equal, parse_number
from fos_rl.rewards.structures import Parts, as_matrices, bracketed, parse_matrix, split_elements
from fos_rl.rewards.units import conversion

_NAME = r"(?:[A-Za-z]|\\[a-z]+(?:\s*\{\w\})?)(?:_(?:\{[^{}]*\}|\w))?"
_FUNCTION = r"'*(?:\^\{?-1\}?)?\s*\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)"
_TUPLE = r"\(\s*[A-Za-z](?:_\w)?(?:\s*,\s*[A-Za-z](?:_\w)?)+\s*\)"
_ASSIGNMENT = re.compile(
    rf"(?P<name>{_NAME}(?:{_FUNCTION})?|{_TUPLE}|[A-Z]\^(?:\{{[^{{}}]*\}}|\w))\s*=(?!=)\s*(?P<value>[^=]+)"
)
_MEMBERSHIP = re.compile(rf"^{_NAME}\s*\\in(?![a-z])\s*(?=[(\[]|\\\{{|\\mathbb|\\emptyset)")
_POLAR_WORDS = frozenset({"yes", "no", "true", "false"})
_NEGATIONS = frozenset({"not", "never", "cannot", "can't", "isn't", "doesn't", "don't", "unless"})
# In any case the same; AB and Ab are different segments, products or choices.
_SHORT_WORDS = frozenset({"no", "ok", "on", "up", "in", "it", "us", "we", "he", "is"})
_WORD = r"[A-Za-z]{2,}(?:['-][A-Za-z]{2,})*"
_WORDS = re.compile(rf"{_WORD}(?:,?\s+(?:a\s+)?{_WORD})*")
_NO_WORDS = re.compile(
    r"(?:pi|inf|infinity|oo|sqrt|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp|max|min|gcd|lcm)\b",
    re.IGNORECASE,
)
# Two values next to each other are a product to a LaTeX parser and two answers to a reader.
_SIDE_BY_SIDE = re.compile(r"[\d}]\s+[\d.]|\d\s+\\frac|[\d}]\s+\(\s*[-+]?[\d.,/]+\s*\)")
# In \log_2 8 and \sin^2 30 the first number belongs to the function.
_INDEX = re.compile(r"(?:_|\\[a-z]+\^)(?:\{[^{}]*\}|\w)")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}\s+[A-Za-z]{2,}")
_SET_SIGN = re.compile(r"\\(?:cup|cap|setminus|emptyset|leq|geq|neq|mathbb)(?![a-z])|[<>]")
_VALUE_AND_UNIT = re.compile(
    r"(?P<value>(?=.*\\).*(?:[\d})°]|\\pi))\s+(?P<unit>[A-Za-z]{2}[A-Za-z. /^{}\d]*)", re.DOTALL
)

_RELATION = re.compile(
    r"\\(?:equiv|cong|simeq|sim|mid|nmid|to|mapsto|subseteq|subset|supseteq|supset|pmod|perp)(?![a-z])"
)

By = Literal["text or value", "value"]


def answers_equal(answer: str, gold: str, *, by: By = "text or value") -> bool:
    """Whether an answer found in a response has the gold answer's value.

    Numbers are compared exactly (34.0 is 34, 0.33 is not 1/3; six decimals of a number that has no
    end are enough). A unit, currency or percent sign on one side only is no difference, two units
    are converted; 25% is 25 and 0.25. An answer of several values is wrong for a gold answer of
    one. Tuples and matrices compare entry by entry, sets in any order, intervals also with
    inequalities, words whole. Formulas are compared by value, which has no time limit here.

    `by="value"` leaves out the comparison of the two as text, so a gold answer equals itself only
    if it has a value that can be read, or is a word.
    """
    return _equal(normalize_answer(answer), normalize_answer(gold), by, depth=0)


def same_text(answer: str, gold: str) -> bool:
    """Whether two answers are the same but for markup and spaces."""
    return _squeeze(normalize_answer(answer)) == _squeeze(normalize_answer(gold))


def _squeeze(text: str) -> str:
    # A space between two digits is a difference.
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text)
    return re.sub(r"\s+", "", text)


def _equal(answer: str, gold: str, by: By, depth: int) -> bool:
    if not answer or not gold or depth > 5:
        return False
    if by == "text or value" and _squeeze(answer) == _squeeze(gold):
        return True
    gold_number = bare_number(gold)
    if gold_number is not None:
        number = parse_number(answer)
        if number is not None:
            return numbers_equal(number, gold_number)
        if _is_several(answer):
            return False
    elif _is_words(gold):
        return _words_equal(answer, gold)
    elif re.fullmatch(r"[A-Z]", gold):
        choice = re.match(r"(?:option |choice )?\(?([A-Z])(?:\)|[.:]\s|\)\s|$)", answer)
        return choice is not None and choice[1] == gold
    return _structures_equal(answer, gold, by, depth)


def _structures_equal(answer: str, gold: str, by: By, depth: int) -> bool:
    answer, answer_unit = _split_unit(_MEMBERSHIP.sub("", answer, count=1))
    gold, gold_unit = _split_unit(_MEMBERSHIP.sub("", gold, count=1))
    if conversion(answer_unit, gold_unit) != 1:
        return False
    gold_assigns, answer_assigns = _ASSIGNMENT.fullmatch(gold), _ASSIGNMENT.fullmatch(answer)
    if gold_assigns and answer_assigns:
        if _squeeze(gold_assigns["name"]) == _squeeze(answer_assigns["name"]):
            return _equal(answer_assigns["value"], gold_assigns["value"], by, depth + 1)
        return _formulas_equal(answer, gold)
    if gold_assigns and "=" not in answer:
        return _equal(answer, gold_assigns["value"].strip(), by, depth + 1)
    if answer_assigns and "=" not in gold:
        return _equal(answer_assigns["value"].strip(), gold, by, depth + 1)
    if parse_matrix(gold) or parse_matrix(answer):
        return _matrices_equal(answer, gold, by, depth)
    compared = _parts_compared(answer, gold, by, depth)
    if compared is not None:
        return compared
    if _SET_SIGN.search(answer) or _SET_SIGN.search(gold):
        from fos_rl.rewards.formulas import descriptions_equal

        return descriptions_equal(answer, gold)
    return _formulas_equal(answer, gold)


def _parts_compared(answer: str, gold: str, by: By, depth: int) -> bool | None:
    """The verdict on tuples, sets, lists, ratios and plus-minus; None if neither is one."""
    for whole in (_plus_minus, _ratio, _relation):
        gold_parts, answer_parts = whole(gold), whole(answer)
        if gold_parts and not answer_parts and whole is _plus_minus:
            answer_parts = Parts("{}", split_elements(_strip_braces(answer)))
        if gold_parts and answer_parts:
            return _parts_equal(answer_parts, gold_parts, by, depth)
    if _ratio(gold) or _ratio(answer):
        # 12:30 is no quotient.
        return False
    gold_parts, answer_parts = bracketed(gold), bracketed(answer)
    if gold_parts and answer_parts:
        return _parts_equal(answer_parts, gold_parts, by, depth)
    if gold_parts and not answer_parts and gold_parts.kind in ("()", "{}"):
        # (1, 2) may be written 1, 2.
        elements = split_elements(answer)
        if len(elements) == len(gold_parts.elements) > 1 and not _SET_SIGN.search(answer):
            return _parts_equal(Parts(gold_parts.kind, elements), gold_parts, by, depth)
    several_golds = split_elements(gold)
    if not gold_parts and len(several_golds) > 1 and not _SET_SIGN.search(gold):
        elements = answer_parts.elements if answer_parts else split_elements(answer)
        return _parts_equal(Parts("{}", elements), Parts("{}", several_golds), by, depth)
    if answer_parts and len(answer_parts.elements) > 1 and not _SET_SIGN.search(gold):
        return False
    if not gold_parts and not _SET_SIGN.search(gold) and _is_several(answer):
        return False
    return None


def _matrices_equal(answer: str, gold: str, by: By, depth: int) -> bool:
    answers, golds = as_matrices(answer), as_matrices(gold)
    if not answers or not golds:
        # A multiple of a matrix, a determinant's value.
        if r"\begin" in answer and r"\begin" in gold:
            return _formulas_equal(answer, gold)
        return any(
            matrix.kind == "determinant" and _formulas_equal(matrix.as_determinant(), other)
            for matrices, other in ((answers, gold), (golds, answer))
            for matrix in matrices
        )
    return any(
        a.kind == g.kind
        and [len(row) for row in a.rows] == [len(row) for row in g.rows]
        and all(
            _equal(x, y, by, depth + 1)
            for row, other in zip(a.rows, g.rows, strict=True)
            for x, y in zip(row, other, strict=True)
        )
        for a in answers
        for g in golds
    )


def _parts_equal(answer: Parts, gold: Parts, by: By, depth: int) -> bool:
    if answer.kind != gold.kind or len(answer.elements) != len(gold.elements):
        return False
    if gold.kind != "{}":
        elements = _by_name(answer.elements) if gold.kind == "()" else answer.elements
        pairs = zip(elements, gold.elements, strict=True)
        return all(_equal(a, g, by, depth + 1) for a, g in pairs)
    left = list(gold.elements)
    for element in answer.elements:
        match = next((g for g in left if _equal(element, g, by, depth + 1)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _by_name(elements: list[str]) -> list[str]:
    """`y = 2, x = 1` in the order of the names, which is that of a tuple (x, y)."""
    matches = [_ASSIGNMENT.fullmatch(element) for element in elements]
    names = [match["name"] for match in matches if match is not None]
    if len(set(names)) < len(elements):
        return elements
    return [element for _, element in sorted(zip(names, elements, strict=True))]


def _strip_braces(text: str) -> str:
    return re.sub(r"^\\?\{(.*)\\?\}$", r"\1", text).removesuffix("\\").strip()


def _plus_minus(text: str) -> Parts | None:
    match = re.fullmatch(r"(?:[A-Za-z]\s*=\s*)?\\pm\s*(?P<value>[^,;=]+)", text)
    if match is None:
        return None
    return Parts("{}", [match["value"], f"-{match['value']}"])


def _ratio(text: str) -> Parts | None:
    if re.search(r"=|\\\{|\\(?:in|to|mapsto)(?![a-z])", text):
        return None
    parts = text.split(":")
    return Parts("::", parts) if len(parts) > 1 and all(p.strip() for p in parts) else None


def _relation(text: str) -> Parts | None:
    r"""The sides of a statement that no formula parser reads: `x \equiv 3 \pmod 7`."""
    sides = _RELATION.split(text)
    signs = _RELATION.findall(text)
    return Parts(" ".join(signs), [side.strip() for side in sides]) if signs else None


def _is_several(answer: str) -> bool:
    """Whether a reader sees more than one value, or a sentence instead of a value."""
    if r"\begin{" in answer:
        return False
    return bool(
        len(split_elements(answer)) > 1
        or _SIDE_BY_SIDE.search(_INDEX.sub("", answer))
        or _PROSE.search(answer)
    )


def _is_words(gold: str) -> bool:
    return bool(_WORDS.fullmatch(gold)) and not _NO_WORDS.match(gold)


def _words_equal(answer: str, gold: str) -> bool:
    if len(gold) == 2 and gold.casefold() not in _SHORT_WORDS:
        return re.split(r"\s*[.,;:]", answer)[0] == gold
    answer, gold = answer.casefold(), gold.casefold()
    words = re.findall(r"[a-z']+", answer)
    if " ".join(words) == " ".join(re.findall(r"[a-z']+", gold)):
        return not re.search(r"[\d\\=+*/^]", answer)
    if gold not in _POLAR_WORDS:
        return bool(re.match(rf"{re.escape(gold)}\s*[.,;:]", answer)) and len(words) < 30
    others = _POLAR_WORDS & set(words) - {gold}
    if gold == "no" and re.match(r"no\s*[.,;:]", answer):
        # What follows says why not.
        return not others and not re.search(r"\b(?:or|maybe|perhaps)\b", answer)
    if words[:1] == [gold] and not re.match(
        rf"{gold}\s*(?:[.,;:!(-]|$|(?:it|this|that|the)\b)", answer
    ):
        # No solution is another answer than no.
        return False
    if _NEGATIONS & set(words) or re.search(r"\b(?:or|maybe|perhaps)\b", answer):
        return False
    return _POLAR_WORDS & set(words) == {gold} and len(words) < 30


def _split_unit(text: str) -> tuple[str, str]:
    r"""A value and its unit, as in `48\sqrt{3} cm^2`; a letter alone is a variable."""
    match = _VALUE_AND_UNIT.fullmatch(text)
    if match and is_unit(match["unit"], spaced=True):
        return match["value"], match["unit"]
    return text, ""


def _formulas_equal(answer: str, gold: str) -> bool:
    # The parser reads words as products of letters.
    if _PROSE.search(answer):
        return False
    # sympy takes a second to import, and most answers are numbers or words.
    from fos_rl.rewards.formulas import formulas_equal

    return formulas_equal(answer, gold)
