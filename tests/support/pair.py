"""Trainer and generator in one process, for tests of what they compute: real vLLM, no Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fos_rl.config import (
    AlgorithmConfig,
    GeneratorConfig,
    RolloutConfig,
    TrainerConfig,
)
from fos_rl.generator.engine import VllmGenerator
from fos_rl.model.hf import read_architecture
from fos_rl.model.sync import sync
from fos_rl.model.tiny import write_tiny_model
from fos_rl.spec import Bf16, Consistency, Family, ModelSpec, Precision
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import Prompt, Rollout, TrainBatch


class SmallBuckets:
    """A trainer as the source of a sync, in buckets of 100 KB."""

    def __init__(self, trainer: GrpoTrainer) -> None:
        self.weights_version = trainer.weights_version
        self.weight_checksums = trainer.weight_checksums
        self.shared_weights = lambda: None
        self.export_weights = lambda: trainer.export_weights(bucket_bytes=100_000)


class Pair:
    """A trainer and a generator of one tiny random model, synced on request."""

    def __init__(
        self,
        folder: Path,
        precision: Precision,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        engine: GeneratorConfig | None = None,
        consistency: Consistency = "fast",
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        spec = ModelSpec(
            architecture=read_architecture(folder), precision=precision, consistency=consistency
        )
        engine = engine or GeneratorConfig(kv_cache_gib=0.2, max_num_seqs=16)
        self.generator = VllmGenerator(spec, folder, rollout, engine, device)
        self.trainer = GrpoTrainer(spec, folder, rollout, algorithm, trainer, torch.device(device))

    def set_temperature(self, temperature: float) -> None:
        for actor in (self.generator, self.trainer):
            actor.rollout = actor.rollout.model_copy(update={"temperature": temperature})

    def sync(self) -> None:
        """Many small buckets, as a large model's."""
        sync(SmallBuckets(self.trainer), [self.generator])

    def generate(self, prompts: list[Prompt], seed: int = 0) -> list[Rollout]:
        groups = self.generator.generate(prompts, seed)
        return [rollout for group in groups for rollout in group]

    def close(self) -> None:
        self.generator.close()


@contextmanager
def tiny_pair(
    family: Family,
    folder: Path,
    *,
    precision: Precision | None = None,
    rollout: RolloutConfig | None = None,
    algorithm: AlgorithmConfig | None = None,
    trainer: TrainerConfig | None = None,
    engine: GeneratorConfig | None = None,
    consistency: Consistency = "fast",
) -> Iterator[Pair]:
    pair = Pair(
        write_tiny_model(family, folder, seed=0),
        precision or Bf16(compute_dtype="float32"),
        rollout or RolloutConfig(group_size=4, max_new_tokens=32, max_prompt_tokens=512),
        algorithm or AlgorithmConfig(),
        trainer or TrainerConfig(lr=1e-3, microbatch_tokens=1024),
        engine,
        consistency,
    )
    try:
        yield pair
    finally:
        pair.close()


def random_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Prompts of different lengths, some sharing a prefix of more than two cache blocks."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 256, 300).tolist()
    return [
        Prompt(
            id=str(i),
            token_ids=(shared if i % 2 else []) + rng.integers(0, 256, 3 + i).tolist(),
            text="",
            answer="",
        )
        for i in range(count)
    ]


def batch_of(rollouts: list[Rollout], advantages: np.ndarray | None = None) -> TrainBatch:
    """A batch of everything, with alternating advantages unless given."""
    if advantages is None:
        advantages = np.where(np.arange(len(rollouts)) % 2, -1.0, 1.0)
    return TrainBatch(
        token_ids=[np.array(r.prompt_ids + r.response_ids) for r in rollouts],
        prompt_lengths=[len(r.prompt_ids) for r in rollouts],
        generator_log_probs=[np.array(r.log_probs, dtype=np.float32) for r in rollouts],
        advantages=advantages.astype(np.float32),
    )
