"""What a log-prob differs by when nothing differs but the batch it is computed in.

The same weights on the same host give a token another log-prob in another batch, since the shapes
of the matrix products change the order of their additions. Without that floor beside it, a
mismatch between two hosts says nothing.
"""

from collections.abc import Sequence

import numpy as np

# A forward is about a third of a training step's work, so a twentieth of the tokens, scored once
# more, costs about 2 % of it.
TOKEN_FRACTION = 0.05


def floor_batches(
    lengths: Sequence[int], groups: Sequence[Sequence[int]], seed: int
) -> list[list[int]]:
    """For each sampled sequence, the batch of its second scoring: itself first, then its company.

    A sequence that was packed with others is scored alone, one that was alone beside a copy of
    itself, so that the batch is another one either way. Sequences are drawn at random until
    TOKEN_FRACTION of the tokens is reached, and at least one.

    Example: lengths [30, 30, 40] in groups [0, 1] and [2]: a draw of sequence 1 gives [[1]], a draw
    of sequence 2 gives [[2, 2]].

    Args:
        lengths: tokens of each sequence, prompt included.
        groups: which sequences were packed together for the first scoring.
        seed: the draw is a function of it and of the number of sequences.
    """
    alone = {group[0] for group in groups if len(group) == 1}
    budget = TOKEN_FRACTION * sum(lengths)
    batches: list[list[int]] = []
    for index in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        batch = [index, index] if index in alone else [index]
        budget -= len(batch) * lengths[index]
        if budget < 0 and batches:
            break
        batches.append(batch)
    return batches
