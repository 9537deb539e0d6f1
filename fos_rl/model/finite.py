"""Weights that a model cannot compute with."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MAX_WEIGHT = math.sqrt(torch.finfo(torch.float32).max)
"""1.8e19: the square of anything above overflows fp32, and with it RMSNorm's mean of squares."""


@torch.no_grad()
def are_usable(tensors: Iterable[Tensor]) -> bool:
    """Whether every element is finite and at most MAX_WEIGHT; one pass over them."""
    extremes = [value for tensor in tensors for value in torch.aminmax(tensor)]
    # A NaN is both extremes of its tensor, and not at most anything.
    return not extremes or bool(torch.stack(extremes).abs().max() <= MAX_WEIGHT)


@torch.no_grad()
def broken_tensor(named: Iterable[tuple[str, Tensor]], limit: float = MAX_WEIGHT) -> str | None:
    """What is wrong with the first of (name, tensor) pairs that is not finite or above the limit.

    Example: `model.norm.weight has 3 of 64 values that are NaN`.
    """
    for name, tensor in named:
        wrong = {
            "NaN": tensor.isnan(),
            "infinite": tensor.isinf(),
            f"above {limit:.1e}": tensor.abs() > limit,
        }
        for what, where in wrong.items():
            if number := int(where.sum()):
                return f"{name} has {number} of {tensor.numel()} values that are {what}"
    return None


def check_loaded(named: Iterable[tuple[str, Tensor]], source: str) -> None:
    """ValueError for (name, tensor) pairs of a source that a model cannot compute with."""
    pairs = list(named)
    if not are_usable(tensor for _, tensor in pairs):
        raise ValueError(
            f"{source}: {broken_tensor(pairs)} (in bf16); the model computes nothing with them. "
            "Take an earlier or a fresh copy of the weights"
        )
