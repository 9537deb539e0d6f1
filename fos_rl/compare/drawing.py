"""How a plot of the report is drawn: inline SVG, one colour, dash and marker per arm in all of
them.

Text stays text, so that the page's own font, search and screen readers reach it. What belongs to
arm 2 has an id with `--arm2--`, by which the page hides it.
"""

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, SymmetricalLogLocator

# Okabe and Ito's palette for colour-blind readers, with brown for a yellow that is too pale on
# white. The numbers of colours and markers have no common factor, so that 56 arms differ.
_COLOURS = (
    "#1a1a1a", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a5a2b",
)  # fmt: skip
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
_MARKERS = "osD^vPX"
INK, MUTED = "#222222", "#666666"

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
_DECADES_SHOWN = 5  # labels that fit on an axis which reaches from 0 over many decades
_WIDTH, _HEIGHT = 6.9, 4.3  # inches; the page shows two side by side

Scale = Literal["linear", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure of the page. `svg` is None when no run has the data, and `missing` says what."""

    id: str
    title: str
    caption: str
    missing: str
    svg: str | None
    wide: bool = False


class Sketch:
    """One figure in the making; an arm is named by its place in the comparison."""

    def __init__(self, name: str, panels: int = 1, columns: int = 1, height: float = 1.0) -> None:
        rows = -(-panels // columns)
        width = _WIDTH * (2 if columns > 1 else 1)
        self._name = name
        self._parts = itertools.count()
        self.drawn = False
        self.figure = Figure((width, _HEIGHT * rows * height), layout="constrained")
        grid = self.figure.subplots(rows, columns, squeeze=False).ravel()
        for spare in grid[panels:]:
            spare.set_axis_off()
        self.panels: list[Axes] = list(grid[:panels])
        self.axes = self.panels[0]

    def line(
        self,
        arm: int,
        x: Sequence[float],
        y: Sequence[float],
        label: str | None = None,
        axes: Axes | None = None,
        floor: bool = False,
    ) -> None:
        """An arm's line with its markers; a thin dotted one for its noise floor."""
        if not len(x):
            return
        # A marker at the edge of the data is whole; what would lie outside is not drawn at all.
        (line,) = (axes or self.axes).plot(x, y, color=colour(arm), clip_on=False)
        if floor:
            line.set(linestyle=":", linewidth=1.2)
        else:
            line.set(linestyle=_dash(arm), marker=marker(arm), label=label)
        self.belongs(line, arm)

    def band(
        self,
        arm: int,
        x: Sequence[float],
        low: Sequence[float],
        high: Sequence[float],
        axes: Axes | None = None,
    ) -> None:
        """An arm's interval between `low` and `high`, as a shade behind its line."""
        if len(x):
            area = (axes or self.axes).fill_between(
                x, low, high, color=colour(arm), alpha=0.1, linewidth=0
            )
            self.belongs(area, arm)

    def belongs(self, artist: Artist, arm: int) -> None:
        """The artist is the arm's, and the figure has something to show."""
        artist.set_gid(f"{self._name}--arm{arm}--{next(self._parts)}")
        self.drawn = True

    def legend(self) -> None:
        """The labels of all lines, below the panels, in as many columns as there is room for."""
        handles, labels = self.axes.get_legend_handles_labels()
        if labels:
            room = 85 if len(self.panels) == 1 else 170
            columns = max(1, min(len(labels), room // (max(map(len, labels)) + 8)))
            self.figure.legend(
                handles, labels, loc="outside lower center", ncols=columns, fontsize=10
            )

    def svg(self, label: str) -> str:
        """The figure as an `<svg>` element that scales with the page."""
        text = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": self._name}):
            self.figure.savefig(
                text,
                format="svg",
                transparent=True,
                dpi=150,
                metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
            )
        element = text.getvalue()[text.getvalue().index("<svg") :]
        element = re.sub(r' (width|height)="[\d.]+pt"', "", element, count=2)
        return element.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def draw(
    name: str,
    title: str,
    caption: str,
    missing: str,
    paint: Callable[[], Sketch],
) -> Plot:
    """The plot that `paint` makes, or what it lacks when it drew nothing for any arm."""
    with matplotlib.rc_context(_STYLE):
        sketch = paint()
        if sketch.drawn:
            sketch.legend()
        svg = sketch.svg(title) if sketch.drawn else None
        wide = len(sketch.panels) > 1
    return Plot(id=name, title=title, caption=caption, missing=missing, svg=svg, wide=wide)


def colour(arm: int) -> str:
    """The colour of the arm of that number."""
    return _COLOURS[arm % len(_COLOURS)]


def marker(arm: int) -> str:
    """The marker of the arm of that number."""
    return _MARKERS[arm % len(_MARKERS)]


def _dash(arm: int) -> str | tuple:
    # Neighbours differ in the dash, too: backward modes of one format lie on each other at first.
    return _DASHES[(arm + arm // len(_COLOURS)) % len(_DASHES)]


def log_axis(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """A logarithmic axis; where values reach 0 (exact agreement, nothing clipped), linear below the
    smallest positive one, so that 0 has a place.

    Values within a factor of 3, or with 0 of 10, get a linear axis: powers of ten would put one
    label on it, or the same one several times.
    """
    data = np.asarray(values, np.float64)
    positive = data[np.isfinite(data) & (data > 0)]
    if not positive.size:
        return
    scale, axis = (axes.set_xscale, axes.xaxis) if which == "x" else (axes.set_yscale, axes.yaxis)
    reaches_zero = bool((data <= 0).any())
    if positive.max() < (10 if reaches_zero else 3) * positive.min():
        return
    if reaches_zero:
        linear_below = float(positive.min())
        scale("symlog", linthresh=linear_below, linscale=0.8)
        locator = SymmetricalLogLocator(base=10, linthresh=linear_below)
        locator.set_params(numticks=_DECADES_SHOWN)
        axis.set_major_locator(locator)
        axis.set_major_formatter(LogFormatter(linthresh=linear_below))
        # Next to nothing here is negative; a little room keeps what is at 0 off the edge.
        limit = axes.set_xlim if which == "x" else axes.set_ylim
        limit(-linear_below if (data < 0).any() else -0.3 * linear_below)
    else:
        # 6e-03 as text, where the default would draw a formula.
        scale("log")
        axis.set_major_formatter(LogFormatter())
        axis.set_minor_formatter(LogFormatter())


def fit_lines(axes: Axes) -> None:
    """Limit a y axis to its lines and some room, where a wide band would flatten them."""
    lines = [np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()]
    if not lines:
        return
    values = np.concatenate(lines)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    room = 0.6 * (high - low) or 0.1
    shown = axes.get_ylim()
    axes.set_ylim(max(shown[0], low - room), min(shown[1], high + room))


def whole_steps(axes: Axes) -> None:
    """Name the x axis "step" and mark whole numbers alone."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names along the y axis, the first on top."""
    if names:
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
