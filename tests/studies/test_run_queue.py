"""Which runs are started, resumed, left alone or set aside; with stand-in programs for the runs.

The stand-ins write run folders as `fos-rl train` does, in milliseconds; `test_ablate.py` has the
real ones.
"""

import contextlib
import fcntl
import json
import signal
import sys
import time
from pathlib import Path

import pytest

from fos_rl.config import parse_config
from fos_rl.config.study import StudyRun
from fos_rl.files.lock import run_lock
from fos_rl.files.manifest import write_manifest
from fos_rl.run_folder.folder import is_finished, resolved_toml
from fos_rl.runtime.cluster import gpu_environments
from fos_rl.studies.run_queue import QueuedRun, run_all
from fos_rl.studies.study_console import seconds_left, summary_text

# argv: "train" CONFIG --out FOLDER, or "resume" FOLDER. A file `fail` beside the folder fails it.
_STAND_IN = """
import json, os, shutil, sys, time
from pathlib import Path
resumed = sys.argv[1] == "resume"
folder = Path(sys.argv[2] if resumed else sys.argv[4])
if not resumed:
    folder.mkdir()
    shutil.copy(sys.argv[2], folder / "config.toml")
    print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"))
(folder / "metrics.jsonl").write_text('{"step": 0}\\n{"step": 1}\\n')
if (folder.parent / "fail").exists():
    sys.exit("failed: no luck")
time.sleep(0.05)
(folder / "command").write_text(sys.argv[1])
(folder / "model").mkdir()
"""


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-c", _STAND_IN, *arguments]


def _runs(*arms: str) -> list[StudyRun]:
    tree = {"model": {"path": "random:llama"}, "data": {"type": "vowels"}, "steps": 2}
    return [StudyRun(arm=arm, seed=0, config=parse_config(tree)) for arm in arms]


def _all(runs: list[StudyRun], out: Path, at_once: int = 1) -> dict[str, QueuedRun]:
    queue = run_all(runs, out, [{}] * at_once, lambda _: None, _command)
    return {item.run.arm: item for item in queue}


def _unfinished(folder: Path, run: StudyRun) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(resolved_toml(run.config))
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    return folder


def test_finished_means_all_steps_and_a_model(tmp_path: Path) -> None:
    (run,) = _runs("a")
    folder = _unfinished(tmp_path / "a", run)
    assert not is_finished(tmp_path / "nothing")
    (folder / "model").mkdir()
    assert not is_finished(folder)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert is_finished(folder)
    (folder / "model").rmdir()
    assert not is_finished(folder)


def test_one_failure_does_not_stop_the_others_and_is_tried_again(tmp_path: Path) -> None:
    runs = _runs("good", "bad", "late")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "fail").touch()
    first = _all(runs, tmp_path)
    assert {arm: item.state for arm, item in first.items()} == {
        "good": "finished",
        "bad": "failed",
        "late": "finished",
    }
    assert first["bad"].reason == "failed: no luck"
    text = summary_text(list(first.values()), "fos-rl ablate x")
    for word in ("2 runs finished", "1 failed", "bad/seed_0", "no luck", "seed_0.log", "ablate x"):
        assert word in text

    (tmp_path / "bad" / "fail").unlink()
    kept = (tmp_path / "good/seed_0/model").stat().st_mtime_ns
    second = _all(runs, tmp_path)
    assert [item.state for item in second.values()] == ["skipped", "finished", "skipped"]
    assert (tmp_path / "good/seed_0/model").stat().st_mtime_ns == kept
    # The failed try is kept, and the log holds both.
    assert (tmp_path / "bad/seed_0.failed-1/metrics.jsonl").is_file()
    assert "no luck" in (tmp_path / "bad/seed_0.log").read_text()


@pytest.mark.parametrize(
    ("checkpoint", "state", "command"),
    [
        pytest.param(1, b"state", "resume", id="steps left"),
        pytest.param(2, b"state", "resume", id="only the model left to write"),
        pytest.param(3, b"state", "train", id="beyond the last step"),
        pytest.param(1, None, "train", id="an empty folder"),
        pytest.param(None, None, "train", id="none"),
    ],
)
def test_an_unfinished_run_with_a_whole_checkpoint_is_resumed(
    tmp_path: Path, checkpoint: int | None, state: bytes | None, command: str
) -> None:
    (run,) = _runs("a")
    folder = _unfinished(tmp_path / run.name, run)
    if checkpoint is not None:
        place = folder / "checkpoints" / f"{checkpoint:06d}"
        place.mkdir(parents=True)
        if state is not None:
            (place / "state.pt").write_bytes(state)
            facts = {"checkpoint": place.name, "contract": None, "settings": None}
            write_manifest(place, facts)
    assert _all([run], tmp_path)["a"].state == "finished"
    assert (folder / "command").read_text() == command
    assert (tmp_path / "a/seed_0.failed-1").exists() == (command == "train")


