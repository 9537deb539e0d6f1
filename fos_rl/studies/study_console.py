"""What the user of `fos-rl ablate` watches: the plan, every run's state with the time left, and
what came of it."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fos_rl.config.study import Study, stated_differences
from fos_rl.run_folder.folder import resolved_toml
from fos_rl.studies.estimate import Estimate
from fos_rl.studies.run_queue import QueuedRun

_STYLES = {"running": "bold", "failed": "red", "finished": "green", "skipped": "dim"}


class StudyConsole:
    """A live table on a terminal, one line per change of state in a log file."""

    def __init__(self, total_steps: int) -> None:
        self.console = Console()
        self._live = Live(console=self.console, refresh_per_second=2)
        self._states: dict[str, str] = {}
        self._total_steps = total_steps

    def say(self, text: str = "") -> None:
        """Print text as it is, without markup."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> "StudyConsole":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def watch(self, queue: Sequence[QueuedRun]) -> None:
        """Show where every run is; called again and again."""
        for item in queue:
            if self._states.get(item.run.name) != item.state:
                self._states[item.run.name] = item.state
                if not self.console.is_terminal and item.state != "waiting":
                    self.say(_state_line(item))
        if self.console.is_terminal:
            self._live.update(self._table(queue))

    def _table(self, queue: Sequence[QueuedRun]) -> Table:
        left = seconds_left(queue)
        done = sum(item.steps_done for item in queue)
        title = f"{done} of {self._total_steps} steps"
        table = Table(title=title + (f", about {_minutes(left)} left" if left else ""))
        for heading in ("run", "state", "step", ""):
            table.add_column(heading)
        for item in queue:
            steps = f"{item.steps_done}/{item.run.config.steps}"
            note = item.reason[:80] if item.state == "failed" else ""
            style = _STYLES.get(item.state)
            table.add_row(item.run.name, item.state, steps, note, style=style)
        return table


def seconds_left(queue: Sequence[QueuedRun]) -> float | None:
    """Time to the last run's end, from what the running ones took so far; None before a step."""
    running = [item for item in queue if item.state == "running" and item.steps_done]
    if not running:
        return None
    elapsed = sum(time.monotonic() - item.started for item in running)
    pace = elapsed / sum(item.steps_done for item in running)
    active = [item for item in queue if item.state in ("waiting", "running")]
    steps = sum(item.run.config.steps - item.steps_done for item in active)
    at_once = sum(item.state == "running" for item in queue)
    return pace * steps / at_once


def plan_text(
    study: Study,
    estimates: Mapping[str, Estimate],
    at_once: int,
    where: str,
    memory_gib: float | None = None,
) -> str:
    """The arms, what sets them apart from the baseline, and what all of it takes.

    Args:
        memory_gib: of the devices the runs share, where it is known.
    """
    arms, base = study.arms, study.base_config
    seeds = sorted({run.seed for run in study.runs})
    head = (
        f"study {study.name}: {len(arms)} arms, seeds {', '.join(map(str, seeds))}: "
        f"{len(study.runs)} runs of {base.steps} steps, baseline {study.baseline}"
    )
    lines = [head, "", f"{study.baseline}, the baseline, resolved:", _indented(resolved_toml(base))]
    for arm, config in arms.items():
        lines += ["", f"{arm}:" if arm != study.baseline else f"{arm} (baseline):"]
        for name, (theirs, ours) in stated_differences(base, config).items():
            lines.append(f"  {name} = {_shown(ours)}  (baseline: {_shown(theirs)})")
        lines.append(f"  {estimates[arm]}")
    total_s = sum(estimates[run.arm].run_s for run in study.runs) / at_once
    one_run = max(e.trainer_gib + e.generator_gib for e in estimates.values())
    memory = one_run * at_once
    lines += [
        "",
        f"{where}, {at_once} at a time: about {_minutes(total_s)} and {memory:.1f} GiB in all",
    ]
    if memory_gib is not None and memory > memory_gib:
        fit = max(1, int(memory_gib / one_run))
        lines.append(
            f"warning: that is more than the {memory_gib:.0f} GiB there are, and runs may fail for "
            f"lack of it; --parallel {fit} would fit"
        )
    return "\n".join(lines)


def summary_text(queue: Sequence[QueuedRun], again: str) -> str:
    """What came of every run, and the next step where some failed."""
    failed = [item for item in queue if item.state == "failed"]
    done = sum(item.state == "finished" for item in queue)
    skipped = sum(item.state == "skipped" for item in queue)
    lines = [f"{done} runs finished, {skipped} were finished before, {len(failed)} failed"]
    for item in failed:
        lines.append(f"  {item.run.name} after {item.steps_done} steps: {item.reason}")
        lines.append(f"    log: {item.log}")
    if failed:
        lines.append(f"finished runs are kept; fix the cause and call again: {again}")
    return "\n".join(lines)


def _state_line(item: QueuedRun) -> str:
    name, state = f"{item.run.name:<30}", item.state
    if state == "running":
        who = f"log {item.log}" if item.process else "started by an earlier call; waiting for it"
        return f"{name} running    {who}"
    took = _minutes(time.monotonic() - item.started) if state != "skipped" else "before this call"
    return f"{name} {state:<10} {took} {item.reason}".rstrip()


def _minutes(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.strip().splitlines())


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)
