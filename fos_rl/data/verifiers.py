"""Rewards of responses: 1.0 for the gold answer, else 0.0, whatever a response contains."""

import contextlib
import json
import queue
import re
import selectors
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from fos_rl.data.answers import MAX_RESPONSE_CHARS, find_answer
from fos_rl.data.equivalence import answers_equal

if TYPE_CHECKING:
    from fos_rl.config import RewardConfig
    from fos_rl.types import FinishReason, Rollout

Rule = Literal["math", "math_by_value", "last_integer", "has_letter_of"]
_MATH_VERIFY = f"(math-verify {version('math-verify')})"
VERIFIER_NAMES: dict[Rule, str] = {
    "math": f"fos_rl.math/2 {_MATH_VERIFY}",
    "math_by_value": f"fos_rl.math_by_value/1 {_MATH_VERIFY}",
    "last_integer": "fos_rl.last_integer/1",
    "has_letter_of": "fos_rl.has_letter_of/1",
}
"""Name and version of each rule, recorded with a run. A changed verdict is a new version."""
VERIFIER = VERIFIER_NAMES["math"]

# A worker imports sympy, which takes seconds on a busy machine.
_START_LIMIT_S = 120.0
# The limit counts a worker's processor time, so that a busy machine changes no reward; a worker
# that is silent for this many times as long is taken for stuck all the same.
_WALL_FACTOR = 20


def verify(response: str, gold: str, finish_reason: "FinishReason" = "stop") -> float:
    r"""1.0 if the answer that a response gives equals the gold answer, else 0.0.

    The answer is the last `Answer: ...` line, `#### ...` line, `\boxed{...}` or `<answer>` tag; see
    `answers.find_answer` for what counts as one and `equivalence.answers_equal` for what is equal.
    A response cut off (`finish_reason` other than stop) is right only if its answer was finished.

    Pure, without signals or a time limit, so it runs in any thread; `VerifierPool` limits it.
    """
    answer = find_answer(response, complete=finish_reason == "stop")
    return 0.0 if answer is None else float(answers_equal(answer, gold))


def verify_by_value(response: str, gold: str, finish_reason: "FinishReason" = "stop") -> float:
    """As `verify`, but the answer's text being the gold answer's is no proof: both need a value.

    For the check of gold answers: one that does not equal itself this way has nothing that another
    spelling of it could equal. A word has no value beyond its text and equals itself.
    """
    answer = find_answer(response, complete=finish_reason == "stop")
    return 0.0 if answer is None else float(answers_equal(answer, gold, by="value"))


def verify_last_integer(response: str, gold: str, finish_reason: "FinishReason" = "stop") -> float:
    """1.0 if the last number of a finished response is the gold integer: `7`, `3 + 4 = 7.`

    For generated arithmetic, where a small model that is right need not know a format as well. A
    number can be cut in two, so a response that was cut off is wrong.
    """
    if finish_reason != "stop":
        return 0.0
    text = response[-MAX_RESPONSE_CHARS:].replace("\u2212", "-")
    numbers = re.findall(r"(?<![\w.])-?\d[\d,]{0,30}(?:\.\d{1,30})?(?![\w])", text)
    return float(bool(numbers) and Fraction(numbers[-1].replace(",", "")) == Fraction(gold))


def verify_has_letter_of(
    response: str, letters: str, finish_reason: "FinishReason" = "stop"
) -> float:
    """1.0 if any of `letters` is in the response, finished or not: a task for smoke runs."""
    return float(any(letter in response.lower() for letter in letters))


RULES: dict[Rule, Callable[[str, str, "FinishReason"], float]] = {
    "math": verify,
    "math_by_value": verify_by_value,
    "last_integer": verify_last_integer,
    "has_letter_of": verify_has_letter_of,
}


