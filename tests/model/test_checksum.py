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


def test_order_and_length_count_but_chunks_do_not(monkeypatch) -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(tensor) != checksum(tensor[:-1])
    whole = checksum(tensor)
    monkeypatch.setattr("fos_rl.model.checksum._CHUNK", 7)
    assert checksum(tensor) == whole
    assert checksum(tensor.reshape(20, 50).T.contiguous().T) == whole


def test_differences_name_changed_and_missing() -> None:
    assert checksum_differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9, "d": 4}) == [
        "b",
        "c",
        "d",
    ]
