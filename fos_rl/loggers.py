"""Optional metric loggers beside metrics.jsonl: TensorBoard and Weights & Biases."""

import importlib
from collections.abc import Callable
from pathlib import Path

from fos_rl.config import RunConfig
from fos_rl.types import StepRecord

Log = Callable[[StepRecord], None]


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
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        raise ValueError(
            f"logging.wandb_project = {config.logging.wandb_project!r}: the package wandb is not "
            "installed; run pip install 'fos-rl[wandb]' or leave the setting out"
        ) from None
    run = wandb.init(
        project=config.logging.wandb_project,
        name=folder.name,
        dir=str(folder),
        config=config.model_dump(mode="json"),
    )
    return lambda record: run.log(record.metrics, step=record.step)
