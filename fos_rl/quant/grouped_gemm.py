"""Row groups, and the sums of products of a grouped GEMM on exact operands.

offs holds cumulative row ends: group e is rows offs[e-1]..offs[e]. Rows past offs[-1] belong to no
group.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor
from torch.nn.functional import pad

from fos_rl.kernels import quantize_ops
from fos_rl.quant.backend import use_cute
from fos_rl.quant.gemm import fp32_mm


def check_offs(offs: Tensor, rows: int, experts: int) -> None:
    """Raise unless offs is int32 [experts] and, where its values are on the host, ascending in
    0..rows."""
    if offs.dtype != torch.int32 or tuple(offs.shape) != (experts,):
        raise ValueError(
            f"offs is {offs.dtype} of shape {tuple(offs.shape)}; it must be int32 "
            f"of shape ({experts},), the cumulative row end of each expert. "
            "Use counts.cumsum(0).to(torch.int32)."
        )
    if offs.device.type != "cpu":
        return
    ends = offs.tolist()
    if any(end < start for start, end in group_spans(ends)) or (ends and ends[-1] > rows):
        raise ValueError(
            f"offs is {ends} for {rows} rows; cumulative row ends must not decrease and must "
            "lie in 0..rows. Use counts.cumsum(0).to(torch.int32)."
        )


def group_spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first row, end row) of each group."""
    return list(zip([0, *ends][:-1], ends, strict=True))


def group_of_rows(offs: Int32[Tensor, "experts"], rows: int) -> Int64[Tensor, "rows"]:
    """Return each row's group; rows past offs[-1] get the number of experts. Needs no host sync."""
    index = torch.arange(rows, dtype=torch.int32, device=offs.device)
    return torch.searchsorted(offs, index, right=True)


def per_row(
    per_group: Float32[Tensor, "experts"], group: Int64[Tensor, "rows"]
) -> Float32[Tensor, "rows"]:
    """Return each row's group value; rows of no group get 0."""
    return pad(per_group, (0, 1))[group]


def group_amax(
    x: Float[Tensor, "rows cols"], group: Int64[Tensor, "rows"], experts: int
) -> Float32[Tensor, "experts"]:
    """Return the amax of each group's rows, 0 for an empty one; NaN propagates."""
    if use_cute("auto", x) and not torch.compiler.is_compiling():
        return quantize_ops.group_amax(x, group, experts)
    row_amax = x.abs().amax(-1).to(torch.float32)
    amax = torch.zeros(experts + 1, dtype=torch.float32, device=x.device)
    return amax.scatter_reduce_(0, group, row_amax, "amax")[:experts]


def looped_sums(
    a: Float[Tensor, "rows k"], b: Float[Tensor, "experts n k"], ends: Sequence[int]
) -> Float32[Tensor, "rows n"]:
    """Return a[group e] @ b[e].T in fp32, group after group; rows of no group are 0."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    for expert, (start, end) in enumerate(group_spans(ends)):
        if end > start:
            out[start:end] = fp32_mm(a[start:end], b[expert])
    return out
