"""The loop with stand-ins: several generators give one generator's run, call by call."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from fos_rl.config import parse_config
from fos_rl.grpo import grpo_steps
from fos_rl.types import (
    Prompt,
    Rollout,
    Sampling,
    StepResult,
    TrainBatch,
    WeightBucket,
)
from tests.support.loop import GivenPrompts, LengthRewards, MemoryJournal

PROMPTS = [Prompt(id=str(i), token_ids=[i], text="", answer="") for i in range(5)]
CONFIG = parse_config(
    {"model": {"path": "random:llama"}, "data": {"type": "vowels"}, "steps": 2, "seed": 3}
)


class FakeTrainer:
    """Each step adds 1 to its only weight."""

    def __init__(self) -> None:
        self.version = 0

    def contract(self) -> dict[str, object]:
        return {}

    def weights_version(self) -> int:
        return self.version

    def weight_checksums(self) -> dict[str, int]:
        return {"w": self.version}

    def shared_weights(self) -> None: ...
    def release_memory(self) -> None: ...

    def export_weights(self) -> Iterator[WeightBucket]:
        yield WeightBucket(shapes={"w": (1,)}, bits=np.array([self.version], dtype=np.int16))

    def measure(self, batch: TrainBatch) -> StepResult:
        total = sum(int(ids.sum()) for ids in batch.token_ids)
        return StepResult(
            policy_version=self.version,
            metrics={"seen/tokens": float(total)},
            log_probs=batch.generator_log_probs,
        )

    def step(self, batch: TrainBatch) -> StepResult:
        self.version += 1
        return self.measure(batch)

    def layer_errors(self, batch: TrainBatch) -> dict[str, float]:
        return {}

    def save_model(self, folder: Path) -> None: ...
    def save_checkpoint(self, folder: Path, settings: dict[str, object]) -> None: ...
    def load_checkpoint(self, folder: Path) -> None: ...


class FakeGenerator:
    """A response is a function of its weight, the seed, the prompt's place and the member."""

    def __init__(self, peak_gib: float) -> None:
        self.weight = -1
        self.peak_gib = peak_gib
        self.syncs: list[tuple[int, dict[str, int]]] = []

    def contract(self) -> dict[str, object]:
        return {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        sampling: Sampling | None = None,
        first_index: int = 0,
    ) -> list[list[Rollout]]:
        return [
            [self._rollout(prompt, seed, index, member) for member in range(4)]
            for index, prompt in enumerate(prompts, first_index)
        ]

    def _rollout(self, prompt: Prompt, seed: int, index: int, member: int) -> Rollout:
        rng = np.random.default_rng([self.weight, seed, index, member])
        ids = rng.integers(1, 100, rng.integers(1, 5)).tolist()
        return Rollout(
            prompt_id=prompt.id,
            prompt_ids=prompt.token_ids,
            response_ids=ids,
            log_probs=[-0.5] * len(ids),
            finish_reason="stop",
            policy_version=self.weight,
            text="",
        )

    def rescore(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        return [np.array(r.log_probs, dtype=np.float32) for r in rollouts]

    def peak_memory_gib(self) -> float:
        return self.peak_gib

    def release_memory(self) -> None: ...

    def heartbeat(self) -> int:
        return 0

    def begin_weight_sync(self) -> None:
        self.weight = -1

    def load_shared_weights(self, weights: object) -> bool:
        return False

    def load_weight_bucket(self, bucket: WeightBucket) -> None:
        self.weight = int(bucket.bits[0])

    def finish_weight_sync(self, policy_version: int, checksums: dict[str, int]) -> None:
        self.syncs.append((policy_version, checksums))


def _run(num_generators: int) -> tuple[list[dict[str, float]], MemoryJournal, list[FakeGenerator]]:
    generators = [FakeGenerator(1.0 + i) for i in range(num_generators)]
    journal = MemoryJournal()
    records = grpo_steps(
        CONFIG,
        prompts=GivenPrompts(PROMPTS),
        trainer=FakeTrainer(),
        generators=generators,
        rewards=LengthRewards(),
        journal=journal,
    )
    return [record.metrics for record in records], journal, generators


@pytest.mark.parametrize("num_generators", [2, 3, 7])
def test_several_generators_give_the_run_of_one(num_generators: int) -> None:
    metrics, journal, generators = _run(num_generators)
    expected, one_journal, _ = _run(1)
    assert len(metrics) == CONFIG.steps
    assert journal.samples == one_journal.samples
    # All are synced before the first rollout and after each step, whoever had prompts.
    syncs = [(version, {"w": version}) for version in range(CONFIG.steps + 1)]
    assert [g.syncs for g in generators] == [syncs] * num_generators
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours.pop("memory/generator_peak_gib") == num_generators
        assert theirs.pop("memory/generator_peak_gib") == 1
        assert _timeless(ours) == _timeless(theirs)


def _timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if not k.startswith(("time/", "throughput/"))}
