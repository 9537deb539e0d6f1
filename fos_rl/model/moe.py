"""Routed experts: choose, sort by expert, multiply, un-sort, combine; none waits for the host."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fos_rl.model.ops import Ops
from fos_rl.model.uninitialized import linear
from fos_rl.spec import Architecture

ChooseExperts = Callable[[Int[Tensor, "tokens k"]], Int[Tensor, "tokens k"]]
"""The router's choice of each token's experts -> the experts to use."""


def routers_own(chosen: Int[Tensor, "tokens k"]) -> Int[Tensor, "tokens k"]:
    """The router's choice as it is."""
    return chosen


class SparseMlp(nn.Module):
    """A mixture-of-experts MLP: each token goes through its top-k experts, weighted by the router.

    Attributes are named as in Hugging Face's classes: `gate` is the router. `choose` sees its
    choice and has the last word: see `fos_rl.model.router_replay`.
    """

    def __init__(self, architecture: Architecture, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.num_experts_per_token = architecture.num_experts_per_token
        self.norm_topk_prob = architecture.norm_topk_prob
        self.choose: ChooseExperts = routers_own
        self.gate = linear(ops, architecture.hidden_size, architecture.num_experts, bias=False)
        self.experts = Experts(
            ops,
            architecture.num_experts,
            architecture.hidden_size,
            architecture.moe_intermediate_size,
        )

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Each token's chosen experts' outputs, weighted by their gates and summed."""
        chosen, gates = route(
            hidden,
            self.gate.weight,
            num_experts_per_token=self.num_experts_per_token,
            norm_topk_prob=self.norm_topk_prob,
            ops=self.ops,
            choose=self.choose,
        )
        sorted_experts, order = chosen.flatten().sort(stable=True)
        places = torch.arange(order.numel(), device=order.device)
        inverse = torch.empty_like(order).scatter_(0, order, places)
        expert_ids = torch.arange(self.gate.weight.shape[0], device=order.device)
        ends = torch.searchsorted(sorted_experts, expert_ids, right=True, out_int32=True)
        rows = _Gather.apply(hidden, order, inverse, self.num_experts_per_token)
        rows = _Gather.apply(self.experts(rows, ends), inverse, order, 1)
        return combine(rows.unflatten(0, chosen.shape), gates)


class Experts(nn.Module):
    """All experts of one layer, weights stacked: the leaf that a quantized version replaces.

    Row i belongs to the expert e with ends[e - 1] <= i < ends[e].
    """

    def __init__(
        self, ops: Ops, num_experts: int, hidden_size: int, intermediate_size: int
    ) -> None:
        super().__init__()
        self.ops = ops
        in_shape = (num_experts, intermediate_size, hidden_size)
        self.gate_proj = nn.Parameter(torch.empty(in_shape))
        self.up_proj = nn.Parameter(torch.empty(in_shape))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))

    def forward(
        self, rows: Float[Tensor, "rows hidden"], ends: Int[Tensor, " experts"]
    ) -> Float[Tensor, "rows hidden"]:
        """The experts' MLPs of rows sorted by expert; `ends` are the groups' ends."""
        gate = self.multiply("gate_proj", rows, ends)
        up = self.multiply("up_proj", rows, ends)
        return self.multiply("down_proj", self.ops.silu(gate) * up, ends)

    def multiply(
        self, projection: str, rows: Float[Tensor, "rows k"], ends: Int[Tensor, " experts"]
    ) -> Float[Tensor, "rows n"]:
        """One of the three projections, of each row by its own expert."""
        return self.ops.grouped_linear(rows, getattr(self, projection), ends)


def route(
    hidden: Float[Tensor, "tokens hidden"],
    router_weight: Float[Tensor, "experts hidden"],
    *,
    num_experts_per_token: int,
    norm_topk_prob: bool,
    ops: Ops,
    choose: ChooseExperts = routers_own,
) -> tuple[Int[Tensor, "tokens k"], Float[Tensor, "tokens k"]]:
    """Each token's experts, the router's best first unless `choose` says otherwise, and their gates
    (fp32), which are the router's whoever chose.

    Matmul and softmax are in fp32: a rounded router logit flips experts between trainer and
    generator, the largest log-prob difference that a bf16 mixture of experts shows. Ties go to the
    lower expert.
    """
    logits = ops.router_logits(hidden, router_weight)  # [tokens, experts]
    probs = logits.softmax(dim=-1)
    best_first = probs.argsort(dim=-1, descending=True, stable=True)
    chosen = choose(best_first[:, :num_experts_per_token])
    gates = probs.gather(-1, chosen)
    if norm_topk_prob:
        gates = gates / ops.sum_last(gates)
    return chosen, gates


def combine(
    rows: Float[Tensor, "tokens k hidden"], gates: Float[Tensor, "tokens k"]
) -> Float[Tensor, "tokens hidden"]:
    """sum_j gates[:, j] * rows[:, j] in fp32, added in the order of j, rounded once.

    Not `sum(dim=1)`: its order of additions may depend on the number of tokens.
    """
    weighted = rows.float() * gates[:, :, None]
    total = weighted[:, 0]
    for j in range(1, weighted.shape[1]):
        total = total + weighted[:, j]
    return total.to(rows.dtype)


class _Gather(torch.autograd.Function):
    """rows[index // copies] with a backward that gathers too.

    `inverse[index] = arange`. Plain indexing scatters in backward, with additions in no fixed
    order on CUDA; here row t's gradient is the sum of its `copies` in their own order.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[index // copies]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None
