"""Trainer and generator of a run in this process, to be examined; no Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fos_rl.config import RunConfig
from fos_rl.generator.engine import VllmGenerator
from fos_rl.model.sync import sync
from fos_rl.runtime.launch import Plan
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A trainer and a generator that holds its weights."""

    trainer: GrpoTrainer
    generator: VllmGenerator

    def sample(self, prompts: list[Prompt], seed: int) -> list[Rollout]:
        """Sync, then sample; all groups' rollouts in one list, in the prompts' order."""
        sync(self.trainer, [self.generator])
        groups = self.generator.generate(prompts, seed)
        return [rollout for group in groups for rollout in group]


@contextmanager
def open_pair(plan: Plan, config: RunConfig) -> Iterator[Pair]:
    """The run's trainer and generator, in eager mode: a captured graph would run no hook."""
    placement = plan.placement
    trainer = GrpoTrainer(
        plan.spec,
        plan.model_folder,
        config.rollout,
        config.algorithm,
        config.trainer,
        torch.device("cuda" if placement.trainer_gpus else "cpu"),
    )
    generator = VllmGenerator(
        plan.spec,
        plan.model_folder,
        config.rollout,
        config.generator.model_copy(update={"cuda_graphs": False}),
        "cuda" if placement.generator_gpus else "cpu",
    )
    try:
        yield Pair(trainer=trainer, generator=generator)
    finally:
        generator.close()
