"""What a full disk, an exception or a kill leaves of files and folders that are being written."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fos_rl.files.whole import (
    append_line,
    replace_folder,
    restore_replaced,
    whole_folder,
    write_whole,
)


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let a file grow further, in the middle of a write, as a full disk does
    (EFBIG in place of ENOSPC; Python ignores the signal)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_text_file_is_the_earlier_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    write_whole(path, "first\n")
    with pytest.raises(OSError, match="File too large"), no_file_above(1000):
        write_whole(path, "x" * 5000)
    assert path.read_text() == "first\n"
    write_whole(path, "second é\n")
    assert path.read_bytes() == "second é\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_an_appended_line_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, "one")
    with pytest.raises(OSError, match="File too large"), no_file_above(1000):
        append_line(path, "x" * 5000)
    assert path.read_text() == "one\n"
    append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with whole_folder(folder) as partial:
        (partial / "a").write_text("1")
        assert not folder.exists()
    with pytest.raises(FileNotFoundError), whole_folder(folder) as partial:
        (partial / "a").write_text("2") and (partial / "b").read_text()
    assert (folder / "a").read_text() == "1"
    with whole_folder(folder) as partial:
        (partial / "b").write_text("3")
        assert (folder / "a").exists(), "the earlier one stays until the new one is whole"
    assert [path.name for path in folder.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_kill_between_the_two_renames_is_undone(tmp_path: Path, monkeypatch) -> None:
    folder, new = tmp_path / "model", tmp_path / "model.new"
    for path, text in ((folder, "old"), (new, "new")):
        path.mkdir()
        (path / "weights").write_text(text)
    rename, calls = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_folder(new, folder)
    assert not folder.exists()
    assert restore_replaced(folder)
    assert (folder / "weights").read_text() == "old"
    assert not restore_replaced(folder)
    replace_folder(new, folder)
    assert (folder / "weights").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]
