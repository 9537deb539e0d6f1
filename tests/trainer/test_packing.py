"""Packing against the docstring's worked example and a brute-force reading."""

import numpy as np
import torch

from fos_rl.trainer.packing import group_by_tokens, pack, pack_together
from fos_rl.types import TrainBatch

CPU = torch.device("cpu")


def _batch(lengths: list[tuple[int, int]]) -> TrainBatch:
    rng = np.random.default_rng(0)
    return TrainBatch(
        token_ids=[rng.integers(0, 50, prompt + response) for prompt, response in lengths],
        prompt_lengths=[prompt for prompt, _ in lengths],
        generator_log_probs=[-rng.random(response).astype(np.float32) for _, response in lengths],
        advantages=rng.standard_normal(len(lengths)).astype(np.float32),
    )


def test_worked_example() -> None:
    batch = TrainBatch(
        token_ids=[np.array([5, 9, 7, 2]), np.array([5, 3])],
        prompt_lengths=[2, 1],
        generator_log_probs=[np.float32([-0.5, -1.2]), np.float32([-0.1])],
        advantages=np.float32([1.0, -2.0]),
    )
    [packed] = pack(batch, [0, 1], 100, CPU)
    assert packed.token_ids.tolist() == [5, 9, 7, 2, 5, 3]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.lengths == [4, 2]
    assert packed.predicted_from.tolist() == [1, 2, 4]
    assert packed.targets.tolist() == [7, 2, 3]
    assert packed.response_lengths == [2, 1]
    assert packed.advantages.tolist() == [1.0, 1.0, -2.0]
    torch.testing.assert_close(packed.generator_log_probs, torch.tensor([-0.5, -1.2, -0.1]))


def test_every_sequence_once_and_no_microbatch_too_long() -> None:
    lengths = [(3, 4), (10, 20), (1, 1), (2, 5), (8, 8), (40, 60)]
    batch = _batch(lengths)
    order = [4, 0, 5, 2, 1, 3]
    packed = pack(batch, order, 32, CPU)
    assert [i for m in packed for i in m.sequences] == order
    for m in packed:
        assert sum(m.lengths) == m.token_ids.numel()
        assert sum(m.lengths) <= 32 or len(m.sequences) == 1
        for i, ids in zip(m.sequences, m.token_ids.split(m.lengths), strict=True):
            assert ids.tolist() == batch.token_ids[i].tolist()
        # The token after each predicting place is its target.
        assert torch.equal(m.token_ids[m.predicted_from + 1], m.targets)


def test_grouping_example() -> None:
    assert group_by_tokens([4, 3, 5, 20], 8) == [[0, 1], [2], [3]]
    assert group_by_tokens([], 8) == []


def test_a_sequence_may_be_packed_beside_its_copy() -> None:
    batch = _batch([(2, 3), (4, 2)])
    packed = pack_together(batch, [1, 1], CPU)
    assert packed.lengths == [6, 6]
    assert packed.token_ids.tolist() == [*batch.token_ids[1], *batch.token_ids[1]]
    assert packed.response_lengths == [2, 2]
