import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fos_rl.config import RewardConfig
from fos_rl.data.verifiers import VERIFIER, VerifierPool
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
    assert pool.name == VERIFIER
    assert VERIFIER.startswith("fos_rl.math/2 (math-verify 0.")
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


def test_a_dead_worker_is_counted_and_replaced(pool: VerifierPool) -> None:
    stuck = threading.Thread(target=pool.score_texts, args=([MIXED[0]] * 4,))
    stuck.start()
    stuck.join()
    for pid in worker_pids(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    rewards, metrics = pool.score_texts(MIXED * 2)
    errors = int(metrics["reward/errors"])
    assert 1 <= errors <= 2
    assert len(rewards) == 2 * len(MIXED)
    assert np.sum(rewards != np.array(REWARDS * 2)) <= errors
    assert pool.score_texts(MIXED)[0].tolist() == REWARDS


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
        "from fos_rl.data.verifiers import VerifierPool\n"
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
