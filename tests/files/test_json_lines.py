"""A torn last line is left out and named; a damaged line before it is refused by file and line."""

from pathlib import Path

import pytest

from fos_rl.files.json_lines import last_object, read_run_lines

WHOLE = b'{"step": 0}\n{"step": 1}\n'


@pytest.mark.parametrize(
    ("tail", "torn"),
    [
        pytest.param(b"", False, id="whole"),
        pytest.param(b'{"step": 2, "rew', True, id="cut"),
        pytest.param(b'{"step": 2, "rew\n', True, id="cut, and a newline by an editor"),
        pytest.param(b"\0\0\0\0", True, id="zeros after a power loss"),
        pytest.param(b'{"text": "\xe2\x82', True, id="cut inside a character"),
        pytest.param(b"12", True, id="a number"),
    ],
)
def test_a_torn_last_line_is_left_out_and_named(tmp_path: Path, tail: bytes, torn: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + tail)
    lines = read_run_lines(path, "restore it")
    assert lines.rows == [{"step": 0}, {"step": 1}]
    assert (f"{path}, line 3" in lines.torn) == torn
    assert last_object(path) == {"step": 1}


def test_a_last_line_without_its_newline_is_whole(tmp_path: Path) -> None:
    """No beginning of a JSON object is a JSON object."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE.rstrip())
    lines = read_run_lines(path, "restore it")
    assert (lines.rows, lines.torn) == ([{"step": 0}, {"step": 1}], "")


@pytest.mark.parametrize("damage", [b'{"step": 1, "rew', b"\0\0", b"[1]", b"\xff{}"])
def test_a_damaged_line_before_the_last_is_refused(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + damage + b'\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON .*; restore it"):
        read_run_lines(path, "restore it")


def test_separators_of_unicode_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"text": "a\u2028b\u0085c"}\n{"text": "d"}\n', encoding="utf-8")
    assert [row["text"] for row in read_run_lines(path, "restore it").rows] == [
        "a\u2028b\u0085c",
        "d",
    ]


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    assert read_run_lines(path, "restore it").rows == []
    assert last_object(path) is None
    with pytest.raises(ValueError, match=r"nothing\.jsonl does not exist; restore it"):
        read_run_lines(tmp_path / "nothing.jsonl", "restore it")
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        read_run_lines(path, "restore it")
