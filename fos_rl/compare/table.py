"""The comparison as text: a short table for the terminal, all of it as Markdown and CSV."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from fos_rl.compare.checks import Check, setting_differences
from fos_rl.compare.findings import Difference
from fos_rl.compare.load import Arm, Comparison, Run
from fos_rl.compare.quantities import (
    CLIPPED,
    FIRST_DIFFERENCE,
    FIRST_P50,
    GENERATE_SPEED,
    GRAD_NORM,
    LATER_K3,
    OVER_FLOOR,
    REWARD,
    Quantity,
    recorded_quantities,
)
from fos_rl.compare.statistics import arm_interval, show_interval

# Heading and quantity of the terminal's columns.
_COLUMNS = (
    ("|d| at first", FIRST_DIFFERENCE),
    ("median", FIRST_P50),
    ("over floor", OVER_FLOOR),
    ("k3 later", LATER_K3),
    ("clipped", CLIPPED),
    ("grad norm", GRAD_NORM),
    ("gen tok/s", GENERATE_SPEED),
)


# Characters that all of them take.
_WIDE = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of text; the first column names the rows. `sections`: titles by the row below."""

    heading: list[str]
    rows: list[list[str]]
    sections: dict[int, str] = field(default_factory=dict)

    def markdown(self) -> str:
        """The table in Markdown, with the sections' titles in bold."""
        lines = [_line(self.heading), _line(["---", *["---:"] * (len(self.heading) - 1)])]
        for number, row in enumerate(self.rows):
            if number in self.sections:
                lines.append(_line([f"**{self.sections[number]}**", *[""] * (len(row) - 1)]))
            lines.append(_line(row))
        return "\n".join(lines) + "\n"


def terminal_table(
    comparison: Comparison, differences: Sequence[Difference], width: int = _WIDE
) -> Table:
    """One line per arm: what to look at first; on a narrow terminal the mismatch and the reward."""
    columns = _COLUMNS if width >= _WIDE else _COLUMNS[:2]
    against = {d.arm.name: d for d in differences if d.quantity is REWARD}
    table = Table(title=f"{comparison.title}, baseline {comparison.baseline.name}")
    table.add_column("arm", overflow="fold")
    for heading in ("seeds", "steps", *(h for h, _ in columns), "late reward", "- baseline's"):
        table.add_column(heading, justify="right")
    for arm in comparison.arms:
        steps = sorted({len(run.steps) for run in arm.runs})
        cells = (quantity.show(quantity.of_arm(arm)) for _, quantity in columns)
        difference = against.get(arm.name)
        verdict = "baseline"
        if difference:
            verdict = f"{difference.show()} {difference.verdict}{difference.reason}"
        table.add_row(
            arm.name,
            str(len(arm.runs)),
            "-".join(map(str, dict.fromkeys((steps[0], steps[-1])))),
            *cells,
            _with_interval(arm, REWARD, REWARD.show(REWARD.of_arm(arm))),
            verdict,
        )
    return table


def arm_grid(comparison: Comparison) -> Grid:
    """Every quantity, an arm per column: mean, (median) and, of the reward, the [interval]."""
    return _grid(
        comparison,
        [arm.name for arm in comparison.arms],
        lambda quantity: [
            _with_interval(arm, quantity, _with_median(quantity, quantity.of_arm(arm), arm.whole))
            for arm in comparison.arms
        ],
    )


def run_grid(comparison: Comparison) -> Grid:
    """Every quantity, a run a column: mean and (median)."""
    return _grid(
        comparison,
        [run.name for run in comparison.runs],
        lambda quantity: [
            _with_median(quantity, quantity.of(run), [run]) for run in comparison.runs
        ],
    )


