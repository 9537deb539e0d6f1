"""Wrong input is answered before any actor starts, with the field and the remedy."""

import subprocess
import sys
from pathlib import Path

import pytest
import ray

from fos_rl.cli import main
from fos_rl.config import parse_config
from fos_rl.runtime.cluster import plan_placement

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "configs" / "tiny_moe.toml")


def _error(capsys, *overrides: str) -> str:
    arguments = [part for override in overrides for part in ("--set", override)]
    assert main(["train", TINY, *arguments]) == 2
    assert not ray.is_initialized()
    return capsys.readouterr().err


def test_dry_run_checks_and_starts_nothing(capsys, tmp_path: Path) -> None:
    assert main(["train", TINY, "--dry-run", "--out", str(tmp_path / "run")]) == 0
    assert not ray.is_initialized()
    assert not (tmp_path / "run").exists()
    shown = capsys.readouterr().out
    for word in ("random:qwen3_moe", "contract", "100 problems", "on the CPU", "nothing started"):
        assert word in shown


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.pth=x", ["model.pth", "did you mean path"]),
        ("trainer.lr=fast", ["trainer.lr", "number"]),
        ("model.path=./nowhere", ["model.path", "./nowhere", "no such folder"]),
        ("model.path=random:gpt2", ["model.path", "random:gpt2", "random:llama"]),
        ("rollout.top_p=0.9", ["rollout.top_p", "set 1.0"]),
        ("rollout.group_size=1", ["rollout.group_size", "use 2 or more"]),
        ("trainer.device=cuda", ["trainer.device = 'cuda'", "no GPU", "set it to 'cpu'"]),
        ("trainer.num_gpus=0", ["trainer.num_gpus = 0", "trainer.device", "device = 'cpu'"]),
        ("generator.num_gpus=1", ["generator.num_gpus = 1", "device = 'cuda'"]),
        ("rollout.max_prompt_tokens=3", ["rollout.max_prompt_tokens = 3", "raise it"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input(capsys, override: str, words: list[str]) -> None:
    message = _error(capsys, override)
    for word in words:
        assert word in message


def test_data_set_without_the_named_column(capsys, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1", "answer": "2"}\n')
    message = _error(capsys, "data.type=dataset", f"data.path={path}")
    for word in ("data.prompt_column", "'prompt'", "question"):
        assert word in message
    message = _error(capsys, "data.type=gsm8k", f"data.path={tmp_path / 'none.jsonl'}")
    assert "data.path" in message


@pytest.mark.parametrize(
    ("trainer", "generator", "available", "expected"),
    [
        ("auto", "auto", 0, (0, 0, False)),
        ("auto", "auto", 1, (1, 1, True)),
        ("auto", "auto", 8, (1, 1, False)),
        ("cuda", "cuda", 1, (1, 1, True)),
        ("cpu", "cuda", 1, (0, 1, False)),
        ("cpu", "cpu", 2, (0, 0, False)),
    ],
)
def test_placement(trainer, generator, available: int, expected: tuple) -> None:
    config = parse_config(
        {
            "model": {"path": "x"},
            "data": {"type": "arithmetic"},
            "trainer": {"device": trainer},
            "generator": {"device": generator},
        }
    )
    plan = plan_placement(config, available)
    assert (plan.trainer_gpus, plan.generator_gpus, plan.colocated) == expected


def test_explain(capsys) -> None:
    assert main(["explain", "algorithm"]) == 0
    assert "clip_high" in capsys.readouterr().out
    assert main(["explain", "nothing"]) == 2
    assert "no section" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain metrics", "--help"])
def test_a_closed_pipe_ends_a_command_quietly(command: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "fos_rl.cli", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # Before the command has written a byte.
        process.stdout.close()
        assert process.stderr.read() == b""
    # argparse itself overlooks it where output is not buffered.
    assert process.returncode in (128 + 13, 0 if command == "--help" else 128 + 13)


def test_another_broken_pipe_is_our_bug(monkeypatch, capsys) -> None:
    def explain(section: str) -> str:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("fos_rl.config.explain.explain", explain)
    monkeypatch.setattr("fos_rl.cli._reader_is_gone", lambda stream: False)
    with pytest.raises(BrokenPipeError):
        main(["explain"])
