"""A run folder of an earlier version stays readable and resumable; a user's file is refused."""

from pathlib import Path

import pytest

from fos_rl.compare.load import load
from fos_rl.config import load_config, other_arm
from fos_rl.config.stored import translate_stored
from fos_rl.run_folder.folder import RunFolder, read_config

BASE = """steps = 3
model = { path = "random:llama" }
data = { type = "vowels" }
trainer = { DEVICE, lr = 1e-3 }
generator = { DEVICE }
"""


def written(folder: Path, device: str) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(BASE.replace("DEVICE", device))
    return folder


@pytest.mark.parametrize(
    ("old", "new"), [("0", "cpu"), ("1", "cuda"), ('"auto"', "auto")], ids=["cpu", "cuda", "auto"]
)
def test_a_stored_config_has_todays_names(old: str, new: str, tmp_path: Path) -> None:
    today = load_config(written(tmp_path / "today", f'device = "{new}"') / "config.toml")
    run = written(tmp_path / "run", f"num_gpus = {old}")
    (run / "environment.json").write_text("{}")
    assert read_config(run) == load_config(run / "config.toml") == today
    assert other_arm(run / "config.toml", ["model.precision.recipe=mxfp8"], None).steps == 3
    # What an error of `fos-rl resume` tells to do, with today's name for a change.
    assert load_config(run / "config.toml", ["trainer.device=cpu"]).trainer.device == "cpu"


def test_a_users_file_is_refused_with_what_to_write(tmp_path: Path) -> None:
    run = written(tmp_path / "run", "num_gpus = 1")
    with pytest.raises(ValueError, match=r"it is trainer\.device now") as error:
        load_config(run / "config.toml")
    assert str(error.value).splitlines() == [
        f"{side}.num_gpus = 1: it is {side}.device now; write device = 'cuda'"
        for side in ("trainer", "generator")
    ]


def test_a_config_of_today_is_translated_to_itself(tmp_path: Path) -> None:
    config = load_config(written(tmp_path / "run", 'device = "cpu"') / "config.toml")
    tree = config.model_dump(mode="json")
    assert translate_stored(tree) == tree
    assert read_config(RunFolder.create(tmp_path / "new", config, {}).path) == config


def test_runs_of_both_versions_compare_without_a_difference(tmp_path: Path) -> None:
    for name, device in (("old", "num_gpus = 0"), ("new", 'device = "cpu"')):
        run = written(tmp_path / name, device)
        (run / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 1.0}\n')
    old, new = (load([tmp_path / name]).arms[0].runs[0] for name in ("old", "new"))
    assert old.settings == new.settings
