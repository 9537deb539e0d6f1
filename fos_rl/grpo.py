"""The main path: one GRPO step is six verbs, in this order, on whatever trainer and generators it
is given; between collating and training the noise floor is measured, and once per run the layers'
errors. Around training, whoever shares a GPU gives its spare memory to the other."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fos_rl.algorithms.dealing import sample_groups
from fos_rl.algorithms.groups import collate, rollout_metrics, score_groups, trainable, unmasked
from fos_rl.algorithms.noise_floor import noise_floor, with_floor
from fos_rl.config import RunConfig
from fos_rl.model.sync import sync
from fos_rl.trainer.dead_model import at_step
from fos_rl.types import (
    Generator,
    Journal,
    PromptStream,
    Sample,
    StepRecord,
    Trainer,
    Verifier,
)


class NoLearningSignal(RuntimeError):
    """Raised when no group had reward variance for `algorithm.max_zero_variance_steps` steps."""


def grpo_steps(
    config: RunConfig,
    *,
    prompts: PromptStream,
    trainer: Trainer,
    generators: Sequence[Generator],
    rewards: Verifier,
    journal: Journal,
    first_step: int = 0,
) -> Iterator[StepRecord]:
    """Train, yielding a record per step. Weights are synced before the first rollout, too.

    Args:
        generators: at least one; they share each step's prompts, and how many they are changes no
            sample's seed. The noise floor is measured by the first.
    """
    sync(trainer, generators)
    steps_without_signal = 0
    for step in range(first_step, config.steps):
        times: dict[str, float] = {}
        with timed(times, "generate"):
            batch_prompts = prompts.batch(step)
            groups = sample_groups(generators, batch_prompts, config.seed * 1_000_003 + step)
        with timed(times, "reward"):
            samples, metrics = score_groups(batch_prompts, groups, rewards, config)
        journal.rollouts(step, samples)
        metrics |= rollout_metrics(samples)
        learnable = trainable(samples)
        steps_without_signal = 0 if learnable else steps_without_signal + 1
        # A step that nothing can be learned from is measured all the same.
        if scored := learnable or unmasked(samples):
            batch = collate(scored)
            with timed(times, "noise_floor"):
                floor = noise_floor(generators[0], scored, seed=step)
            for generator in generators:
                generator.release_memory()
            if not journal.has_layer_errors:
                journal.layer_errors(trainer.layer_errors(batch))
            with timed(times, "train"), at_step(step):
                result = trainer.step(batch) if learnable else trainer.measure(batch)
            trainer.release_memory()
            journal.trainer_log_probs(step, scored, result.log_probs)
            metrics |= with_floor(result.metrics, floor)
        if learnable:
            with timed(times, "sync"):
                sync(trainer, generators)
        metrics["memory/generator_peak_gib"] = max(g.peak_memory_gib() for g in generators)
        metrics |= phase_metrics(times, samples, scored)
        yield StepRecord(step=step, metrics=metrics)
        if steps_without_signal == config.algorithm.max_zero_variance_steps:
            raise NoLearningSignal(_explain_no_signal(steps_without_signal, metrics))


def _explain_no_signal(steps: int, metrics: dict[str, float]) -> str:
    return (
        f"no group had reward variance for {steps} steps in a row (reward/mean "
        f"{metrics['reward/mean']:.2f}): nothing can be learned. With reward 0 the task is too "
        "hard or the answers are not recognised (read rollouts/ in the run folder); with 1 it is "
        "too easy. Change data, rollout.group_size or rollout.max_new_tokens, or raise "
        "algorithm.max_zero_variance_steps"
    )


@contextmanager
def timed(times: dict[str, float], phase: str) -> Iterator[None]:
    """Record the wall-clock seconds of a phase."""
    start = time.perf_counter()
    yield
    times[phase] = time.perf_counter() - start


def phase_metrics(
    times: dict[str, float], sampled: Sequence[Sample], trained: Sequence[Sample]
) -> dict[str, float]:
    """Seconds per phase, and the generator's and trainer's tokens per second."""
    metrics = {f"time/{phase}_s": seconds for phase, seconds in times.items()}
    metrics["time/step_s"] = sum(times.values())
    response_tokens = sum(len(s.rollout.response_ids) for s in sampled)
    metrics["throughput/generate_tokens_per_s"] = response_tokens / times["generate"]
    if "train" in times:
        tokens = sum(len(s.rollout.prompt_ids) + len(s.rollout.response_ids) for s in trained)
        metrics["throughput/train_tokens_per_s"] = tokens / times["train"]
    return metrics
