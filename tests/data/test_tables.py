"""Files are read as what they say; one that cannot be read is named with place and remedy."""

import errno
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fos_rl.data.tables import iterate_columns, open_table

MIXED = [34, "x", [1, 2], 2**64 + 1, None, 0, False, {"a": 1}]


def read(path: Path | str, *columns: str, split: str = "train") -> list[tuple[Any, ...]]:
    return list(iterate_columns(open_table(str(path), split), columns))


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_column_of_mixed_types_is_what_the_file_says(tmp_path: Path) -> None:
    rows = [{"answer": value} for value in MIXED]
    lines = write_lines(tmp_path / "a.jsonl", rows)
    whole = tmp_path / "a.json"
    whole.write_text(json.dumps(rows, indent=1))
    for path in (lines, whole):
        assert [value for (value,) in read(path, "answer")] == MIXED


@pytest.mark.parametrize("kind", ["folder", "parquet", "saved"])
def test_json_texts_of_datasets_are_decoded(tmp_path: Path, kind: str) -> None:
    """`datasets` keeps mixed types as texts of the Arrow type json, also within structs."""
    features = datasets.Features({"answer": datasets.Json(), "r": {"gold": datasets.Json()}})
    values = [34, "x", [1, 2]]
    table = datasets.Dataset.from_dict(
        {"answer": values, "r": [{"gold": v} for v in values]}, features=features
    )
    path = tmp_path / "data"
    if kind == "saved":
        table.save_to_disk(path, num_proc=None)
    else:
        path.mkdir()
        table.to_parquet(path / "train.parquet")
    if kind == "parquet":
        path = path / "train.parquet"
    assert read(path, "answer", "r.gold") == [(v, v) for v in values]


def test_numbers_are_not_rounded(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 9007199254740993}\n{"a": 0.12345678901234567891}\n')
    assert read(path, "a") == [(9007199254740993,), (Decimal("0.12345678901234567891"),)]
    path = tmp_path / "a.csv"
    path.write_text('a,b\n9007199254740993,NA\n007,"1,5"\n,\n')
    assert read(path, "a", "b") == [("9007199254740993", "NA"), ("007", "1,5"), (None, None)]


def test_rows_need_not_have_the_same_columns(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"a": 1}, {"b": {"c": 2}}, {"b": "text"}])
    assert read(path, "a", "b.c") == [(1, None), (None, 2), (None, None)]


@pytest.mark.parametrize("name", ["data[1].jsonl", "a*b?.jsonl", "{x}.jsonl", "a b.JSONL"])
def test_a_path_is_no_pattern(tmp_path: Path, name: str) -> None:
    # The neighbours that the patterns would match.
    for other in ("data1.jsonl", "axbx.jsonl"):
        write_lines(tmp_path / other, [{"a": "wrong"}])
    assert read(write_lines(tmp_path / name, [{"a": "right"}]), "a") == [("right",)]


def test_a_folder_is_no_pattern_and_leaves_no_copy(tmp_path: Path, monkeypatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    folder = tmp_path / "data[1]"
    folder.mkdir()
    (folder / "train.csv").write_text("a,b\n1,x\n2,y\n")
    assert read(folder, "b") == [("x",), ("y",)]
    assert not cache.exists()


def test_a_slice_of_a_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"a": i} for i in range(10)])
    assert read(path, "a", split="train[:3]") == [(0,), (1,), (2,)]
    assert read(path, "a", split="test[80%:]") == [(8,), (9,)]
    assert read(path, "a", split="x[:1]+x[9:]") == [(0,), (9,)]
    assert len(read(path, "a", split="train[:1000]")) == 10
    for split in ("train[", "train+test", "train[20:30]"):
        with pytest.raises(ValueError, match=r"data\.split = .*10 rows"):
            read(path, "a", split=split)


BAD: dict[str, tuple[bytes, str]] = {
    "empty.jsonl": (b"", "the file is empty"),
    "blank.jsonl": (b"\n \n", "holds no rows"),
    "empty.json": (b"", "the file is empty"),
    "list.json": (b"[]", "holds no rows"),
    "empty.csv": (b"", "the file is empty"),
    "header.csv": (b"a,b\n", "holds no rows"),
    "empty.parquet": (b"", "the file is empty"),
    "broken.jsonl": (b'{"a": 1}\n{"a": \n', r"line 2 is not JSON"),
    "list.jsonl": (b'{"a": 1}\n\n[1]\n', r"line 3 is a list, not an object"),
    "deep.jsonl": (b"[" * 100_000, r"line 1 is not JSON"),
    "digits.jsonl": (b'{"a": ' + b"1" * 5000 + b"}", r"line 1 is not JSON"),
    "latin.jsonl": (b'{"a": "x"}\n{"a": "\xe9"}\n', r"line 2, byte 8 is 0xe9.*UTF-8; save"),
    "latin.json": (b'[{"a": "\xe9"}]', r"line 1, byte 9 is 0xe9.*UTF-8; save"),
    "latin.csv": (b"a\nx\n\xe9\n", r"line 3, byte 1 is 0xe9.*UTF-8; save"),
    "utf16.csv": ("a\nx\n".encode("utf-16"), "UTF-16 text; save it as UTF-8"),
    "broken.json": (b'[{"a": 1}', "it is not JSON"),
    "values.json": (b"[1]", "row 1 is a number, not an object"),
    "ragged.csv": (b"a,b\n1,2\n1,2,3\n", r"line 3: 3 values where the first line names 2"),
    "quotes.csv": (b'a,b\n1,"2\n', r"line 2: .*check its quotes"),
    "twice.csv": (b"a,a\n1,2\n", "two columns have the name 'a'"),
    "broken.parquet": (b"PAR1 and more", "not a whole Parquet file"),
    "pointer.parquet": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_table_is_named(tmp_path: Path, name: str) -> None:
    content, reason = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"data\.path = '.*{name}': cannot be read.*{reason}"):
        read(tmp_path / name, "a")


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [str(i) for i in range(1000)]}), path)
    content = bytearray(path.read_bytes())
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"a\.parquet': .*not a whole Parquet file"):
        read(path, "a")


def test_a_parquet_file_without_rows_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="holds no rows"):
        read(tmp_path / "a.parquet", "a")


def test_a_byte_order_mark_is_no_name(tmp_path: Path) -> None:
    for name, text in (("a.csv", "a\nx\n"), ("a.jsonl", '{"a": "x"}\n'), ("a.json", '[{"a":"x"}]')):
        (tmp_path / name).write_text("\ufeff" + text)
        assert read(tmp_path / name, "a") == [("x",)]


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"a": 1}])

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    # Tests may run as root, whom no permission stops.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"a\.jsonl': .*Permission denied.*permissions"):
        open_table(str(path), "train")


def test_a_home_that_is_not_known_is_named() -> None:
    with pytest.raises(ValueError, match=r"data\.path = '~no-such-user/a\.jsonl': .*without ~"):
        open_table("~no-such-user/a.jsonl", "train")


def test_a_folder_without_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"a\.jsonl': the folder holds no .*\.parquet"):
        open_table(str(tmp_path / "a.jsonl"), "train")


def test_a_cache_that_cannot_be_written_is_named(monkeypatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/home/user/.cache")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"openai/gsm8k': .*Read-only.*set HF_HOME"):
        open_table("openai/gsm8k", "train")
