"""Questions with gold answers, from any of the sources of the `data` section."""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from fos_rl.config import (
    ArithmeticData,
    DapoMathData,
    Data,
    DatasetData,
    Gsm8kData,
    VowelsData,
)
from fos_rl.data.arithmetic_problems import generate_arithmetic
from fos_rl.data.chats import read_prompt
from fos_rl.data.distinct import Problem, ProblemCounts, Problems, ReadRow, distinct_problems
from fos_rl.data.gold_check import check_golds
from fos_rl.data.golds import Gold, read_gold, read_gsm8k_gold
from fos_rl.data.row_text import RefusedRow
from fos_rl.data.tables import iterate_columns, open_table, require_column

# Both wordings of DAPO-Math-17k's instruction around the question.
_DAPO_BEFORE = re.compile(
    r"\s*Solve the following math problem step by step\. The last line of your response should be "
    r"of the form Answer: (?:\$Answer \(without quotes\)|\\boxed\{\$Answer\}) where \$Answer is "
    r"the answer to the problem\.\s*"
)
_DAPO_AFTER = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.\s*$")


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
    problems = distinct_problems(rows)
    if not problems.rows:
        raise ValueError(
            f"data.path = {config.path!r}: no problem in split {config.split!r} "
            f"({'; '.join([str(problems.summary), *problems.notes])}). Choose another split, or "
            "check that the columns hold questions and answers"
        )
    answers = [problem.answer for problem in problems.rows]
    return replace(problems, gold_check=check_golds(answers, f"data.path = {config.path!r}"))


_Row = ReadRow | RefusedRow
_Parse = Callable[[Any, Any], _Row]


def _parse_once(parse: _Parse, rows: Iterable[tuple[Any, Any]]) -> Iterator[_Row]:
    """`parse` of each row, worked out once for rows that are the same to the letter."""
    known: dict[bytes, _Row] = {}
    for row in rows:
        key = hashlib.blake2b(repr(row).encode("utf-8", "replace"), digest_size=16).digest()
        if key not in known:
            try:
                known[key] = parse(*row)
            except RefusedRow as reason:
                # Without the traceback, which would keep the row in memory.
                known[key] = RefusedRow(str(reason))
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

    def parse(question: Any, solution: Any) -> _Row:
        return _problem(question, read_gsm8k_gold(solution), config.instruction)

    yield from _parse_once(parse, iterate_columns(table, ["question", "answer"]))


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

    def parse(prompt: Any, answer: Any) -> _Row:
        return _problem(prompt, read_gold(answer), instruction="")

    yield from _parse_once(parse, iterate_columns(table, columns))


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
        return _problem(prompt, read_gold(answer), config.instruction)

    columns = [config.prompt_column, config.answer_column]
    yield from _parse_once(parse, iterate_columns(table, columns))


def _problem(prompt: Any, gold: Gold, instruction: str) -> _Row:
    """A question with the instruction behind it, or a chat as it is."""
    messages = read_prompt(prompt)
    if isinstance(messages, str):
        question = messages
        content = f"{question}\n\n{instruction}" if instruction else question
        messages = (("user", content),)
    elif len(messages) == 1:
        question = messages[0][1]
    else:
        question = "\n".join(f"{role}: {content}" for role, content in messages)
    question = _DAPO_AFTER.sub("", _DAPO_BEFORE.sub("", question, count=1))
    if not question.strip():
        raise RefusedRow("a prompt without a question")
    problem = Problem(id=_question_id(question), messages=messages, answer=gold.answer)
    return ReadRow(problem=problem, taken_from=gold.taken_from)


def _question_id(question: str) -> str:
    """16 hex digits of the question's text, blind to whitespace and to Unicode composition."""
    text = unicodedata.normalize("NFC", " ".join(question.split()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
