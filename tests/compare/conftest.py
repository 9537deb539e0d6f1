"""Run folders of known content, written by the class that writes real ones."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fos_rl.config import load_config
from fos_rl.run_folder.folder import RunFolder
from fos_rl.types import Rollout, Sample, StepRecord

CONFIG = Path(__file__).parents[2] / "configs" / "tiny_moe.toml"
QUANTIZED = {
    "high_precision": ["model.precision.recipe=nvfp4", "trainer.backward_override=high_precision"],
    "dequantized": ["model.precision.recipe=nvfp4", "trainer.backward_override=dequantized"],
}

WriteRun = Callable[..., Path]


@pytest.fixture(scope="session")
def write_run() -> WriteRun:
    """write_run(folder, metrics, rewards=..., overrides=..., log_prob=...) -> the run folder.

    metrics: one dict per step. rewards: [step][prompt], which each prompt's two responses get.
    Every response is one token of generator log-prob `log_prob` and trainer log-prob 0.1 above it.
    """

    def write(
        folder: Path,
        metrics: Sequence[dict[str, float]],
        rewards: Sequence[Sequence[float]] = (),
        overrides: Sequence[str] = (),
        log_prob: float = -1.0,
    ) -> Path:
        seed = folder.name.removeprefix("seed_") if folder.name.startswith("seed_") else "0"
        config = load_config(CONFIG, [f"steps={len(metrics)}", f"seed={seed}", *overrides])
        run = RunFolder.create(folder, config, environment={})
        for step, values in enumerate(metrics):
            if step < len(rewards):
                samples = [
                    _sample(prompt, reward, log_prob)
                    for prompt, reward in enumerate(rewards[step])
                    for _ in range(2)
                ]
                run.rollouts(step, samples)
                run.trainer_log_probs(step, samples, [np.array([log_prob + 0.1])] * len(samples))
            run.metrics(StepRecord(step=step, metrics=values))
        return run.path

    return write


def _sample(prompt: int, reward: float, log_prob: float) -> Sample:
    rollout = Rollout(
        prompt_id=f"vowels/{prompt}",
        prompt_ids=[1],
        response_ids=[2],
        log_probs=[log_prob],
        finish_reason="stop",
        policy_version=0,
        text="a",
    )
    return Sample(
        rollout=rollout,
        answer="a",
        group=prompt,
        reward=reward,
        advantage=0.0,
        zero_variance=False,
        masked=False,
    )
