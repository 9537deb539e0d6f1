"""Triton kernels of exact mode: right when interpreted, one row's bits in every batch on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent


def on_gpu(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(skip(test))


def test_interpreted_kernels_agree_with_fp64():
    script = HERE / "interpreted_fixed_tile.py"
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=HERE.parents[1],
        env={"PYTHONPATH": str(HERE.parents[1]), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("ok") == 4


# Widths of SmolLM2-135M and of its vocabulary, a K that no tile divides, and a wide layer.
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (192, 576), (49152, 576), (130, 72)])
def test_a_row_of_a_product_has_the_same_bits_in_every_batch(dtype, n, k):
    from fos_rl.kernels.fixed_tile import mm

    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(1000, k, device="cuda", generator=generator).to(dtype)
    b = torch.randn(n, k, device="cuda", generator=generator).to(dtype)
    whole = mm(a, b)
    exact = a.double() @ b.double().T
    bound = k * 2.0**-22 * (a.double().abs() @ b.double().abs().T)
    assert ((whole.double() - exact).abs() <= bound).all()
    for rows in (1, 2, 7, 16, 63, 64, 65, 128, 999):
        assert torch.equal(mm(a[:rows], b), whole[:rows]), rows
        assert torch.equal(mm(a[-rows:], b), whole[-rows:]), rows
    order = torch.randperm(1000, device="cuda", generator=generator)
    assert torch.equal(mm(a[order], b), whole[order])


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_grouped_product_is_each_group_s_own(dtype):
    from fos_rl.kernels.fixed_tile import grouped_mm, mm

    generator = torch.Generator("cuda").manual_seed(1)
    sizes = [3, 0, 200, 64, 1, 0]
    rows = sum(sizes) + 5
    a = torch.randn(rows, 96, device="cuda", generator=generator).to(dtype)
    b = torch.randn(len(sizes), 200, 96, device="cuda", generator=generator).to(dtype)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    out = grouped_mm(a, b, ends)
    parts = a[: sum(sizes)].split(sizes)
    expected = [mm(part, matrix) for part, matrix in zip(parts, b, strict=True)]
    assert torch.equal(out[: sum(sizes)], torch.cat(expected))
    assert (out[sum(sizes) :] == 0).all()


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 576, 4096])
def test_a_mean_square_has_the_same_bits_in_every_batch(dtype, width):
    from fos_rl.kernels.fixed_tile import mean_square

    x = torch.randn(300, width, device="cuda").to(dtype)
    whole = mean_square(x)
    torch.testing.assert_close(
        whole.double(), x.double().square().mean(-1), rtol=width * 2.0**-23, atol=0
    )
    for rows in (1, 2, 64, 299):
        assert torch.equal(mean_square(x[-rows:]), whole[-rows:])


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 2, 32), (8, 1, 128)])
def test_attention_of_a_token_has_the_same_bits_however_it_is_computed(
    dtype, heads, kv_heads, head_dim
):
    """Packed training, paged decode, and a prefill in chunks, of three sequences."""
    from fos_rl.kernels.fixed_tile_attention import paged_attention

    lengths, page = [300, 64, 129], 16
    tokens = sum(lengths)
    generator = torch.Generator("cuda").manual_seed(2)
    shape = {"device": "cuda", "generator": generator}
    q = torch.randn(tokens, heads, head_dim, **shape).to(dtype)
    k = torch.randn(tokens, kv_heads, head_dim, **shape).to(dtype)
    v = torch.randn(tokens, kv_heads, head_dim, **shape).to(dtype)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    seq_lens = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    index = torch.arange(max(lengths), device="cuda", dtype=torch.int32)
    own_tokens = bounds[:-1, None] + index.clamp(max=tokens - 1)
    packed = paged_attention(
        q, k[:, None], v[:, None], own_tokens.contiguous(), bounds, seq_lens, max(lengths)
    )

    for s, n in enumerate(lengths):
        part = slice(int(bounds[s]), int(bounds[s + 1]))
        wide = [x[part].transpose(0, 1)[None].double() for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(
            *wide, is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        # Rounded weights and one rounding of the output, each half an ulp of values below 6.
        rounding = torch.finfo(dtype).eps * 6
        assert (packed[part].double() - expected).abs().max() < rounding + 1e-5, n

    pages = [-(-n // page) for n in lengths]
    k_cache = torch.full((sum(pages), 2, page, kv_heads, head_dim), float("nan"), device="cuda")
    cache = k_cache.to(dtype).transpose(0, 1)  # [2, pages, page, kv_heads, head_dim]
    table = torch.zeros(3, max(pages), dtype=torch.int32, device="cuda")
    taken = 0
    for s, n in enumerate(lengths):
        table[s, : pages[s]] = torch.arange(taken, taken + pages[s]).flip(0)
        taken += pages[s]
        for j in range(n):
            for side, x in enumerate((k, v)):
                cache[side, table[s, j // page], j % page] = x[int(bounds[s]) + j]

    last = bounds[1:].long() - 1
    one_each = torch.arange(4, dtype=torch.int32, device="cuda")
    decoded = paged_attention(q[last], cache[0], cache[1], table, one_each, seq_lens, 1)
    assert torch.equal(decoded, packed[last])

    done = 0
    for chunk in (37, 100, 163):
        end = done + chunk
        part = paged_attention(
            q[done:end],
            cache[0],
            cache[1],
            table[:1],
            torch.tensor([0, chunk], dtype=torch.int32, device="cuda"),
            torch.tensor([end], dtype=torch.int32, device="cuda"),
            chunk,
        )
        assert torch.equal(part, packed[done:end])
        done = end
