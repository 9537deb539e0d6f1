"""Checksums of weights, comparable between hosts and devices, to the bit."""

import zlib

import torch
from torch import Tensor, nn

from fos_rl.model.hf import named_hf_weights


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the tensor's bytes in row-major order; about 2 GB/s, on the CPU."""
    return zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().data)


def named_checksums(decoder: nn.Module) -> dict[str, int]:
    """Checksum per Hugging Face weight name, of the weights the forward multiplies."""
    return {name: checksum(tensor) for name, tensor in named_hf_weights(decoder)}


def checksum_differences(ours: dict[str, int], theirs: dict[str, int]) -> list[str]:
    """Names whose checksums differ or that only one side has."""
    return sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
