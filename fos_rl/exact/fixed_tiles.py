"""Products in tiles of a fixed number of rows: more rows are more tiles, never another shape."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int32
from torch import Tensor

TILE_ROWS = 16
"""Rows a CPU tile has. A decode step of fewer rows is padded to it; a larger tile would be faster
for thousands of rows (32: a quarter) and slower for a few (half)."""


@torch.no_grad()
def fixed_tile_mm(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float32[Tensor, "m n"]:
    """a @ b.T with fp32 products, sums and output; row m has the same bits in every batch.

    On the CPU bf16 operands are upcast, which is exact, and each tile is one `torch.mm` of constant
    shape. `check_fixed_tiles` asks whether this machine's sgemm then treats all rows of a tile
    alike, as it should. No gradient.
    """
    if a.is_cuda:
        from fos_rl.kernels import fixed_tile

        return fixed_tile.mm(a, b)
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    _fill_tiles(out, a.float().contiguous(), b.float().contiguous())
    return out


@torch.no_grad()
def fixed_tile_grouped_mm(
    a: Float[Tensor, "rows k"], b: Float[Tensor, "experts n k"], ends: Int32[Tensor, " experts"]
) -> Float32[Tensor, "rows n"]:
    """a[i] @ b[e].T for each row's expert e; ends are cumulative, rows past the last are 0.

    Bits of a row as in `fixed_tile_mm`, whoever shares its expert. No gradient.
    """
    if a.is_cuda:
        from fos_rl.kernels import fixed_tile

        return fixed_tile.grouped_mm(a, b, ends)
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    a = a.float().contiguous()
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            _fill_tiles(out[start:end], a[start:end], b[expert].float().contiguous())
        start = end
    return out


# Autocast would multiply a padded tile in bf16, and a whole one, with its out=, in fp32.
@torch.autocast("cpu", enabled=False)
def _fill_tiles(
    out: Float32[Tensor, "m n"], a: Float32[Tensor, "m k"], b: Float32[Tensor, "n k"]
) -> None:
    for tile, into in zip(a.split(TILE_ROWS), out.split(TILE_ROWS), strict=True):
        if missing := TILE_ROWS - tile.shape[0]:
            into.copy_(torch.mm(F.pad(tile, (0, 0, 0, missing)), b.t())[:-missing])
        else:
            torch.mm(tile, b.t(), out=into)


def check_fixed_tiles(shapes: Iterable[tuple[int, ...]]) -> None:
    """Multiply random rows with an [n, k] matrix of each shape, in several places of their tiles.

    Whether the rows of a tile are alike is up to the CPU's BLAS library, so it is asked before a
    run rather than believed.

    Raises:
        RuntimeError: naming the shape for which this machine's GEMM breaks it.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    for n, k in sorted(shapes):
        rows, weight = (
            torch.randn(count, k, generator=generator, device="cpu") for count in (3 * TILE_ROWS, n)
        )
        together = fixed_tile_mm(rows, weight)
        for first in (1, TILE_ROWS // 2, TILE_ROWS + 3):
            apart = fixed_tile_mm(rows[first:], weight)
            if different := int((apart != together[first:]).any(1).sum()):
                raise RuntimeError(
                    f"consistency 'exact' unavailable: in a product with a {n} x {k} matrix "
                    f"{different} of {len(apart)} rows depend on their place in the batch; this "
                    "CPU's BLAS library treats the rows of a tile differently with "
                    f"{torch.get_num_threads()} threads. Try fewer (trainer.num_threads and "
                    "generator.num_threads, both the same), run on a GPU, or set "
                    "model.consistency = 'fast'"
                )
