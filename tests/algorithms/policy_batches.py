"""Batches of response tokens for tests of losses and corrections, and plain loops over them."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from fos_rl.algorithms.aggregation import token_weights
from fos_rl.algorithms.corrections import CorrectionFactors
from fos_rl.algorithms.losses import PolicyTokens

LENGTHS = [3, 1, 5, 2]
# The first sequence's second token and the whole of the second sequence do not count.
UNCOUNTED = [1, 3]
MAX_NEW_TOKENS = 8


def policy_tokens(
    *, spread: float = 0.4, aggregation: str = "sequence_mean", uncounted: bool = False
) -> PolicyTokens:
    """Log-ratios of that standard deviation, advantages of both signs, no correction."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(sum(LENGTHS), generator=generator) * 4
    new = old + spread * torch.randn(sum(LENGTHS), generator=generator)
    advantages = torch.tensor([0.7, -1.1, 1.3, -0.4]).repeat_interleave(torch.tensor(LENGTHS))
    mask = np.ones(sum(LENGTHS), dtype=bool)
    if uncounted:
        mask[UNCOUNTED] = False
        old[UNCOUNTED] = torch.tensor([math.nan, -math.inf])
    masks = np.split(mask, np.cumsum(LENGTHS)[:-1])
    weights = token_weights(masks, aggregation=aggregation, max_new_tokens=MAX_NEW_TOKENS)
    return PolicyTokens(
        log_probs=new,
        old_log_probs=old,
        advantages=advantages,
        weights=torch.from_numpy(np.concatenate(weights)),
        correction=CorrectionFactors(weights=torch.ones(sum(LENGTHS))),
        lengths=LENGTHS,
    )


def subset(tokens: PolicyTokens, sequences: list[int]) -> PolicyTokens:
    """A micro-batch of some of the sequences."""

    def of(values: torch.Tensor) -> torch.Tensor:
        parts = values.split(list(tokens.lengths))
        return torch.cat([parts[i] for i in sequences])

    return replace(
        tokens,
        log_probs=of(tokens.log_probs),
        old_log_probs=of(tokens.old_log_probs),
        advantages=of(tokens.advantages),
        weights=of(tokens.weights),
        correction=CorrectionFactors(weights=of(tokens.correction.weights)),
        lengths=[tokens.lengths[i] for i in sequences],
    )


def sequences(tokens: PolicyTokens) -> Iterator[list[int]]:
    """The counted tokens of each sequence, by index; sequences without any are left out."""
    start = 0
    for length in tokens.lengths:
        counted = [t for t in range(start, start + length) if tokens.weights[t] != 0]
        if counted:
            yield counted
        start += length


def aggregate(losses: dict[int, float], tokens: PolicyTokens, aggregation: str) -> float:
    """The loss of the batch from its tokens' losses, by the definition of the aggregation."""
    rows = [[losses[t] for t in row] for row in sequences(tokens)]
    return {
        "sequence_mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "token_mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "sequence_sum": sum(map(sum, rows)) / len(rows),
        "constant": sum(map(sum, rows)) / (len(rows) * MAX_NEW_TOKENS),
    }[aggregation]
