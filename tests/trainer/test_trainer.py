"""The trainer's step on a tiny model: packing, accumulation, ratio modes, bad numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fos_rl.config import AlgorithmConfig, RolloutConfig, TrainerConfig
from fos_rl.model.hf import read_architecture, read_weights
from fos_rl.model.tiny import write_tiny_model
from fos_rl.model.transport import unpack_weights
from fos_rl.spec import Bf16, ModelSpec
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import TrainBatch
from tests.support.metric_keys import unknown_keys


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def folder(request, tmp_path_factory) -> Path:
    return write_tiny_model(request.param, tmp_path_factory.mktemp(request.param), seed=0)


def _trainer(
    folder: Path, *, microbatch_tokens: int = 4096, dtype: str = "float32", **algorithm: object
) -> GrpoTrainer:
    spec = ModelSpec(architecture=read_architecture(folder), precision=Bf16(compute_dtype=dtype))
    return GrpoTrainer(
        spec,
        folder,
        RolloutConfig(max_new_tokens=20),
        AlgorithmConfig(**algorithm),
        TrainerConfig(lr=1e-3, microbatch_tokens=microbatch_tokens, log_prob_chunk_tokens=16),
        torch.device("cpu"),
    )


def _batch(trainer: GrpoTrainer, count: int = 6) -> TrainBatch:
    """Random sequences; the generator's log-probs are the trainer's own plus noise."""
    rng = np.random.default_rng(0)
    lengths = [(int(rng.integers(2, 9)), int(rng.integers(3, 20))) for _ in range(count)]
    batch = TrainBatch(
        token_ids=[rng.integers(0, 256, p + r) for p, r in lengths],
        prompt_lengths=[p for p, _ in lengths],
        generator_log_probs=[np.zeros(r, np.float32) for _, r in lengths],
        advantages=rng.standard_normal(count).astype(np.float32),
    )
    own = [values.numpy() for values in trainer._score(batch)]
    noise = [rng.normal(0, 0.05, len(v)).astype(np.float32) for v in own]
    log_probs = [v + n for v, n in zip(own, noise, strict=True)]
    return replace(batch, generator_log_probs=log_probs)


def test_version_zero_is_the_file(folder: Path) -> None:
    trainer = _trainer(folder)
    buckets = list(trainer.export_weights(1000))
    assert len(buckets) > 1
    exported = {
        name: t for bucket in buckets for name, t in unpack_weights(bucket, torch.device("cpu"))
    }
    stored = dict(read_weights(folder))
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name], tensor), name


def test_a_packed_sequence_scores_as_alone(folder: Path) -> None:
    trainer = _trainer(folder)
    batch = _batch(trainer)
    packed = list(trainer._score(batch))
    trainer.config = trainer.config.model_copy(update={"microbatch_tokens": 1})
    alone = list(trainer._score(batch))
    for a, b in zip(packed, alone, strict=True):
        # Other shapes, other order of additions in fp32: some 1e-6 on log-probs of size 5.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"aggregation": "sequence_mean"},
        {"aggregation": "token_mean"},
        {"aggregation": "sequence_sum"},
        {"type": "dr_grpo", "correction": {"type": "geometric", "low": 0.99, "high": 1.005}},
        {"type": "gspo", "clip_low": 0.01, "clip_high": 0.01},
        {
            "type": "cispo",
            "ratio": "decoupled",
            "correction": {"type": "truncated", "level": "sequence", "max_weight": 1.1},
        },
        {"ratio": "decoupled", "correction": {"type": "masked", "low": 0.97, "high": 1.03}},
    ],
    ids=["sequence", "token", "sum", "dr_grpo", "gspo", "cispo", "masked"],
)
def test_microbatches_sum_to_the_whole_batch(folder: Path, algorithm: dict) -> None:
    """Loss, metrics and updated weights do not depend on how the batch is cut."""
    results, weights = [], []
    for tokens in (4096, 30):
        trainer = _trainer(folder, microbatch_tokens=tokens, **algorithm)
        results.append(trainer.step(_batch(trainer)))
        weights.append(torch.cat([w.flatten() for w in trainer.masters]))
    for key in ("loss/policy", "loss/ratio/mean", "policy/entropy", "trainer/grad_norm"):
        assert results[0].metrics[key] == pytest.approx(results[1].metrics[key], rel=1e-4)
    assert results[0].metrics["loss/clip_frac"] == results[1].metrics["loss/clip_frac"]
    assert not unknown_keys(results[0].metrics)
    corrected = {key for key in results[0].metrics if key.startswith("correction/")}
    assert bool(corrected) == ("correction" in algorithm)
    for key in corrected:
        assert 0 < results[0].metrics[key] == pytest.approx(results[1].metrics[key], rel=1e-5)
    # Adam divides by the gradient's own size: an element whose gradient is at the noise may move
    # the other way by lr, few may.
    assert (weights[0] - weights[1]).abs().max() <= 2.1e-3
    assert (weights[0] - weights[1]).abs().mean() < 1e-6


def test_mismatch_is_measured_before_the_update(folder: Path) -> None:
    trainer = _trainer(folder)
    batch = _batch(trainer)
    result = trainer.step(batch)
    d = np.concatenate(result.log_probs) - np.concatenate(batch.generator_log_probs)
    assert result.metrics["mismatch/log_prob_abs_diff/mean"] == pytest.approx(np.abs(d).mean())
    # The noise that the batch was given: mean |N(0, 0.05)| = 0.04.
    assert 0.02 < result.metrics["mismatch/log_prob_abs_diff/mean"] < 0.06
    assert result.policy_version == trainer.policy_version == 1


def test_corrections_use_the_trainers_log_probs_before_the_step(folder: Path) -> None:
    """Also in later updates of a step, when the policy has moved on."""
    correction = {"type": "truncated", "max_weight": 1.01}
    trainer = _trainer(folder, ratio="decoupled", minibatches=3, correction=correction)
    batch = _batch(trainer)
    before = np.concatenate([values.numpy() for values in trainer._score(batch)])
    rho = np.exp(before - np.concatenate(batch.generator_log_probs))
    metrics = trainer.step(batch).metrics
    # One token of 60 may sit on the limit, where fp32 and numpy round differently.
    assert metrics["correction/truncated_frac"] == pytest.approx(np.mean(rho > 1.01), abs=0.02)
    assert metrics["correction/weight/mean"] == pytest.approx(np.minimum(rho, 1.01).mean(), 1e-5)
    assert "correction/masked_frac" not in metrics


def test_a_masked_token_has_no_gradient(folder: Path) -> None:
    """With every token outside the limits the masters stay, but for nothing: AdamW without decay
    and with a gradient of 0."""
    trainer = _trainer(
        folder, ratio="decoupled", correction={"type": "masked", "low": 0.999, "high": 1.001}
    )
    batch = _batch(trainer)
    far = [values + np.float32(0.5) for values in batch.generator_log_probs]
    before = [w.clone() for w in trainer.masters]
    metrics = trainer.step(replace(batch, generator_log_probs=far)).metrics
    assert metrics["correction/masked_frac"] == 1
    assert metrics["correction/weight/mean"] == 0
    assert metrics["trainer/grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.masters, strict=True))


def test_ratio_modes(folder: Path) -> None:
    """bypass divides by the generator's probabilities, decoupled by the trainer's own."""
    bypass = _trainer(folder, ratio="bypass", clip_low=0.01, clip_high=0.01)
    result = bypass.step(_batch(bypass)).metrics
    assert result["loss/ratio_is_generator"] == 1
    # |N(0, 0.05)| exceeds 0.01 for 84 % of the tokens; about half of those are clipped.
    assert 0.7 < result["loss/out_of_band_frac"] < 0.95
    assert 0.2 < result["loss/clip_frac"] < 0.7
    decoupled = _trainer(folder, ratio="decoupled", clip_low=0.01, clip_high=0.01)
    result = decoupled.step(_batch(decoupled)).metrics
    assert result["loss/ratio_is_generator"] == 0
    assert result["loss/ratio/mean"] == 1
    assert result["loss/out_of_band_frac"] == 0


def test_later_minibatches_see_an_updated_policy(folder: Path) -> None:
    trainer = _trainer(folder, ratio="decoupled", minibatches=3)
    batch = _batch(trainer)
    before = [values.numpy() for values in trainer._score(batch)]
    result = trainer.step(batch)
    # The first of three updates has ratio 1; the others do not.
    assert result.metrics["loss/ratio/mean"] != 1
    for a, b in zip(result.log_probs, before, strict=True):
        assert np.array_equal(a, b)


def test_a_log_prob_that_is_not_finite_is_left_out(folder: Path) -> None:
    clean = _trainer(folder, aggregation="token_mean")
    batch = _batch(clean)
    poisoned = [values.copy() for values in batch.generator_log_probs]
    poisoned[0][1] = np.nan
    poisoned[2][0] = -np.inf
    trainer = _trainer(folder, aggregation="token_mean")
    metrics = trainer.step(replace(batch, generator_log_probs=poisoned)).metrics
    total = sum(len(v) for v in poisoned)
    assert metrics["mismatch/non_finite_frac"] == pytest.approx(2 / total)
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(w.isfinite().all() for w in trainer.masters)


def test_a_gradient_that_is_not_finite_skips_the_update(folder: Path) -> None:
    trainer = _trainer(folder)
    batch = _batch(trainer)
    before = [w.clone() for w in trainer.masters]
    advantages = batch.advantages.copy()
    advantages[0] = np.inf
    metrics = trainer.step(replace(batch, advantages=advantages)).metrics
    assert metrics["trainer/skipped_updates"] == 1
    assert "trainer/grad_norm" not in metrics
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.masters, strict=True))


def test_temperature_divides_the_logits(folder: Path) -> None:
    """Against a plain log_softmax of the decoder's logits, one sequence."""
    trainer = _trainer(folder)
    trainer.rollout = trainer.rollout.model_copy(update={"temperature": 0.6})
    batch = _batch(trainer, count=1)
    [scored] = trainer._score(batch)
    ids = torch.from_numpy(batch.token_ids[0])
    trainer._sequences.set([len(ids)])
    with torch.no_grad():
        logits = trainer.decoder.logits(trainer.decoder(ids, torch.arange(len(ids))))
    first = batch.prompt_lengths[0]
    want = (logits / 0.6).log_softmax(-1)[torch.arange(first - 1, len(ids) - 1), ids[first:]]
    torch.testing.assert_close(scored, want, rtol=0, atol=1e-5)
