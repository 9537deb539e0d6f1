"""Elementwise functions and sums along a row, each element's bits from its row alone."""

import torch
from jaxtyping import Float, Float32
from torch import Tensor


@torch.no_grad()
def mean_square(x: Float32[Tensor, "*batch width"]) -> Float32[Tensor, "*batch 1"]:
    """mean(x ** 2) over the last dim. No gradient."""
    if x.is_cuda:
        from fos_rl.kernels import fixed_tile

        return fixed_tile.mean_square(x).unsqueeze(-1)
    # On the CPU torch sums a contiguous last dim row by row.
    return x.contiguous().square().mean(dim=-1, keepdim=True)


@torch.no_grad()
def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x / (1 + exp(-x)) in fp32, rounded once. No gradient.

    Not `F.silu`, whose CPU kernel has another exp for the last elements of a tensor that do not
    fill a vector, so that a value depends on the place it has.
    """
    wide = x.float()
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def sum_last(x: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch 1"]:
    """The sum over a short last dim, added in its order."""
    total = x[..., :1]
    for j in range(1, x.shape[-1]):
        total = total + x[..., j : j + 1]
    return total
