"""The report: one HTML file with everything in it, readable without a network."""

from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fos_rl.compare.checks import Check
from fos_rl.compare.drawing import Plot, colour
from fos_rl.compare.findings import Difference
from fos_rl.compare.load import Comparison
from fos_rl.compare.table import arm_grid, difference_grid, run_grid, setting_grid


def html_page(
    comparison: Comparison,
    summary: Sequence[str],
    checks: Sequence[Check],
    differences: Sequence[Difference],
    plots: Sequence[Plot],
) -> str:
    """The page of `page.html`: failed checks, summary, tables, plots, every run."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["wrappable"] = _wrappable
    template = environment.from_string(files("fos_rl.compare").joinpath("page.html").read_text())
    return template.render(
        title=comparison.title,
        lead=_lead(comparison),
        failed=[check.detail for check in checks if not check.passed],
        summary=[*summary, *comparison.notes],
        interval=_interval_words(comparison),
        arms=arm_grid(comparison),
        differences=difference_grid(differences),
        legend=[
            {"name": arm.name, "colour": colour(number)}
            for number, arm in enumerate(comparison.arms)
        ],
        plots=plots,
        runs=run_grid(comparison),
        settings=setting_grid(comparison),
        checks=checks,
    )


def _wrappable(name: str) -> Markup:
    """A name that a narrow column may break after an underscore."""
    return Markup("_<wbr>").join(name.split("_"))


def _lead(comparison: Comparison) -> str:
    """`6 arms, 18 runs of 10 steps, baseline bf16`."""
    steps = sorted({len(run.steps) for run in comparison.runs})
    span = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    arms, runs = len(comparison.arms), len(comparison.runs)
    return (
        f"{arms} {'arm' if arms == 1 else 'arms'}, {runs} {'run' if runs == 1 else 'runs'} "
        f"of {span} steps, baseline {comparison.baseline.name}"
    )


def _interval_words(comparison: Comparison) -> str:
    seeds = {len(arm.runs) > 1 for arm in comparison.arms}
    unit = {
        frozenset({True}): "over seeds",
        frozenset({False}): "over the prompt groups of the one seed",
    }.get(frozenset(seeds), "over seeds, or over prompt groups where an arm has one seed")
    return f"the 95 % bootstrap interval {unit}"
