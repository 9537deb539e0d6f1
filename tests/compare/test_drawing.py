"""Axes whose labels tell values apart, and markers that no edge cuts."""

import math

import pytest

from fos_rl.compare.drawing import Sketch, log_axis


def _labels(values: list[float], which: str) -> list[str]:
    """The labels in view of an axis that `values` are drawn on."""
    sketch = Sketch("test")
    places = list(range(len(values)))
    x, y = (values, places) if which == "x" else (places, values)
    sketch.line(0, x, y)
    log_axis(sketch.axes, which, values)  # type: ignore[arg-type]
    sketch.figure.draw_without_rendering()
    axis = sketch.axes.xaxis if which == "x" else sketch.axes.yaxis
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    shown = [t.label1.get_text() for t in ticks if low <= t.get_loc() <= high]
    return [label for label in shown if label]


@pytest.mark.parametrize("which", ["x", "y"])
@pytest.mark.parametrize(
    "values",
    [
        [0.6, 0.6004, 0.6009],
        [0.0222, 0.0229],
        [1e-7, 1.0000001e-7],
        [0.29, 0.296, 0.0],
        [0.1, 0.25, 0.29],
        [0.1, 0.35],
        [1.5, 9.0],
        [0.02, 0.36],
        [1e-7, 0.3],
        [0.0, 1e-7, 0.3],
        [0.0, 0.0],
        [0.5, 0.5],
        [3e-4, 0.0, 0.3],
    ],
    ids=str,
)
def test_labels_differ(values: list[float], which: str) -> None:
    labels = _labels(values, which)
    assert len(labels) >= 2
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("values", [[1e-6, 0.3], [0.0, 1e-6, 0.3], [0.6, 0.601], [0.0, 0.0]])
def test_markers_are_whole_and_in_view(values: list[float]) -> None:
    sketch = Sketch("test")
    sketch.line(0, list(range(len(values))), values)
    log_axis(sketch.axes, "y", values)
    (line,) = sketch.axes.get_lines()
    assert not line.get_clip_on()
    low, high = sketch.axes.get_ylim()
    assert all(low < value < high for value in values)
    assert math.isfinite(low)
