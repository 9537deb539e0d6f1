"""The run folder: what was asked, where it ran, what it earned. Every file is readable at any time.

config.toml        the resolved configuration; config.NNNN.toml what it was before `resume --set`
environment.json   versions, git commit, device, verifier, and again of each resume
metrics.jsonl      one JSON object per step
run.lock           held by the process that writes the folder, which it names
per_layer.json     relative error of each layer's quantized products, at the first step
rollouts/NNNNNN.jsonl           a step's samples: token ids, log-probs, text, reward
rollouts/NNNNNN.trainer.jsonl   the trainer's log-probs of those it learned from
rollouts/NNNNNN.experts.npz     of a mixture of experts: each sample's routing, by line number
checkpoints/NNNNNN/             the trainer before that step, where trainer.save_every is set
before-resume-N/   what was done after the checkpoint that the N-th resume continued from
model/             the trained weights, written last
model.outdated     while model/ is of an earlier end, and the run has continued since
"""

import json
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fos_rl.config import OUTDATED_MODEL, RunConfig, load_config
from fos_rl.files.json_lines import JsonLines, last_object, read_run_lines
from fos_rl.files.reading import is_number
from fos_rl.files.whole import append_line, whole_file, write_whole
from fos_rl.run_folder.version import git_commit, package_versions
from fos_rl.types import Sample, StepRecord


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
        write_whole(run.path / "config.toml", resolved_toml(config))
        write_whole(run.path / "environment.json", json.dumps(environment, indent=2) + "\n")
        return run

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the step's samples to `rollouts/`, and the experts that were chosen beside them."""
        folder = self.path / "rollouts"
        experts = {str(i): s.rollout.experts for i, s in enumerate(samples)}
        routed = {i: values for i, values in experts.items() if values is not None}
        if routed:
            with whole_file(folder / f"{step:06d}.experts.npz") as file:
                np.savez_compressed(file, allow_pickle=False, **routed)
        rows = ({**_sampled(s), **_earned(s)} for s in samples)
        _write_jsonl(folder / f"{step:06d}.jsonl", rows)

    def trainer_log_probs(
        self, step: int, samples: Sequence[Sample], log_probs: Sequence[np.ndarray]
    ) -> None:
        """Write the trainer's log-probs of the samples, in their order."""
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
        """Whether the layers' errors have been measured."""
        return self._layer_errors.is_file()

    def layer_errors(self, errors: dict[str, float]) -> None:
        """Write the layers' errors, once per run."""
        write_whole(self._layer_errors, json.dumps(errors, indent=2) + "\n")

    @property
    def _layer_errors(self) -> Path:
        return self.path / "per_layer.json"

    def metrics(self, record: StepRecord) -> None:
        """Append a line to metrics.jsonl."""
        append_line(
            self.path / "metrics.jsonl", json.dumps({"step": record.step, **record.metrics})
        )


def resolved_toml(config: RunConfig) -> str:
    """Every setting, defaults too, as a config file that loads again."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The steps of a run, oldest first; a last line that is torn is left out."""
    return read_metrics_lines(folder).rows


def read_metrics_lines(folder: Path) -> JsonLines:
    """`read_metrics`, and what is wrong with a last line that is torn.

    Raises:
        ValueError: for a line before the last that is damaged, naming file and line.
    """
    path, remedy = folder / "metrics.jsonl", "remove the line, or leave the run out"
    lines = read_run_lines(path, remedy, keys=("step",))
    last = -1
    for row in lines.rows:
        for key, value in row.items():
            if not is_number(value) or (key == "step" and not isinstance(value, int)):
                raise ValueError(
                    f"{path}, step {row['step']}: {key} is {value!r}, no number; {remedy}"
                )
        if row["step"] <= last:
            raise ValueError(
                f"{path}: step {row['step']} comes after step {last}, as when two processes wrote "
                f"there; {remedy}"
            )
        last = row["step"]
    return lines


def finished_steps(folder: Path) -> int:
    """Steps up to the last with metrics; 0 where there is no run."""
    path = folder / "metrics.jsonl"
    last = last_object(path) if path.is_file() else None
    return 0 if last is None else int(last["step"]) + 1


def read_config(folder: Path) -> RunConfig | None:
    """The settings a run was started with; None where there is no run."""
    path = folder / "config.toml"
    return load_config(path) if path.is_file() else None


def is_finished(folder: Path) -> bool:
    """Whether a run did every step of its config and wrote its model, which comes last."""
    config = read_config(folder)
    if config is None or not (folder / "model").is_dir() or (folder / OUTDATED_MODEL).exists():
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
        "packages": package_versions(),
        "git_commit": git_commit(),
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
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "CPU")
