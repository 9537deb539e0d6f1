"""What `fos-rl resume` refuses before anything starts, and that a refusal changes nothing."""

import shutil
from pathlib import Path

import pytest
import ray
import torch

from fos_rl.cli import main
from fos_rl.config import load_config
from fos_rl.files.manifest import MANIFEST, write_manifest
from fos_rl.run_folder.folder import RunFolder
from fos_rl.run_folder.resume_plan import plan_resume
from fos_rl.trainer.checkpoint import STATE, checkpoint_folder
from fos_rl.types import StepRecord

TINY = Path(__file__).parents[2] / "configs" / "tiny_moe.toml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three finished steps, checkpoints before steps 1 and 3, the model."""
    config = load_config(TINY)
    folder = RunFolder.create(tmp_path / "run", config, {"git_commit": "abc"})
    for step in range(3):
        folder.metrics(StepRecord(step=step, metrics={}))
    for step in (1, 3):
        place = checkpoint_folder(folder.path, step)
        place.mkdir(parents=True)
        torch.save({"masters": torch.arange(1000)}, place / STATE)
        facts = {"contract": {"family": "llama"}, "settings": config.model_dump(mode="json")}
        write_manifest(place, {"checkpoint": place.name, **facts})
    (folder.path / "model").mkdir()
    return folder.path


def _edit(run: Path, old: str, new: str) -> None:
    text = (run / "config.toml").read_text()
    assert old in text
    (run / "config.toml").write_text(text.replace(old, new))


def _none_whole(run: Path) -> None:
    for step in (1, 3):
        (checkpoint_folder(run, step) / STATE).write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "arguments", "words"),
    [
        pytest.param(lambda r: None, [], "has finished its 3 steps", id="finished"),
        pytest.param(
            lambda r: None,
            ["--set", "steps=2"],
            "steps = 2: {run}/checkpoints/000003 has gone through 3 steps",
            id="steps lowered",
        ),
        pytest.param(
            lambda r: None,
            ["--set", "steps=9", "--set", "seed=5"],
            "seed = 5: the run has 0",
            id="seed",
        ),
        pytest.param(
            lambda r: _edit(r, "seed = 0", "seed = 5"),
            ["--set", "steps=9"],
            "seed = 5: the run has 0",
            id="edited config",
        ),
        pytest.param(
            lambda r: (r / "config.toml").write_text("steps ="), [], "not valid TOML", id="no TOML"
        ),
        pytest.param(
            lambda r: (r / "config.toml").unlink(), [], "is not a run folder", id="no config"
        ),
        pytest.param(
            lambda r: shutil.rmtree(r / "checkpoints"),
            [],
            "has no checkpoint to resume from",
            id="no checkpoints",
        ),
        pytest.param(
            _none_whole,
            [],
            "no checkpoint that is whole: checkpoints/000003: state.pt is truncated: 0 bytes",
            id="none whole",
        ),
        pytest.param(
            lambda r: (r / "checkpoints/000004.partial").mkdir(),
            ["--set", "steps=9", "--strict"],
            "--strict: {run} has checkpoints that are not whole: checkpoints/000004.partial",
            id="strict, left over",
        ),
        pytest.param(
            lambda r: (checkpoint_folder(r, 3) / MANIFEST).unlink(),
            ["--set", "steps=9", "--strict"],
            "checkpoints/000003: unverified",
            id="strict, unverified",
        ),
        pytest.param(
            lambda r: (r / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n'),
            ["--set", "steps=9"],
            "metrics.jsonl, line 2 is not JSON",
            id="damaged metrics",
        ),
        pytest.param(
            lambda r: (r / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 1}\n'),
            ["--set", "steps=9"],
            "step 1 comes after step 1, as when two processes wrote there",
            id="metrics of two writers",
        ),
        pytest.param(
            lambda r: (r / "environment.json").write_text('{"git'),
            ["--set", "steps=9"],
            "environment.json is not JSON",
            id="damaged environment",
        ),
    ],
)
def test_a_refused_resume_names_the_reason_and_changes_nothing(
    run: Path, capsys, damage, arguments: list[str], words: str
) -> None:
    damage(run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert main(["resume", str(run), *arguments]) == 2
    assert words.format(run=run) in capsys.readouterr().err
    after = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != "run.lock"}
    assert after == before


def test_a_run_whose_model_is_not_written_goes_on_to_write_it(run: Path) -> None:
    (run / "model").rmdir()
    plan = plan_resume(run)
    assert (plan.next_step, plan.config.steps, plan.changes) == (3, 3, {})


def test_a_damaged_checkpoint_that_strict_refuses_is_passed_by(run: Path) -> None:
    (checkpoint_folder(run, 3) / STATE).write_bytes(b"")
    assert plan_resume(run, ["steps=9"]).next_step == 1
    with pytest.raises(ValueError, match=r"leave --strict out to continue from .*000001"):
        plan_resume(run, ["steps=9"], strict=True)


def test_a_checkpoint_of_another_model_is_refused_before_anything_starts(run: Path, capsys) -> None:
    before = (run / "environment.json").read_bytes()
    assert main(["resume", str(run), "--set", "steps=9"]) == 2
    words = "000003 was saved under another model or precision (checkpoint != now): "
    assert words in capsys.readouterr().err
    assert not ray.is_initialized()
    assert (run / "environment.json").read_bytes() == before
