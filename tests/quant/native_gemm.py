"""A stand-in for torch's scaled GEMM that asks torch for its rules and multiplies on the CPU.

Operands are decoded here from bytes by the formats' definitions, and sums run over k in ascending
order, so that whatever the padding, equal operands give equal bits.
"""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ordered_mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T in fp32, terms added one after the other from 0."""
    sums = torch.zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):
        sums = sums + a[:, k, None].float() * b[None, :, k].float()
    return sums


class CheckedScaledMm:
    """Called in place of scaled_mm; `shapes` is what torch's meta function was asked, and took."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, int]] = []

    def __call__(self, mat_a: Tensor, mat_b: Tensor, **options) -> Tensor:
        on_meta = {
            name: as_meta(value) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        out = scaled_mm(as_meta(mat_a), as_meta(mat_b), **on_meta)
        # cuBLAS takes addresses of whole 16 bytes.
        assert mat_a.data_ptr() % 16 == mat_b.data_ptr() % 16 == 0
        a = decoded(mat_a, options["scale_a"], options["scale_recipe_a"])
        b = decoded(mat_b.t(), options["scale_b"], options["scale_recipe_b"])
        self.shapes.append((a.shape[0], b.shape[0], a.shape[1]))
        product = ordered_mm(a, b)
        assert (product.shape, product.dtype) == (out.shape, out.dtype)
        return product


def as_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")


def decoded(data: Tensor, scale: Tensor, quantizer: ScalingType) -> Tensor:
    """fp32 [rows, k] of codes and swizzled scales."""
    if quantizer == ScalingType.BlockWise1x16:
        values, width = decoded_e2m1(data.view(torch.uint8)), 16
    else:
        assert quantizer == ScalingType.BlockWise1x32
        values, width = data.float(), 32
    rows, k = values.shape
    column_tiles = -(-(k // width) // 4)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(k // width), indexing="ij")
    # cuBLAS documentation, "1D block scaling factors layout".
    place = ((r // 128 * column_tiles + c // 4) * 32 + r % 32) * 16 + r % 128 // 32 * 4 + c % 4
    scales = scale.float()[place]
    return values * scales.repeat_interleave(width, 1)


def decoded_e2m1(data: Tensor) -> Tensor:
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return table[codes.int()]
