import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from fos_rl.config import RewardConfig
from fos_rl.rewards import verifiers
from fos_rl.rewards.verifiers import VERIFIER_NAMES, VerifierPool
from fos_rl.types import Rollout

# The factorial of 10^8 keeps sympy busy for longer than any limit.
STUCK = r"Answer: $\prod_{n=1}^{10^8} n$"
MIXED = [
    ("Answer: 34", "34", "stop"),
    ("Answer: 35", "34", "stop"),
    (r"Answer: $\frac{68}{2}$", "34", "stop"),
    ("Answer: 34", "34", "length"),
    ("Answer: $(x+1)^2$", "x^2+2x+1", "stop"),
    ("Answer: \\frac{\\frac{", "34", "stop"),
    ("\ud800 lone surrogate\nAnswer: 34", "34", "stop"),
    ("\x00Answer: 34\x00", "34", "stop"),
    ("", "34", "stop"),
    (r"\boxed{34}", "34", "length"),
]
REWARDS = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0]


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(RewardConfig(workers=2, timeout_s=1.0)) as pool:
        yield pool


def score_in_a_thread(pool: VerifierPool, samples) -> np.ndarray:
    results = []
    thread = threading.Thread(target=lambda: results.append(pool.score_texts(samples)[0]))
    thread.start()
    thread.join()
    return results[0]


def test_name_and_version_are_recorded(pool: VerifierPool) -> None:
    assert pool.name == VERIFIER_NAMES["math"]
    assert pool.name.startswith("fos_rl.math/2 (math-verify 0.")
    with VerifierPool(RewardConfig(), rule="last_integer") as other:
        assert other.name == "fos_rl.last_integer/1"


def test_processes_and_threads_agree(pool: VerifierPool) -> None:
    rewards, metrics = pool.score_texts(MIXED * 3)
    assert rewards.tolist() == REWARDS * 3
    # A key with nothing to count is absent.
    assert metrics == {}
    assert score_in_a_thread(pool, MIXED).tolist() == REWARDS
    with VerifierPool(RewardConfig(workers=0)) as here:
        assert here.score_texts(MIXED)[0].tolist() == REWARDS
        assert score_in_a_thread(here, MIXED).tolist() == REWARDS


def test_rollouts_are_scored_in_order(pool: VerifierPool) -> None:
    rollouts = [
        Rollout(
            prompt_id=str(i),
            prompt_ids=[1],
            response_ids=[2],
            log_probs=[-1.0],
            finish_reason="stop",
            policy_version=0,
            text=f"Answer: {i}",
        )
        for i in range(50)
    ]
    rewards, _ = pool.score(rollouts, [str(i if i % 3 else -1) for i in range(50)])
    assert rewards.tolist() == [float(i % 3 != 0) for i in range(50)]
    with pytest.raises(ValueError, match="50 rollouts but 1 answers"):
        pool.score(rollouts, ["1"])


