"""Packed attention: a brute-force loop, and no sample that sees another."""

import pytest
import torch

from fos_rl.model.packed_attention import PackedAttention, PackedSequences
from tests.support.decoders import FAMILIES, random_samples, tiny


def brute_force(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each query token and head by itself, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = k[: t + 1, head // group], v[: t + 1, head // group]
            weights = (keys @ q[t, head] / q.shape[2] ** 0.5).softmax(dim=0)
            out[t, head] = weights @ values
    return out


@pytest.mark.parametrize("lengths", [[7], [1, 5, 3], [4, 1]], ids=str)
def test_equals_a_loop_over_tokens_and_heads(lengths):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    q = torch.randn(tokens, 4, 16, generator=generator)
    k, v = torch.randn(2, tokens, 2, 16, generator=generator)
    got = PackedAttention(PackedSequences(lengths))(q, k, v)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    want = torch.cat([brute_force(*part) for part in parts])
    # fp32 softmax averages of at most 7 numbers of size 1.
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)


# fp32: a matmul's row may depend on its number of rows in the last bit, hence not exactly 0.
# bf16: rounding that difference moves an activation by 2^-9, as any reordering does.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.2)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_sample_has_the_log_probs_it_has_alone(family, dtype, tolerance):
    packed = tiny(family)
    packed.decoder.to(dtype)
    samples = random_samples(30, 1, 64, 17)
    with torch.no_grad():
        together = packed.log_probs(samples).split([len(sample) for sample in samples])
        for alone, shared in zip(samples, together, strict=True):
            assert float((packed.log_probs([alone]) - shared).abs().max()) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_change_nothing(family):
    """Bitwise: the same lengths with other tokens in the other samples."""
    packed = tiny(family)
    before, sample, after = random_samples(13, 20, 11)
    others = random_samples(13, 20, 11, seed=1)
    with torch.no_grad():
        first = packed.log_probs([before, sample, after])[13:33]
        second = packed.log_probs([others[0], sample, others[2]])[13:33]
    assert torch.equal(first, second)


def test_gradients_do_not_cross_samples():
    packed = tiny("qwen3")
    samples = random_samples(6, 9)
    packed.sequences.set([6, 9])
    embedded = packed.decoder.embed(torch.cat(samples)).detach().requires_grad_()
    positions = packed.sequences.positions(embedded.device)
    packed.decoder.model(embedded, positions)[:6].square().sum().backward()
    assert bool((embedded.grad[:6] != 0).any())
    assert bool((embedded.grad[6:] == 0).all())


def test_gradients_of_a_packed_batch_are_the_sum_over_samples():
    packed = tiny("qwen3_moe")
    samples = random_samples(6, 9, 4)

    def gradients(*batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        packed.decoder.zero_grad()
        for batch in batches:
            packed.log_probs(batch).gather(1, torch.cat(batch)[:, None]).sum().backward()
        return {name: p.grad.clone() for name, p in packed.decoder.named_parameters()}

    together, apart = gradients(samples), gradients(*([sample] for sample in samples))
    for name, gradient in together.items():
        # fp32 sums of 19 tokens in two orders.
        torch.testing.assert_close(gradient, apart[name], rtol=1e-4, atol=1e-4, msg=name)


def test_positions_restart_and_boundaries_add_up():
    sequences = PackedSequences([3, 2])
    cpu = torch.device("cpu")
    assert sequences.positions(cpu).tolist() == [0, 1, 2, 0, 1]
    assert sequences.cu_seqlens(cpu).tolist() == [0, 3, 5]
    assert (sequences.num_tokens, sequences.max_length) == (5, 3)
    sequences.set([1])
    assert sequences.cu_seqlens(cpu).tolist() == [0, 1]


def test_a_stale_description_is_noticed():
    q = torch.zeros(4, 2, 8)
    with pytest.raises(AssertionError, match="said 3 tokens, got 4"):
        PackedAttention(PackedSequences([3]))(q, q, q)
