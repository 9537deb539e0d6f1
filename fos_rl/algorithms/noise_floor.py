"""What a log-prob differs by when nothing differs but the batch it is computed in.

The same weights in the same program give a token another log-prob in another batch: the shapes of
the matrix products change the order of their additions. The generator sampled each token in a
decode step; it scores some of them once more by its prefill. Without that floor beside it, a
mismatch between trainer and generator says nothing.
"""

from collections.abc import Sequence

import numpy as np

from fos_rl.algorithms.mismatch import mismatch_metrics, over_floor
from fos_rl.types import Generator, Sample

TOKEN_FRACTION = 0.05
"""Share of a step's tokens: a prefill of so few takes far less time than a step."""
MIN_TOKENS = 1500
"""A prefill of fewer rows may show no noise at all, probably since it meets the kernels of a decode
step: on an H200 fewer than 300 tokens showed a floor of 0 in every step (experiments/four_bit_rl),
where 1,500 tokens of a model of the same shape showed all of its mismatch
(experiments/deepmath)."""


def noise_floor(generator: Generator, samples: Sequence[Sample], seed: int) -> dict[str, float]:
    """`mismatch/floor_*`: the generator's prefill against its own decode steps, on some samples.

    Call it while the generator still has the weights that the samples were drawn with; any of a
    run's generators will do, since all have the same.
    """
    rollouts = [samples[i].rollout for i in floor_sample(token_counts(samples), seed)]
    return mismatch_metrics(
        generator.rescore(rollouts),
        [np.array(r.log_probs, dtype=np.float32) for r in rollouts],
        prefix="mismatch/floor_",
    )


def with_floor(metrics: dict[str, float], floor: dict[str, float]) -> dict[str, float]:
    """A step's metrics with the floor's, and `mismatch/over_floor`: how many times the floor."""
    both = metrics | floor
    return both | over_floor(both)


def token_counts(samples: Sequence[Sample]) -> list[int]:
    """Tokens of each sample, prompt included."""
    return [len(s.rollout.prompt_ids) + len(s.rollout.response_ids) for s in samples]


def floor_sample(lengths: Sequence[int], seed: int) -> list[int]:
    """Sequences drawn at random until TOKEN_FRACTION of the tokens, or MIN_TOKENS, is reached; at
    least one, and at most all.

    The draw is a function of the seed and the number of sequences.
    """
    budget = max(TOKEN_FRACTION * sum(lengths), MIN_TOKENS)
    chosen: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        budget -= lengths[index]
        if budget < 0 and chosen:
            break
        chosen.append(index)
    return chosen
