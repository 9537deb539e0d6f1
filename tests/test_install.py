"""The package away from its checkout: shipped configs, stored paths, the wheel, versions."""

import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from fos_rl.cli import main
from fos_rl.config import load_config, parse_config
from fos_rl.config.shipped import config_names, find_config, shipped_configs

ROOT = Path(__file__).parent.parent
RECIPES = {file.stem for file in (ROOT / "configs" / "recipes").glob("*.toml")}


def test_examples_and_recipes_have_names_in_any_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(config_names("recipes")) == RECIPES
    assert find_config("demo") == shipped_configs() / "demo.toml"
    assert load_config("tiny_moe", recipe="mxfp8").model.precision.recipe == "mxfp8"
    # Files of that name come first, in the current directory and in its configs/.
    assert find_config("demo.toml") == Path("demo.toml")
    (tmp_path / "demo").mkdir()
    assert find_config("demo") == shipped_configs() / "demo.toml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.toml").write_text("")
    assert find_config("demo") == Path("configs/demo.toml")
    with pytest.raises(ValueError, match=r"nothing does not exist; give a file, or one of demo, "):
        load_config("nothing")


def test_paths_that_exist_are_stored_for_any_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}")
    # The run folder of an earlier example, say.
    (tmp_path / "gsm8k").mkdir()
    config = parse_config(
        {
            "model": {"path": "model"},
            "data": {"type": "dataset", "path": "rows.jsonl"},
            "eval": {"sets": ["gsm8k", "rows.jsonl"]},
        }
    )
    assert config.model.path == str(tmp_path / "model")
    assert config.data.path == str(tmp_path / "rows.jsonl")
    assert config.eval.sets == ("gsm8k", str(tmp_path / "rows.jsonl"))
    hub = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"type": "gsm8k"}}
    assert parse_config(hub).model.path == "Qwen/Qwen3-0.6B"
    assert parse_config(hub).data.path == "openai/gsm8k"


def test_version_names_the_packages_without_importing_them(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"fos-rl {version('fos-rl')}")
    assert f"torch {version('torch')}" in printed
    command = "import sys, fos_rl.cli; print('torch' in sys.modules, 'vllm' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert loaded.stdout.split() == ["False", "False"]


def test_pythons_are_named_alike() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if "Python ::" in c]
    assert named == ["3.11", "3.12", "3.13"]
    assert project["requires-python"] == ">=3.11,<3.14"


@pytest.mark.long
def test_the_wheel_runs_a_config_from_an_empty_folder(tmp_path: Path) -> None:
    """Built and installed beside the checkout, it trains, is resumed, compared, rescored and
    evaluated from a folder that holds nothing else."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    held = {Path(name).stem for name in zipfile.ZipFile(wheel).namelist() if "/recipes/" in name}
    assert held == RECIPES
    site, empty = tmp_path / "site", tmp_path / "empty"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    empty.mkdir()

    def fos_rl(folder: Path, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, "-m", "fos_rl.cli", *arguments]
        found = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert found.returncode == 0, found.stderr
        assert str(ROOT / "fos_rl") not in found.stderr

    settings = ("steps=2", "trainer.save_every=1", "model.precision.compute_dtype=float32")
    overrides = [word for setting in settings for word in ("--set", setting)]
    fos_rl(empty, "train", "tiny_moe", "--recipe", "nvfp4", *overrides)
    run = str(empty / "runs" / "tiny_moe")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    fos_rl(elsewhere, "resume", run, "--set", "steps=3")
    fos_rl(elsewhere, "compare", run)
    fos_rl(elsewhere, "rescore", run, "--steps", "0")
    rows = elsewhere / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    fos_rl(elsewhere, "eval", run, "--data", "rows.jsonl", "--precision", "arm")