class VerifierPool:
    """Scores rollouts in worker processes, each answer under a limit of processor time.

    A worker is a Python process of its own that imports the rules and nothing of torch, Ray or
    vLLM; it knows nothing of the caller's main module, threads or signals, so scores are the same
    from wherever the pool is called. One that is over the limit or dies is killed and replaced,
    its answer scores 0 and is counted. Workers start with the first call. With
    `reward.workers = 0` the caller verifies itself: the same scores, but no time limit.
    """

    def __init__(self, config: "RewardConfig", rule: Rule = "math") -> None:
        self.name = VERIFIER_NAMES[rule]
        self._rule: Rule = rule
        self._num_workers = config.workers
        self._limit_s = config.timeout_s
        # None stands for a worker still to be started.
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(config.workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(max(1, config.workers), thread_name_prefix="verifier")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(
        self, rollouts: Sequence["Rollout"], answers: Sequence[str]
    ) -> tuple[np.ndarray, dict[str, float]]:
        """One reward a rollout, in order, and the counts `reward/timeouts`, `reward/errors`.

        A count of 0 is absent.

        Raises:
            ValueError: as many answers as rollouts are needed.
            RuntimeError: no worker can start; nothing could be scored then.
        """
        if len(rollouts) != len(answers):
            raise ValueError(f"{len(rollouts)} rollouts but {len(answers)} answers")
        pairs = zip(rollouts, answers, strict=True)
        return self.score_texts([(r.text, a, r.finish_reason) for r, a in pairs])

    def score_texts(
        self, samples: Sequence[tuple[str, str, "FinishReason"]]
    ) -> tuple[np.ndarray, dict[str, float]]:
        """As `score`, of (response, gold answer, finish reason)."""
        verdicts = list(self._threads.map(self._verdict, samples))
        counts = Counter(verdict for verdict in verdicts if isinstance(verdict, str))
        rewards = [0.0 if isinstance(verdict, str) else verdict for verdict in verdicts]
        metrics = {f"reward/{what}": float(count) for what, count in counts.items()}
        return np.array(rewards, dtype=np.float64), metrics

    def close(self) -> None:
        """End the workers; the pool is done for."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            worker = self._idle.get()
            if worker is not None:
                worker.kill()

    def _verdict(
        self, sample: tuple[str, str, "FinishReason"]
    ) -> float | Literal["timeouts", "errors"]:
        text, gold, finish_reason = sample
        if self._num_workers == 0:
            return verify_safely(self._rule, text, gold, finish_reason)
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker()
            # The start of a long response is not read, so it need not travel either.
            request = [self._rule, text[-MAX_RESPONSE_CHARS:], gold, finish_reason]
            verdict = worker.ask(request, self._limit_s)
            if verdict in ("timeouts", "died"):
                worker.kill()
                worker = None
            return "errors" if verdict == "died" else verdict  # type: ignore[return-value]
        finally:
            self._idle.put(worker)


def verify_safely(
    rule: Rule, text: str, gold: str, finish_reason: "FinishReason"
) -> float | Literal["errors"]:
    """The rule's verdict, or "errors" for a response that broke it.

    One sample must not end a run or shift the rewards of the others, so whatever a parser raises
    on model output is an answer that cannot be read.
    """
    try:
        return RULES[rule](text, gold, finish_reason)
    except Exception:
        return "errors"


class _Worker:
    """One verifier process: a line of JSON in, a line of JSON out."""

    def __init__(self) -> None:
        # The caller's import path, as multiprocessing would hand it on; not its main module.
        start = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from fos_rl.data.verifier_worker import main; main()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._read_line(_START_LIMIT_S) != "ready":
            self.kill()
            raise RuntimeError(
                f"a verifier worker did not start ({sys.executable}, exit code "
                f"{self._process.returncode}); its error is on stderr"
            )

    def ask(self, request: list[str], limit_s: float) -> float | str:
        """The verdict on [rule, response, gold, finish reason], or "timeouts", "died".

        After the last two the worker is of no more use.
        """
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps([limit_s, *request]).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            return "died"
        verdict = self._read_line(limit_s * _WALL_FACTOR)
        # The worker's own timer ends it at the limit.
        if verdict == "died" and self._process.wait() == -signal.SIGPROF:
            return "timeouts"
        return verdict

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            # A request it never read may still be in the buffer.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read_line(self, limit_s: float) -> float | str:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return "timeouts"
        # Lines are short and written at once.
        line = stdout.readline()
        return json.loads(line) if line else "died"
