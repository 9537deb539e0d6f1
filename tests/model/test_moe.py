"""Routed experts against a loop over tokens."""

import pytest
import torch
import torch.nn.functional as F

from fos_rl.model import unquantized_matmul
from fos_rl.model.moe import SparseMlp, route
from fos_rl.model.ops import FAST
from fos_rl.model.unquantized_matmul import grouped_linear
from fos_rl.spec import Architecture
from tests.support.decoders import tiny


def layer(**changes: object) -> SparseMlp:
    architecture = tiny("qwen3_moe").spec.architecture.model_copy(update=changes)
    assert isinstance(architecture, Architecture)
    mlp = SparseMlp(architecture, FAST)
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        with torch.no_grad():
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return mlp


def one_token(mlp: SparseMlp, x: torch.Tensor) -> torch.Tensor:
    """The layer on one token, in fp64, from its definition."""
    probs = (mlp.gate.weight.double() @ x).softmax(dim=0)
    chosen = sorted(range(len(probs)), key=lambda e: (-probs[e].item(), e))
    chosen = chosen[: mlp.num_experts_per_token]
    total = sum(probs[e] for e in chosen) if mlp.norm_topk_prob else 1.0
    out = torch.zeros_like(x)
    for e in chosen:
        gate, up, down = (
            w[e].double()
            for w in (mlp.experts.gate_proj, mlp.experts.up_proj, mlp.experts.down_proj)
        )
        out = out + probs[e] / total * (down @ (F.silu(gate @ x) * (up @ x)))
    return out


@pytest.mark.parametrize("norm_topk_prob", [True, False], ids=["normed", "raw"])
@pytest.mark.parametrize("per_token", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_equals_a_loop_over_tokens(tokens, per_token, norm_topk_prob):
    """tokens: 1 and 3 leave experts empty, 40 fills all; per_token: one, some, all experts."""
    mlp = layer(num_experts_per_token=per_token, norm_topk_prob=norm_topk_prob)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    weights = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(2))
    out = mlp(x)
    exact_x = x.detach().double().requires_grad_()
    want = torch.stack([one_token(mlp, row) for row in exact_x])
    # fp32 sums of 64 terms of size 0.1 to 1, three matmuls deep.
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)

    got = torch.autograd.grad((out * weights).sum(), [x, *mlp.parameters()])
    expected = torch.autograd.grad((want * weights).sum(), [exact_x, *mlp.parameters()])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)


def test_no_tokens_still_reach_every_weight():
    mlp = layer()
    out = mlp(torch.zeros(0, 64))
    assert out.shape == (0, 64)
    out.sum().backward()
    assert bool((mlp.experts.down_proj.grad == 0).all())


def test_ties_go_to_the_lower_expert():
    hidden = torch.ones(2, 4)
    weight = torch.zeros(6, 4)
    weight[4] = 1.0
    chosen, gates = route(hidden, weight, num_experts_per_token=3, norm_topk_prob=True, ops=FAST)
    assert chosen.tolist() == [[4, 0, 1]] * 2
    torch.testing.assert_close(gates.sum(dim=-1), torch.ones(2))


def test_routing_is_decided_in_fp32():
    """Two bf16 experts whose logits differ by less than bf16 can hold."""
    hidden = torch.tensor([[1.0, 2**-9]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16)
    chosen, _ = route(hidden, weight, num_experts_per_token=1, norm_topk_prob=False, ops=FAST)
    assert chosen.tolist() == [[1]]


@pytest.mark.parametrize("tokens", [12, 30])
def test_a_token_does_not_depend_on_its_batch(tokens):
    """Bitwise: permuting a batch permutes the outputs, whichever rows share an expert with it."""
    mlp = layer().to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=generator).to(torch.bfloat16)
    order = torch.randperm(tokens, generator=generator)
    with torch.no_grad():
        assert torch.equal(mlp(x)[order], mlp(x[order]))


@pytest.mark.parametrize("sizes", [[3, 0, 5, 2], [0, 0, 0, 4], [1, 1, 1, 1], [9, 0, 0, 0]], ids=str)
def test_both_ways_to_multiply_groups_agree(sizes):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(sizes), 16, generator=generator)
    weight = torch.randn(4, 8, 16, generator=generator)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    expert_of = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    want = torch.einsum("ri,roi->ro", rows.double(), weight[expert_of].double())
    # Sums of 16 products of size 1 in fp32.
    for got in (
        grouped_linear(rows, weight, ends),
        unquantized_matmul._grouped_linear_masked(rows, weight, ends),
    ):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
