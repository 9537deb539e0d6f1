"""Rows of a data set on the Hugging Face hub or in a file, read column by column."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

# The datasets builder of each file type.
_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_BATCH_ROWS = 10_000
# Reading fewer rows takes no time worth a progress bar.
_PROGRESS_ROWS = 100_000


def open_table(path: str, split: str, subset: str | None = None) -> "Dataset":
    """The data set at a hub name, a folder, or a .jsonl, .json, .csv or .parquet file.

    A path that ends in one of these suffixes, or that is not of the form `owner/name`, is a file.

    Raises:
        ValueError: naming data.path or data.split, its value and the remedy.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    where = f"data.path = {path!r}"
    file = Path(path).expanduser()
    try:
        if file.is_file():
            builder = _BUILDERS.get(file.suffix)
            if builder is None:
                known = ", ".join(_BUILDERS)
                raise ValueError(f"{where}: unknown file type; use one of {known}")
            # A file has one split; it goes by the name that is asked for, as in train[:100].
            name = split.partition("[")[0]
            return load_dataset(builder, data_files={name: str(file)}, split=split)
        if file.suffix in _BUILDERS or path.startswith((".", "/", "~")) or path.count("/") > 1:
            if not file.is_dir():
                raise ValueError(
                    f"{where}: no such file, looked in {Path.cwd()}; give the path of an existing "
                    f"{', '.join(_BUILDERS)} file, or a hub name such as openai/gsm8k"
                )
            return load_dataset(str(file), subset, split=split)
        return load_dataset(path, subset, split=split)
    except ConnectionError as error:
        raise ValueError(
            f"{where}: the Hugging Face hub cannot be reached ({error}); check the network, or "
            "download the data set and set data.path to its .jsonl, .csv or .parquet file"
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
    except ValueError as error:
        text = str(error)
        if text.startswith("data."):
            raise
        if "split" in text.lower():
            raise ValueError(f"data.split = {split!r}: {text}; choose a split of {path}") from error
        raise ValueError(f"{where}: {text}") from error


def require_column(table: "Dataset", column: str, *, field: str, remedy: str) -> None:
    """Raises ValueError unless the table has the column; `a.b` is entry b of a struct column a.

    Args:
        field: the setting at fault with its value, as in `data.prompt_column = 'question'`.
        remedy: what to do about it.
    """
    if column in table.column_names:
        return
    top, _, entry = column.partition(".")
    struct = table.features.get(top)
    if entry and isinstance(struct, dict) and entry in struct:
        return
    columns = [
        f"{name}.{entry}" if entry else name
        for name, feature in table.features.items()
        for entry in (feature if isinstance(feature, dict) else [""])
    ]
    raise ValueError(
        f"{field}: there is no column {column!r}; the columns are {', '.join(columns)}. {remedy}"
    )


def iterate_columns(table: "Dataset", columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """One tuple a row with the values of the columns, in order.

    Only these columns are read, in Arrow batches: DAPO-Math-17k has 1.79 million rows.
    """
    from tqdm.auto import tqdm

    tops = [c if c in table.column_names else c.partition(".")[0] for c in columns]
    entries = [c[len(top) + 1 :] for c, top in zip(columns, tops, strict=True)]
    arrow = table.select_columns(list(dict.fromkeys(tops))).with_format("arrow")
    # disable=None shows the bar on a terminal only.
    disable = True if len(table) < _PROGRESS_ROWS else None
    with tqdm(total=len(table), unit=" rows", desc="reading problems", disable=disable) as bar:
        batch: Any
        for batch in arrow.iter(_BATCH_ROWS):
            values = [
                _column_values(batch, top, entry) for top, entry in zip(tops, entries, strict=True)
            ]
            yield from zip(*values, strict=True)
            bar.update(batch.num_rows)


def _column_values(batch: Any, column: str, entry: str) -> list[Any]:
    values = batch.column(column).to_pylist()
    if not entry:
        return values
    return [None if value is None else value[entry] for value in values]
