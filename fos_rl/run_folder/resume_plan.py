"""What a resume would continue from, found and checked before anything in the run folder
changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fos_rl.config import RunConfig, load_config, parse_config
from fos_rl.config.stored import translate_stored
from fos_rl.files.json_lines import JsonLines
from fos_rl.files.reading import read_json_object
from fos_rl.run_folder.find_checkpoint import Found, find_checkpoint
from fos_rl.run_folder.folder import is_finished, read_metrics_lines
from fos_rl.run_folder.resume_settings import check_resumed
from fos_rl.spec import ModelSpec, contract_difference
from fos_rl.trainer.checkpoint import other_contract


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """Where a run continues, and under what.

    `changes` are the settings that differ from the checkpoint's, by dotted name, as (before, now);
    `metrics` and `environment` what the folder holds so far.
    """

    run: Path
    config: RunConfig
    found: Found
    changes: dict[str, tuple[Any, Any]]
    metrics: JsonLines
    environment: dict[str, Any]

    @property
    def next_step(self) -> int:
        """The first step that is done, or done again."""
        return self.found.checkpoint.step

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's folder."""
        return self.found.checkpoint.folder

    @property
    def last_environment(self) -> dict[str, Any]:
        """That of the newest start or resume."""
        return [self.environment, *self.environment.get("resumed", [])][-1]

    def check_contract(self, spec: ModelSpec) -> None:
        """ValueError for a checkpoint of another model or code version than `spec`'s."""
        contract = self.found.checkpoint.contract
        if contract is None:
            return
        if different := contract_difference(contract, spec.contract()):
            raise ValueError(other_contract(self.checkpoint, different))


def plan_resume(run: Path, overrides: Sequence[str] = (), *, strict: bool = False) -> ResumePlan:
    """The plan of `fos-rl resume`.

    Args:
        strict: refuse where any checkpoint is damaged, left over or unverified.

    Raises:
        ValueError: without a whole checkpoint; for a setting that may not change; for a damaged
            file; and where nothing is left to do.
    """
    found = find_checkpoint(run)
    if strict and found.notes:
        raise ValueError(
            f"--strict: {run} has checkpoints that are not whole: {'; '.join(found.notes)}. "
            "Restore or move them, or leave --strict out to continue from "
            f"{found.checkpoint.folder}"
        )
    config = load_config(run / "config.toml", overrides)
    # The checkpoint knows what it was made under, whoever edited config.toml since.
    settings = found.checkpoint.settings
    before = (
        load_config(run / "config.toml")
        if settings is None
        else parse_config(translate_stored(settings))
    )
    changes = check_resumed(before, config, str(run))
    step = found.checkpoint.step
    if step > config.steps:
        raise ValueError(
            f"steps = {config.steps}: {found.checkpoint.folder} has gone through {step} steps; set "
            f"steps to more than {step}, or start another run: fos-rl train {run}/config.toml"
        )
    if step == config.steps and is_finished(run):
        raise ValueError(
            f"{run} has finished its {config.steps} steps; pass --set steps=N to go further"
        )
    metrics, environment = run / "metrics.jsonl", run / "environment.json"
    remedy = "restore it, or move it away to continue without"
    return ResumePlan(
        run=run,
        config=config,
        found=found,
        changes=changes,
        metrics=read_metrics_lines(run) if metrics.exists() else JsonLines(rows=[]),
        environment=read_json_object(environment, remedy) if environment.exists() else {},
    )
