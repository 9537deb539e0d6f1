"""One writer per run folder: refused while it lives, taken over once it does not."""

import errno
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fos_rl.cli import main
from fos_rl.files.lock import is_live, run_lock
from fos_rl.run_folder.folder import new_run_folder

# Holds the lock, and has a child that outlives it, as Ray's processes do.
_HOLDER = """
import subprocess, sys, time
from pathlib import Path
from fos_rl.files.lock import run_lock
with run_lock(Path(sys.argv[1]), print):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("child", child.pid, flush=True)
    time.sleep(60)
"""


@contextmanager
def _holder(run: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes a run folder; killed at the end, with its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(run)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.kill(child, signal.SIGKILL)


def _take(run: Path) -> list[str]:
    said: list[str] = []
    with run_lock(run, said.append):
        assert is_live(run)
    assert not is_live(run)
    return said


def test_a_second_writer_is_refused_by_pid_and_machine_until_the_first_ends(
    tmp_path: Path, capsys
) -> None:
    (tmp_path / "config.toml").write_text('[model]\npath = "random:llama"\n[data]\ntype = "vowels"')
    assert not is_live(tmp_path)
    with _holder(tmp_path) as process:
        assert is_live(tmp_path)
        words = f"process {process.pid} on {platform.node()}"
        with pytest.raises(ValueError, match=f"is being written by {words}"):
            _take(tmp_path)
        assert main(["resume", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        # Its child lives on, without the lock.
        [said] = _take(tmp_path)
    assert words in said
    assert "was killed" in said
    # Released: nothing is said of an owner any more.
    assert _take(tmp_path) == []


def test_an_exception_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), run_lock(tmp_path, pytest.fail):
        raise KeyboardInterrupt
    assert _take(tmp_path) == []


def test_the_text_does_not_decide(tmp_path: Path) -> None:
    """A living process id without the lock is another process's by now, or another machine's."""
    owner = {"pid": os.getpid(), "host": "elsewhere", "since": "then", "folder": str(tmp_path)}
    (tmp_path / "run.lock").write_text(json.dumps(owner))
    [said] = _take(tmp_path)
    assert f"process {os.getpid()} on elsewhere, since then" in said
    (tmp_path / "run.lock").write_text("{torn")
    assert _take(tmp_path) == []


def test_a_copy_of_a_live_run_is_a_run_of_its_own(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    with run_lock(run, pytest.fail):
        shutil.copytree(run, copy)
        assert _take(copy) == []


def test_a_probe_does_not_make_a_writer_fail(tmp_path: Path) -> None:
    (tmp_path / "run.lock").touch()
    with (tmp_path / "run.lock").open() as probe:
        fcntl.flock(probe, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (probe, fcntl.LOCK_UN)).start()
        assert _take(tmp_path) == []


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch) -> None:
    def none_here(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none_here)
    said: list[str] = []
    with run_lock(tmp_path, said.append):
        assert not is_live(tmp_path)
    assert said == [
        f"warning: the file system of {tmp_path} has no locks (No locks available), so nothing "
        "keeps a second process from writing there"
    ]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(ValueError, match="cannot be opened for writing"):
        _take(tmp_path)


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    found: list[Path] = []
    barrier = threading.Barrier(16)

    def start() -> None:
        barrier.wait()
        found.append(new_run_folder(tmp_path / "demo"))

    threads = [threading.Thread(target=start) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {"demo", *(f"demo-{n}" for n in range(2, 17))}
    assert {folder.name for folder in found} == names
