"""What a run needs to go on where it stopped: masters, optimizer, counters."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fos_rl.trainer.trainer import GrpoTrainer

_STATE = "state.pt"


def save_checkpoint(trainer: "GrpoTrainer", folder: Path) -> None:
    """Write the trainer's state; the folder appears whole or not at all."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state = {
        "contract": trainer.contract(),
        "policy_version": trainer.policy_version,
        "updates": trainer.updates,
        "masters": trainer.masters.weights,
        "optimizer": trainer.optimizer.state_dict(),
    }
    torch.save(state, partial / _STATE)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load_checkpoint(trainer: "GrpoTrainer", folder: Path) -> None:
    """Put a saved state into a trainer built from the same spec.

    Raises:
        ValueError: when the checkpoint was written under another contract.
    """
    state = torch.load(folder / _STATE, map_location=trainer.device, weights_only=True)
    if state["contract"] != trainer.contract():
        raise ValueError(
            f"{folder} was saved under another model or precision; resume with the run's own config"
        )
    with torch.no_grad():
        for name, master in trainer.masters.weights.items():
            master.copy_(state["masters"][name])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.policy_version = state["policy_version"]
    trainer.updates = state["updates"]
    trainer.masters.publish()


def checkpoint_folder(run: Path, next_step: int) -> Path:
    """Where the state before step `next_step` is kept."""
    return run / "checkpoints" / f"{next_step:06d}"


def latest_checkpoint(run: Path) -> tuple[Path, int]:
    """The newest whole checkpoint of a run and the step that follows it.

    Raises:
        ValueError: when the run has none.
    """
    steps = [int(path.parent.name) for path in run.glob(f"checkpoints/[0-9]*/{_STATE}")]
    if not steps:
        raise ValueError(
            f"{run} has no checkpoint to resume from; a run writes them when trainer.save_every is "
            "set"
        )
    return checkpoint_folder(run, max(steps)), max(steps)
