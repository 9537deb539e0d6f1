"""Recorded rollouts to score again: of a run folder, or a JSONL file of another toolkit.

The file has one JSON object per line: `prompt_ids`, `response_ids`, `log_probs` (the generator's,
one per response token) and, where there are any, `trainer_log_probs`. vLLM's names
`prompt_token_ids`, `token_ids` and `logprobs` do as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fos_rl.files.json_lines import read_run_lines, torn_tail
from fos_rl.files.reading import read_json_lines
from fos_rl.types import TrainBatch

_ALIASES = {
    "prompt_ids": ("prompt_ids", "prompt_token_ids"),
    "response_ids": ("response_ids", "response_token_ids", "token_ids", "completion_ids"),
    "log_probs": ("log_probs", "logprobs", "generator_log_probs"),
    "trainer_log_probs": ("trainer_log_probs",),
}

# What tells a sampled response from all others of its step.
_KEY = ("prompt_id", "group", "response_ids")
_REMEDY = "give a run folder, or a JSONL file with one object per line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sampled response, with the log-probs that generator and trainer gave its tokens."""

    prompt_ids: list[int]
    response_ids: list[int]
    generator: np.ndarray
    trainer: np.ndarray | None
    policy_version: int | None


def run_steps(run: Path) -> list[int]:
    """Steps whose rollouts a run folder holds.

    Raises:
        ValueError: when it holds none.
    """
    files = run.glob("rollouts/[0-9]*.jsonl")
    steps = sorted(int(path.stem) for path in files if path.stem.isdecimal())
    if not steps:
        raise ValueError(
            f"{run} has no rollouts/NNNNNN.jsonl; give the folder of a run, or a JSONL file with "
            "--config"
        )
    return steps


def read_step(run: Path, step: int) -> list[Record]:
    """A step's responses: those the trainer scored, in its order, or all where it scored none."""
    file, scored_file = _step_files(run, step)
    lines = read_run_lines(file, _REMEDY, (*_KEY, "prompt_ids", "log_probs"))
    sampled = {_key(row): row for row in lines.rows}
    if not scored_file.is_file():
        return [_record(row, None) for row in lines.rows if row["response_ids"]]
    scored = read_run_lines(scored_file, _REMEDY, (*_KEY, "trainer_log_probs")).rows
    if lines.torn:
        # What was on the torn line is lost.
        scored = [row for row in scored if _key(row) in sampled]
    if any(_key(row) not in sampled for row in scored):
        raise ValueError(f"{scored_file} has a response that {file} lacks; {_REMEDY}")
    return [_record(sampled[_key(row)], row["trainer_log_probs"]) for row in scored]


def torn_rollouts(run: Path, step: int) -> list[str]:
    """What is wrong with a last line of a step's files that `read_step` leaves out."""
    found = (torn_tail(path) for path in _step_files(run, step) if path.is_file())
    return [torn for torn in found if torn]


def _step_files(run: Path, step: int) -> tuple[Path, Path]:
    """What the generator sampled, and what the trainer scored of it."""
    folder = run / "rollouts"
    return folder / f"{step:06d}.jsonl", folder / f"{step:06d}.trainer.jsonl"


def read_jsonl(path: Path, vocab_size: int) -> list[Record]:
    """Another toolkit's rollouts.

    Raises:
        ValueError: naming the line, the field and what it should be.
    """
    records = []
    for number, row in enumerate(_rows(path), start=1):
        found = {name: _field(row, name) for name in _ALIASES}
        where = f"{path}, line {number}"
        for name in ("prompt_ids", "response_ids", "log_probs"):
            if not isinstance(found[name], list) or not found[name]:
                raise ValueError(
                    f"{where}: {name} is {found[name]!r:.40}; give a list with at least one number "
                    f"under one of the names {', '.join(_ALIASES[name])}"
                )
        for name in ("log_probs", "trainer_log_probs"):
            values = found[name]
            if values is not None and len(values) != len(found["response_ids"]):
                raise ValueError(
                    f"{where}: {len(values)} {name} for {len(found['response_ids'])} response_ids; "
                    "give one for each"
                )
        wrong = [i for i in found["prompt_ids"] + found["response_ids"] if not 0 <= i < vocab_size]
        if wrong:
            raise ValueError(
                f"{where}: token id {wrong[0]} is not in the model's vocabulary of {vocab_size}; "
                "give the config of the model that sampled"
            )
        records.append(_record(found, found["trainer_log_probs"]))
    if not records:
        raise ValueError(f"{path} is empty; give one JSON object per line")
    return records


def sample_records(records: Sequence[Record], max_tokens: int) -> list[Record]:
    """Leading records with at most that many tokens together, prompts included; at least one."""
    kept, used = [], 0
    for record in records:
        used += len(record.prompt_ids) + len(record.response_ids)
        if kept and used > max_tokens:
            break
        kept.append(record)
    return kept


def as_batch(records: Sequence[Record]) -> TrainBatch:
    """The records as a batch of advantage 0, with what the generator recorded."""
    return TrainBatch(
        token_ids=[np.array(r.prompt_ids + r.response_ids) for r in records],
        prompt_lengths=[len(r.prompt_ids) for r in records],
        generator_log_probs=[r.generator.astype(np.float32) for r in records],
        advantages=np.zeros(len(records), np.float32),
    )


def _rows(path: Path, keys: Sequence[str] = ()) -> list[dict[str, Any]]:
    return read_json_lines(path, _REMEDY, keys)


def _field(row: dict[str, Any], name: str) -> Any:
    return next((row[alias] for alias in _ALIASES[name] if alias in row), None)


def _key(row: dict[str, Any]) -> tuple[object, ...]:
    return (row["prompt_id"], row["group"], tuple(row["response_ids"]))


def _record(row: dict[str, Any], trainer: list[float] | None) -> Record:
    return Record(
        prompt_ids=row["prompt_ids"],
        response_ids=row["response_ids"],
        generator=_log_probs(row["log_probs"]),
        trainer=None if trainer is None else _log_probs(trainer),
        policy_version=row.get("policy_version"),
    )


def _log_probs(values: Sequence[float | None]) -> np.ndarray:
    """fp64; null stands for a log-prob that is not finite."""
    return np.array([np.nan if v is None else v for v in values], np.float64)
