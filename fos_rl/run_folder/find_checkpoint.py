"""The newest whole checkpoint of a run, and what is wrong with those that are not."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fos_rl.files.whole import PARTIAL
from fos_rl.trainer.checkpoint import verify_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint. `contract` and `settings` are None where its writer did not say."""

    folder: Path
    step: int
    contract: dict[str, object] | None
    settings: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """An entry of the checkpoints' folder that nothing can continue from, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest whole checkpoint; what is wrong with others, and what is to say of it itself."""

    checkpoint: Checkpoint
    unusable: list[Unusable]
    unverified: str = ""

    @property
    def notes(self) -> list[str]:
        """What to say of the other checkpoints, one line each."""
        return [*map(str, self.unusable), *([self.unverified] if self.unverified else [])]


def checkpoint_steps(run: Path) -> list[int]:
    """Steps that have a checkpoint's folder, damaged or not, in order."""
    folders = (path for path in run.glob("checkpoints/*") if path.is_dir())
    return sorted(int(path.name) for path in folders if _is_step(path.name))


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and name == f"{int(name):06d}"


def find_checkpoint(run: Path) -> Found:
    """The newest whole checkpoint of a run; those older than it are not examined.

    Raises:
        ValueError: when there is none, naming each that is not whole, and why.
    """
    unusable = [Unusable(path=p, reason=r) for p, r in _foreign(run / "checkpoints")]
    for step in reversed(checkpoint_steps(run)):
        folder = run / "checkpoints" / f"{step:06d}"
        try:
            checkpoint, unverified = _whole(folder, step)
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            unusable.append(Unusable(path=folder, reason=reason or str(error)))
            continue
        return Found(checkpoint=checkpoint, unusable=unusable, unverified=unverified)
    if not unusable:
        raise ValueError(
            f"{run} has no checkpoint to resume from; a run writes them when trainer.save_every is "
            f"set. Start it again: fos-rl train {run}/config.toml"
        )
    raise ValueError(
        f"{run} has no checkpoint that is whole: {'; '.join(map(str, unusable))}. Restore one from "
        f"a copy, or start the run again: fos-rl train {run}/config.toml"
    )


def _foreign(folder: Path) -> Iterator[tuple[Path, str]]:
    """What is there and is no checkpoint's folder."""
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise ValueError(f"{folder} cannot be read: {error.strerror}") from error
    for path in entries:
        if path.name.endswith(PARTIAL):
            yield path, "left by a save that was interrupted"
        elif not _is_step(path.name):
            yield path, "not a checkpoint's name, which is its next step in six digits"
        elif not path.is_dir():
            yield path, "a file, where a checkpoint is a folder"


def _whole(folder: Path, step: int) -> tuple[Checkpoint, str]:
    """A checkpoint that can be trusted, and a note where only its zip file says so."""
    facts = verify_checkpoint(folder)
    unverified = ""
    if facts is None:
        facts = {"contract": None, "settings": None}
        unverified = (
            f"checkpoints/{folder.name}: unverified, an earlier version wrote it without a "
            "manifest (the checksums inside its zip file hold)"
        )
    return Checkpoint(
        folder=folder, step=step, contract=facts["contract"], settings=facts["settings"]
    ), unverified
