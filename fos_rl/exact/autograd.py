"""An exact forward with an ordinary backward.

Exactness is about values that trainer and generator both compute; gradients are the trainer's. So a
backward runs the ordinary function again, on the same inputs, and differentiates it: its kernels
are the fast ones, and its gradient is that of the exact function up to the order of additions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def ordinary_backward(
    exact: Callable[..., Tensor], ordinary: Callable[..., Tensor], *inputs: Tensor | None
) -> Tensor:
    """exact(*inputs), with the gradient of ordinary(*inputs).

    Example: `ordinary_backward(lambda x, w: fixed_tile_mm(x, w), F.linear, x, w)`.
    """
    return _OrdinaryBackward.apply(exact, ordinary, *inputs)


class _OrdinaryBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exact: Callable[..., Tensor],
        ordinary: Callable[..., Tensor],
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.ordinary = ordinary
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [
            None if saved is None else saved.detach().requires_grad_(wanted)
            for saved, wanted in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.ordinary(*inputs)
        variables = [x for x in inputs if x is not None and x.requires_grad]
        grads = iter(torch.autograd.grad(out, variables, grad))
        return None, None, *(next(grads) if wanted else None for wanted in needed)
