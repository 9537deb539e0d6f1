"""Open a run folder to continue at an earlier step: what was done after it is kept, out of the way.

Nothing is deleted. What the resumed run will do again goes to before-resume-N/, with the
checkpoints that could not be used; what changes in the settings is written down.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fos_rl.config import OUTDATED_MODEL, RunConfig
from fos_rl.files.json_lines import read_run_lines, torn_tail
from fos_rl.files.whole import PARTIAL, restore_replaced, write_whole
from fos_rl.run_folder.folder import (
    RunFolder,
    read_config,
    resolved_toml,
)
from fos_rl.run_folder.resume_plan import ResumePlan
from fos_rl.run_folder.resume_settings import change_lines

_STEP_FILE = re.compile(r"([0-9]{6,})\.")


def environment_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Other code or machine than the run had: the same settings need not give the same bits."""
    keys = ("git_commit", "python", "device")
    pairs = {key: (before.get(key), now.get(key)) for key in keys}
    earlier, later = before.get("packages", {}), now.get("packages", {})
    pairs |= {name: (earlier.get(name), later.get(name)) for name in earlier | later}
    return [f"{name} {a} then, {b} now" for name, (a, b) in pairs.items() if a != b and before]


def reopen(plan: ResumePlan, environment: dict[str, Any]) -> tuple[RunFolder, list[str]]:
    """The folder, ready for the plan's next step, and what was done to it, in words.

    Args:
        environment: that of this process, to be written down.
    """
    run, next_step = plan.run, plan.next_step
    words = [plan.metrics.torn] if plan.metrics.torn else []
    aside = _free_name(run)
    if restore_replaced(run / "model") or (run / "model").exists():
        write_whole(run / OUTDATED_MODEL, f"The run has continued from step {next_step} since.\n")
    kept = [row for row in plan.metrics.rows if row["step"] < next_step]
    later = [row for row in plan.metrics.rows if row["step"] >= next_step]
    moved = _move_rollouts(run, next_step, aside)
    # Figures of the model that this run will replace.
    if (run / "eval.json").exists():
        _move(run / "eval.json", aside)
        moved.append("eval.json")
    for path in (item.path for item in plan.found.unusable):
        try:
            _move(path, aside / "checkpoints")
            moved.append(f"{path.parent.name}/{path.name}")
        except OSError as error:
            # As for a folder of another user's.
            words.append(f"{path} could not be moved ({error.strerror}); remove it")
    if later:
        aside.mkdir(exist_ok=True)
        write_whole(aside / "metrics.jsonl", _lines(later))
        moved.insert(0, f"metrics of {_steps(row['step'] for row in later)}")
    if moved:
        words.append(f"moved to {aside}: {', '.join(moved)}")
    if absent := sorted(set(range(next_step)) - {row["step"] for row in kept}):
        words.append(f"metrics.jsonl lacks {_steps(absent)}, which the checkpoint has gone through")
    (run / "rollouts").mkdir(exist_ok=True)
    if (run / "metrics.jsonl").exists():
        write_whole(run / "metrics.jsonl", _lines(kept))
    words += _drop_torn_rollouts(run)
    words += _write_revision(run, plan.config)
    entry: dict[str, Any] = {"step": next_step, **environment}
    if plan.changes:
        entry["settings"] = {n: {"before": a, "now": b} for n, (a, b) in plan.changes.items()}
    started = dict(plan.environment)
    started["resumed"] = [*started.get("resumed", []), entry]
    write_whole(run / "environment.json", json.dumps(started, indent=2) + "\n")
    words += change_lines(plan.changes)
    words += environment_changes(plan.last_environment, environment)
    return RunFolder(run), words


def _free_name(run: Path) -> Path:
    number = 1
    while (folder := run / f"before-resume-{number}").exists():
        number += 1
    return folder


def _move_rollouts(run: Path, next_step: int, aside: Path) -> list[str]:
    """Move the files of that step and later ones, and what was never finished."""
    found: list[Path] = []
    steps: set[int] = set()
    for path in sorted((run / "rollouts").glob("*")):
        match = _STEP_FILE.match(path.name)
        if match and int(match[1]) >= next_step:
            steps.add(int(match[1]))
            found.append(path)
        elif path.name.endswith(PARTIAL):
            found.append(path)
    for path in found:
        _move(path, aside / "rollouts")
    return [f"rollouts of {_steps(steps)}"] if steps else []


def _move(path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path.rename(folder / path.name)


def _drop_torn_rollouts(run: Path) -> list[str]:
    """Leave out a torn last line; files are written whole, but a copy of them can be cut short."""
    words: list[str] = []
    for path in sorted((run / "rollouts").glob("[0-9]*.jsonl")):
        if torn := torn_tail(path):
            write_whole(path, _lines(read_run_lines(path, "restore it, or move it away").rows))
            words.append(torn)
    return words


def _write_revision(run: Path, config: RunConfig) -> list[str]:
    """Store the config of what follows, and the earlier one as config.NNNN.toml."""
    if read_config(run) == config:
        return []
    number = 1
    while (earlier := run / f"config.{number:04d}.toml").exists():
        number += 1
    write_whole(earlier, (run / "config.toml").read_text())
    write_whole(run / "config.toml", resolved_toml(config))
    return [f"config.toml has the settings from here on, {earlier.name} those until now"]


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _steps(steps: Any) -> str:
    """`step 3`, `steps 3 to 5` or `steps 1, 3, 4`."""
    numbers = sorted(set(steps))
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"steps {numbers[0]} to {numbers[-1]}"
    return f"steps {', '.join(map(str, numbers))}"
