"""What `grpo_steps` needs beside a trainer and generators, in memory."""

from collections.abc import Sequence

import numpy as np

from fos_rl.types import Prompt, Rollout, Sample


class GivenPrompts:
    """The same prompts at every step."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts

    def batch(self, step: int) -> list[Prompt]:
        return self.prompts


class LengthRewards:
    """A response earns its number of tokens, or 0 each where nothing is to be learned."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def score(
        self, rollouts: Sequence[Rollout], answers: Sequence[str]
    ) -> tuple[np.ndarray, dict[str, float]]:
        return np.array([self.scale * len(r.response_ids) for r in rollouts]), {}


class MemoryJournal:
    """Keeps the samples of each step, in order."""

    has_layer_errors = True

    def __init__(self) -> None:
        self.samples: list[list[Sample]] = []

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        self.samples.append(list(samples))

    def trainer_log_probs(
        self, step: int, samples: Sequence[Sample], log_probs: Sequence[np.ndarray]
    ) -> None: ...

    def layer_errors(self, errors: dict[str, float]) -> None: ...
