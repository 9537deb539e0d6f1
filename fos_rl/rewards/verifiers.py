"""Rewards of responses: 1.0 for the gold answer, else 0.0, whatever a response contains."""

import queue
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from fos_rl.rewards.answers import MAX_RESPONSE_CHARS, find_answer
from fos_rl.rewards.equivalence import answers_equal
from fos_rl.rewards.verifier_client import VerifierProcess

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

# Each answer's first tenth of a second is not counted against its batch: an honest one needs less.
_FREE_S = 0.1
# An answer whose worker dies is given to fresh ones, this many times in all.
_ATTEMPTS = 3

Verdict = float | Literal["timeouts", "errors"]
Sample = tuple[str, str, "FinishReason"]
"""A response, the gold answer and the finish reason."""


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
    """1.0 if the last number of a finished response is the gold integer: `7` or `3 + 4 = 7`.

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
    """Scores rollouts in worker processes, each answer and each batch under a limit of time.

    A worker is a Python process of its own that imports the rules and nothing of torch, Ray or
    vLLM; it knows nothing of the caller's main module, threads or signals, so scores are the same
    from wherever the pool is called. Workers start with the first call. With `reward.workers = 0`
    the caller verifies itself: the same scores, but no time limit.

    An answer over `reward.timeout_s` scores 0 and is counted in `reward/timeouts`. One whose worker
    dies is scored again by a fresh one; if that dies too, and the next, it scores 0 and is counted
    in `reward/errors`, as is one that breaks the rule.

    A batch has `reward.batch_timeout_s`. All answers are first tried under a limit that keeps the
    whole batch within half of it, so that no answer waits for slower ones; those over that limit
    are then tried again under `reward.timeout_s`, until the batch's time is used up.
    """

    def __init__(self, config: "RewardConfig", rule: Rule = "math") -> None:
        self.name = VERIFIER_NAMES[rule]
        self._rule: Rule = rule
        self._num_workers = config.workers
        self._limit_s = config.timeout_s
        self._batch_limit_s = config.batch_timeout_s * config.workers
        # None stands for a worker still to be started.
        self._idle: queue.SimpleQueue[VerifierProcess | None] = queue.SimpleQueue()
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
        """One reward per rollout, in order, and the counts `reward/timeouts`, `reward/errors`.

        A count of 0 is absent.

        Raises:
            ValueError: as many answers as rollouts are needed.
            RuntimeError: no worker can start; nothing could be scored then.
        """
        if len(rollouts) != len(answers):
            raise ValueError(f"{len(rollouts)} rollouts but {len(answers)} answers")
        pairs = zip(rollouts, answers, strict=True)
        return self.score_texts([(r.text, a, r.finish_reason) for r, a in pairs])

    def score_texts(self, samples: Sequence[Sample]) -> tuple[np.ndarray, dict[str, float]]:
        """As `score`, of (response, gold answer, finish reason)."""
        verdicts = self.verdicts(samples)
        counts = Counter(verdict for verdict in verdicts if isinstance(verdict, str))
        rewards = [0.0 if isinstance(verdict, str) else verdict for verdict in verdicts]
        metrics = {f"reward/{what}": float(count) for what, count in counts.items()}
        return np.array(rewards, dtype=np.float64), metrics

    def verdicts(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in order: 1.0, 0.0, or why there is none."""
        if self._num_workers == 0:
            return [verify_safely(self._rule, *sample) for sample in samples]
        budget = _Budget(self._batch_limit_s)
        share_s = self._batch_limit_s / (2 * max(1, len(samples)))
        first_s = min(self._limit_s, max(_FREE_S, share_s))
        verdicts = self._in_parallel(samples, first_s, budget)
        if first_s == self._limit_s:
            return verdicts
        slow = [place for place, verdict in enumerate(verdicts) if verdict == "timeouts"]
        again = self._in_parallel([samples[place] for place in slow], self._limit_s, budget)
        for place, verdict in zip(slow, again, strict=True):
            verdicts[place] = verdict
        return verdicts

    def _in_parallel(
        self, samples: Sequence[Sample], limit_s: float, budget: "_Budget"
    ) -> list[Verdict]:
        tasks = [self._threads.submit(self._verdict, s, limit_s, budget) for s in samples]
        return [task.result() for task in tasks]

    def close(self) -> None:
        """End the workers; the pool cannot be used again."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            worker = self._idle.get()
            if worker is not None:
                worker.kill()

    def _verdict(self, sample: Sample, limit_s: float, budget: "_Budget") -> Verdict:
        text, gold, finish_reason = sample
        # The start of a long response is not read, so it need not travel either.
        request = [self._rule, text[-MAX_RESPONSE_CHARS:], gold, finish_reason]
        worker = self._idle.get()
        try:
            for _ in range(_ATTEMPTS):
                if budget.is_used_up():
                    return "timeouts"
                if worker is None:
                    worker = VerifierProcess()
                verdict, seconds = worker.ask(request, limit_s)
                budget.use(seconds - _FREE_S)
                if verdict in ("died", "stuck"):
                    worker.kill()
                    worker = None
                if verdict != "died":
                    return "timeouts" if verdict == "stuck" else verdict  # type: ignore[return-value]
            return "errors"
        finally:
            self._idle.put(worker)


class _Budget:
    """The processor time that is left for the slow answers of a batch, of all workers together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()

    def use(self, seconds: float) -> None:
        with self._lock:
            self._seconds -= max(0.0, seconds)

    def is_used_up(self) -> bool:
        return self._seconds <= 0


def verify_safely(rule: Rule, text: str, gold: str, finish_reason: "FinishReason") -> Verdict:
    """The rule's verdict, or "errors" for a response that broke it.

    One sample must not end a run or shift the rewards of the others, so whatever a parser raises
    on model output is an answer that cannot be read.
    """
    try:
        return RULES[rule](text, gold, finish_reason)
    except Exception:
        return "errors"
