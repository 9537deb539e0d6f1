"""Checksums change with any bit and any swap, and name what differs."""

import torch

from fos_rl.model.checksum import _keys, checksum, checksum_differences


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


def test_two_flipped_signs_count() -> None:
    """The top bits of two words, which cancel in a sum that is only multiplied by odd keys."""
    tensor = torch.ones(4096, dtype=torch.bfloat16)
    seen = {checksum(tensor)}
    for first, second in ((3, 7), (3, 11), (7, 4095)):
        changed = tensor.clone()
        changed[[first, second]] *= -1
        seen.add(checksum(changed))
    assert len(seen) == 4


def test_a_product_and_its_complement_count() -> None:
    """Words whose products with the inner key are x and ~x, which an arithmetic shift merges."""
    inner, _ = _keys(torch.device("cpu"))
    inverse = pow(int(inner[0]), -1, 1 << 64)
    words = [(product * inverse) % (1 << 64) for product in (12345, ~12345)]
    first, second = (torch.tensor([w - (1 << 64) if w >> 63 else w]) for w in words)
    assert (first * inner[0] == ~(second * inner[0])).all()
    assert checksum(first) != checksum(second)


def test_words_far_apart_and_zeros_at_the_end_count() -> None:
    """Beyond 8 MiB the keys repeat; a length that is not a multiple of 8 bytes is padded with 0."""
    tensor = torch.zeros((9 << 20) + 1, dtype=torch.uint8)
    tensor[0] = 1
    moved = tensor.roll(8 << 20)
    seen = [tensor, moved, tensor[:-1], tensor[:-2], tensor[: 8 << 20], tensor[1:]]
    assert len({checksum(t) for t in seen}) == len(seen)


def test_layout_does_not_count() -> None:
    tensor = torch.arange(1000, dtype=torch.float32).reshape(20, 50)
    assert checksum(tensor.T.contiguous().T) == checksum(tensor) == checksum(tensor.flatten())
    assert checksum(torch.arange(3, dtype=torch.uint8)) != checksum(torch.zeros(3).byte())


def test_a_slice_at_any_offset_is_summed_like_its_copy() -> None:
    tensor = torch.arange(100, dtype=torch.bfloat16)
    for start in range(5):
        assert checksum(tensor[start : start + 50]) == checksum(tensor[start : start + 50].clone())


def test_differences_name_changed_and_missing() -> None:
    assert checksum_differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 9, "d": 4}) == [
        "b",
        "c",
        "d",
    ]
