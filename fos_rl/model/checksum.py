"""Checksums of weights, comparable between trainer, generator and devices, to the bit.

They are summed where the weights are: a model on a GPU is not carried to the CPU for it, and is
read once, by one kernel. torch.hash_tensor is an xor of all words, which does not see two that
changed places.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from fos_rl.model.hf import named_hf_weights

# The sum repeats its keys after so many words, each time multiplied once more.
_PERIOD = 1 << 20
_REPEAT = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
# As many words and keys as a CPU's cache holds; on a GPU fewer launches are faster.
_CPU_WORDS_AT_ONCE = 1 << 15


def checksum(tensor: Tensor) -> int:
    """A sum over the tensor's bytes in row-major order, modulo 2^64."""
    return int(_sum(tensor))


def named_checksums(decoder: nn.Module) -> dict[str, int]:
    """Checksum per Hugging Face weight name, of the weights the forward multiplies."""
    weights = {name: tensor.detach() for name, tensor in named_hf_weights(decoder)}
    return dict(zip(weights, _sums(list(weights.values())), strict=True))


def checksum_differences(ours: dict[str, int], theirs: dict[str, int]) -> list[str]:
    """Names whose checksums differ or that only one side has."""
    return sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )


@torch.no_grad()
def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """The checksums of tensors of one device, which is waited for once."""
    sums: list[Tensor] = []
    whole: list[int] = []
    if tensors[0].is_cuda:
        # Imports Triton, which a CPU may lack.
        from fos_rl.kernels import checksum_kernel

        whole = [i for i, tensor in enumerate(tensors) if checksum_kernel.fits(tensor)]
        constants = (_PERIOD, _signed(_REPEAT), _signed(_MIX))
        if whole:
            sums.append(checksum_kernel.sums([tensors[i] for i in whole], *constants))
    rest = sorted(set(range(len(tensors))) - set(whole))
    sums += [_sum(tensors[i]).view(1) for i in rest]
    values = dict(zip([*whole, *rest], torch.cat(sums).tolist(), strict=True))
    return [values[i] for i in range(len(tensors))]


@torch.no_grad()
def _sum(tensor: Tensor) -> Tensor:
    """Sum of every 8 bytes, mixed with numbers that depend on their place, plus the length.

    A product with an odd number is one to one modulo 2^64, and so is the xor with the own upper
    half (a logical shift: an arithmetic one would take x and ~x to the same word). So a single
    changed word always shows, and several cancel only by chance. Integers add up in any order.
    """
    octets = tensor.detach().contiguous().flatten().view(torch.uint8)
    # Filled on the device: a number copied there would wait for it.
    total = torch.full((), octets.numel(), dtype=torch.int64, device=octets.device)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        octets = nn.functional.pad(octets, (0, -octets.numel() % 8)).clone()
    words = octets.view(torch.int64)
    inner, outer = _keys(words.device)
    at_once = _PERIOD if words.is_cuda else _CPU_WORDS_AT_ONCE
    for start in range(0, words.numel(), at_once):
        block = words[start : start + at_once]
        own = slice(start % _PERIOD, start % _PERIOD + block.numel())
        mixed = block * inner[own]
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * outer[own]
        total += mixed.sum() * _signed(pow(_REPEAT, start // _PERIOD, 1 << 64))
    return total


@cache
def _keys(device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd numbers without a pattern, int64: an inner and an outer one for each word."""
    x = torch.arange(1, 2 * _PERIOD + 1, device=device) * _signed(_REPEAT)
    x = (x ^ (x >> 31)) * _signed(_MIX)
    inner, outer = ((x ^ (x >> 29)) | 1).chunk(2)
    return inner, outer


def _signed(value: int) -> int:
    """The int64 with these 64 bits."""
    return value - (1 << 64) if value >> 63 else value
