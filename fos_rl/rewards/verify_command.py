"""`fos-rl verify`: the verdicts of the math rule on a file of responses, and their reasons."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from fos_rl.config import RewardConfig
from fos_rl.rewards.answers import find_answer
from fos_rl.rewards.equivalence import same_text
from fos_rl.rewards.normalize import normalize_answer
from fos_rl.rewards.verifiers import Verdict, VerifierPool
from fos_rl.types import FinishReason

# Lines go out while later ones are scored.
_LINES_PER_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer to verify: gold answer, response, and how the response ended."""

    gold: str
    response: str
    finish_reason: FinishReason = "stop"


def verify_file(path: Path) -> int:
    """Print one JSON object per line of a JSONL file, in order, and a summary to stderr.

    Raises:
        ValueError: a line is not a JSON object with `gold` and `response`; it is named.
    """
    samples = list(read_samples(path))
    start = time.monotonic()
    outcomes: Counter[str] = Counter()
    config = RewardConfig(workers=min(8, len(os.sched_getaffinity(0))))
    with VerifierPool(config) as pool:
        for first in range(0, len(samples), _LINES_PER_BATCH):
            batch = samples[first : first + _LINES_PER_BATCH]
            verdicts = pool.verdicts([(s.response, s.gold, s.finish_reason) for s in batch])
            for sample, verdict in zip(batch, verdicts, strict=True):
                judgment = explain_verdict(sample, verdict, config.timeout_s)
                print(json.dumps(judgment, ensure_ascii=False), flush=True)
                outcomes["right" if judgment["verdict"] else "wrong"] += 1
                outcomes["without an answer"] += judgment["answer"] is None
                if isinstance(verdict, str):
                    outcomes[verdict] += 1
        name = pool.name
    counts = [f"{outcomes[key]} {key}" for key in ("right", "wrong", "without an answer")]
    counts += [f"{outcomes[key]} {key}" for key in ("timeouts", "errors") if outcomes[key]]
    print(
        f"{len(samples)} responses: {', '.join(counts)}; {time.monotonic() - start:.1f} s; {name}",
        file=sys.stderr,
    )
    return 0


def explain_verdict(
    sample: Sample, verdict: Verdict, limit_s: float
) -> dict[str, int | str | None]:
    """`verdict` (0 or 1), the `answer` found, and a short `reason`."""
    answer = find_answer(sample.response, complete=sample.finish_reason == "stop")
    if answer is None:
        unfinished = find_answer(sample.response) is not None
        reason = (
            f"cut off (finish_reason {sample.finish_reason!r}) before its answer was finished"
            if unfinished
            else r"no answer: no text after Answer: or ####, in \boxed{} or in <answer> tags"
        )
    elif verdict == "timeouts":
        reason = f"not decided within {limit_s:g} s of processor time"
    elif verdict == "errors":
        reason = "the verifier failed on it"
    elif verdict:
        reason = "the same text" if same_text(answer, sample.gold) else "the same value"
    else:
        read, gold = normalize_answer(answer), normalize_answer(sample.gold)
        reason = f"read as {read!r}, which is not {gold!r}"
    return {"verdict": int(verdict == 1.0), "answer": answer, "reason": reason}


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a JSONL file; blank lines are left out.

    Raises:
        ValueError: the file cannot be read, is empty, or a line is not as described.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a JSONL file") from None
    if not any(line.strip() for line in lines):
        raise ValueError(
            f'{path} is empty; each line is {{"gold": "34", "response": "Answer: 34"}}'
        )
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _sample(f"{path}, line {number}", line)


def _sample(place: str, line: bytes) -> Sample:
    try:
        # A number keeps its digits as written.
        row = json.loads(line, parse_int=str, parse_float=str)
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 ({error.reason}); write the file as UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error}); give one JSON object per line") from None
    if not isinstance(row, dict):
        raise ValueError(
            f'{place}: {str(row)[:40]!r} is not an object with keys "gold" and "response"'
        )
    for key in ("gold", "response"):
        if key not in row:
            raise ValueError(f"{place}: no key {key!r}, only {sorted(row)}; add it")
        if not isinstance(row[key], str):
            raise ValueError(f"{place}: {key} is {row[key]!r}; give it as a string")
    reason = row.get("finish_reason") or "stop"
    if reason not in get_args(FinishReason):
        raise ValueError(
            f"{place}: finish_reason {reason!r} is none of {', '.join(get_args(FinishReason))}"
        )
    return Sample(gold=row["gold"], response=row["response"], finish_reason=reason)
