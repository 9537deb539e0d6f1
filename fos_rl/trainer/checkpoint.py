"""What a run needs to continue where it stopped: masters, optimizer, counters.

RUN/checkpoints/NNNNNN is the state before step NNNNNN: `state.pt` and a manifest of its bytes. It
is checked whenever it is read; `find_checkpoint` chooses among a run's.
"""

import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fos_rl.files.manifest import MANIFEST, read_manifest, write_manifest
from fos_rl.files.whole import whole_folder
from fos_rl.model.finite import check_loaded
from fos_rl.model.hf import named_hf_weights
from fos_rl.spec import contract_difference

if TYPE_CHECKING:
    from fos_rl.trainer.trainer import GrpoTrainer

STATE = "state.pt"
_KEYS = {"contract", "policy_version", "updates", "masters", "optimizer"}


def checkpoint_folder(run: Path, next_step: int) -> Path:
    """Where the state before step `next_step` is kept."""
    return run / "checkpoints" / f"{next_step:06d}"


def save_checkpoint(
    trainer: "GrpoTrainer", folder: Path, settings: dict[str, Any] | None = None
) -> None:
    """Write the trainer's state; the folder appears whole or not at all.

    Args:
        settings: of the run (a dumped RunConfig), so that what continues from here can tell whether
            it is under others.

    Raises:
        DeadModel: when nothing can be computed with the weights.
        RuntimeError: when it could not be written, as on a full disk; nothing is left of it then.
    """
    trainer.check_alive()
    state = {
        "contract": trainer.contract(),
        "policy_version": trainer.policy_version,
        "updates": trainer.updates,
        "masters": trainer.masters.weights,
        "optimizer": trainer.optimizer.state_dict(),
    }
    facts = {"contract": state["contract"], "settings": settings}
    try:
        with whole_folder(folder) as partial:
            with (partial / STATE).open("wb") as file:
                torch.save(state, file)
            write_manifest(partial, {"checkpoint": folder.name, **facts})
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"the checkpoint {folder} could not be written ({_reason(error)}); the run continues "
            "from an earlier one when there is room: fos-rl resume"
        ) from error


def _reason(error: BaseException) -> str:
    """torch reports a failed write as a wrong position; the write's own error stands behind it."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError):
            return behind.strerror or str(behind)
        behind = behind.__context__
    return str(error)


def load_checkpoint(trainer: "GrpoTrainer", folder: Path) -> None:
    """Put a saved state into a trainer built from the same spec.

    Raises:
        ValueError: when the checkpoint is damaged, or was written under another contract.
    """
    state = read_state(folder, trainer.device)
    if different := contract_difference(state["contract"], trainer.contract()):
        raise ValueError(other_contract(folder, different))
    with torch.no_grad():
        for name, master in trainer.masters.weights.items():
            master.copy_(state["masters"][name])
    # The moments are the checkpoint's; lr, weight decay and which AdamW runs are the settings'.
    own = [{**group} for group in trainer.optimizer.param_groups]
    trainer.optimizer.load_state_dict(state["optimizer"])
    for group, settings in zip(trainer.optimizer.param_groups, own, strict=True):
        group.update({**settings, "params": group["params"]})
    trainer.policy_version = state["policy_version"]
    trainer.updates = state["updates"]
    trainer.masters.publish()
    check_loaded(named_hf_weights(trainer.decoder), str(folder))


def read_state(folder: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A checkpoint's state, from the bytes that were written.

    Raises:
        ValueError: naming the folder and what is wrong.
    """
    try:
        verify_checkpoint(folder)
        state = torch.load(folder / STATE, map_location=device, weights_only=True)
    except (ValueError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{folder} cannot be loaded: {reason}; move it out of the checkpoints, and continue "
            "from another one"
        ) from error
    if not isinstance(state, dict) or not state.keys() >= _KEYS:
        raise ValueError(
            f"{folder}/{STATE} does not hold a trainer's state; move it out of the folder"
        )
    return state


def verify_checkpoint(folder: Path) -> dict[str, Any] | None:
    """What the manifest says of a checkpoint, whose bytes are those it lists; None for one of an
    earlier version, which had no manifest and of which only the checksums inside its zip file hold.

    Raises:
        ValueError: saying what is wrong with it.
        OSError: when it cannot be read.
    """
    if not any(folder.iterdir()):
        raise ValueError("an empty folder")
    if (folder / MANIFEST).exists():
        facts = read_manifest(folder)
        if not facts.keys() >= {"checkpoint", "contract", "settings"}:
            raise ValueError(f"{MANIFEST} is not that of a checkpoint")
        if facts["checkpoint"] != folder.name:
            raise ValueError(f"written as {facts['checkpoint']}, and renamed since")
        return facts
    if not (folder / STATE).exists():
        raise ValueError(f"no {STATE}")
    _check_zip(folder / STATE)
    return None


def _check_zip(path: Path) -> None:
    """torch.save writes a zip file, which has a CRC-32 of each entry; torch.load ignores it."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        raise ValueError(f"no {MANIFEST}, and {path.name} is truncated or not torch's") from None
    if damaged is not None:
        raise ValueError(f"no {MANIFEST}, and {path.name} has other bytes than were written")


def other_contract(folder: Path, different: list[str]) -> str:
    """The message for a checkpoint of another model or precision than the run's."""
    return (
        f"{folder} was saved under another model or precision (checkpoint != now): "
        f"{'; '.join(different)}; resume with the run's own config, model and code version"
    )
