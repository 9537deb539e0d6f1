"""A study's runs, each in a process of its own, several at a time, over as many calls as it takes.

In the study's folder a run ARM/seed_N has, beside each other:

seed_N.toml       its resolved config, which its process reads
seed_N/           its run folder
seed_N.log        what its processes printed
seed_N.lock       held while a process works on it, whichever call started that
seed_N.failed-1/  what an earlier try left that cannot be resumed
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fos_rl.config.study import StudyRun
from fos_rl.files.lock import is_live
from fos_rl.files.whole import write_whole
from fos_rl.run_folder.find_checkpoint import find_checkpoint
from fos_rl.run_folder.folder import finished_steps, is_finished, resolved_toml, set_aside

State = Literal["waiting", "running", "finished", "failed", "skipped"]
Command = Callable[[list[str]], list[str]]
Watch = Callable[[Sequence["QueuedRun"]], None]

_POLL_S = 0.5
# A run that is interrupted closes its actors; after this long it is killed.
_STOP_LIMIT_S = 60.0


@dataclass(slots=True, kw_only=True)
class QueuedRun:
    """A run and how far it is. `skipped` was finished before this call; `running` without a
    process is the work of an earlier call that still lives."""

    run: StudyRun
    folder: Path
    state: State = "waiting"
    reason: str = ""
    """Why it failed: the last line it printed."""
    process: subprocess.Popen[bytes] | None = None
    slot: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def log(self) -> Path:
        """Where the run's output goes, beside its folder."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def steps_done(self) -> int:
        """Steps that the run's folder has, at most those of its config."""
        return min(finished_steps(self.folder), self.run.config.steps)


def fos_rl_command(arguments: list[str]) -> list[str]:
    """A command line of this Python's fos_rl."""
    return [sys.executable, "-m", "fos_rl.cli", *arguments]


def run_all(
    runs: Sequence[StudyRun],
    out: Path,
    environments: Sequence[dict[str, str]],
    watch: Watch,
    command: Command = fos_rl_command,
) -> list[QueuedRun]:
    """Bring every run to its end, finished or failed; one that fails does not stop the others.

    A finished run is left alone. An unfinished one continues from its newest checkpoint, or is set
    aside and started again. When this process is interrupted, so are its runs; when it is killed,
    they continue, and the next call waits for them.

    Args:
        environments: variables of each run that works at the same time, as many as may.
        watch: called about twice per second with all runs.
    """
    queue = [QueuedRun(run=run, folder=out / run.name) for run in runs]
    free = list(range(len(environments)))
    try:
        while True:
            for item in queue:
                if item.state == "running" and _has_ended(item):
                    _settle(item)
                    free.append(item.slot)
                if item.state == "waiting" and free:
                    _start(item, environments[free[0]], command)
                    if item.state == "running":
                        item.slot = free.pop(0)
            watch(queue)
            if not any(item.state in ("waiting", "running") for item in queue):
                return queue
            time.sleep(_POLL_S)
    except BaseException:
        _stop([item for item in queue if item.state == "running"])
        raise


def resumable(folder: Path, steps: int) -> bool:
    """Whether a run can continue from a checkpoint, if only to write its model."""
    try:
        return find_checkpoint(folder).checkpoint.step <= steps
    except ValueError:
        return False


def _start(item: QueuedRun, environment: dict[str, str], command: Command) -> None:
    """Start the run's process, unless it is finished or an earlier call's process works on it."""
    item.folder.parent.mkdir(parents=True, exist_ok=True)
    item.started = time.monotonic()
    item.state = "running"
    with _lock(item) as lock:
        if lock is None:
            return
        if is_live(item.folder):
            # By a call of `resume` or `train` for this run alone.
            return
        if is_finished(item.folder):
            item.state = "skipped"
            return
        if resumable(item.folder, item.run.config.steps):
            arguments = ["resume", str(item.folder)]
        else:
            if item.folder.exists():
                set_aside(item.folder)
            config = item.folder.with_name(f"{item.folder.name}.toml")
            write_whole(config, resolved_toml(item.run.config))
            arguments = ["train", str(config), "--out", str(item.folder)]
        with item.log.open("ab") as log:
            item.process = subprocess.Popen(
                command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                # The lock lives as long as the process that inherits it.
                pass_fds=[lock],
                # A terminal's Ctrl-C reaches this process, which passes it on once.
                start_new_session=True,
            )


@contextlib.contextmanager
def _lock(item: QueuedRun) -> Iterator[int | None]:
    """The run's lock, or None while another process holds it."""
    path = item.folder.with_name(f"{item.folder.name}.lock")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file.fileno()


def _has_ended(item: QueuedRun) -> bool:
    if item.process is not None:
        return item.process.poll() is not None
    with _lock(item) as lock:
        return lock is not None and not is_live(item.folder)


def _settle(item: QueuedRun) -> None:
    """What a run that has ended came to."""
    if is_finished(item.folder):
        item.state = "finished"
    elif item.process is None:
        # The earlier call's process gave up; it is this call's turn.
        item.state = "waiting"
    else:
        item.state = "failed"
        item.reason = _last_line(item.log) or f"exit status {item.process.returncode}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _stop(items: Sequence[QueuedRun]) -> None:
    """Interrupt the runs that this call started, and wait for their actors to be gone."""
    processes = [item.process for item in items if item.process is not None]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _STOP_LIMIT_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
