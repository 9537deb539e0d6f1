"""Questions with gold answers, from any of the sources of the `data` section."""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fos_rl.config import (
    ArithmeticData,
    DapoMathData,
    Data,
    DatasetData,
    Gsm8kData,
    VowelsData,
)
from fos_rl.data.arithmetic import generate_arithmetic
from fos_rl.data.tables import iterate_columns, open_table, require_column
from fos_rl.data.verifiers import Rule

Messages = tuple[tuple[str, str], ...]
"""A chat as (role, content) pairs."""

# Both wordings of DAPO-Math-17k's instruction around the question.
_DAPO_BEFORE = re.compile(
    r"\s*Solve the following math problem step by step\. The last line of your response should be "
    r"of the form Answer: (?:\$Answer \(without quotes\)|\\boxed\{\$Answer\}) where \$Answer is "
    r"the answer to the problem\.\s*"
)
_DAPO_AFTER = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$")

# A backslash command read as an escape: \f of \frac, \b of \beta, \a of \alpha, \v of \vec. These
# characters have no use in text, so the command is certain; \t and \r are whitespace, and only
# commands that cannot be words after it are taken back.
_EATEN = {"\x07": "a", "\x08": "b", "\x0b": "v", "\x0c": "f", "\t": "t", "\r": "r"}
_EATEN_COMMAND = re.compile(
    r"[\x07\x08\x0b\x0c](?=[a-z])|\t(?=frac\b|imes\b|heta\b|ext\{|riangle\b)|\r(?=ight\b|angle\b)"
)
# What remains then is beyond repair: control characters, the mark of undecodable bytes, and a
# \frac without its first two characters.
_DAMAGED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffd]|(?<![A-Za-z\\])rac\{")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question. `id` depends on the question alone, not on its place in the file."""

    id: str
    messages: Messages
    answer: str


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

    `verifier` names the rule that scores answers to them, a key of `verifiers.RULES`.
    """

    rows: list[Problem]
    summary: ProblemCounts
    verifier: Rule = "math"


def load_problems(config: Data, seed: int) -> Problems:
    """The problems of a data section; `seed` steers generated ones only.

    A question that occurs again is dropped as a duplicate; a question with two different answers
    is dropped whole, since one of them is wrong and nothing tells which. LaTeX commands whose
    backslash was lost to an escape (a form feed before `rac`) are repaired; rows damaged beyond
    that, without a question or without an answer are dropped. All of it is counted.

    Raises:
        ValueError: naming the field of the section, its value and the remedy.
    """
    match config:
        case ArithmeticData():
            return _arithmetic_problems(config, seed)
        case VowelsData():
            return _vowel_problems(config)
        case Gsm8kData():
            rows = _gsm8k_rows(config)
        case DapoMathData():
            rows = _dapo_rows(config)
        case DatasetData():
            rows = _dataset_rows(config)
    problems, counts = _deduplicate(rows)
    if not problems:
        raise ValueError(
            f"data.path = {config.path!r}: no problem in split {config.split!r} ({counts}). "
            "Choose another split, or check that the answer column holds answers"
        )
    return Problems(rows=problems, summary=counts)


# A row that is a problem, or None for one that is damaged or empty.
_Row = Problem | None


def _parse_once(
    parse: Callable[[Any, Any], _Row], rows: Iterable[tuple[Any, Any]]
) -> Iterator[_Row]:
    """`parse` of each row, worked out once for rows that are the same to the letter."""
    known: dict[bytes, _Row] = {}
    for row in rows:
        key = hashlib.blake2b(repr(row).encode("utf-8", "replace"), digest_size=16).digest()
        if key not in known:
            known[key] = parse(*row)
        yield known[key]


def held_out_arithmetic(config: ArithmeticData, seed: int, num_problems: int) -> Problems:
    """Problems of the section's kind that `load_problems` with the same seed does not hold: the
    generator draws distinct ones in order, and these are the next.

    Raises:
        ValueError: when the section already holds every problem of its difficulty.
    """
    drawn = generate_arithmetic(config.difficulty, config.num_problems + num_problems, seed)
    if not (pairs := drawn[config.num_problems :]):
        raise ValueError(
            f"data.num_problems = {config.num_problems}: all {len(drawn)} problems of "
            f"data.difficulty = {config.difficulty} are trained on; lower it to hold some out"
        )
    return _arithmetic_rows(pairs)


def _arithmetic_problems(config: ArithmeticData, seed: int) -> Problems:
    return _arithmetic_rows(generate_arithmetic(config.difficulty, config.num_problems, seed))


def _arithmetic_rows(pairs: Iterable[tuple[str, int]]) -> Problems:
    problems = [
        Problem(
            id=f"arithmetic/{expression.replace(' ', '')}",
            messages=(("user", f"What is {expression}? Answer with the number only."),),
            answer=str(value),
        )
        for expression, value in pairs
    ]
    return Problems(rows=problems, summary=_all_kept(problems), verifier="last_integer")


def _vowel_problems(config: VowelsData) -> Problems:
    problems = [
        Problem(
            id=f"vowels/{i}", messages=(("user", f"Say a vowel, please ({i})."),), answer="aeiou"
        )
        for i in range(config.num_problems)
    ]
    return Problems(rows=problems, summary=_all_kept(problems), verifier="has_letter_of")


def _all_kept(problems: list[Problem]) -> ProblemCounts:
    count = len(problems)
    return ProblemCounts(rows=count, duplicates=0, conflicting=0, damaged=0, kept=count)


def _gsm8k_rows(config: Gsm8kData) -> Iterator[_Row]:
    # The hub's data set has two subsets; a file has none.
    subset = "main" if config.path == "openai/gsm8k" else None
    table = open_table(config.path, config.split, subset)
    for column in ("question", "answer"):
        require_column(
            table,
            column,
            field=f"data.path = {config.path!r}",
            remedy='gsm8k needs question and answer; for other columns use data.type = "dataset" '
            "with data.prompt_column and data.answer_column",
        )
    for question, solution in iterate_columns(table, ["question", "answer"]):
        _, marker, answer = (solution or "").rpartition("####")
        yield _question_row(question, answer if marker else None, config.instruction)


def _dapo_rows(config: DapoMathData) -> Iterator[_Row]:
    table = open_table(config.path, config.split)
    columns = ["prompt", "reward_model.ground_truth"]
    for column in columns:
        require_column(
            table,
            column,
            field=f"data.path = {config.path!r}",
            remedy="dapo_math needs DAPO-Math-17k's prompt and reward_model.ground_truth; for "
            'other columns use data.type = "dataset" with data.prompt_column and '
            "data.answer_column",
        )
    yield from _parse_once(_chat_row, iterate_columns(table, columns))


def _dataset_rows(config: DatasetData) -> Iterator[_Row]:
    table = open_table(config.path, config.split, config.subset)
    for field in ("prompt_column", "answer_column"):
        column = getattr(config, field)
        require_column(
            table,
            column,
            field=f"data.{field} = {column!r}",
            remedy=f"Set data.{field} to one of them",
        )

    def parse(prompt: Any, answer: Any) -> _Row:
        if isinstance(prompt, list):
            return _chat_row(prompt, answer)
        return _question_row(prompt, answer, config.instruction)

    columns = [config.prompt_column, config.answer_column]
    yield from _parse_once(parse, iterate_columns(table, columns))


def _question_row(question: Any, answer: Any, instruction: str) -> _Row:
    question, answer = _clean_text(question), _clean_answer(answer)
    if question is None or answer is None:
        return None
    content = f"{question}\n\n{instruction}" if instruction else question
    return Problem(id=_question_id(question), messages=(("user", content),), answer=answer)


def _chat_row(prompt: Any, answer: Any) -> _Row:
    answer = _clean_answer(answer)
    if not isinstance(prompt, list) or not prompt or answer is None:
        return None
    messages = []
    for message in prompt:
        role, content = message.get("role"), _clean_text(message.get("content"))
        if not role or content is None:
            return None
        messages.append((role, content))
    if messages[-1][0] == "assistant":
        # The answer is already there; nothing is left to sample.
        return None
    if len(messages) == 1:
        question = _DAPO_AFTER.sub("", _DAPO_BEFORE.sub("", messages[0][1], count=1))
    else:
        question = "\n".join(f"{role}: {content}" for role, content in messages)
    if not question.strip():
        return None
    return Problem(id=_question_id(question), messages=tuple(messages), answer=answer)


def _clean_text(text: Any) -> str | None:
    """The text with eaten LaTeX commands repaired; None if empty or damaged beyond that."""
    if not isinstance(text, str):
        return None
    text = _EATEN_COMMAND.sub(lambda match: "\\" + _EATEN[match.group()], text).strip()
    return None if not text or _DAMAGED.search(text) else text


def _clean_answer(answer: Any) -> str | None:
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    return None if answer is None or isinstance(answer, list | dict) else _clean_text(str(answer))


def _deduplicate(rows: Iterable[_Row]) -> tuple[list[Problem], ProblemCounts]:
    first: dict[str, Problem] = {}
    conflicts: set[str] = set()
    total = damaged = 0
    for row in rows:
        total += 1
        if row is None:
            damaged += 1
            continue
        known = first.setdefault(row.id, row)
        if known.answer != row.answer and _plain(known.answer) != _plain(row.answer):
            conflicts.add(row.id)
    problems = [problem for problem in first.values() if problem.id not in conflicts]
    counts = ProblemCounts(
        rows=total,
        duplicates=total - damaged - len(first),
        conflicting=len(conflicts),
        damaged=damaged,
        kept=len(problems),
    )
    return problems, counts


def _question_id(question: str) -> str:
    """16 hex digits of the question's text, blind to whitespace and to Unicode composition."""
    text = unicodedata.normalize("NFC", " ".join(question.split()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(answer: str) -> str:
    """The answer with spellings of one number made equal: 1,007 and 1007.0, 34 and $34$."""
    text = answer.strip().strip("$").replace(" ", "")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    if re.fullmatch(r"[-+]?\d+\.\d*", text):
        text = text.rstrip("0").rstrip(".")
    return text.removeprefix("+")
