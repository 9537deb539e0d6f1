"""The decoder's ordinary products, as fast as libraries make them."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def grouped_linear(
    rows: Float[Tensor, "rows in_features"],
    weight: Float[Tensor, "experts out_features in_features"],
    ends: Int[Tensor, " experts"],
) -> Float[Tensor, "rows out_features"]:
    """rows @ weight[e].T for each row's expert e: fp32 accumulation, one rounding to rows.dtype."""
    if rows.shape[0] == 0:
        return rows @ weight[0].T
    if not rows.is_cuda:
        return _grouped_linear_by_expert(rows, weight, ends)
    if rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return _grouped_linear_masked(rows, weight, ends)


def _grouped_linear_by_expert(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    parts = zip(rows.split(sizes), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, expert) for part, expert in parts])


def _grouped_linear_masked(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Every expert over every row, keeping its own: fp32 on CUDA has no grouped kernel, and
    splitting by `ends` would wait for the host, which a CUDA graph cannot record."""
    index = torch.arange(rows.shape[0], device=rows.device)
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    start = ends.new_zeros(())
    for expert, end in zip(weight.unbind(), ends.unbind(), strict=True):
        own = (index >= start) & (index < end)
        out = torch.where(own[:, None], F.linear(rows, expert), out)
        start = end
    return out


def fp32_matmul(
    rows: Float[Tensor, "rows hidden"], weight: Float[Tensor, "vocab hidden"]
) -> Float[Tensor, "rows vocab"]:
    """rows @ weight.T with fp32 accumulation and fp32 output, whatever the operands' dtype.

    A product of two bf16 numbers is exact in fp32, so both branches sum the same terms.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return _Bf16MatmulFp32Out.apply(rows, weight)
    return F.linear(rows.float(), weight.float())


class _Bf16MatmulFp32Out(torch.autograd.Function):
    """bf16 tensor-core matmul whose fp32 accumulator is returned unrounded.

    Backward rounds the incoming fp32 gradient to bf16 once and runs two bf16 matmuls.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return torch.mm(rows, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        grad = grad.to(rows.dtype)
        return grad @ weight, grad.T @ rows
