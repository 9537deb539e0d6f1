"""Paged attention: a loop over queries agrees, and a query has its bits in every batch."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fos_rl.exact.paged_attention import paged_attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Sequence:
    """Queries, keys and values of every token of one sequence."""

    def __init__(self, length: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.q = normal(length, HEADS, HEAD_DIM, seed=seed).to(dtype)
        self.k = normal(length, KV_HEADS, HEAD_DIM, seed=seed + 100).to(dtype)
        self.v = normal(length, KV_HEADS, HEAD_DIM, seed=seed + 200).to(dtype)


def attend(parts: list[tuple[Sequence, int, int]], block_size: int) -> list[Tensor]:
    """One call for several (sequence, first query, end), whose caches lie in shuffled blocks of a
    cache laid out as vLLM's on the CPU. Unused slots hold NaN."""
    counts = [-(-end // block_size) for _, _, end in parts]
    blocks = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(7))
    dtype = parts[0][0].q.dtype
    cache = torch.full((len(blocks), KV_HEADS, block_size, 2 * HEAD_DIM), float("nan"), dtype=dtype)
    k_cache, v_cache = cache.transpose(1, 2).chunk(2, dim=-1)
    table = torch.zeros(len(parts), max(counts), dtype=torch.int32)
    used = 0
    for row, ((sequence, _, end), count) in enumerate(zip(parts, counts, strict=True)):
        table[row, :count] = blocks[used : used + count]
        used += count
        for j in range(end):
            place = int(table[row, j // block_size]), j % block_size
            k_cache[place], v_cache[place] = sequence.k[j], sequence.v[j]
    sizes = [end - first for _, first, end in parts]
    out = paged_attention(
        torch.cat([sequence.q[first:end] for sequence, first, end in parts]),
        k_cache,
        v_cache,
        table,
        torch.tensor([0, *sizes]).cumsum(0).to(torch.int32),
        torch.tensor([end for _, _, end in parts], dtype=torch.int32),
        max(sizes),
    )
    return list(out.split(sizes))


def one_query(sequence: Sequence, i: int) -> Tensor:
    """[heads, head_dim] in fp64, from the definition."""
    rows = []
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        keys, values = (x[: i + 1, kv].double() for x in (sequence.k, sequence.v))
        scores = keys @ sequence.q[i, head].double() / HEAD_DIM**0.5
        rows.append(scores.softmax(0) @ values)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_a_loop_over_queries(dtype: torch.dtype) -> None:
    """Lengths on both sides of a query tile (16) and of a key span (128)."""
    sequences = [Sequence(n, seed, dtype) for seed, n in enumerate((1, 16, 17, 128, 141))]
    parts = [(s, 0, len(s.q)) for s in sequences]
    for sequence, got in zip(sequences, attend(parts, 32), strict=True):
        want = torch.stack([one_query(sequence, i) for i in range(len(sequence.q))])
        # Means of values of size 1 to 3, fp32 inside; bf16 rounds once, by 2^-9 of up to 4.
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_query_has_the_same_bits_however_it_is_computed(dtype: torch.dtype) -> None:
    """Whole prefill over blocks of one token, the trainer's; chunks of it, among other sequences;
    one decode step per token over vLLM's blocks."""
    sequence, other = Sequence(150, 0, dtype), Sequence(60, 1, dtype)
    [whole] = attend([(sequence, 0, 150)], 1)
    bounds = [0, 5, 16, 50, 131, 150]
    for first, end in pairwise(bounds):
        for parts in ([(sequence, first, end)], [(other, 40, 60), (sequence, first, end)]):
            chunk = attend(parts, 32)[-1]
            assert torch.equal(chunk, whole[first:end]), f"chunk {first} to {end}"
    for i in (0, 15, 16, 127, 128, 149):
        for beside in ([], [(other, 59, 60)], [(other, 3, 41)]):
            got = attend([*beside, (sequence, i, i + 1)], 32)[-1]
            assert torch.equal(got, whole[i : i + 1]), f"decode at {i} beside {len(beside)}"


def test_a_later_key_does_not_matter() -> None:
    """Causal to the bit: a prefix alone, and at the head of a longer sequence."""
    sequence = Sequence(150, 0)
    [whole] = attend([(sequence, 0, 150)], 32)
    for length in (1, 20, 129):
        [prefix] = attend([(sequence, 0, length)], 32)
        assert torch.equal(prefix, whole[:length])


def test_padding_tokens_are_zero() -> None:
    """A CUDA graph's batch is longer than its sequences."""
    sequence = Sequence(3, 0)
    bounds, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    table = torch.arange(3, dtype=torch.int32)[None]
    out = paged_attention(
        sequence.q, sequence.k[:, None], sequence.v[:, None], table, bounds, lengths, 2
    )
    assert out[:2].any(-1).all()
    assert not out[2].any()
