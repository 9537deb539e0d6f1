"""What a decoder calls where bits can depend on how many tokens are computed together.

All else in it (additions, products and quotients of elements, gathers, sorts) is rounded per
element. `FAST` is what libraries do best; `EXACT` gives every token the same bits in any batch, for
`spec.consistency = "exact"`. A module takes its ops when it is built, so no forward asks which.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fos_rl.exact import rows as exact_rows
from fos_rl.exact.autograd import ordinary_backward
from fos_rl.exact.fixed_tiles import fixed_tile_grouped_mm, fixed_tile_mm
from fos_rl.model.unquantized_matmul import fp32_matmul, grouped_linear
from fos_rl.spec import Consistency


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The products, sums and transcendental functions of a decoder, all differentiable."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """x [tokens, k], weight [n, k], bias [n] -> [tokens, n] in x's dtype."""
    grouped_linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    """rows [rows, k], weight [experts, n, k], cumulative ends [experts] -> [rows, n]."""
    router_logits: Callable[[Tensor, Tensor], Tensor]
    """hidden [tokens, hidden], weight [experts, hidden] -> fp32 [tokens, experts]."""
    logits: Callable[[Tensor, Tensor], Tensor]
    """hidden [tokens, hidden], weight [vocab, hidden] -> fp32 [tokens, vocab]."""
    mean_square: Callable[[Tensor], Tensor]
    """fp32 [*batch, width] -> fp32 [*batch, 1]."""
    silu: Callable[[Tensor], Tensor]
    sum_last: Callable[[Tensor], Tensor]
    """[*batch, k] -> [*batch, 1]."""


def _router_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(hidden.float(), weight.float())


def _mean_square(x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch 1"]:
    return x.square().mean(dim=-1, keepdim=True)


FAST = Ops(
    linear=F.linear,
    grouped_linear=grouped_linear,
    router_logits=_router_logits,
    logits=fp32_matmul,
    mean_square=_mean_square,
    silu=F.silu,
    sum_last=lambda x: x.sum(dim=-1, keepdim=True),
)


def _exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        sums = fixed_tile_mm(x, weight)
        return (sums if bias is None else sums.add_(bias.float())).to(x.dtype)

    return ordinary_backward(forward, F.linear, x, weight, bias)


def _exact_grouped_linear(
    rows: Float[Tensor, "rows k"],
    weight: Float[Tensor, "experts n k"],
    ends: Int[Tensor, " experts"],
) -> Float[Tensor, "rows n"]:
    return ordinary_backward(
        lambda rows, weight: fixed_tile_grouped_mm(rows, weight, ends).to(rows.dtype),
        lambda rows, weight: grouped_linear(rows, weight, ends),
        rows,
        weight,
    )


EXACT = Ops(
    linear=_exact_linear,
    grouped_linear=_exact_grouped_linear,
    router_logits=lambda x, weight: ordinary_backward(fixed_tile_mm, _router_logits, x, weight),
    logits=lambda x, weight: ordinary_backward(fixed_tile_mm, fp32_matmul, x, weight),
    mean_square=lambda x: ordinary_backward(exact_rows.mean_square, _mean_square, x),
    silu=lambda x: ordinary_backward(exact_rows.silu, F.silu, x),
    sum_last=exact_rows.sum_last,
)

OPS: dict[Consistency, Ops] = {"fast": FAST, "exact": EXACT}


class Linear(nn.Linear):
    """nn.Linear that multiplies with the decoder's ops."""

    def __init__(self, ops: Ops, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.ops = ops

    def forward(self, input: Float[Tensor, "tokens k"]) -> Float[Tensor, "tokens n"]:
        """x @ weight.T + bias by the matmul of the consistency."""
        return self.ops.linear(input, self.weight, self.bias)
