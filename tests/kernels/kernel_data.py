"""Inputs that reach every path of the kernels, and launches of compiled kernels on numpy."""

import struct

import numpy as np
import torch
from torch import Tensor

from tests.kernels.ptx_machine import Machine

KINDS = (
    "normal", "heavy", "half_zeros", "zeros", "ties", "wide", "wide_blocks", "ternary", "one_hot",
    "constant", "nan", "inf", "tiny", "huge", "subnormal", "small", "negative_zero",
    "near_tie",
)  # fmt: skip
_GRID = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
# Beside an amax of 8, where map-to-4 (mae, bound 448) is better by one ulp of the errors.
_NEAR_TIE = (
    -0.71875, 0.08544921875, 0.205078125, 0.5859375, -0.36328125, 0.421875, -0.1787109375,
    -1.0078125, -1.3125, -0.050537109375, 2.046875, -2.8125, 1.1953125, 0.41015625,
    -0.04736328125, 1.296875,
)  # fmt: skip


def make(
    kind: str, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """A matrix of a kind, on the generator's device. Both wide kinds span many powers of ten."""
    device = generator.device
    options = {"device": device, "generator": generator}

    def normal() -> Tensor:
        return torch.randn(shape, **options)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, **options)

    rows, cols = shape
    match kind:
        case "heavy":
            x = normal() / (normal().abs() + 1e-3)
        case "half_zeros":
            x = normal() * (uniform(*shape) < 0.5)
        case "zeros":
            x = torch.zeros(shape, device=device)
        case "ties":
            grid = torch.tensor(_GRID, device=device)
            power = 2.0 ** torch.randint(-4, 4, (rows, 1), **options)
            x = grid[torch.randint(0, len(_GRID), shape, **options)] * normal().sign() * power
        case "wide":
            x = normal() * 10.0 ** (uniform(*shape) * 12 - 6)
        case "wide_blocks":
            x = normal() * (10.0 ** (uniform(rows, cols // 16) * 8 - 6)).repeat_interleave(16, 1)
        case "ternary":
            x = torch.randint(-1, 2, shape, **options).float()
        case "one_hot":
            x = normal() * (uniform(*shape) < 0.06)
        case "constant":
            x = torch.full(shape, 1.5, device=device)
        case "nan" | "inf":
            x = normal()
            x[rows // 2, cols // 3] = float(kind)
        case "tiny":
            x = normal() * 1e-38
        case "huge":
            x = (normal() * 1e38).clamp(-3.3e38, 3.3e38)
        case "subnormal":
            x = normal() * (1e-44 if dtype == torch.float32 else 1e-39)
        case "small":
            x = normal() * 1e-17
        case "negative_zero":
            x = -torch.zeros(shape, device=device)
            x[:, ::3] = normal()[:, ::3] * 1e-3
            x[:, 1::5] = 1.0
        case "near_tie":
            # Zeros in the first half of a 16x16 block, which both encodings decode equally.
            x = torch.tensor(_NEAR_TIE, device=device).repeat(rows, cols // 16)
            x[torch.arange(rows, device=device) % 16 < 8] = 0.0
            x[0, 0] = 8.0
        case _:
            x = normal()
    return x.to(dtype)


def tensor_argument(address: int, *shape: int) -> bytes:
    """A tensor as the kernels take it: its address, then its sizes."""
    return struct.pack(f"<Q{len(shape)}i", address, *shape).ljust(64, b"\0")


def run_quantizer(
    text: str, layout: str, threads: int, share: int, x: Tensor, amax: Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Run a quantizing kernel's PTX on a stack of matrices: codes, scale bytes, amaxes and operand
    bits.

    share is that of ``small_quantize_kernel``'s kernels; others have one of no partial amaxes.
    """
    stack, rows, cols = x.shape
    out_shape = (stack, cols if layout.startswith("quantize_column") else rows, -1)
    rows *= stack
    grid = {
        "quantize_rows": (rows, 1),
        "quantize_blocks": (-(-rows * cols // (16 * threads)), 1),
        "quantize_short_rows": (-(-rows // max(share, 1)), 1),
        "quantize_split_rows": (rows * share, 1),
    }.get(layout, (2, stack))
    machine = Machine(text, grid, threads)
    word = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    unwritten = np.full(rows * cols * 2, 0xEE, np.uint8)
    x_at = machine.allocate(x.contiguous().view(word).numpy())
    codes_at = machine.allocate(unwritten[: rows * cols // 2])
    scales_at = machine.allocate(unwritten[: rows * cols // 16])
    operand_at = machine.allocate(unwritten)
    amax_at = machine.allocate(amax.numpy())
    num_numbers = {"quantize_rows": 0, "quantize_short_rows": 1, "quantize_split_rows": 1}
    numbers = (share, amax.numel())[: num_numbers.get(layout, 2)]
    machine.pass_arguments(
        tensor_argument(x_at, rows, cols),
        *(struct.pack("<q", at) for at in (amax_at, codes_at, scales_at, operand_at)),
        *(struct.pack("<i", number) for number in numbers),
    )
    machine.run()
    return (
        machine.read(codes_at, np.uint8, rows * cols // 2).reshape(out_shape),
        machine.read(scales_at, np.uint8, rows * cols // 16).reshape(out_shape),
        machine.read(amax_at, np.float32, amax.numel()).reshape(amax.shape),
        machine.read(operand_at, np.uint16, rows * cols).reshape(out_shape),
    )


def run_group_amax(text: str, threads: int, x: Tensor, group: Tensor, groups: int) -> np.ndarray:
    """Run the PTX of the amaxes of groups of rows."""
    rows, cols = x.shape
    machine = Machine(text, (-(-rows * 32 // threads), 1), threads)
    word = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    x_at = machine.allocate(x.view(word).numpy())
    group_at = machine.allocate(group.numpy())
    amax_at = machine.allocate(np.zeros(groups + 1, np.float32))
    addresses = (struct.pack("<q", at) for at in (group_at, amax_at))
    machine.pass_arguments(tensor_argument(x_at, rows, cols), *addresses)
    machine.run()
    return machine.read(amax_at, np.float32, groups)


def run_decoder(
    text: str, codes: Tensor, scale: Tensor, amax: Tensor, out_bytes: int
) -> np.ndarray:
    """Run a decoding kernel's PTX on a matrix: the bytes it writes."""
    rows, half = codes.shape
    machine = Machine(text, (1, 1), 256)
    out = np.full(rows * half * 2 * out_bytes, 0xEE, np.uint8)
    places = [
        machine.allocate(codes.contiguous().numpy()),
        machine.allocate(scale.contiguous().view(torch.uint8).numpy()),
        machine.allocate(amax.numpy()),
        machine.allocate(out),
    ]
    machine.pass_arguments(
        tensor_argument(places[0], rows, half),
        tensor_argument(places[1], rows, half // 8),
        tensor_argument(places[2], amax.numel()),
        tensor_argument(places[3], rows, half * 2),
        struct.pack("<i", rows // amax.numel()),
    )
    machine.run()
    return machine.read(places[3], np.uint8, len(out))