def test_a_stuck_answer_scores_0_and_is_counted(pool: VerifierPool) -> None:
    samples = [MIXED[0], (STUCK, "34", "stop"), *MIXED[1:], (STUCK, "34", "stop"), MIXED[0]]
    rewards, metrics = pool.score_texts(samples)
    assert rewards.tolist() == [1.0, 0.0, *REWARDS[1:], 0.0, 1.0]
    assert metrics == {"reward/timeouts": 2.0}
    # The workers were replaced.
    assert pool.score_texts(MIXED)[0].tolist() == REWARDS


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        pytest.param("9" * 1_000_000 + "\nAnswer: 34", 1.0, id="digits-before"),
        pytest.param("Answer: " + "9" * 1_000_000, 0.0, id="digits"),
        pytest.param("Answer: " + "{" * 1_000_000, 0.0, id="braces"),
        pytest.param("\\boxed{" * 200_000, 0.0, id="boxes"),
        pytest.param("Answer: " * 200_000 + "34", 1.0, id="markers"),
        pytest.param("Answer: " + "\\frac{1}{" * 100 + "1" + "}" * 100, 0.0, id="nested"),
    ],
)
def test_a_long_answer_takes_no_time(pool: VerifierPool, response: str, reward: float) -> None:
    pool.score_texts([MIXED[0]] * 2)
    start = time.monotonic()
    rewards, metrics = pool.score_texts([(response, "34", "stop")])
    assert (rewards.tolist(), metrics) == ([reward], {})
    # Without a cap on what is read, these take minutes.
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("whole", [False, True], ids=["the-parents-alone", "with-their-children"])
def test_answers_of_dead_workers_are_scored_by_fresh_ones(pool: VerifierPool, whole: bool) -> None:
    pool.score_texts([MIXED[0]] * 4)
    workers = worker_pids(os.getpid())
    assert workers
    for pid in workers:
        for child in worker_pids(pid) if whole else []:
            os.kill(child, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    rewards, metrics = pool.score_texts(MIXED * 2)
    assert (rewards.tolist(), metrics) == (REWARDS * 2, {})


class FakeProcess:
    """A worker whose answers say what becomes of them: `12 s` takes 12 s, `dies 2` kills two."""

    started = 0
    deaths: ClassVar[dict[str, int]] = {}
    seconds = 0.0

    def __init__(self) -> None:
        FakeProcess.started += 1

    def ask(self, request: list[str], limit_s: float) -> tuple[float | str, float]:
        what, _, figure = request[1].partition(" ")
        if what == "dies" and FakeProcess.deaths.setdefault(request[1], int(figure)) > 0:
            FakeProcess.deaths[request[1]] -= 1
            return "died", 0.0
        took = min(float(figure), limit_s) if what == "takes" else 0.001
        FakeProcess.seconds += took
        return ("timeouts" if took == limit_s else 1.0), took

    def kill(self) -> None:
        pass


@pytest.fixture
def fake_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifierPool]:
    monkeypatch.setattr(verifiers, "VerifierProcess", FakeProcess)
    FakeProcess.started, FakeProcess.deaths, FakeProcess.seconds = 0, {}, 0.0
    with VerifierPool(RewardConfig(workers=2, timeout_s=5.0, batch_timeout_s=30.0)) as pool:
        yield pool


def score_fakes(pool: VerifierPool, texts: list[str]) -> tuple[list[float], dict[str, float]]:
    rewards, metrics = pool.score_texts([(text, "34", "stop") for text in texts])
    return rewards.tolist(), metrics


@pytest.mark.parametrize(
    ("text", "reward", "metrics", "fresh"),
    [
        ("dies 1", 1.0, {}, 1),
        ("dies 2", 1.0, {}, 2),
        # Two fresh workers died of it as well.
        ("dies 3", 0.0, {"reward/errors": 1.0}, 2),
    ],
)
def test_an_answer_that_kills_workers(
    fake_pool: VerifierPool, text: str, reward: float, metrics, fresh: int
) -> None:
    assert score_fakes(fake_pool, ["right", text, "right"]) == ([1.0, reward, 1.0], metrics)
    # Up to two workers were there before.
    assert FakeProcess.deaths == {text: max(0, int(text[-1]) - 3)}
    assert fresh + 1 <= FakeProcess.started <= fresh + 2


def test_a_batch_of_slow_answers_keeps_to_its_time(fake_pool: VerifierPool) -> None:
    texts = ["takes 100", "right"] * 128
    rewards, metrics = score_fakes(fake_pool, texts)
    # No answer waits for the slow ones to use up the time.
    assert rewards == [0.0, 1.0] * 128
    assert metrics == {"reward/timeouts": 128.0}
    # 30 s for each of two workers, 0.1 s of each answer apart, and one answer each that began
    # before the time was over.
    assert FakeProcess.seconds < 2 * 30 + 256 * 0.1 + 2 * 5


def test_a_slow_answer_among_many_has_its_whole_time(fake_pool: VerifierPool) -> None:
    texts = ["right"] * 200 + ["takes 4.5", "takes 5.5"]
    assert score_fakes(fake_pool, texts) == ([1.0] * 201 + [0.0], {"reward/timeouts": 1.0})


def worker_pids(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == parent and "verifier_worker" in command:
            found.append(int(entry.name))
    return found


def test_an_unguarded_script_can_use_the_pool(tmp_path: Path) -> None:
    # multiprocessing would run it again in each worker, for ever.
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from fos_rl.config import RewardConfig\n"
        "from fos_rl.rewards.verifiers import VerifierPool\n"
        "pool = VerifierPool(RewardConfig(workers=1))\n"
        "print(pool.score_texts([('Answer: 34', '34', 'stop')])[0].tolist())\n"
        "pool.close()\n"
    )
    out = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert out.stdout == "[1.0]\n", out.stderr
    assert out.stderr == ""


def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with (
        VerifierPool(RewardConfig(workers=1)) as pool,
        pytest.raises(RuntimeError, match="a verifier worker did not start"),
    ):
        pool.score_texts(MIXED)
