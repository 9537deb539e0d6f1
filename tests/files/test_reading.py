"""A file that cannot be used is named, with what is wrong with it and the remedy."""

import errno
from pathlib import Path

import pytest

from fos_rl.cli import main
from fos_rl.config import load_config
from fos_rl.files.reading import (
    describe_os_error,
    read_json_lines,
    read_json_object,
    read_text,
    writing,
)
from fos_rl.run_folder.folder import RunFolder
from fos_rl.types import StepRecord

CONFIG = '[model]\npath = "random:llama"\n[data]\ntype = "vowels"\n'
MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        ("folder", "is a folder"),
        (b"caf\xe9", "not UTF-8 text (byte 3)"),
        ("{}".encode("utf-16"), "not UTF-8 text (byte 0)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b'{"a": ', "is not JSON (Expecting value: line 1 column 7"),
        (b"[1]", "is not a JSON object, it begins '[1]'"),
        (b"null", "is not a JSON object"),
    ],
)
def test_what_is_no_json_object_is_named(content: bytes | str | None, words: str, tmp_path: Path):
    path = tmp_path / "some[1].json"
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are in brackets)
        read_json_object(path, "write it again")
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)
    if words != "git lfs pull":
        assert str(error.value).endswith("write it again")


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_bytes(MARK + b'{"a": 1}')
    assert read_json_object(path, "") == {"a": 1}
    path.write_bytes(MARK + "é".encode())
    assert read_text(path, "") == "é"
    config = tmp_path / "x.toml"
    config.write_bytes(MARK + CONFIG.replace("\n", "\r\n").encode())
    assert load_config(config).data.type == "vowels"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1}\n{"a"', "line 2 is not JSON"),
        ('{"a": 1}\n\n[1]\n', "line 3 is not a JSON object"),
        ('{"a": 1}\n{"b": 1}\n', "line 2 has no a"),
    ],
)
def test_a_damaged_line_is_named(text: str, words: str, tmp_path: Path):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"x\.jsonl, {words}.*; leave it out$"):
        read_json_lines(path, "leave it out", ("a",))


def test_a_line_ends_at_its_newline_alone(tmp_path: Path):
    """str.splitlines parts at characters that JSON lets stand in a string."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "1\u2028\x852"}\n', encoding="utf-8")
    assert read_json_lines(path, "") == [{"a": "1\u2028\x852"}]


def test_a_full_disk_names_the_file(tmp_path: Path):
    run = RunFolder(tmp_path)
    # Every write to it fails as one to a full disk does.
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as error:
        run.metrics(StepRecord(step=0, metrics={"reward/mean": 1.0}))
    described = describe_os_error(error.value)
    assert described is not None
    for words in (str(tmp_path / "metrics.jsonl"), "No space left", "free some space"):
        assert words in described


def test_an_error_without_a_file_is_ours():
    with pytest.raises(OSError, match="Broken pipe") as error:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert describe_os_error(error.value) is None
    with pytest.raises(PermissionError) as denied, writing(Path("runs/x")):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert describe_os_error(denied.value) == (
        "runs/x: Permission denied; check the path and its permissions"
    )


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.toml", None, "none.toml does not exist"),
        ("empty.toml", b"", "empty.toml is empty"),
        ("comment.toml", b"# steps = 1\n", "comment.toml is empty"),
        ("latin.toml", b"steps = 2 # caf\xe9\n", "latin.toml is not UTF-8 text (byte 15)"),
        ("nul.toml", b"steps = 2\n\x00", "nul.toml is not valid TOML"),
        ("x" * 300, None, "cannot be read (File name too long)"),
    ],
)
@pytest.mark.parametrize("use", ["config", "recipe", "study", "base"])
def test_a_toml_file_is_named(use, name, content, words, tmp_path: Path, capsys):
    path, config, study = tmp_path / name, tmp_path / "c.toml", tmp_path / "s.toml"
    if content is not None:
        path.write_bytes(content)
    config.write_text(CONFIG)
    study.write_text(f'base = "{name}"\nbaseline = "a"\nseeds = [0]\n[arms.a]\n')
    arguments = {
        "config": ["train", str(path)],
        "recipe": ["train", str(config), "--recipe", str(path)],
        "study": ["ablate", str(path)],
        "base": ["ablate", str(study)],
    }
    assert main([*arguments[use], "--dry-run"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("model = 3", "model = 3: it is a table"),
        ("[model]\nprecision = 'nvfp4'", "model.precision = 'nvfp4': it is a table"),
        ("trainer = 3\n[model.precision]\nrecipe = 'mxfp8'", "trainer = 3: it is a table"),
    ],
)
def test_a_recipe_of_another_shape_is_refused(recipe: str, words: str, tmp_path: Path):
    path, config = tmp_path / "r.toml", tmp_path / "c.toml"
    path.write_text(recipe)
    config.write_text(CONFIG)
    with pytest.raises(ValueError, match=words):
        load_config(config, recipe=str(path))


@pytest.mark.parametrize("odd", ["a", "=1", "=", "", ".a=1", "model.=1", "model..path=1", " =1"])
def test_an_odd_key_is_shown_how(odd: str, tmp_path: Path):
    (tmp_path / "c.toml").write_text(CONFIG)
    with pytest.raises(ValueError, match=r"write it as a\.b=VALUE"):
        load_config(tmp_path / "c.toml", [odd])


def test_an_override_is_one_setting(tmp_path: Path):
    (tmp_path / "c.toml").write_text(CONFIG)
    assert load_config(tmp_path / "c.toml", [" trainer.lr = 1e-3"]).trainer.lr == 1e-3
    with pytest.raises(ValueError, match="one setting has one line"):
        load_config(tmp_path / "c.toml", ["trainer.lr=1e-3\nsteps=3"])
    with pytest.raises(ValueError, match="path is a value, not a section; give it as path=VALUE"):
        load_config(tmp_path / "c.toml", ["model.path.x=1"])
