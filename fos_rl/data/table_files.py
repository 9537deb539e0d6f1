"""Rows of .jsonl, .json, .csv and .parquet files, as the file has them.

Read without `datasets`, which rounds large integers, hands out columns of mixed types as JSON text,
takes brackets in a path for a pattern and writes a copy of every file into its cache.
"""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch, Schema

Row = Mapping[str, Any]

_BATCH_ROWS = 10_000
_ROWS = "it needs a row per problem"
_LFS = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A data set whose rows are read when they are asked for.

    `columns` maps a name to the entries of the objects in that column, () for plain values;
    `read` gives the rows with at least the columns named, from the first at each call.
    """

    columns: Mapping[str, Sequence[str]]
    num_rows: int
    read: Callable[[Sequence[str]], Iterator[Row]]


def open_file(path: Path) -> Table:
    """The table in a file, whose suffix is one of `READERS`.

    Raises:
        ValueError: saying what is wrong and where, without the file's name.
    """
    with path.open("rb") as file:
        start = file.read(max(len(_LFS), 4))
    if not start:
        raise ValueError(f"the file is empty; {_ROWS}")
    if start.startswith(_LFS):
        raise ValueError("it is a Git LFS pointer, not the file itself; run git lfs pull")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("it is UTF-16 text; save it as UTF-8")
    table = READERS[path.suffix.lower()](path)
    if not table.num_rows:
        raise ValueError(f"the file holds no rows; {_ROWS}")
    return table


def parse_json(text: str) -> Any:
    """JSON without rounding: integers of any size, a number with a point as Decimal.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(text, parse_float=Decimal)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def json_reader(kind: "DataType") -> Callable[[Any], Any] | None:
    """What turns a value of an Arrow type into what its JSON texts say; None if it holds none.

    Newer `datasets` store a column of mixed types that way, with the Arrow type `arrow.json`.
    """
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return _unless_none(parse_json)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        of_item = json_reader(kind.value_type)
        return of_item and _unless_none(lambda value: [of_item(item) for item in value])
    if types.is_struct(kind):
        of_entry = {field.name: reader for field in kind if (reader := json_reader(field.type))}
        return (
            _unless_none(
                lambda value: value | {name: read(value[name]) for name, read in of_entry.items()}
            )
            if of_entry
            else None
        )
    return None


def _unless_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def arrow_columns(schema: "Schema") -> dict[str, list[str]]:
    """The columns of an Arrow schema with the entries of structs."""
    from pyarrow import types

    return {
        field.name: [entry.name for entry in field.type] if types.is_struct(field.type) else []
        for field in schema
    }


def arrow_rows(batch: "RecordBatch") -> Iterator[Row]:
    """The rows of an Arrow batch as Python values."""
    values = []
    for column in batch.columns:
        read = json_reader(column.type)
        values.append([read(v) for v in column.to_pylist()] if read else column.to_pylist())
    for row in zip(*values, strict=True):
        yield dict(zip(batch.schema.names, row, strict=True))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of UTF-8 text, the byte-order mark left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"line {number}, byte {error.start + 1} is {line[error.start]:#04x}, which is "
                    "not UTF-8; save the file as UTF-8"
                ) from None


def _json_lines(path: Path) -> Table:
    def read(_: Sequence[str] = ()) -> Iterator[Row]:
        for number, line in _lines(path):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(
                    f"line {number} is not JSON: {error}; correct or remove it"
                ) from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is {_kind(row)}, not an object; {_ROWS}")
            yield row

    columns, num_rows = _json_columns(read())
    return Table(columns=columns, num_rows=num_rows, read=read)


def _json(path: Path) -> Table:
    """A list of objects, or what a .jsonl file holds."""
    text = "".join(line for _, line in _lines(path))
    if not text.lstrip().startswith("["):
        return _json_lines(path)
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"it is not JSON: {error}; correct it, or write one object per line"
        ) from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {_kind(row)}, not an object; {_ROWS}")
    columns, num_rows = _json_columns(iter(rows))
    return Table(columns=columns, num_rows=num_rows, read=lambda _: iter(rows))


def _json_columns(rows: Iterator[Row]) -> tuple[dict[str, list[str]], int]:
    """The columns of all rows, which need not have the same, and the number of rows."""
    columns: dict[str, dict[str, None]] = {}
    num_rows = 0
    for row in rows:
        num_rows += 1
        for name, value in row.items():
            entries = columns.setdefault(name, {})
            if isinstance(value, dict):
                entries.update(dict.fromkeys(value))
    return {name: list(entries) for name, entries in columns.items()}, num_rows


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")


def _csv(path: Path) -> Table:
    """Every value is the text that the file has; an empty one is None."""

    def records() -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader((line for _, line in _lines(path)), strict=True)
        try:
            for record in reader:
                if record:
                    yield reader.line_num, record
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}; check its quotes") from None

    _, header = next(records(), (0, []))
    if repeated := {name for name in header if header.count(name) > 1}:
        raise ValueError(f"two columns have the name {min(repeated)!r}; rename one")

    def read(_: Sequence[str] = ()) -> Iterator[Row]:
        rows = records()
        next(rows)
        for number, record in rows:
            if len(record) != len(header):
                raise ValueError(
                    f"line {number}: {len(record)} values where the first line names {len(header)} "
                    "columns; put values with commas or line breaks in double quotes"
                )
            yield dict(zip(header, (value or None for value in record), strict=True))

    num_rows = sum(1 for _ in read()) if header else 0
    return Table(columns=dict.fromkeys(header, ()), num_rows=num_rows, read=read)


def _parquet(path: Path) -> Table:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    def open_parquet() -> ParquetFile:
        try:
            return ParquetFile(path)
        except ArrowException as error:
            raise ValueError(
                f"it is not a whole Parquet file: {error}; copy or write it again"
            ) from None

    def read(columns: Sequence[str]) -> Iterator[Row]:
        with open_parquet() as file:
            try:
                for batch in file.iter_batches(_BATCH_ROWS, columns=list(columns)):
                    yield from arrow_rows(batch)
            except (ArrowException, OSError) as error:
                raise ValueError(
                    f"it is not a whole Parquet file: {error}; copy or write it again"
                ) from None

    with open_parquet() as file:
        columns = arrow_columns(file.schema_arrow)
        return Table(columns=columns, num_rows=file.metadata.num_rows, read=read)


READERS: dict[str, Callable[[Path], Table]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
