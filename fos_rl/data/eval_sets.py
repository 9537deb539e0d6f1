"""Problems to evaluate on, by name or from a file, as tokenized prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fos_rl.config import ArithmeticData, DapoMathData, Data, DatasetData, Gsm8kData, RunConfig
from fos_rl.data.problems import Problems, held_out_arithmetic, load_problems
from fos_rl.data.prompts import encode_problems, special_token_notes
from fos_rl.data.tables import iterate_columns, open_table
from fos_rl.rewards.verifiers import Rule
from fos_rl.types import Prompt

# AIME 2024 comes as 32 copies of 30 problems; loading keeps one of each.
NAMED_SETS: dict[str, Data] = {
    "gsm8k": Gsm8kData(split="test"),
    "math500": DatasetData(
        path="HuggingFaceH4/MATH-500", split="test", prompt_column="problem", answer_column="answer"
    ),
    "aime24": DapoMathData(path="BytedTsinghua-SIA/AIME-2024"),
    "aime25": DatasetData(
        path="math-ai/aime25", split="test", prompt_column="problem", answer_column="answer"
    ),
}

HELD_OUT = "held_out"
"""Problems of the run's own generated task that it does not train on."""
_HELD_OUT_PROBLEMS = 200

_QUESTION_COLUMNS = ("prompt", "problem", "question", "messages", "conversations")
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """Distinct problems; `too_long` more have more tokens than rollout.max_prompt_tokens. `notes`
    say what else was left out, and which gold answers cannot score."""

    name: str
    prompts: list[Prompt]
    rule: Rule
    too_long: int
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line: name, number of problems, and what was left out."""
        dropped = f", {self.too_long:,} too long" if self.too_long else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{self.name}: {len(self.prompts):,} problems{dropped}{notes}"


def trained_on_note(eval_set: EvalSet, trained: Sequence[Prompt]) -> str:
    """How many problems of a set are trained on, recognised by their questions; "" if none is."""
    shared = {prompt.id for prompt in eval_set.prompts} & {prompt.id for prompt in trained}
    return f"; {len(shared):,} of them trained on" if shared else ""


def load_eval_sets(config: RunConfig, tokenizer: Any) -> list[EvalSet]:
    """The sets of the `eval` section; none without one.

    Raises:
        ValueError: naming the set, and what is wrong with it.
    """
    if config.eval is None:
        return []
    limit, most = config.rollout.max_prompt_tokens, config.eval.max_problems
    return [
        _held_out(config, tokenizer)
        if name == HELD_OUT
        else load_eval_set(name, tokenizer, limit, most)
        for name in config.eval.sets
    ]


def _held_out(config: RunConfig, tokenizer: Any) -> EvalSet:
    assert config.eval is not None
    if not isinstance(config.data, ArithmeticData):
        raise ValueError(
            f"eval.sets: {HELD_OUT!r} is of generated problems, data.type = 'arithmetic'; "
            f"data.type = {config.data.type!r} needs a file or a named set"
        )
    number = config.eval.max_problems or _HELD_OUT_PROBLEMS
    problems = held_out_arithmetic(config.data, config.seed, number)
    return _eval_set(HELD_OUT, problems, tokenizer, config.rollout.max_prompt_tokens, number)


def load_eval_set(
    source: str, tokenizer: Any, max_prompt_tokens: int, max_problems: int | None = None
) -> EvalSet:
    """A named set, or the problems of a .jsonl, .json, .csv or .parquet file.

    A file's columns tell what it is: DAPO-Math-17k's, GSM8K's, or a question (prompt, problem,
    question, messages or conversations) with an answer (answer, ground_truth or solution).
    """
    try:
        data = NAMED_SETS[source] if source in NAMED_SETS else _data_of_file(source)
        problems = load_problems(data, seed=0)
    except ValueError as error:
        raise ValueError(f"eval.sets: {source!r}: {error}") from error
    name = source if source in NAMED_SETS else Path(source).stem
    return _eval_set(name, problems, tokenizer, max_prompt_tokens, max_problems)


def _eval_set(
    name: str,
    problems: Problems,
    tokenizer: Any,
    max_prompt_tokens: int,
    max_problems: int | None,
) -> EvalSet:
    chosen = problems.rows[:max_problems]
    encoded = encode_problems(chosen, tokenizer)
    prompts = [prompt for prompt in encoded if len(prompt.token_ids) <= max_prompt_tokens]
    if not prompts:
        raise ValueError(
            f"eval.sets: {name!r}: all {len(encoded)} prompts have more than "
            f"rollout.max_prompt_tokens = {max_prompt_tokens} tokens; raise it"
        )
    too_long = len(encoded) - len(prompts)
    check = problems.gold_check
    notes = [
        *problems.notes,
        *special_token_notes(chosen, tokenizer),
        *([str(check)] if check and (check.failed or check.scored < check.sampled) else []),
    ]
    if problems.summary.conflicting:
        notes.append(f"dropped {problems.summary.conflicting:,} with conflicting answers")
    return EvalSet(
        name=name,
        prompts=prompts,
        rule=problems.verifier,
        too_long=too_long,
        notes=tuple(notes),
    )


def _data_of_file(source: str) -> Data:
    if not Path(source).suffix:
        raise ValueError(f"no such set; use one of {', '.join(NAMED_SETS)}, or a file")
    table = open_table(source, "train")
    columns = list(table.columns)
    if "reward_model" in columns:
        return DapoMathData(path=source)
    if {"question", "answer"} <= set(columns):
        first = next(iterate_columns(table, ["answer"]), (None,))
        if "####" in str(first[0]):
            return Gsm8kData(path=source)
    question = next((c for c in _QUESTION_COLUMNS if c in columns), None)
    answer = next((c for c in _ANSWER_COLUMNS if c in columns), None)
    if question is None or answer is None:
        raise ValueError(
            f"the columns are {', '.join(columns)}; rename a question column to one of "
            f"{', '.join(_QUESTION_COLUMNS)} and an answer column to one of "
            f"{', '.join(_ANSWER_COLUMNS)}"
        )
    return DatasetData(path=source, prompt_column=question, answer_column=answer)
