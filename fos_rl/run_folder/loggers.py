"""Optional metric loggers beside metrics.jsonl: TensorBoard and Weights & Biases."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fos_rl.config import RunConfig
from fos_rl.types import StepRecord

Log = Callable[[StepRecord], None]


def check_loggers(config: RunConfig) -> list[str]:
    """What is not known of the wanted loggers before they start.

    Raises:
        ValueError: when a logger's package is not installed, or W&B has no key to log in with.
    """
    if config.logging.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "logging.tensorboard = true: the package tensorboard is not installed; run pip install "
            "tensorboard or leave the setting out"
        )
    project = config.logging.wandb_project
    if not project:
        return []
    wandb = _import_wandb(project)
    if wandb.setup().settings.mode != "online":
        return []
    if not wandb.login(prompt=False):
        raise ValueError(
            f"logging.wandb_project = {project!r}: Weights & Biases has no key on this machine; "
            "run wandb login, or wandb offline to keep the logs in the run folder"
        )
    return ["whether Weights & Biases can be reached and takes the key"]


def start_loggers(config: RunConfig, folder: Path, first_step: int = 0) -> list[Log]:
    """A function a wanted logger.

    Args:
        first_step: of a resumed run; what TensorBoard has of it and later is done again.

    Raises:
        ValueError: when a wanted logger's package is not installed.
    """
    loggers: list[Log] = []
    if config.logging.tensorboard:
        loggers.append(_tensorboard(folder, first_step))
    if config.logging.wandb_project:
        loggers.append(_wandb(config, folder))
    return loggers


def _tensorboard(folder: Path, first_step: int) -> Log:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)

    def log(record: StepRecord) -> None:
        for name, value in record.metrics.items():
            writer.add_scalar(name, value, record.step)
        writer.flush()

    return log


def _wandb(config: RunConfig, folder: Path) -> Log:
    project = config.logging.wandb_project
    assert project is not None
    wandb = _import_wandb(project)
    try:
        run = wandb.init(
            project=project,
            name=folder.name,
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )
    except wandb.errors.Error as error:
        raise RuntimeError(
            f"logging.wandb_project = {project!r}: Weights & Biases did not start ({error}); run "
            "wandb offline to keep the logs in the run folder, or leave the setting out"
        ) from error
    return lambda record: run.log(record.metrics, step=record.step)


def _import_wandb(project: str) -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ValueError(
            f"logging.wandb_project = {project!r}: the package wandb is not installed; run pip "
            "install 'fos-rl[wandb]' or leave the setting out"
        ) from None
