"""The plots of the report, in the order of the page."""

from collections.abc import Sequence

from fos_rl.compare.arm_plots import plot_first_step, plot_phases, plot_reward_differences
from fos_rl.compare.drawing import Plot
from fos_rl.compare.findings import Difference
from fos_rl.compare.load import Comparison
from fos_rl.compare.step_plots import (
    CLIP_FRACTION,
    ENTROPY,
    GRAD_NORM,
    KL_K3,
    LENGTH,
    MISMATCH,
    plot_backward_modes,
    plot_metric,
    plot_reward,
)
from fos_rl.compare.token_plots import (
    plot_by_position,
    plot_by_probability,
    plot_layer_error,
    plot_routing_flips,
    plot_scatter,
)


def all_plots(comparison: Comparison, differences: Sequence[Difference]) -> list[Plot]:
    """Every plot of the page; one whose data no run has says so in its place.

    Args:
        differences: those of each arm against the baseline.
    """
    arms = comparison.arms
    return [
        plot_first_step(arms),
        plot_reward_differences(arms, differences),
        plot_metric(arms, MISMATCH),
        plot_metric(arms, KL_K3),
        plot_reward(arms),
        plot_metric(arms, CLIP_FRACTION),
        plot_metric(arms, GRAD_NORM),
        plot_metric(arms, ENTROPY),
        plot_metric(arms, LENGTH),
        plot_phases(arms),
        plot_by_probability(arms),
        plot_by_position(arms),
        plot_routing_flips(arms),
        plot_layer_error(arms),
        plot_backward_modes(arms),
        plot_scatter(arms),
    ]
