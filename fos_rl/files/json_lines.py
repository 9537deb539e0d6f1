"""JSON lines that a run wrote: the last one may be torn, any other must be whole."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fos_rl.files.reading import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """A file's objects, in order. `torn` says what is wrong with a last line that was left out: a
    process or a machine ended while it was written. "" where all lines are whole."""

    rows: list[dict[str, Any]]
    torn: str = ""


def read_run_lines(path: Path, remedy: str, keys: Iterable[str] = ()) -> JsonLines:
    """The objects of a file with one per line, all of which must have `keys`.

    Raises:
        ValueError: as `files.reading.read_json_lines`, but for a last line that is not whole.
    """
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if not data or data.startswith(b"version "):
        # What keeps it from being read, or that it is a Git LFS pointer, has its words there.
        read_text(path, remedy)
    lines = [(n, line) for n, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    rows: list[dict[str, Any]] = []
    for number, line in lines:
        row = _object(line)
        if row is None and number == lines[-1][0]:
            return JsonLines(rows=rows, torn=f"{path}, line {number}: torn in a write, left out")
        if row is None:
            raise ValueError(f"{path}, line {number} is not JSON ({_shown(line)}); {remedy}")
        if missing := [key for key in keys if key not in row]:
            raise ValueError(f"{path}, line {number} has no {', '.join(missing)}; {remedy}")
        rows.append(row)
    return JsonLines(rows=rows)


def torn_tail(path: Path) -> str:
    """What is wrong with the last line of such a file, if it is torn; of a file that ends a line,
    the last byte alone is read."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return ""
        file.seek(-1, 2)
        if file.read(1) == b"\n":
            return ""
    return read_run_lines(path, "restore it, or leave the run out").torn


def last_object(path: Path) -> dict[str, Any] | None:
    """The last whole object of such a file, found without parsing the lines before it."""
    lines = reversed(path.read_bytes().split(b"\n"))
    return next((row for line in lines if (row := _object(line)) is not None), None)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        # JSON's and UTF-8's decoding errors both are.
        return None
    return value if isinstance(value, dict) else None


def _shown(line: bytes, limit: int = 40) -> str:
    text = line.decode(errors="backslashreplace")
    return f"it begins {text[:limit]!r}"
