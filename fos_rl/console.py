"""What the user watches: one line a step, a bar with the time left, a table at the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fos_rl.types import StepRecord

# Heading, metric, format.
_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("|log-prob diff|", "mismatch/log_prob_abs_diff/mean", "{:.2e}"),
    ("max", "mismatch/log_prob_abs_diff/max", "{:.2e}"),
    ("clip", "loss/clip_frac", "{:.3f}"),
    ("length", "rollout/response_length/mean", "{:.0f}"),
    ("gen tok/s", "throughput/generate_tokens_per_s", "{:.0f}"),
    ("step s", "time/step_s", "{:.1f}"),
)


class RunConsole:
    """Live progress on a terminal, plain lines in a log file."""

    def __init__(self, total_steps: int, first_step: int = 0) -> None:
        self.console = Console()
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            # A log file gets the step lines alone.
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=total_steps, completed=first_step)
        self._printed = 0

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Say what is going on while it goes on."""
        if self.console.is_terminal:
            with self.console.status(text):
                yield
        else:
            self.say(f"{text} ...")
            yield

    @contextmanager
    def live(self) -> Iterator[None]:
        with self._progress:
            yield

    def step(self, record: StepRecord) -> None:
        if self._printed % 20 == 0:
            self.say(" ".join(["  step", *(f"{head:>15}" for head, _, _ in _COLUMNS)]))
        cells = (f"{cell:>15}" for cell in _cells(record.metrics))
        self.say(" ".join([f"{record.step:>6}", *cells]))
        self._printed += 1
        self._progress.advance(self._task)

    def summary(self, steps: Sequence[dict[str, float]], folder: str) -> None:
        """The table of the whole run."""
        table = Table(title=folder)
        table.add_column("step", justify="right")
        for heading, _, _ in _COLUMNS:
            table.add_column(heading, justify="right")
        for metrics in steps:
            table.add_row(str(int(metrics["step"])), *_cells(metrics))
        self.console.print(table)


def _cells(metrics: dict[str, float]) -> list[str]:
    return [f.format(metrics[key]) if key in metrics else "-" for _, key, f in _COLUMNS]
