"""`fos-rl compare`: runs side by side, as a table and as one HTML report."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fos_rl.compare.cautions import cautions
from fos_rl.compare.checks import Check, Limit, check_backward_modes, check_limits
from fos_rl.compare.drawing import Plot
from fos_rl.compare.findings import backward_differences, baseline_differences, summary
from fos_rl.compare.load import load
from fos_rl.compare.page import html_page
from fos_rl.compare.plots import all_plots
from fos_rl.compare.table import csv_table, markdown_page, terminal_table
from fos_rl.files.whole import write_whole

__all__ = ["Check", "Limit", "compare"]


def compare(
    paths: Sequence[Path],
    baseline: str | None = None,
    out: Path | None = None,
    limits: Sequence[Limit] = (),
) -> list[Check]:
    """Compare runs or whole studies: print a table, write report.html, .md and .csv, and plots/.

    Args:
        paths: run folders, arms' folders or studies' folders.
        baseline: the arm that others are compared with; by default the study's, else the first.
        out: folder of what is written; by default `comparison` in the folder that holds all runs.
        limits: what no step of any run may exceed.

    Returns:
        What had to hold and does not, empty for healthy runs.

    Raises:
        ValueError: for a path without runs, an unknown baseline or a metric that is not recorded.
    """
    comparison = load(paths, baseline)
    comparison = replace(comparison, notes=[*comparison.notes, *cautions(comparison)])
    backward = check_backward_modes(comparison.arms)
    checks = [*backward, *check_limits(comparison.runs, limits)]
    against_baseline = baseline_differences(comparison)
    words = summary(comparison, backward)
    differences = [*against_baseline, *backward_differences(comparison)]
    plots = all_plots(comparison, against_baseline)

    out = out or _common_folder(paths) / "comparison"
    out.mkdir(parents=True, exist_ok=True)
    page = html_page(comparison, words, checks, differences, plots)
    write_whole(out / "report.html", page)
    write_whole(out / "report.md", markdown_page(comparison, words, checks, differences))
    write_whole(out / "report.csv", csv_table(comparison))
    _write_plots(plots, out / "plots")

    console = Console()
    # A file or a pipe has no width of its own.
    wide = console if console.is_terminal else Console(width=180)
    wide.print(terminal_table(comparison, against_baseline, wide.width))
    for line in [*words, *comparison.notes]:
        # A terminal breaks lines between words, a file keeps them whole.
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    console.print(f"report {out / 'report.html'}", highlight=False, markup=False, soft_wrap=True)
    failed = [check for check in checks if not check.passed]
    for check in failed:
        console.print(f"FAILED {check.detail}", style="bold red", markup=False, soft_wrap=True)
    return failed


def _write_plots(plots: Sequence[Plot], folder: Path) -> None:
    """Each plot as an SVG file on white, for a text or slides."""
    folder.mkdir(exist_ok=True)
    for plot in plots:
        if plot.svg is not None:
            on_white = plot.svg.replace("<svg", '<svg style="background: white"', 1)
            write_whole(folder / f"{plot.id}.svg", on_white)


def _common_folder(paths: Sequence[Path]) -> Path:
    """A single study's own folder; of several paths, the folder that holds them all."""
    if len(paths) == 1 and not (paths[0] / "config.toml").is_file():
        return paths[0]
    return Path(os.path.commonpath([path.resolve().parent for path in paths]))