def difference_grid(differences: Sequence[Difference]) -> Grid:
    """A pair of arms per row, a quantity per column, each cell `verdict: difference [interval]`."""
    quantities = list(dict.fromkeys(d.quantity for d in differences))
    pairs: dict[tuple[str, str], dict[Quantity, Difference]] = {}
    for d in differences:
        pairs.setdefault((d.arm.name, d.other.name), {})[d.quantity] = d
    rows = [
        [
            f"{ours} - {theirs}",
            next((d.interval.units for d in found.values() if d.interval), "-"),
            *(
                f"{found[quantity].verdict}: {found[quantity].show()}{found[quantity].reason}"
                if quantity in found
                else "-"
                for quantity in quantities
            ),
        ]
        for (ours, theirs), found in pairs.items()
    ]
    return Grid(heading=["arms", "pairs", *(quantity.name for quantity in quantities)], rows=rows)


def setting_grid(comparison: Comparison) -> Grid:
    """The settings that make the arms differ."""
    rows = [
        [name, *("-" if value is None else str(value) for value in values)]
        for name, values in setting_differences(comparison.arms).items()
    ]
    return Grid(heading=["setting", *(arm.name for arm in comparison.arms)], rows=rows)


def markdown_page(
    comparison: Comparison,
    summary: Sequence[str],
    checks: Sequence[Check],
    differences: Sequence[Difference],
) -> str:
    """Summary, checks and tables, to paste into an issue or a paper's appendix."""
    failed = [f"- **FAILED** {check.detail}" for check in checks if not check.passed]
    parts = [
        f"# {comparison.title}\n",
        "\n".join([*failed, *(f"- {line}" for line in [*summary, *comparison.notes])]) + "\n",
        "## Arms: mean over steps and seeds (median of the same) [95 % interval]\n",
        arm_grid(comparison).markdown(),
        "## Differences\n",
        difference_grid(differences).markdown(),
        "## Runs: mean over steps (median)\n",
        run_grid(comparison).markdown(),
        "## Settings that differ\n",
        setting_grid(comparison).markdown(),
    ]
    return "\n".join(parts)


def csv_table(comparison: Comparison) -> str:
    """A line per run, full precision; a metric that a run does not record is an empty cell."""
    quantities = recorded_quantities(comparison.runs)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [f"{q.key}:{q.window}:{q.reduce}" for q in quantities]
    medians = [q for q in quantities if q.reduce == "mean"]
    names += [f"{q.key}:{q.window}:median" for q in medians]
    writer.writerow(["arm", "seed", "run", "steps", *names])
    for run in comparison.runs:
        values = [quantity.of(run) for quantity in quantities]
        # Of a single step the median is its value.
        values += [q.of(run) if (m := q.median([run])) is None else m for q in medians]
        cells = ["" if value is None else repr(value) for value in values]
        writer.writerow([run.arm, run.seed, str(run.path), len(run.steps), *cells])
    return text.getvalue()


def _with_median(quantity: Quantity, value: float | None, runs: Sequence[Run]) -> str:
    median = quantity.median(runs)
    text = quantity.show(value)
    if median is None or text == quantity.zero:
        return text
    return f"{text} ({quantity.show(median)})"


def _with_interval(arm: Arm, quantity: Quantity, text: str) -> str:
    """The reward's cell; an interval without width has its reason, and so has a missing one."""
    if quantity is not REWARD or quantity.of_arm(arm) is None:
        return text
    interval = arm_interval(arm, quantity)
    if interval is None:
        seeds = len(arm.whole)
        why = "one seed" if seeds == 1 else "a seed's is not finite"
        return f"{text}, no interval ({why})"
    reason = f", {interval.reason}" if interval.reason else ""
    return f"{text} {show_interval(interval, quantity.format)}{reason}"


def _grid(comparison: Comparison, names: list[str], cells: Callable[[Quantity], list[str]]) -> Grid:
    quantities = recorded_quantities(comparison.runs)
    sections: dict[int, str] = {}
    for number, quantity in enumerate(quantities):
        if number == 0 or quantity.section != quantities[number - 1].section:
            sections[number] = quantity.section
    rows = [[quantity.label, *cells(quantity)] for quantity in quantities]
    return Grid(heading=["quantity", *names], rows=rows, sections=sections)


def _line(cells: Sequence[str]) -> str:
    # A bar ends a cell, and |d| has two.
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
