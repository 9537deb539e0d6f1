"""Rows of a data set on the Hugging Face hub, in a folder or in a file, read column by column."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fos_rl.data.table_files import READERS, Row, Table, arrow_columns, arrow_rows, open_file

if TYPE_CHECKING:
    from datasets import Dataset

_BATCH_ROWS = 10_000
# Reading fewer rows takes no time worth a progress bar.
_PROGRESS_ROWS = 100_000


def open_table(path: str, split: str, subset: str | None = None) -> Table:
    """The data set at a hub name, a folder, or a .jsonl, .json, .csv or .parquet file.

    A path that ends in one of these suffixes, or that is not of the form `owner/name`, is a file.
    Files are read as they stand; only data sets of the hub go through the cache of `datasets`.

    Raises:
        ValueError: naming data.path or data.split, its value and the remedy.
    """
    where = f"data.path = {path!r}"
    known = ", ".join(READERS)
    with _naming(where):
        file = Path(path).expanduser()
        is_file, is_folder = file.is_file(), file.is_dir()
    if is_file and file.suffix.lower() not in READERS:
        raise ValueError(f"{where}: unknown file type; use one of {known}")
    if is_file:
        with _naming(where):
            table = open_file(file)
        return _rows_of_split(replace(table, read=_named_reader(where, table)), split, path)
    if is_folder:
        return _of_dataset(_load_folder(file, split, subset, where))
    if file.suffix.lower() in READERS or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(
            f"{where}: no such file, looked in {Path.cwd()}; give the path of an existing "
            f"{known} file, or a hub name such as openai/gsm8k"
        )
    return _of_dataset(_load(path, split, subset, where))


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Errors of reading a file name the setting."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{where}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from error
    except RuntimeError as error:
        # A home folder, as of ~nobody, that is not known.
        raise ValueError(f"{where}: {error}; give the path without ~") from error
    except ValueError as error:
        raise ValueError(f"{where}: cannot be read as a table ({error})") from error


def _named_reader(where: str, table: Table):
    def read(columns: Sequence[str]) -> Iterator[Row]:
        with _naming(where):
            yield from table.read(columns)

    return read


def _rows_of_split(table: Table, split: str, path: str) -> Table:
    """The rows that `train[:100]` or `train[10%:20%]` names; a file's one split has any name."""
    if not set("[+") & set(split):
        return table
    from datasets import ReadInstruction

    name = split.partition("[")[0]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: table.num_rows})
        ranges = [(part.from_, min(part.to, table.num_rows)) for part in parts]
        if not any(start < end for start, end in ranges):
            raise ValueError("there are no such rows")
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"data.split = {split!r}: {error}; {path} has {table.num_rows} rows, of which "
            "train[:100] would be the first 100"
        ) from error

    def read(columns: Sequence[str]) -> Iterator[Row]:
        for start, end in ranges:
            yield from islice(table.read(columns), start, end)

    return replace(table, num_rows=sum(max(0, end - start) for start, end in ranges), read=read)


def _load_folder(folder: Path, split: str, subset: str | None, where: str) -> "Dataset":
    """A folder of data files, or one that `save_to_disk` wrote.

    The converted copy that `datasets` needs is temporary, so it can neither be stale nor meet a
    home folder that cannot be written; a mapped file outlives its name.
    """
    from datasets import load_from_disk

    for mark, chosen in (("state.json", folder), ("dataset_dict.json", folder / split)):
        if (folder / mark).is_file():
            with _naming(where):
                return load_from_disk(str(chosen))  # type: ignore[return-value]
    with tempfile.TemporaryDirectory(prefix="fos-rl-data-") as scratch:
        if has_magic(str(folder)):
            folder = _linked(folder, Path(scratch) / "folder")
        return _load(str(folder), split, subset, where, cache_dir=scratch)


def _linked(folder: Path, links: Path) -> Path:
    """Links to the files of a folder whose name `datasets` would take for a pattern."""
    for file in folder.rglob("*"):
        if file.is_file():
            link = links / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
    return links


def _load(path: str, split: str, subset: str | None, where: str, **options: Any) -> "Dataset":
    from datasets import load_dataset
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetsError

    try:
        return load_dataset(path, subset, split=split, **options)
    except ConnectionError as error:
        raise ValueError(
            f"{where}: the Hugging Face hub cannot be reached ({error}); check the network, or "
            "download the data set and set data.path to its .jsonl, .csv or .parquet file"
        ) from error
    except (DataFilesNotFoundError, EmptyDatasetError) as error:
        raise ValueError(
            f"{where}: the folder holds no {', '.join(READERS)} file; give the path of one"
        ) from error
    except FileNotFoundError as error:
        raise ValueError(
            f"{where}: no such file, folder or hub data set ({error}); check the spelling, or log "
            "in with `hf auth login` if it is private"
        ) from error
    except DatasetsError as error:
        cause = error.__cause__ or error
        raise ValueError(
            f"{where}: cannot be read as a table ({cause}); every row needs the same columns, and "
            "a column one type"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{where}: {error}; `datasets` keeps a copy in its cache, so set HF_HOME to a folder "
            "that can be written and has space, or set data.path to a file"
        ) from error
    except ValueError as error:
        text = str(error)
        if "split" in text.lower():
            raise ValueError(f"data.split = {split!r}: {text}; choose a split of it") from error
        raise ValueError(f"{where}: {text}") from error


def _of_dataset(dataset: "Dataset") -> Table:
    def read(columns: Sequence[str]) -> Iterator[Row]:
        arrow = dataset.select_columns(list(columns)).with_format("arrow")
        table: Any
        for table in arrow.iter(_BATCH_ROWS):
            for batch in table.to_batches():
                yield from arrow_rows(batch)

    columns = arrow_columns(dataset.features.arrow_schema)
    return Table(columns=columns, num_rows=len(dataset), read=read)


def require_column(table: Table, column: str, *, field: str, remedy: str) -> None:
    """Raises ValueError unless the table has the column; `a.b` is entry b of a struct column a.

    Args:
        field: the setting at fault with its value, as in `data.prompt_column = 'question'`.
        remedy: what to do about it.
    """
    top, _, entry = column.partition(".")
    if column in table.columns or entry in table.columns.get(top, ()):
        return
    columns = [
        f"{name}.{entry}" if entry else name
        for name, entries in table.columns.items()
        for entry in entries or [""]
    ]
    raise ValueError(
        f"{field}: there is no column {column!r}; the columns are {', '.join(columns)}. {remedy}"
    )


def iterate_columns(table: Table, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """One tuple per row with the values of the columns, in order; None for a value not there.

    Only these columns are read, in batches: DAPO-Math-17k has 1.79 million rows.
    """
    from tqdm.auto import tqdm

    places = [(c, "") if c in table.columns else c.split(".", 1) for c in columns]
    tops = list(dict.fromkeys(top for top, _ in places))
    # disable=None shows the bar on a terminal only.
    disable = True if table.num_rows < _PROGRESS_ROWS else None
    rows = tqdm(
        table.read(tops),
        total=table.num_rows,
        unit=" rows",
        desc="reading problems",
        disable=disable,
    )
    for row in rows:
        yield tuple(_value(row, top, entry) for top, entry in places)


def _value(row: Row, top: str, entry: str) -> Any:
    value = row.get(top)
    if not entry:
        return value
    return value.get(entry) if isinstance(value, dict) else None
