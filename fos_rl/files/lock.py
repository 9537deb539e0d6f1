"""A run folder has one writer: a lock that the operating system ends with the process.

`run.lock` is locked (flock) for as long as a process writes the folder, and says who that is. The
lock, not the text, decides: it is gone with its process, however that ends, and holds across
containers and, where the server does locks, NFS clients. A process id alone could be another
process by now, or be counted in another container.
"""

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

_FILE = "run.lock"
# A probe (`is_live`) holds a free lock for microseconds.
_PATIENCE_S = 0.5
# flock on a file system that has none.
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who writes a run folder, as its lock file says. `folder` tells a copy from the original."""

    pid: int
    host: str
    since: str
    folder: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@contextmanager
def run_lock(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Be the one writer of a run folder.

    Args:
        say: reports an owner that ended without a word, and a file system without locks.

    Raises:
        ValueError: while another process writes the folder, naming it; or when the folder cannot
            be written.
    """
    try:
        descriptor = os.open(run / _FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(
            f"{run}: its lock file {_FILE} cannot be opened for writing ({error.strerror}); give "
            "a run folder that you may write, or copy it to such a place"
        ) from error
    with os.fdopen(descriptor, "r+") as file:
        _take(file.fileno(), run, say)
        own = Owner(pid=os.getpid(), host=platform.node(), since=_now(), folder=str(run.resolve()))
        last = _owner(run)
        if last is not None and last.folder == own.folder:
            say(f"the run's last process was killed ({last}); its lock is taken over")
        _write(file.fileno(), own)
        try:
            yield
        finally:
            file.truncate(0)


def is_live(run: Path) -> bool:
    """Whether a process writes the run folder now."""
    try:
        with (run / _FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # No such folder, never written under a lock, or no locks there.
        return False
    return False


def _take(descriptor: int, run: Path, say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            owner = _owner(run)
            raise ValueError(
                f"{run} is being written by {owner or 'a process that has not said its name yet'}; "
                "two writers would spoil it: wait for that process, or end it, and call again"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return say(
                f"warning: the file system of {run} has no locks ({error.strerror}), so nothing "
                "keeps a second process from writing there"
            )


def _owner(run: Path) -> Owner | None:
    """The owner that the lock file names; None where it was released."""
    try:
        return Owner(**json.loads((run / _FILE).read_text()))
    except (ValueError, TypeError):
        return None


def _write(descriptor: int, owner: Owner) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(asdict(owner)) + "\n").encode(), 0)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
