r"""Answers of several values: tuples, sets, lists and matrices, as their elements."""

import re
from dataclasses import dataclass
from typing import Literal

_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MATRIX = re.compile(
    r"(?P<open>[(\[|]?)\s*\\begin\s*\{(?P<kind>[pbBvV]?(?:small)?matrix\*?|array|cases)\}"
    r"(?:\s*(?:\[[a-z]\]|\{[lcr|\s]*\}))?(?P<body>.*)\\end\s*\{(?P=kind)\}\s*(?P<close>[)\]|]?)"
    r"\s*(?P<transpose>\^\{?\s*(?:T|t|\\top|\\intercal|\\prime|')\s*\}?)?",
    re.DOTALL,
)
_TRANSPOSE = re.compile(r"\^\{?\s*(?:T|\\top|\\intercal)\s*\}?$")


@dataclass(frozen=True, slots=True)
class Parts:
    """A tuple, set or interval: its outer brackets and its elements."""

    kind: str
    elements: list[str]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Entries by rows. A determinant is a matrix between bars, whose value is a number."""

    kind: Literal["matrix", "determinant", "cases"]
    rows: list[list[str]]

    def as_determinant(self) -> str:
        """Its LaTeX between vertical bars."""
        body = r" \\ ".join(" & ".join(row) for row in self.rows)
        return rf"\begin{{vmatrix}} {body} \end{{vmatrix}}"

    def transposed(self) -> "Matrix":
        """The matrix of the same kind with rows and columns swapped."""
        return Matrix(self.kind, [list(column) for column in zip(*self.rows, strict=True)])


def bracketed(text: str) -> Parts | None:
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
    # \{x : x > 1\} has conditions, no elements.
    if re.search(r"\||\\mid|:" if text[0] == "{" else r"\||\\mid", text):
        return None
    return Parts(text[0] + text[-1], elements)


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


def parse_matrix(text: str) -> Matrix | None:
    r"""A matrix that is all of a normalized text, in any environment or brackets, `^T` applied."""
    match = _MATRIX.fullmatch(text.strip())
    if match is None or r"\begin" in match["body"] or r"\end" in match["body"]:
        return None
    rows = [
        [entry.strip() for entry in re.split(r"(?<!\\)&", row)]
        for row in re.split(
            r"\\\\(?:\s*\[[^\]]*\])?|\\cr(?![a-z])", match["body"].replace(r"\hline", "")
        )
        if row.strip()
    ]
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    bars = match["open"] == "|" or match["kind"][0] in "vV"
    kind = "cases" if match["kind"] == "cases" else "determinant" if bars else "matrix"
    matrix = Matrix(kind, rows)
    return matrix.transposed() if match["transpose"] else matrix


def as_matrices(text: str) -> list[Matrix]:
    """The matrices that a text can stand for: a tuple is a column or a row, rows in brackets one.

    Empty if it is not a matrix.
    """
    matrix = parse_matrix(text)
    if matrix is not None:
        return [matrix]
    transpose = _TRANSPOSE.search(text)
    parts = bracketed(text[: transpose.start()] if transpose else text)
    if parts is None or parts.kind not in ("()", "[]") or len(parts.elements) < 2:
        return []
    inner = [bracketed(element) for element in parts.elements]
    if all(row is not None and row.kind == parts.kind for row in inner):
        rows = [row.elements for row in inner if row is not None]
        if len({len(row) for row in rows}) > 1:
            return []
        matrix = Matrix("matrix", rows)
        return [matrix.transposed() if transpose else matrix]
    row = Matrix("matrix", [parts.elements])
    return [row.transposed()] if transpose else [row.transposed(), row]
