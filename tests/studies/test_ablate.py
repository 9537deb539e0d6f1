"""Studies of real runs: checked before they start, killed in the middle, called again."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import ray
import tomli_w

from fos_rl.cli import main
from fos_rl.config import load_config
from fos_rl.config.study import load_study
from fos_rl.run_folder.folder import is_finished, read_metrics

ROOT = Path(__file__).parents[2]
FLOAT32 = {"compute_dtype": "float32"}


def _study(folder: Path, arms: dict | None = None, **base: object) -> Path:
    config = tomllib.loads((ROOT / "configs" / "tiny_moe.toml").read_text())
    (folder / "base.toml").write_text(tomli_w.dumps({**config, "steps": 2, **base}))
    study = {
        "base": "base.toml",
        "baseline": "bf16",
        "seeds": [0],
        "arms": arms
        or {"bf16": {}, "mxfp8": {"model": {"precision": {"recipe": "mxfp8", **FLOAT32}}}},
    }
    path = folder / "study.toml"
    path.write_text(tomli_w.dumps(study))
    return path


def test_dry_run_shows_the_plan_and_starts_nothing(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["ablate", str(_study(tmp_path)), "--out", str(out), "--dry-run"]) == 0
    assert not ray.is_initialized()
    assert not out.exists()
    shown = capsys.readouterr().out
    for words in (
        "2 arms, seeds 0: 2 runs of 2 steps, baseline bf16",
        'path = "random:qwen3_moe"',
        "model.precision.recipe = mxfp8  (baseline: bf16)",
        "s per step",
        "trainer and generator on the CPU, 1 at a time",
        "nothing started",
    ):
        assert words in shown
    # Defaults that come with a recipe are no difference that anyone asked for.
    assert "scale_mode" not in shown


def test_more_runs_at_once_than_memory_holds_are_warned_about(tmp_path: Path, capsys) -> None:
    arguments = ["ablate", str(_study(tmp_path)), "--out", str(tmp_path / "out"), "--dry-run"]
    assert main([*arguments, "--parallel", "1"]) == 0
    assert "warning: that is more" not in capsys.readouterr().out
    assert main([*arguments, "--parallel", "100000"]) == 0
    shown = capsys.readouterr().out
    assert "GiB there are, and runs may fail for lack of it; --parallel " in shown


def test_an_arm_that_cannot_work_stops_the_study_before_it_starts(tmp_path: Path, capsys) -> None:
    """A wrong setting is seen in the file, a wrong layer pattern only with the model at hand."""
    out = tmp_path / "out"
    precision = {"recipe": "mxfp8", "include": ["*.mpl.*"]}
    path = _study(tmp_path, {"bf16": {}, "typo": {"model": {"precision": precision}}})
    assert main(["ablate", str(path), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: arm 'typo': model.precision.include")
    assert "*.mpl.*" in message
    assert not out.exists()
    assert not ray.is_initialized()


def test_a_folder_of_other_settings_is_refused(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    study = load_study(_study(tmp_path))
    folder = out / study.runs[0].name
    folder.mkdir(parents=True)
    earlier = load_config(ROOT / "configs" / "tiny_moe.toml", ["trainer.lr=1"])
    (folder / "config.toml").write_text(
        tomli_w.dumps(earlier.model_dump(mode="json", exclude_none=True))
    )
    assert main(["ablate", str(study.path), "--out", str(out)]) == 2
    message = capsys.readouterr().err
    for words in ("arm 'bf16'", "other settings", "trainer.lr: 1.0 there, 0.0001 now", "--out"):
        assert words in message


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_in_the_middle_and_called_again(tmp_path: Path) -> None:
    """The finished run is left alone, and the one that was at work continues from its checkpoint.

    SIGKILL for the study and for the run that works: nothing of ours can clean up.
    """
    path = _study(tmp_path, steps=20, trainer={"lr": 1e-4, "save_every": 1})
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fos_rl.cli", "ablate", str(path), "--out", str(out)]
    first, second = (out / run.name for run in load_study(path).runs)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            _wait_for(lambda: any(second.glob("checkpoints/[0-9]*/state.pt")), process)
        finally:
            run = _child(process.pid)
            process.kill()
            os.kill(run, signal.SIGKILL)
    assert is_finished(first)
    assert not is_finished(second)
    done = {p: p.stat().st_mtime_ns for p in first.rglob("*") if p.is_file()}

    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 runs finished, 1 were finished before, 0 failed" in result.stdout
    assert is_finished(second)
    assert "resumed" in json.loads((second / "environment.json").read_text())
    assert [m["step"] for m in read_metrics(second)] == list(range(20))
    assert done == {p: p.stat().st_mtime_ns for p in first.rglob("*") if p.is_file()}
    assert (out / "study.toml").read_bytes() == path.read_bytes()
    assert (out / "comparison" / "report.html").is_file()
    # The two arms answered the same prompts in every step.
    for step in range(20):
        prompts = [
            [json.loads(line)["prompt_id"] for line in (run / f"rollouts/{step:06d}.jsonl").open()]
            for run in (first, second)
        ]
        assert prompts[0] == prompts[1]


def _wait_for(condition, process: subprocess.Popen, limit_s: float = 500) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _child(parent: int) -> int:
    """The process id of the run that a study has started."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(entry.read_text().rpartition(")")[2].split()[1]) == parent:
                return int(entry.parent.name)
        except OSError:
            continue
    raise AssertionError("the study has no run")
