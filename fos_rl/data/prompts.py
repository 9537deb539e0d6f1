"""Problems as token ids, in an order fixed by the seed."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fos_rl.config import RunConfig
from fos_rl.data.problems import Problem, Problems
from fos_rl.rewards.verifiers import Rule
from fos_rl.types import Prompt

_ENCODE_ROWS = 1000
_MAX_SPECIAL = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCounts:
    """`too_long` prompts have more tokens than rollout.max_prompt_tokens; `kept` are in the set."""

    too_long: int
    kept: int
    max_prompt_tokens: int
    longest: int

    def __str__(self) -> str:
        return (
            f"{self.kept:,} prompts of at most {self.longest:,} tokens; dropped {self.too_long:,} "
            f"of more than {self.max_prompt_tokens:,} (rollout.max_prompt_tokens)"
        )


class PromptSet:
    """The prompts of a run. `batch(step)` depends on (seed, step) and the set alone.

    Prompts are drawn epoch after epoch; an epoch is a permutation of the set by a hash of (seed,
    epoch, prompt id), so neither the order of the file nor a library's random generator matters.
    Batches follow each other without a gap: one may end an epoch and begin the next. A set smaller
    than a batch goes through several epochs in one, so a batch can hold a prompt twice.
    """

    def __init__(self, problems: Problems, tokenizer: Any, config: RunConfig) -> None:
        """Tokenizes the problems.

        Raises:
            ValueError: no prompt fits rollout.max_prompt_tokens.
        """
        self.problem_counts = problems.summary
        check = problems.gold_check
        self._notes = [*problems.notes, *([str(check)] if check else [])]
        self._notes += special_token_notes(problems.rows, tokenizer)
        self.verifier: Rule = problems.verifier
        self._seed = config.seed
        self._batch_size = config.rollout.prompts_per_step
        limit = config.rollout.max_prompt_tokens
        encoded = encode_problems(problems.rows, tokenizer)
        self.prompts = [prompt for prompt in encoded if len(prompt.token_ids) <= limit]
        if not self.prompts:
            shortest = min(len(prompt.token_ids) for prompt in encoded)
            raise ValueError(
                f"rollout.max_prompt_tokens = {limit}: all {len(encoded)} prompts are longer, the "
                f"shortest has {shortest} tokens; raise it to at least {shortest}"
            )
        self.counts = PromptCounts(
            too_long=len(encoded) - len(self.prompts),
            kept=len(self.prompts),
            max_prompt_tokens=limit,
            longest=max(len(prompt.token_ids) for prompt in self.prompts),
        )
        # A batch needs two epochs at most times; a permutation of 17 thousand takes 20 ms.
        self._epoch_order = lru_cache(maxsize=2)(self._permute)

    @property
    def summary(self) -> str:
        """What was read, dropped and kept, for printing."""
        return "; ".join(map(str, [self.problem_counts, *self._notes, self.counts]))

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int) -> list[Prompt]:
        """The `rollout.prompts_per_step` prompts of a step; any step, in any order of calls."""
        first = step * self._batch_size
        return [self._prompt_at(place) for place in range(first, first + self._batch_size)]

    def _prompt_at(self, place: int) -> Prompt:
        epoch, index = divmod(place, len(self.prompts))
        return self.prompts[self._epoch_order(epoch)[index]]

    def _permute(self, epoch: int) -> list[int]:
        keys = [
            hashlib.sha256(f"{self._seed}/{epoch}/{prompt.id}".encode()).digest()
            for prompt in self.prompts
        ]
        return sorted(range(len(keys)), key=keys.__getitem__)


def encode_problems(problems: Sequence[Problem], tokenizer: Any) -> list[Prompt]:
    """One prompt per problem: its messages in the tokenizer's chat template, ready to be answered.

    A tokenizer without a template gets the messages' text, with its own begin-of-text token.

    Raises:
        ValueError: a chat that the template cannot render, or renders without a message's text, or
            one of several turns without a template.
    """
    templated = _has_template(tokenizer)
    render = _render if templated else _plain_text
    prompts: list[Prompt] = []
    for start in range(0, len(problems), _ENCODE_ROWS):
        part = problems[start : start + _ENCODE_ROWS]
        texts = [render(problem, tokenizer) for problem in part]
        # The template writes the special tokens itself.
        encoded = tokenizer(texts, add_special_tokens=not templated)["input_ids"]
        prompts += [
            Prompt(
                id=problem.id, token_ids=_open_end(ids, tokenizer), text=text, answer=problem.answer
            )
            for problem, ids, text in zip(part, encoded, texts, strict=True)
        ]
    return prompts


def special_token_notes(problems: Sequence[Problem], tokenizer: Any) -> list[str]:
    """A note on problems whose text holds special tokens, which the chat template should write.

    Raises:
        ValueError: more than 1 % do, so a template was applied to the data already.
    """
    if not _has_template(tokenizer) or not (tokens := tokenizer.all_special_tokens):
        return []
    special = re.compile("|".join(map(re.escape, tokens)))
    found = [
        (problem, match[0])
        for problem in problems
        if (match := special.search("\n".join(text for _, text in problem.messages)))
    ]
    if not found:
        return []
    problem, token = found[0]
    count = f"{len(found):,} of {len(problems):,} prompts hold special tokens of the model"
    if len(found) > _MAX_SPECIAL * len(problems):
        raise ValueError(
            f"{count}, as {token!r} in {_where(problem)}; its chat template writes them, so give "
            "questions or messages that are not rendered yet, or a model without chat_template"
        )
    return [f"{count} ({token!r} in {_where(problem)})"]


def _has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _open_end(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Token ids without the end-of-text token that some tokenizers add: nothing could follow it."""
    end = -1 if ids and ids[-1] == tokenizer.eos_token_id else None
    return list(ids[:end])


def _plain_text(problem: Problem, _: Any) -> str:
    roles = [role for role, _ in problem.messages]
    if "assistant" in roles or roles.count("user") > 1:
        raise ValueError(
            f"model.path: its tokenizer has no chat template, and {_where(problem)} is a chat of "
            f"{len(roles)} turns ({', '.join(roles)[:80]}), whose roles would be lost; add "
            "chat_template.jinja to the model's folder, or use data with one question per row"
        )
    return "\n\n".join(content for _, content in problem.messages if content) + "\n"


def _render(problem: Problem, tokenizer: Any) -> str:
    chat = [{"role": role, "content": content} for role, content in problem.messages]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        # A template is the model's own code, and its errors are of any type.
        raise ValueError(
            f"the tokenizer's chat_template cannot render {_where(problem)} ({_roles(problem)}): "
            f"{type(error).__name__}: {error}. Change these messages to what the template "
            "takes, or correct chat_template in the model's folder"
        ) from error
    for role, content in problem.messages:
        # Templates may leave out an assistant's reasoning.
        if role != "assistant" and content not in text:
            raise ValueError(
                f"the tokenizer's chat_template leaves out what the {role} says in "
                f"{_where(problem)}; put it into the user's message, or correct chat_template in "
                "the model's folder"
            )
    return text


def _where(problem: Problem) -> str:
    begin = " ".join(problem.messages[-1][1].split())[:60]
    row = f"row {problem.row} of the data" if problem.row else f"prompt {problem.id}"
    return f"{row}, {begin!r}"


def _roles(problem: Problem) -> str:
    return ", ".join(role for role, _ in problem.messages)
