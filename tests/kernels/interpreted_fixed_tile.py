"""Run by test_fixed_tile.py in a process whose Triton kernels are interpreted on the CPU.

In fp32: the interpreter takes the bits of bf16 operands for integers.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fos_rl.kernels import fixed_tile
from fos_rl.kernels.fixed_tile_attention import paged_attention


def check_mm() -> None:
    generator = torch.Generator().manual_seed(0)
    for m, n, k in [(1, 8, 16), (70, 130, 72)]:
        a = torch.randn(m, k, generator=generator)
        b = torch.randn(n, k, generator=generator)
        exact = a.double() @ b.double().T
        # k products and sums, each within 2^-24 of the running magnitude.
        bound = k * 2.0**-23 * (a.double().abs() @ b.double().abs().T)
        assert ((fixed_tile.mm(a, b).double() - exact).abs() <= bound).all()


def check_grouped_mm() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [3, 0, 66, 1, 0]
    rows, n, k = sum(sizes) + 4, 40, 48  # the last 4 rows belong to no group
    a = torch.randn(rows, k, generator=generator)
    b = torch.randn(len(sizes), n, k, generator=generator)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    out = fixed_tile.grouped_mm(a, b, ends)
    start = 0
    for expert, size in enumerate(sizes):
        part = slice(start, start + size)
        assert torch.equal(out[part], fixed_tile.mm(a[part], b[expert]))
        start += size
    assert (out[start:] == 0).all()
    # Ends that do not ascend or lie past the rows, which the host does not see, stay in bounds.
    for wrong, right in (([5, 900, 70], [5, 70, 70]), ([-7, 66, 3], [0, 66, 66])):
        outs = [
            fixed_tile.grouped_mm(a[:70], b[:3], torch.tensor(ends, dtype=torch.int32))
            for ends in (wrong, right)
        ]
        assert torch.equal(*outs)


def check_mean_square() -> None:
    x = torch.randn(5, 3, 40, generator=torch.Generator().manual_seed(2))
    expected = x.double().square().mean(-1)
    assert torch.allclose(fixed_tile.mean_square(x).double(), expected, rtol=40 * 2.0**-23)


def reference_attention(q, keys, values, context):
    """Softmax attention of one sequence in fp64, by head, by query."""
    n, heads, head_dim = q.shape
    group = heads // keys.shape[1]
    out = torch.empty(n, heads, head_dim, dtype=torch.float64)
    for i in range(n):
        for h in range(heads):
            k = keys[: context + i + 1, h // group].double()
            v = values[: context + i + 1, h // group].double()
            weights = (k @ q[i, h].double() * head_dim**-0.5).softmax(0)
            out[i, h] = weights @ v
    return out


def check_attention() -> None:
    generator = torch.Generator().manual_seed(3)
    heads, kv_heads, head_dim, block_size = 6, 2, 24, 4
    lengths, queries = [5, 130, 17], [5, 3, 1]
    keys = [torch.randn(n, kv_heads, head_dim, generator=generator) for n in lengths]
    values = [torch.randn(n, kv_heads, head_dim, generator=generator) for n in lengths]
    q = torch.randn(sum(queries) + 2, heads, head_dim, generator=generator)
    bounds = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    # Pages handed out in no order.
    pages = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(pages), generator=generator).to(torch.int32)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    k_cache = torch.full((sum(pages), block_size, kv_heads, head_dim), float("nan"))
    v_cache = k_cache.clone()
    used = 0
    for s, n in enumerate(lengths):
        table[s, : pages[s]] = order[used : used + pages[s]]
        used += pages[s]
        for j in range(n):
            page = int(table[s, j // block_size])
            k_cache[page, j % block_size] = keys[s][j]
            v_cache[page, j % block_size] = values[s][j]
    out = paged_attention(q, k_cache, v_cache, table, bounds, seq_lens, max(queries))
    for s, n in enumerate(lengths):
        part = slice(int(bounds[s]), int(bounds[s + 1]))
        expected = reference_attention(q[part], keys[s], values[s], n - queries[s])
        # Weights sum to 1, values are below 5: 150 sums of 2^-24 relative error each.
        assert (out[part].double() - expected).abs().max() < 5 * 150 * 2.0**-23
    assert (out[sum(queries) :] == 0).all()

    # The packed keys of a trainer are pages of one token.
    alone = paged_attention(
        q[5:8],
        keys[1][:, None],
        values[1][:, None],
        torch.arange(130, dtype=torch.int32)[None],
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([130], dtype=torch.int32),
        3,
    )
    assert torch.equal(alone, out[5:8])


for check in (check_mm, check_grouped_mm, check_mean_square, check_attention):
    check()
    print(check.__name__, "ok")
