"""Triton kernels whose every row is a function of that row alone, whatever the batch around it.

A library GEMM picks its tiling, and with it the order of its additions, by the number of rows; so
does a reduction. Here the tile is fixed, and how many rows there are only says how many tiles run:
row m of a product is the same bits in a decode step of 1 row and in a training batch of 8192. The
number of rows is never a compile-time constant either, so that one binary serves them all.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32
from torch import Tensor

# One warpgroup; the 64 x 128 accumulator leaves room for two blocks per multiprocessor.
BLOCK_ROWS, BLOCK_COLS, BLOCK_K = 64, 128, 64


def mm(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float32[Tensor, "m n"]:
    """Return a @ b.T: fp32 products and sums of bf16 or fp32 operands on CUDA, fp32 out."""
    a, b = a.contiguous(), b.contiguous()
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=torch.float32, device=a.device)
    if m == 0:
        return out
    grid = (triton.cdiv(m, BLOCK_ROWS), triton.cdiv(n, BLOCK_COLS))
    _mm_kernel[grid](
        a, b, out, m, n, k, BLOCK_ROWS, BLOCK_COLS, BLOCK_K, num_warps=4, num_stages=_stages(a)
    )
    return out


def grouped_mm(
    a: Float[Tensor, "rows k"], b: Float[Tensor, "experts n k"], ends: Int32[Tensor, " experts"]
) -> Float32[Tensor, "rows n"]:
    """Return a[i] @ b[e].T for each row i's group e, `ends` being the groups' cumulative row ends.

    `ends` stays on the device, so what it holds is not checked but bounded: an end below the one
    before it counts as that one, an end past the rows as their number. Rows past ends[-1] belong to
    no group and are 0. A row's bits are those that `mm` gives it with its own expert's matrix.
    """
    a, b = a.contiguous(), b.contiguous()
    (rows, k), (experts, n, _) = a.shape, b.shape
    out = torch.zeros(rows, n, dtype=torch.float32, device=a.device)
    if rows == 0:
        return out
    # Each group's last tile may be partly empty: at most one more tile per group.
    grid = (triton.cdiv(rows, BLOCK_ROWS) + experts, triton.cdiv(n, BLOCK_COLS))
    _grouped_mm_kernel[grid](
        a,
        b,
        ends,
        out,
        rows,
        n,
        k,
        experts,
        BLOCK_ROWS,
        BLOCK_COLS,
        BLOCK_K,
        num_warps=4,
        num_stages=_stages(a),
    )
    return out


def mean_square(x: Float[Tensor, "*batch width"]) -> Float32[Tensor, "*batch"]:
    """Return mean(x ** 2) over the last dim in fp32; one block per row, one order of additions."""
    rows = x.contiguous().view(-1, x.shape[-1])
    out = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    if rows.shape[0]:
        width = rows.shape[1]
        _mean_square_kernel[(rows.shape[0],)](
            rows, out, width, triton.next_power_of_2(width), num_warps=4
        )
    return out.view(x.shape[:-1])


def _stages(a: Tensor) -> int:
    # fp32 tiles are twice as large, and shared memory holds no more than two of them.
    return 4 if a.dtype == torch.bfloat16 else 2


@triton.jit
def _tile_of_sums(
    a,
    b,
    rows,
    cols,
    row_mask,
    col_mask,
    k,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums over k of a[rows] * b[cols], k ascending, BLOCK_K at a time."""
    sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    step = tl.arange(0, BLOCK_K)
    a_rows = a + rows.to(tl.int64)[:, None] * k
    b_cols = b + cols.to(tl.int64)[None, :] * k
    for start in range(0, k, BLOCK_K):
        inner = start + step
        a_tile = tl.load(
            a_rows + inner[None, :], mask=row_mask[:, None] & (inner < k)[None, :], other=0.0
        )
        b_tile = tl.load(
            b_cols + inner[:, None], mask=(inner < k)[:, None] & col_mask[None, :], other=0.0
        )
        # "ieee": fp32 operands are multiplied as they are, never as TF32.
        sums = tl.dot(a_tile, b_tile, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["m"])
def _mm_kernel(
    a,
    b,
    out,
    m,
    n,
    k,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    sums = _tile_of_sums(a, b, rows, cols, rows < m, cols < n, k, BLOCK_ROWS, BLOCK_COLS, BLOCK_K)
    place = out + rows.to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(place, sums, mask=(rows < m)[:, None] & (cols < n)[None, :])


@triton.jit(do_not_specialize=["m"])
def _grouped_mm_kernel(
    a,
    b,
    ends,
    out,
    m,
    n,
    k,
    experts,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Find the group of this tile: groups have ceil(size / BLOCK_ROWS) tiles each, in order.
    tile = tl.program_id(0)
    group = 0
    first, last = 0, 0
    tiles_before, tiles_through = 0, 0
    while (group < experts) & (tiles_through <= tile):
        first = last
        last = tl.minimum(tl.maximum(tl.load(ends + group), first), m)
        tiles_before = tiles_through
        tiles_through += tl.cdiv(last - first, BLOCK_ROWS)
        group += 1
    if tiles_through <= tile:
        return
    rows = first + (tile - tiles_before) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    matrix = b + (group - 1).to(tl.int64) * n * k
    sums = _tile_of_sums(
        a, matrix, rows, cols, rows < last, cols < n, k, BLOCK_ROWS, BLOCK_COLS, BLOCK_K
    )
    place = out + rows.to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(place, sums, mask=(rows < last)[:, None] & (cols < n)[None, :])


@triton.jit
def _mean_square_kernel(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + cols, mask=cols < width, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(values * values, axis=0) / width)
