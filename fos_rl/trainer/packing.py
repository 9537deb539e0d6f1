"""Sequences of different lengths, packed into flat micro-batches without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from fos_rl.model.router_replay import UNKNOWN
from fos_rl.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed sequences, flat.

    Example: sequences [5, 9, 7, 2] (prompt of 2) and [5, 3] (prompt of 1) give
    token_ids [5 9 7 2 5 3], positions [0 1 2 3 0 1], lengths [4, 2]; predicted_from [1 2 4]
    are the places whose hidden state predicts the response tokens, targets [7 2 3].
    """

    sequences: list[int]
    """Index of each packed sequence in the batch."""
    token_ids: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    lengths: list[int]
    predicted_from: Int[Tensor, " responses"]
    targets: Int[Tensor, " responses"]
    response_lengths: list[int]
    generator_log_probs: Float[Tensor, " responses"]
    advantages: Float[Tensor, " responses"]
    experts: Int[Tensor, "tokens layers k"] | None = None
    """The generator's, UNKNOWN for each sequence's last token; None where none are recorded."""


def pack(
    batch: TrainBatch, sequences: Sequence[int], max_tokens: int, device: torch.device
) -> list[MicroBatch]:
    """The chosen sequences in order, in micro-batches of at most `max_tokens` tokens."""
    lengths = [len(batch.token_ids[i]) for i in sequences]
    groups = group_by_tokens(lengths, max_tokens)
    return [pack_together(batch, [sequences[i] for i in group], device) for group in groups]


def group_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Sequences in order, in groups of at most `max_tokens` tokens; a longer one is alone.

    Example: lengths [4, 3, 5, 20] and 8 tokens make groups [0, 1], [2] and [3].
    """
    groups: list[list[int]] = []
    used = max_tokens
    for index, length in enumerate(lengths):
        if used + length > max_tokens:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += length
    return groups


def pack_together(batch: TrainBatch, group: list[int], device: torch.device) -> MicroBatch:
    """One micro-batch of the chosen sequences, which may repeat."""
    lengths = [len(batch.token_ids[i]) for i in group]
    prompts = [batch.prompt_lengths[i] for i in group]
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    responses = [n - p for n, p in zip(lengths, prompts, strict=True)]

    def to_device(parts: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, dtype)

    return MicroBatch(
        sequences=group,
        token_ids=to_device([batch.token_ids[i] for i in group], torch.int64),
        positions=to_device([np.arange(n) for n in lengths], torch.int64),
        lengths=lengths,
        predicted_from=to_device(
            [
                np.arange(start + p - 1, start + n - 1)
                for start, p, n in zip(starts[:-1], prompts, lengths, strict=True)
            ],
            torch.int64,
        ),
        targets=to_device(
            [batch.token_ids[i][p:] for i, p in zip(group, prompts, strict=True)], torch.int64
        ),
        response_lengths=responses,
        generator_log_probs=to_device([batch.generator_log_probs[i] for i in group], torch.float32),
        advantages=to_device(
            [np.full(n, batch.advantages[i]) for i, n in zip(group, responses, strict=True)],
            torch.float32,
        ),
        experts=None
        if batch.experts is None
        else to_device([_with_last_unknown(batch.experts[i]) for i in group], torch.int64),
    )


def _with_last_unknown(
    experts: Integer[np.ndarray, "before_last layers k"],
) -> Integer[np.ndarray, "tokens layers k"]:
    return np.pad(experts, ((0, 1), (0, 0), (0, 0)), constant_values=UNKNOWN)
