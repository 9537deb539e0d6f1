"""Plots of where the mismatch sits: which tokens, and which layers."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from fos_rl.compare.drawing import MUTED, Plot, Sketch, colour, draw, log_axis, name_rows
from fos_rl.compare.load import Arm
from fos_rl.compare.series import bin_means, layer_errors

_SCATTER_TOKENS = 1500
_SCATTER_COLUMNS = 3


def plot_by_probability(arms: Sequence[Arm]) -> Plot:
    """Mean |d| by the probability that the generator gave the token, in tenths."""
    return _tenths(
        arms,
        "by-probability",
        "Mismatch by the token's probability",
        "probability that the generator gave the token",
        "Mean |d| in tenths of the probability, averaged over steps and seeds.",
    )


def plot_by_position(arms: Sequence[Arm]) -> Plot:
    """Mean |d| by the token's place in its response, in tenths."""
    return _tenths(
        arms,
        "by-position",
        "Mismatch by position",
        "position in the response, 0 its first token and 1 its last",
        "Mean |d| in tenths of each response, averaged over steps and seeds.",
    )


def plot_routing_flips(arms: Sequence[Arm]) -> Plot:
    """The share of expert choices that differ, layer by layer."""

    def paint() -> Sketch:
        sketch = Sketch("routing-flips")
        for number, arm in enumerate(arms):
            flips = bin_means(arm, "mismatch/routing_flip_frac/layer_")
            sketch.line(number, list(flips), list(flips.values()), arm.name)
        sketch.axes.set_xlabel("layer")
        sketch.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        sketch.axes.set_ylabel("share of expert choices that differ")
        return sketch

    caption = "Trainer against generator on the same tokens, averaged over steps and seeds."
    missing = "No run records mismatch/routing_flip_frac/layer_N; mixtures of experts can."
    return draw("routing-flips", "Routing flips by layer", caption, missing, paint)


def plot_layer_error(arms: Sequence[Arm]) -> Plot:
    """The relative error of quantized products, layer by layer."""

    def paint() -> Sketch:
        errors = [layer_errors(arm) for arm in arms]
        names = list(dict.fromkeys(name for found in errors for name in found))
        sketch = Sketch("layer-error", height=max(1.0, len(names) / 22))
        for number, (arm, found) in enumerate(zip(arms, errors, strict=True)):
            places = [names.index(name) for name in found]
            sketch.line(number, list(found.values()), places, arm.name)
        name_rows(sketch.axes, names)
        sketch.axes.set_xlabel("relative error of the layer's quantized products")
        log_axis(sketch.axes, "x", [value for found in errors for value in found.values()])
        return sketch

    caption = (
        "Each layer's quantized products against those of the same activations and the unquantized "
        "weights, at the first step, averaged over seeds; the first layer is on top."
    )
    missing = "No run folder has a per_layer.json."
    return draw("layer-error", "Error by layer", caption, missing, paint)


def plot_scatter(arms: Sequence[Arm]) -> Plot:
    """Token by token, a panel per arm."""

    def paint() -> Sketch:
        sketch = Sketch("scatter", panels=len(arms), columns=_SCATTER_COLUMNS, height=0.95)
        for number, (arm, axes) in enumerate(zip(arms, sketch.panels, strict=True)):
            axes.set_title(arm.name)
            axes.set_xlabel("generator log-prob (nats)")
            if number % _SCATTER_COLUMNS == 0:
                axes.set_ylabel("trainer log-prob (nats)")
            generator, trainer = _some_tokens(arm)
            if not generator.size:
                axes.text(0.5, 0.5, "no log-probs", transform=axes.transAxes, ha="center")
                continue
            low = float(min(generator.min(), trainer.min()))
            axes.plot([low, 0], [low, 0], color=MUTED, linewidth=0.8, zorder=1)
            # An image inside the SVG: thousands of circles would make the page slow.
            axes.scatter(
                generator, trainer, s=9, alpha=0.45, color=colour(number), lw=0, rasterized=True
            )
            sketch.belongs(axes, number)
        return sketch

    caption = (
        f"Up to {_SCATTER_TOKENS:,} tokens of the first trained step of an arm's first seed; on "
        "the line both agree."
    )
    missing = "No run has rollouts/NNNNNN.trainer.jsonl."
    return draw("scatter", "Generator against trainer, token by token", caption, missing, paint)


def _tenths(arms: Sequence[Arm], name: str, title: str, axis: str, caption: str) -> Plot:
    prefix = f"mismatch/{name.replace('-', '_')}/"

    def paint() -> Sketch:
        sketch = Sketch(name)
        means: list[float] = []
        for number, arm in enumerate(arms):
            tenths = bin_means(arm, prefix)
            middles = [(tenth + 0.5) / 10 for tenth in tenths]
            sketch.line(number, middles, list(tenths.values()), arm.name)
            means += tenths.values()
        sketch.axes.set_xlabel(axis)
        sketch.axes.set_xlim(0, 1)
        sketch.axes.set_ylabel("mean |log-prob difference| (nats)")
        log_axis(sketch.axes, "y", means)
        return sketch

    return draw(name, title, caption, f"No run records {prefix}0 to {prefix}9.", paint)


def _some_tokens(arm: Arm) -> tuple[np.ndarray, np.ndarray]:
    """A fixed sample of the first trained step's finite (generator, trainer) log-probs."""
    for metrics in arm.runs[0].steps:
        generator, trainer = arm.runs[0].log_probs(int(metrics["step"]))
        finite = np.isfinite(generator) & np.isfinite(trainer)
        if finite.any():
            generator, trainer = generator[finite], trainer[finite]
            stride = math.ceil(generator.size / _SCATTER_TOKENS)
            return generator[::stride], trainer[::stride]
    return np.zeros(0), np.zeros(0)
