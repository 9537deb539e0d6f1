"""Distinct problems of the rows of a data set, and what became of the other rows."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fos_rl.data.chats import Messages
from fos_rl.data.gold_check import GoldCheck
from fos_rl.data.row_text import RefusedRow
from fos_rl.rewards.equivalence import same_text
from fos_rl.rewards.normalize import normalize_answer
from fos_rl.rewards.numerals import bare_number, numbers_equal
from fos_rl.rewards.verifiers import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question. `id` depends on the question alone, not on its place in the file."""

    id: str
    messages: Messages
    answer: str
    row: int = 0
    """The first row of the data set that holds it, from 1; 0 for a generated one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemCounts:
    """What became of the rows: rows = duplicates + conflicting + damaged + kept.

    Example: six rows, of which A 1, A 1, A 1, B 2, B 3 and one is empty: 3 duplicates (two of A,
    one of B), 1 conflicting question (B), 1 damaged row, 1 kept (A).
    """

    rows: int
    duplicates: int
    conflicting: int
    damaged: int
    kept: int

    def __str__(self) -> str:
        return (
            f"{_count(self.kept, 'problem')} of {_count(self.rows, 'row')}; dropped "
            f"{_count(self.duplicates, 'duplicate')}, {_count(self.conflicting, 'question')} with "
            f"conflicting answers, {_count(self.damaged, 'damaged or empty row')}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """The distinct problems of a data set in the order of their first rows.

    `verifier` names the rule that scores answers to them, a key of `verifiers.RULES`. `notes` say
    why rows were refused and what answers were taken out of.
    """

    rows: list[Problem]
    summary: ProblemCounts
    verifier: Rule = "math"
    notes: tuple[str, ...] = ()
    gold_check: GoldCheck | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRow:
    """A row read as a problem, and what its answer was taken from."""

    problem: Problem
    taken_from: str


def distinct_problems(rows: Iterable[ReadRow | RefusedRow]) -> Problems:
    """Every question once, at its first row; questions whose answers differ, and rows that cannot
    be used, are left out and counted."""
    first: dict[str, ReadRow] = {}
    conflicts: set[str] = set()
    refused: Counter[str] = Counter()
    refused_first: dict[str, int] = {}
    total = 0
    for total, row in enumerate(rows, start=1):
        if isinstance(row, RefusedRow):
            refused[str(row)] += 1
            refused_first.setdefault(str(row), total)
            continue
        problem = row.problem
        if problem.id not in first:
            first[problem.id] = replace(row, problem=replace(problem, row=total))
        elif not _same_answer(first[problem.id].problem.answer, problem.answer):
            conflicts.add(problem.id)
    kept = [row for row in first.values() if row.problem.id not in conflicts]
    counts = ProblemCounts(
        rows=total,
        duplicates=total - refused.total() - len(first),
        conflicting=len(conflicts),
        damaged=refused.total(),
        kept=len(kept),
    )
    taken = Counter(row.taken_from for row in kept if row.taken_from)
    notes = [
        *(
            f"refused {_count(n, 'row')} with {reason} (first in row {refused_first[reason]})"
            for reason, n in refused.most_common()
        ),
        *(f"took {_count(n, 'answer')} out of {source}" for source, n in taken.most_common()),
    ]
    return Problems(rows=[row.problem for row in kept], summary=counts, notes=tuple(notes))


def _same_answer(a: str, b: str) -> bool:
    """Whether two gold answers of a question agree: 1,007 and 1007.0, $34$ and 34, 1/2 and 0.5.

    Only by spelling and by number, which takes no time whatever the text is.
    """
    if a == b or same_text(a, b):
        return True
    first, second = bare_number(normalize_answer(a)), bare_number(normalize_answer(b))
    return first is not None and second is not None and numbers_equal(first, second)
