"""Files that a user gave or a run wrote, read with errors that name the file and the remedy."""

import errno
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LFS = "version https://git-lfs"


def read_text(path: Path, remedy: str) -> str:
    """A file's UTF-8 text, without the byte-order mark that some editors put before it.

    Raises:
        ValueError: naming the file, what is wrong with it and the remedy.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8, or {remedy}"
        ) from None
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; {remedy}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, not a file; {remedy}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {remedy}") from None
    if text.startswith(_LFS):
        raise ValueError(f"{path} is a Git LFS pointer, not the file itself; run git lfs pull")
    return text


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object that a JSON file holds; errors as `read_text`."""
    text = read_text(path, remedy)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        what = f"is not JSON ({error})" if text.strip() else "is empty"
        raise ValueError(f"{path} {what}; {remedy}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object, it begins {text.strip()[:20]!r}; {remedy}")
    return value


def read_json_lines(path: Path, remedy: str, keys: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The objects of a file with one per line, all of which must have `keys`; errors as
    `read_text`, naming the line."""
    rows = []
    # Text keeps other characters that str.splitlines takes for line ends.
    for number, line in enumerate(read_text(path, remedy).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); {remedy}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object; {remedy}")
        if missing := [key for key in keys if key not in row]:
            raise ValueError(f"{path}, line {number} has no {', '.join(missing)}; {remedy}")
        rows.append(row)
    return rows


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Writes to a file, whose errors name it: those of a write alone do not.

    Raises:
        OSError: with the path as its `filename`.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def describe_os_error(error: OSError) -> str | None:
    """What went wrong with which file, and the remedy; None for an error that names no file."""
    if error.filename is None and not is_full_disk(error):
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    if is_full_disk(error):
        remedy = "free some space; fos-rl resume continues from a run's newest checkpoint"
    else:
        remedy = "check the path and its permissions"
    return f"{where}{error.strerror}; {remedy}"


def is_full_disk(error: OSError) -> bool:
    """Whether a disk or a quota was full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_number(value: object) -> bool:
    """Whether a value read from JSON is a number, which true and false are not; NaN is."""
    return isinstance(value, int | float) and not isinstance(value, bool)
