"""What the user watches: one line per step, a bar with the time left, a table at the end."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fos_rl.types import StepRecord


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    key: str
    format: str
    width: int


# The first matter most: a narrow terminal leaves out the last. All together are 76 wide.
_COLUMNS = (
    _Column("step", "step", "{:.0f}", 6),
    _Column("reward", "reward/mean", "{:.3f}", 7),
    _Column("|d| mean", "mismatch/log_prob_abs_diff/mean", "{:.2e}", 8),
    _Column("median", "mismatch/log_prob_abs_diff/p50", "{:.2e}", 8),
    _Column("max", "mismatch/log_prob_abs_diff/max", "{:.2e}", 8),
    _Column("clip", "loss/clip_frac", "{:.3f}", 6),
    _Column("length", "rollout/response_length/mean", "{:.0f}", 6),
    _Column("step s", "time/step_s", "{:.1f}", 8),
    _Column("gen tok/s", "throughput/generate_tokens_per_s", "{:.0f}", 9),
)
_HEADING_EVERY = 20
_UNIFORM = (
    "warning: for {:.0%} of the tokens the logits are uniform (the entropy is the log of the "
    "vocabulary): the model gives every token the same probability, whatever it reads, as weights "
    "of 0 or so large that they overflow do. Trainer and generator then agree, and learn nothing; "
    "check model.path"
)
# A file or a pipe has no width of its own.
_FILE_WIDTH = 80


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
        self._warned = False

    def say(self, text: str) -> None:
        """Print text as it is, without markup."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Say what is going on while it lasts."""
        if self.console.is_terminal:
            with self.console.status(text):
                yield
        else:
            self.say(f"{text} ...")
            yield

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the progress bar while steps run."""
        with self._progress:
            yield

    def step(self, record: StepRecord) -> None:
        """Print the step's line, and the heading every so many steps."""
        if self._printed % _HEADING_EVERY == 0:
            self.say(heading(self._width))
        self.say(step_line({**record.metrics, "step": record.step}, self._width))
        for line in (
            *trouble_lines(record.metrics),
            *verifier_lines(record.metrics),
            *eval_lines(record.metrics, self._width),
        ):
            self.say(line)
        if not self._warned and record.metrics.get("policy/uniform_frac"):
            self._warned = True
            self.say(_UNIFORM.format(record.metrics["policy/uniform_frac"]))
        self._printed += 1
        self._progress.advance(self._task)

    def summary(self, steps: Sequence[Mapping[str, float]], folder: str) -> None:
        """The table of the whole run, and its last evaluation."""
        self.say(folder)
        self.say(heading(self._width))
        for metrics in steps:
            self.say(step_line(metrics, self._width))
        evaluated = [metrics for metrics in steps if eval_lines(metrics, self._width)]
        for metrics in evaluated[-1:]:
            self.say(f"evaluation after step {metrics['step']:.0f}")
            for line in eval_lines(metrics, self._width):
                self.say(line)

    @property
    def _width(self) -> int:
        return self.console.width if self.console.is_terminal else _FILE_WIDTH


def heading(width: int) -> str:
    """The heading of the columns that fit the width."""
    return " ".join(f"{column.heading:>{column.width}}" for column in _fitting(width))


def step_line(metrics: Mapping[str, float], width: int) -> str:
    """A step's figures under `heading(width)`; what it did not measure is `-`."""
    return " ".join(
        f"{c.format.format(metrics[c.key]) if c.key in metrics else '-':>{c.width}}"
        for c in _fitting(width)
    )


def trouble_lines(metrics: Mapping[str, float]) -> list[str]:
    """What of a step was not finite; nothing if all was.

    Example: `  not finite: 1 update skipped, 3 tokens left out`.
    """
    updates = metrics.get("trainer/skipped_updates", 0.0)
    tokens = metrics.get("mismatch/non_finite_tokens", 0.0)
    parts = [f"{updates:.0f} update{'s' * (updates != 1)} skipped"] if updates else []
    parts += [f"{tokens:.0f} token{'s' * (tokens != 1)} left out"] if tokens else []
    return [f"  not finite: {', '.join(parts)}"] if parts else []


def verifier_lines(metrics: Mapping[str, float]) -> list[str]:
    """That answers of a step were not decided; nothing if all were.

    Example: `  verifier: 2 answers over the time limit, 1 failed; they scored 0`.
    """
    timeouts, errors = (metrics.get(f"reward/{key}", 0.0) for key in ("timeouts", "errors"))
    parts = [f"{timeouts:.0f} answers over the time limit"] if timeouts else []
    parts += [f"{errors:.0f} failed"] if errors else []
    return [f"  verifier: {', '.join(parts)}; they scored 0"] if parts else []


def eval_lines(metrics: Mapping[str, float], width: int) -> list[str]:
    """A step's `eval/<set>/<figure>` metrics, one set after the other, wrapped between figures.

    Example: `  eval gsm8k: avg@4 0.250, pass@4 0.500, truncated_frac 0.000`.
    """
    sets: dict[str, list[str]] = {}
    for key, value in metrics.items():
        if key.startswith("eval/"):
            name, _, figure = key.removeprefix("eval/").rpartition("/")
            sets.setdefault(name, []).append(f"{figure} {value:.3f}")
    lines: list[str] = []
    for name, figures in sets.items():
        lines.append(f"  eval {name}:")
        for number, figure in enumerate(figures):
            part = f" {figure}" + ("," if number < len(figures) - 1 else "")
            if len(lines[-1]) + len(part) > width:
                lines.append("   ")
            lines[-1] += part
    return lines


def _fitting(width: int) -> list[_Column]:
    """The leading columns that fit into so many characters, and always the first four."""
    kept: list[_Column] = []
    used = -1
    for number, column in enumerate(_COLUMNS):
        used += 1 + column.width
        if used > width and number >= 4:
            break
        kept.append(column)
    return kept
