"""What a resume keeps of the steps that it does again, and what it writes down."""

import json
import tomllib
from pathlib import Path

import pytest

from fos_rl.config import OUTDATED_MODEL, RunConfig, load_config, parse_config
from fos_rl.config.evaluation import eval_config
from fos_rl.run_folder.find_checkpoint import Checkpoint, Found, Unusable
from fos_rl.run_folder.folder import RunFolder, is_finished, read_metrics, read_metrics_lines
from fos_rl.run_folder.reopen import environment_changes, reopen
from fos_rl.run_folder.resume_plan import ResumePlan
from fos_rl.types import StepRecord

TINY = Path(__file__).parents[2] / "configs" / "tiny_moe.toml"
BEFORE = {"git_commit": "abc", "packages": {"torch": "2.11.0", "ray": "2.60"}, "device": "CPU"}


def _config(*overrides: str) -> RunConfig:
    return load_config(TINY, ["steps=5", *overrides])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps of metrics and rollouts, as `train` leaves them."""
    folder = RunFolder.create(tmp_path / "run", _config(), dict(BEFORE))
    for step in range(4):
        folder.metrics(StepRecord(step=step, metrics={"reward/mean": step / 4}))
        for kind in ("jsonl", "trainer.jsonl"):
            (folder.path / f"rollouts/{step:06d}.{kind}").write_text(f'{{"step": {step}}}\n')
    return folder.path


def _plan(run: Path, next_step: int, config: RunConfig | None = None, **more) -> ResumePlan:
    """What `plan_resume` makes of a whole checkpoint, without writing one."""
    checkpoint = Checkpoint(
        folder=run / f"checkpoints/{next_step:06d}", step=next_step, contract=None, settings=None
    )
    unusable = [Unusable(path=path, reason="torn") for path in more.pop("unusable", [])]
    return ResumePlan(
        run=run,
        config=config or _config(),
        found=Found(checkpoint=checkpoint, unusable=unusable),
        changes=more.pop("changes", {}),
        metrics=read_metrics_lines(run),
        environment=json.loads((run / "environment.json").read_text()),
    )


def _reopen(*args, now: dict | None = None, **more) -> list[str]:
    """The words, but for those on the environment."""
    journal, words = reopen(_plan(*args, **more), now or dict(BEFORE))
    assert journal.path == args[0]
    return words


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_steps_that_are_done_again_are_kept_out_of_the_way(run: Path) -> None:
    torn = run / "rollouts" / "000004.jsonl.123.partial"
    torn.write_text('{"ste')
    damaged = run / "checkpoints" / "000004"
    damaged.mkdir(parents=True)
    [moved] = _reopen(run, 2, unusable=[damaged])
    aside = run / "before-resume-1"
    assert moved == (
        f"moved to {aside}: metrics of steps 2 to 3, rollouts of steps 2 to 4, checkpoints/000004"
    )
    assert [step["step"] for step in read_metrics(run)] == [0, 1]
    assert read_metrics(aside) == [
        {"step": 2, "reward/mean": 0.5},
        {"step": 3, "reward/mean": 0.75},
    ]
    assert _names(run / "rollouts") == [
        f"{step:06d}.{kind}" for step in (0, 1) for kind in ("jsonl", "trainer.jsonl")
    ]
    assert len(_names(aside / "rollouts")) == 5
    assert (aside / "checkpoints" / "000004").is_dir()
    assert not damaged.exists()
    # The next one has a place of its own; one with nothing to move has none.
    [moved] = _reopen(run, 1)
    assert moved.endswith("before-resume-2: metrics of step 1, rollouts of step 1")
    assert _reopen(run, 1) == []
    assert not (run / "before-resume-3").exists()


def test_a_torn_last_line_is_dropped_and_the_steps_that_are_missing_named(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    rollouts = run / "rollouts" / "000001.jsonl"
    rollouts.write_text('{"step": 1}\n{"step')
    words = _reopen(run, 4)
    assert words == [
        f"{path}, line 4: torn in a write, left out",
        "metrics.jsonl lacks step 3, which the checkpoint has gone through",
        f"{rollouts}, line 2: torn in a write, left out",
    ]
    assert [step["step"] for step in read_metrics(run)] == [0, 1, 2]
    assert rollouts.read_text() == '{"step": 1}\n'
    RunFolder(run).metrics(StepRecord(step=4, metrics={}))
    assert [step["step"] for step in read_metrics(run)] == [0, 1, 2, 4]


def test_changed_settings_are_a_new_revision(run: Path) -> None:
    first = (run / "config.toml").read_text()
    words = _reopen(run, 4, _config("trainer.lr=1e-2"), changes={"trainer.lr": (1e-4, 1e-2)})
    assert words == [
        "config.toml has the settings from here on, config.0001.toml those until now",
        "trainer.lr: 0.0001 until now, 0.01 from here",
    ]
    assert (run / "config.0001.toml").read_text() == first
    stored = parse_config(tomllib.loads((run / "config.toml").read_text()))
    assert stored == _config("trainer.lr=1e-2")
    [entry] = json.loads((run / "environment.json").read_text())["resumed"]
    assert entry == {
        "step": 4,
        **BEFORE,
        "settings": {"trainer.lr": {"before": 1e-4, "now": 1e-2}},
    }
    _reopen(run, 4, _config("trainer.lr=1e-3"))
    assert (run / "config.0002.toml").is_file()
    assert _reopen(run, 4, _config("trainer.lr=1e-3")) == []
    assert not (run / "config.0003.toml").exists()
    assert len(json.loads((run / "environment.json").read_text())["resumed"]) == 3


def test_a_model_of_an_earlier_end_does_not_finish_the_run(run: Path) -> None:
    """The last step is done again and the process killed before the model is written."""
    (run / "model").mkdir()
    (run / "eval.json").write_text("{}")
    RunFolder(run).metrics(StepRecord(step=4, metrics={}))
    assert is_finished(run)
    _reopen(run, 4)
    RunFolder(run).metrics(StepRecord(step=4, metrics={}))
    assert not is_finished(run)
    # Neither its figures nor its weights pass for those of the run as it is now.
    assert _names(run / "before-resume-1") == ["eval.json", "metrics.jsonl"]
    with pytest.raises(ValueError, match="has continued since its model was written"):
        eval_config(str(run), sets=["aime24"], samples=0, greedy=True)
    (run / OUTDATED_MODEL).unlink()
    assert is_finished(run)


def test_other_code_and_packages_are_named(run: Path) -> None:
    now = {**BEFORE, "git_commit": "def", "packages": {"torch": "2.12.0", "vllm": "1"}}
    want = [
        "git_commit abc then, def now",
        "torch 2.11.0 then, 2.12.0 now",
        "ray 2.60 then, None now",
        "vllm None then, 1 now",
    ]
    assert _reopen(run, 4, now=now) == want
    # Against the newest resume, not the first start.
    assert _reopen(run, 4, now=now) == []
    assert environment_changes({}, now) == []
