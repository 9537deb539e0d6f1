"""The checksums of many tensors in one pass over their memory; defined in `model/checksum.py`."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Int64
from torch import Tensor

# Words of a program; divides the period, so that a program's words share their factor.
_CHUNK = 1 << 15
_BLOCK = 2048


def fits(tensor: Tensor) -> bool:
    """Whether the kernel can read the tensor where it lies, as words of 8 bytes."""
    whole_words = tensor.nbytes % 8 == 0 and tensor.data_ptr() % 8 == 0
    return tensor.nbytes > 0 and whole_words and tensor.is_contiguous()


def sums(
    tensors: Sequence[Tensor], period: int, repeat: int, mix: int
) -> Int64[Tensor, " tensors"]:
    """One sum per tensor, on their device, without waiting for it.

    Args:
        tensors: each `fits`.
        period, repeat, mix: the constants of the definition; repeat and mix as signed numbers.
    """
    lengths = np.array([tensor.nbytes for tensor in tensors])
    chunks = -(-lengths // (8 * _CHUNK))
    owner = np.repeat(np.arange(len(tensors)), chunks)
    # Of each program: its place in its tensor, counted in chunks.
    number = np.arange(len(owner)) - np.repeat(chunks.cumsum() - chunks, chunks)
    addresses = np.array([tensor.data_ptr() for tensor in tensors])[owner] + 8 * _CHUNK * number
    words = np.minimum(_CHUNK, lengths[owner] // 8 - _CHUNK * number)
    periods, first = np.divmod(_CHUNK * number, period)
    factors = _powers(repeat, int(periods.max()) + 1)[periods]
    table = torch.from_numpy(np.stack([addresses, words, first, factors, owner]))
    table = table.to(tensors[0].device)
    partial = torch.empty(len(owner), dtype=torch.int64, device=table.device)
    _sum_kernel[(len(owner),)](
        table, partial, len(owner), period, repeat, mix, _CHUNK, _BLOCK, num_warps=4
    )
    totals = torch.from_numpy(lengths).to(table.device)
    # Integers add up in any order.
    return totals.index_add_(0, table[4], partial)


def _powers(base: int, count: int) -> np.ndarray:
    """base^0, base^1, ... modulo 2^64, as signed numbers."""
    powers = np.full(count, base, dtype=np.int64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


@triton.jit
def _key(place, repeat, mix):
    """An odd number without a pattern for each place."""
    x = place * repeat
    x = (x ^ (x >> 31)) * mix
    return (x ^ (x >> 29)) | 1


@triton.jit(do_not_specialize=["programs"])
def _sum_kernel(
    table,
    partial,
    programs,
    period,
    repeat,
    mix,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    words = tl.load(table + program).to(tl.pointer_type(tl.int64))
    count = tl.load(table + programs + program)
    first = tl.load(table + 2 * programs + program)
    factor = tl.load(table + 3 * programs + program)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, CHUNK, BLOCK):
        own = start + tl.arange(0, BLOCK)
        word = tl.load(words + own, mask=own < count, other=0)
        place = first + own + 1
        mixed = word * _key(place, repeat, mix)
        mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _key(place + period, repeat, mix)
        # A word of 0 counts as 0, and so does one past the end.
        total += mixed
    tl.store(partial + program, tl.sum(total, axis=0) * factor)