def test_a_run_of_an_earlier_call_is_waited_for(tmp_path: Path) -> None:
    """The lock of a living process is held; a second process beside it would spoil both runs."""
    (run,) = _runs("a")
    folder = _unfinished(tmp_path / run.name, run)
    with (tmp_path / "a/seed_0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        states: list[str] = []

        def watch(queue) -> None:
            states.append(queue[0].state)
            if len(states) == 3:
                # The earlier call's process ends its work.
                (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
                (folder / "model").mkdir()
                fcntl.flock(lock, fcntl.LOCK_UN)

        (item,) = run_all([run], tmp_path, [{}], watch, _command)
    assert states[:3] == ["running"] * 3
    assert item.state == "finished"
    assert item.process is None
    assert not (folder / "command").exists()


def test_a_run_that_is_resumed_by_hand_is_waited_for(tmp_path: Path) -> None:
    """It has no checkpoint yet, and would be moved from under its writer's feet."""
    (run,) = _runs("a")
    folder = _unfinished(tmp_path / run.name, run)
    states: list[str] = []
    with contextlib.ExitStack() as writer:
        writer.enter_context(run_lock(folder, pytest.fail))

        def watch(queue) -> None:
            states.append(queue[0].state)
            if len(states) == 2:
                (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
                (folder / "model").mkdir()
                writer.close()

        (item,) = run_all([run], tmp_path, [{}], watch, _command)
    assert states[:2] == ["running"] * 2
    assert (item.state, item.process) == ("finished", None)
    assert not (tmp_path / "a/seed_0.failed-1").exists()


def test_an_interruption_ends_the_runs_and_the_next_call_goes_on(tmp_path: Path) -> None:
    """By a signal that no shell makes its background jobs ignore; the run's process is gone when
    the call returns."""
    (run,) = _runs("a")
    started: list[QueuedRun] = []

    def endless(arguments: list[str]) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(1000)", *arguments]

    def watch(queue) -> None:
        started[:] = queue
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([run], tmp_path, [{}], watch, endless)
    assert started[0].process.poll() == -signal.SIGTERM
    assert _all([run], tmp_path)["a"].state == "finished"


def test_as_many_at_once_as_there_is_room_for_and_on_their_own_gpus(tmp_path: Path) -> None:
    most = 0

    def watch(queue) -> None:
        nonlocal most
        most = max(most, sum(item.state == "running" for item in queue))

    environments = gpu_environments(2, 1, 2)
    run_all(_runs("a", "b", "c", "d"), tmp_path, environments, watch, _command)
    assert most == 2
    logs = {arm: (tmp_path / arm / "seed_0.log").read_text().strip() for arm in "abcd"}
    assert {logs["a"], logs["b"]} == {"gpus 0", "gpus 1"}


def test_gpus_are_dealt_in_groups(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def dealt(*arguments: int) -> list[str | None]:
        return [e.get("CUDA_VISIBLE_DEVICES") for e in gpu_environments(*arguments)]

    assert dealt(2, 0, 8) == [None, None]
    assert dealt(3, 1, 2) == ["0", "1", "0"]
    assert dealt(3, 2, 5) == ["0,1", "2,3", "0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    assert dealt(2, 1, 2) == ["3", "7"]


def test_time_left_is_the_pace_of_the_running_times_what_is_left(tmp_path: Path) -> None:
    """Two of four at once, each 1 step in 10 s: 1 + 1 + 2 + 2 steps left, two at a time: 30 s."""
    queue = [QueuedRun(run=run, folder=tmp_path / run.name) for run in _runs("a", "b", "c", "d")]
    assert seconds_left(queue) is None
    for item in queue[:2]:
        item.folder.mkdir(parents=True)
        (item.folder / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
        item.state, item.started = "running", time.monotonic() - 10
    assert seconds_left(queue) == pytest.approx(30, rel=0.05)
