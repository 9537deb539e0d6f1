"""Checksums of weights, comparable between hosts and devices, to the bit."""

import torch
from torch import Tensor, nn

from fos_rl.model.hf import named_hf_weights

_CHUNK = 1 << 22


def checksum(tensor: Tensor) -> int:
    """A 64-bit sum over the tensor's bits, each weighted by its position.

    Integer arithmetic modulo 2^64, so the order of summation and the device do not matter; the odd
    position-dependent factor makes a swap of two unequal elements visible.
    """
    bits = tensor.detach().contiguous().flatten()
    bits = bits.view(torch.int32 if bits.element_size() == 4 else torch.int16)
    total = 0
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(start, start + chunk.numel(), device=bits.device)
        # An odd multiplier is invertible modulo 2^64: no single change can cancel.
        factor = position * -7046029254386353131 | 1
        total += int(((chunk + 65537) * factor).sum())
    return total % (1 << 64)


def named_checksums(decoder: nn.Module) -> dict[str, int]:
    """Checksum per Hugging Face weight name, of the weights the forward multiplies."""
    return {name: checksum(tensor) for name, tensor in named_hf_weights(decoder)}


def checksum_differences(ours: dict[str, int], theirs: dict[str, int]) -> list[str]:
    """Names whose checksums differ or that only one side has."""
    return sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
