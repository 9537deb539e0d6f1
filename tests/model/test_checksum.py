"""Checksums change with any bit and any swap, and name what differs."""

import torch

from fos_rl.model.checksum import checksum, checksum_differences


def test_every_single_bit_counts() -> None:
    tensor = torch.randn(40, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    seen = {checksum(tensor)}
    for i in range(40):
        for bit in range(16):
            changed = tensor.clone()
            mask = (1 << bit) - (1 << 16 if bit == 15 else 0)
            changed.view(torch.int16)[i] ^= mask
            seen.add(checksum(changed))
    assert len(seen) == 1 + 40 * 16


def test_order_length_and_signs_count() -> None:
    tensor = torch.arange(1000, dtype=torch.float32) + 1
    seen = [tensor, tensor.flip(0), tensor[:-1], tensor.roll(1)]
    assert len({checksum(t) for t in seen}) == len(seen)
    assert checksum(tensor) != checksum(-tensor)


def test_layout_does_not_count() -> None:
    tensor = torch.arange(1000, dtype=torch.float32).reshape(20, 50)
    assert checksum(tensor.T.contiguous().T) == checksum(tensor) == checksum(tensor.flatten())
    assert checksum(torch.arange(3, dtype=torch.uint8)) != checksum(torch.zeros(3).byte())


def test_differences_name_changed_and_missing() -> None:
    assert checksum_differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9, "d": 4}) == [
        "b",
        "c",
        "d",
    ]
