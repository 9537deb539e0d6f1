"""Files and folders that appear whole or not at all, whatever ends the process or the machine.

Written under another name beside the wanted one, brought to the disk (fsync), renamed. A rename
within a folder is atomic (POSIX); without the fsync before it, a machine that loses its power can
keep the name and lose the bytes.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fos_rl.files.reading import writing

PARTIAL = ".partial"
"""Suffix of what is not whole yet; left over only where a process was killed while writing."""
_REPLACED = ".replaced"


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its name when the block ends well, and goes when it does not."""
    # The process id: two commands may write the same report at once.
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    with writing(path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def write_whole(path: Path, text: str) -> None:
    """Write a text file; a reader sees the earlier one or this one, never half of it."""
    with whole_file(path) as file:
        file.write(text.encode())


def append_line(path: Path, line: str) -> None:
    """Append a line and bring it to the disk; where that fails, the file keeps what it had."""
    data = memoryview(f"{line}\n".encode())
    with writing(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except BaseException:
            with suppress(OSError):
                file.truncate(size)
            raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name when the block ends well, and goes when it does not.

    A folder that had the name before is replaced only then.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
    except BaseException:
        # On a full disk, what is left of the file would keep it full.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    replace_folder(partial, folder)


def replace_folder(new: Path, folder: Path) -> None:
    """Give a whole folder the name of another one, which is deleted after that."""
    replaced = folder.with_name(folder.name + _REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    new.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(folder: Path) -> bool:
    """Undo a `replace_folder` that was killed between its two renames; whether there was one."""
    replaced = folder.with_name(folder.name + _REPLACED)
    if folder.exists() or not replaced.is_dir():
        return False
    replaced.rename(folder)
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
