"""The data that travels between the six steps of the loop, and the protocols of its actors.

Plain lists and numpy arrays: the driver never holds a tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One tokenized question. `answer` is the gold answer the verifier compares with."""

    id: str
    token_ids: list[int]
    text: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Responses per prompt, and how they are sampled; temperature 0 is greedy."""

    num_samples: int
    temperature: float
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled response, token in, token out.

    Example: prompt_ids [5, 9], response_ids [7, 2], log_probs [-0.5, -1.2] says that token 7 was
    sampled after [5, 9] with log-prob -0.5 at the sampling temperature, and 2 (end of text) after
    [5, 9, 7] with -1.2.
    """

    prompt_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    policy_version: int
    text: str
    experts: np.ndarray | None = field(default=None, compare=False)
    """Of a mixture of experts: int16 [tokens - 1, expert layers, k], what the generator's routers
    chose for every token but the last, which was never fed back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A rollout with what it earned.

    `zero_variance`: all rewards of its group are equal, so it carries no gradient. `masked`: left
    out of the loss, but counted in the metrics.
    """

    rollout: Rollout
    answer: str
    group: int
    reward: float
    advantage: float
    zero_variance: bool
    masked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one trainer step learns from: parallel arrays, one entry per sequence.

    Example: token_ids[i] = [5, 9, 7, 2] with prompt_lengths[i] = 2 has two response tokens, 7 and
    2; generator_log_probs[i] = [-0.5, -1.2] belongs to them, advantages[i] to both.
    """

    token_ids: list[np.ndarray]
    prompt_lengths: list[int]
    generator_log_probs: list[np.ndarray]
    advantages: np.ndarray
    experts: list[np.ndarray] | None = None
    """Of a mixture of experts, each sequence's `Rollout.experts`."""

    @property
    def num_sequences(self) -> int:
        """Sequences of the batch."""
        return len(self.token_ids)

    def first(self) -> "TrainBatch":
        """The batch of the first sequence alone."""
        return TrainBatch(
            token_ids=self.token_ids[:1],
            prompt_lengths=self.prompt_lengths[:1],
            generator_log_probs=self.generator_log_probs[:1],
            advantages=self.advantages[:1],
            experts=None if self.experts is None else self.experts[:1],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some bf16 weights in one piece, by Hugging Face name: their bits, one tensor after another.

    One piece leaves a GPU, travels and enters the next in a copy each. Every copy waits for the
    GPU, and a mixture of experts has hundreds of tensors.
    """

    shapes: dict[str, tuple[int, ...]]
    bits: np.ndarray
    """int16, since numpy has no bf16."""


class SharedWeights(Protocol):
    """A source's weights where they lie, as `fos_rl.model.shared_weights` opens them."""

    def open(self, device: Any) -> Mapping[str, Any] | None:
        """The parameters by name, in the device's memory; None where they cannot be read there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a trainer step returns; log_probs are those before the update, one array per
    sequence."""

    policy_version: int
    metrics: dict[str, float]
    log_probs: list[np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of metrics.jsonl. A key with nothing to measure is absent."""

    step: int
    metrics: dict[str, float]


class PromptStream(Protocol):
    """Where the loop takes its prompts from."""

    def batch(self, step: int) -> list[Prompt]:
        """The step's prompts, the same in every run of one seed."""
        ...


class Sampler(Protocol):
    """Samples responses; keeps the weights of one policy version."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        sampling: Sampling | None = None,
        first_index: int = 0,
    ) -> list[list[Rollout]]:
        """A group of rollouts per prompt, in the prompts' order; by default as the run samples.

        Args:
            seed: of the whole batch; a prompt's own depends on it and on the prompt's place.
            first_index: the first prompt's place, where other generators sample those before it.
        """
        ...


class WeightSource(Protocol):
    """Whose weights a sync carries."""

    def weights_version(self) -> int:
        """The policy version of the weights."""
        ...

    def weight_checksums(self) -> dict[str, int]:
        """One checksum per tensor, by Hugging Face name."""
        ...

    def shared_weights(self) -> SharedWeights | None:
        """The weights for whoever can read them where they lie; None where nobody can."""
        ...

    def export_weights(self) -> Iterator[WeightBucket]:
        """The bf16 weights by Hugging Face name, in buckets."""
        ...


class Generator(Sampler, Protocol):
    """A sampler whose weights are synced, and that can look at its own tokens again."""

    def contract(self) -> dict[str, object]:
        """What its spec says of log-probs; see `ModelSpec.contract`."""
        ...

    def rescore(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Log-probs of the responses' tokens, computed once more in another batch."""
        ...

    def peak_memory_gib(self) -> float:
        """The most memory held so far."""
        ...

    def release_memory(self) -> None:
        """Give back what only sampling needs, where the trainer shares the GPU."""
        ...

    def heartbeat(self) -> int:
        """Engine steps so far; answers while responses are generated."""
        ...

    def begin_weight_sync(self) -> None:
        """Nothing is sampled until `finish_weight_sync`."""
        ...

    def load_shared_weights(self, weights: SharedWeights) -> bool:
        """Copy all of them; False where they cannot be read from here, so buckets must come."""
        ...

    def load_weight_bucket(self, bucket: WeightBucket) -> None:
        """Copy a bucket's weights into the decoder, by name."""
        ...

    def finish_weight_sync(self, policy_version: int, checksums: dict[str, int]) -> None:
        """Compare every tensor; only then are the new weights sampled with."""
        ...


class Verifier(Protocol):
    """What gives every response its reward."""

    def score(
        self, rollouts: Sequence[Rollout], answers: Sequence[str]
    ) -> tuple[np.ndarray, dict[str, float]]:
        """One reward a rollout, in order, whatever fails; and counts of what failed."""
        ...


class Trainer(WeightSource, Protocol):
    """Owns the fp32 masters and the optimizer."""

    def contract(self) -> dict[str, object]:
        """What its spec says of log-probs; see `ModelSpec.contract`."""
        ...

    def step(self, batch: TrainBatch) -> StepResult:
        """Measure the mismatch, then update the weights."""
        ...

    def measure(self, batch: TrainBatch) -> StepResult:
        """The mismatch of a batch that nothing is learned from."""
        ...

    def layer_errors(self, batch: TrainBatch) -> dict[str, float]:
        """Relative error of each layer's quantized products on the batch's first tokens."""
        ...

    def release_memory(self) -> None:
        """Give back what only training needs, where the generator shares the GPU."""
        ...

    def save_model(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        ...

    def save_checkpoint(self, folder: Path, settings: dict[str, object]) -> None:
        """Write all that a bit-equal continuation needs, with the run's settings."""
        ...

    def load_checkpoint(self, folder: Path) -> None:
        """Continue from what `save_checkpoint` wrote."""
        ...


class Journal(Protocol):
    """Keeps what a run has earned as soon as it exists."""

    def rollouts(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep the step's samples, before they are trained on."""
        ...

    def trainer_log_probs(
        self, step: int, samples: Sequence[Sample], log_probs: Sequence[np.ndarray]
    ) -> None:
        """Keep the trainer's log-probs of the samples, in their order."""
        ...

    @property
    def has_layer_errors(self) -> bool:
        """They are measured once a run."""
        ...

    def layer_errors(self, errors: dict[str, float]) -> None:
        """Keep the layers' errors, once per run."""
        ...
