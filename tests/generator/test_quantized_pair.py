"""Quantized precisions: one forward for all backward modes, equal codes after an update.

Axes: family (linears, grouped experts) x recipe x activation scale, where a per-tensor scale also
allows backward "quantized". fp32 compute: bf16 leaves the codes as they are (tests/model) and only
adds noise to the log-probs. Dropped: llama, which differs from qwen3 in nothing that is quantized.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fos_rl.config import RolloutConfig
from fos_rl.model.convert import PreparedWeights, named_codes
from fos_rl.quant.quantizers import Backward
from fos_rl.spec import Family, FourOverSix, Mxfp8, Nvfp4
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import Prompt, Rollout, StepResult
from tests.support.pair import Pair, batch_of, tiny_pair

STEPS = 2
FP32: dict[str, Any] = {"compute_dtype": "float32"}
ROW_SCALED: list[Backward | None] = [None, "dequantized"]
PER_TENSOR: list[Backward | None] = [None, "high_precision", "dequantized"]
ARMS = {
    "mxfp8": (Mxfp8(**FP32), PER_TENSOR),
    "nvfp4": (Nvfp4(**FP32), ROW_SCALED),
    "nvfp4 per tensor": (Nvfp4(**FP32, row_scaled_activation=False), PER_TENSOR),
    "four_over_six": (FourOverSix(**FP32, weight_block="1x16"), ROW_SCALED),
    "four_over_six per tensor": (FourOverSix(**FP32, row_scaled_activation=False), PER_TENSOR),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step of the loop showed, and the codes in trainer and generator after its sync."""

    rollouts: list[Rollout]
    result: StepResult
    trainer_codes: dict[str, Tensor]
    generator_codes: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Two steps a backward mode, all on one engine, and the codes before the first step."""

    steps: dict[Backward | None, list[Step]]
    first_codes: dict[str, Tensor]


def prompts() -> list[Prompt]:
    """Three lengths, among them one below and one above the 16 rows of the smallest GEMM."""
    rng = np.random.default_rng(0)
    lengths = (5, 20, 33)
    return [
        Prompt(id=str(n), token_ids=rng.integers(0, 256, n).tolist(), text="", answer="")
        for n in lengths
    ]


def codes(decoder: Any) -> dict[str, Tensor]:
    return {name: tensor.view(torch.uint8).clone() for name, tensor in named_codes(decoder)}


def quantized_ahead(decoder: Any) -> bool:
    """Whether all weights are multiplied as the sync prepared them, none quantized per forward."""
    modules = (module for module in decoder.modules() if isinstance(module, PreparedWeights))
    return all(m.prepared(name) is m.prepared(name) for m in modules for name in m.weights())


def take_steps(pair: Pair) -> Iterator[Step]:
    pair.sync()
    for step in range(STEPS):
        rollouts = pair.generate(prompts(), seed=step)
        # They do not sum to 0: with ratios of exactly 1 the loss would hide every difference.
        advantages = np.random.default_rng(step).normal(size=len(rollouts))
        result = pair.trainer.step(batch_of(rollouts, advantages))
        pair.sync()
        ahead = pair.generator._engine.apply_model(lambda model: quantized_ahead(model.decoder))
        assert [quantized_ahead(pair.trainer.decoder), *ahead] == [True, True]
        [generator_codes] = pair.generator._engine.apply_model(lambda model: codes(model.decoder))
        yield Step(
            rollouts=rollouts,
            result=result,
            trainer_codes=codes(pair.trainer.decoder),
            generator_codes=generator_codes,
        )


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def runs(request: pytest.FixtureRequest, arm: str, tmp_path_factory: Any) -> Runs:
    family: Family = request.param
    folder: Path = tmp_path_factory.mktemp("model")
    precision, modes = ARMS[arm]
    rollout = RolloutConfig(group_size=4, max_new_tokens=6, max_prompt_tokens=64)
    steps: dict[Backward | None, list[Step]] = {}
    with tiny_pair(family, folder, precision=precision, rollout=rollout) as pair:
        first_codes = codes(pair.trainer.decoder)
        for mode in modes:
            pair.trainer = trainer_of(pair, folder, mode)
            steps[mode] = list(take_steps(pair))
    return Runs(steps=steps, first_codes=first_codes)


def trainer_of(pair: Pair, folder: Path, mode: Backward | None) -> GrpoTrainer:
    """The pair's trainer again, with another backward."""
    old = pair.trainer
    config = old.config.model_copy(update={"backward_override": mode})
    return GrpoTrainer(old.spec, folder, old.rollout, old.algorithm, config, old.device)


def assert_same_bytes(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        different = int((tensor != want[name]).sum())
        assert not different, f"{name}: {different}/{tensor.numel()} bytes differ"


def log_probs(rollouts: list[Rollout]) -> list[list[float]]:
    return [rollout.log_probs for rollout in rollouts]


def test_the_first_step_has_one_forward_in_all_modes(runs: Runs) -> None:
    """Rollouts, log-probs on both sides, loss and mismatch: to the last bit."""
    first, *others = (steps[0] for steps in runs.steps.values())
    for other in others:
        assert other.rollouts == first.rollouts
        for ours, theirs in zip(first.result.log_probs, other.result.log_probs, strict=True):
            assert np.array_equal(ours, theirs)
        ours, theirs = dict(first.result.metrics), dict(other.result.metrics)
        for metrics in (ours, theirs):
            del metrics["memory/trainer_peak_gib"]
        # The backward shows in the gradient alone.
        assert ours.pop("trainer/grad_norm") != theirs.pop("trainer/grad_norm")
        assert ours == theirs
        assert ours["loss/policy"] != 0


def test_the_second_step_differs_between_modes(runs: Runs) -> None:
    """Other gradients made other weights."""
    seconds = [steps[1] for steps in runs.steps.values()]
    for index, ours in enumerate(seconds):
        for theirs in seconds[:index]:
            assert log_probs(ours.rollouts) != log_probs(theirs.rollouts)
            # Not the loss: where the pair agrees its ratios are 1, whatever the weights.
            pairs = zip(ours.result.log_probs, theirs.result.log_probs, strict=True)
            assert not all(np.array_equal(a, b) for a, b in pairs)
            entropies = [s.result.metrics["policy/entropy"] for s in (ours, theirs)]
            assert entropies[0] != entropies[1]


def test_codes_are_equal_in_the_pair_after_every_step(runs: Runs) -> None:
    for steps in runs.steps.values():
        before = runs.first_codes
        for step in steps:
            assert_same_bytes(step.generator_codes, step.trainer_codes)
            # Every weight's codes moved: what is compared is the update, not the loaded file.
            for name in (name for name in before if name.endswith(".codes")):
                assert not torch.equal(before[name], step.trainer_codes[name]), name
            before = step.trainer_codes


def test_the_pair_agrees_unless_a_scale_depends_on_the_batch(arm: str, runs: Runs) -> None:
    """Row-scaled and MXFP8: noise of 1e-6 and the rare flipped code. Per tensor: a token's codes
    follow the other tokens of its GEMM, which are never the same in a prefill, a decode step and a
    micro-batch.
    """
    for steps in runs.steps.values():
        assert [s.result.policy_version for s in steps] == [1, 2]
        for step in steps:
            metrics = step.result.metrics
            assert np.isfinite(list(metrics.values())).all()
            assert "mismatch/non_finite_frac" not in metrics
            mean = metrics["mismatch/log_prob_abs_diff/mean"]
            assert mean > 0.05 if "per tensor" in arm else mean < 0.01, mean
