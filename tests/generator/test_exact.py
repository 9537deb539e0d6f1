"""Exact mode: log-probs equal to the last bit, through real vLLM in this process.

Axes: family (dense, experts) x recipe in fp32 compute, and one recipe each in bf16 compute, which
this CPU emulates. tests/runtime/test_exact_ray.py has the two pairs that are not here, and more of
them, through Ray. Prompts are shorter and longer than a
cache block (32 tokens), half of them share a prefix of 300 tokens that is computed once and then
hit in the cache, and an engine step takes 128 tokens, so that prompts are split and share steps
with decoding. Two policy versions.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler

from fos_rl.config import GeneratorConfig, RolloutConfig, TrainerConfig
from fos_rl.model.log_probs import token_log_probs
from fos_rl.model.ops import EXACT
from fos_rl.model.packed_attention import ExactPackedAttention, PackedAttention
from fos_rl.quant import gemm
from fos_rl.spec import Bf16, Family, FourOverSix, Mxfp8, Nvfp4, Precision
from fos_rl.types import Rollout, TrainBatch
from tests.support.pair import Pair, batch_of, random_prompts, tiny_pair

FP32: dict[str, Any] = {"compute_dtype": "float32"}
ARMS: list[tuple[Family, str, Precision]] = [
    ("qwen3", "four_over_six", FourOverSix()),
    ("qwen3_moe", "bf16", Bf16()),
    ("qwen3", "bf16-fp32", Bf16(**FP32)),
    ("qwen3", "mxfp8-fp32", Mxfp8(**FP32)),
    ("qwen3", "nvfp4-fp32", Nvfp4(**FP32)),
    ("qwen3_moe", "bf16-fp32", Bf16(**FP32)),
    ("qwen3_moe", "nvfp4-fp32", Nvfp4(**FP32)),
    ("qwen3_moe", "four_over_six-fp32", FourOverSix(**FP32, weight_block="1x16")),
    ("qwen2", "four_over_six", FourOverSix()),
]
ROLLOUT = RolloutConfig(group_size=4, max_new_tokens=48, max_prompt_tokens=512, temperature=0.8)


def exact_pair(family: Family, folder: Path, precision: Precision) -> Any:
    return tiny_pair(
        family,
        folder,
        precision=precision,
        rollout=ROLLOUT,
        trainer=TrainerConfig(lr=1e-3, microbatch_tokens=2048),
        engine=GeneratorConfig(kv_cache_gib=0.2, max_num_seqs=16, max_num_batched_tokens=128),
        consistency="exact",
    )


def differences(rollouts: list[Rollout], log_probs: list[np.ndarray]) -> np.ndarray:
    """Trainer minus generator in fp64, so that not a bit is lost."""
    theirs = np.concatenate([np.array(r.log_probs, dtype=np.float64) for r in rollouts])
    return np.concatenate(log_probs).astype(np.float64) - theirs


def assert_exact(pair: Pair, rollouts: list[Rollout]) -> int:
    """Trains on them, too; returns the number of tokens."""
    result = pair.trainer.step(batch_of(rollouts))
    d = differences(rollouts, result.log_probs)
    assert np.isfinite(d).all()
    assert np.abs(d).max() == 0.0, f"{(d != 0).sum()} of {d.size} log-probs differ"
    return d.size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision"), [(f, p) for f, _, p in ARMS], ids=[f"{f}-{n}" for f, n, _ in ARMS]
)
def test_log_probs_are_equal_to_the_last_bit(
    family: Family, precision: Precision, tmp_path: Path
) -> None:
    with exact_pair(family, tmp_path, precision) as pair:
        pair.sync()
        tokens = assert_exact(pair, pair.generate(random_prompts(10), 0))
        pair.sync()
        tokens += assert_exact(pair, pair.generate(random_prompts(4), 1))
    assert tokens >= 2000


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pair with quantized and plain linears, and what its generator sampled."""
    folder = tmp_path_factory.mktemp("model")
    precision = FourOverSix(compute_dtype="float32", exclude=("*.down_proj",))
    with exact_pair("qwen3", folder, precision) as pair:
        pair.sync()
        yield pair, pair.generate(random_prompts(3), 0)


def score(pair: Pair, batch: TrainBatch) -> list[np.ndarray]:
    return [values.numpy() for values in pair.trainer._score(batch)]


def test_the_trainers_log_probs_do_not_change_with_packing(
    sampled: tuple[Pair, list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one micro-batch, and each sequence alone."""
    pair, rollouts = sampled
    batch = batch_of(rollouts)
    together = score(pair, batch)
    alone_config = pair.trainer.config.model_copy(update={"microbatch_tokens": 1})
    monkeypatch.setattr(pair.trainer, "config", alone_config)
    alone = score(pair, batch)
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))
    assert np.abs(differences(rollouts, together)).max() == 0.0


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """The product in fp64, rounded once: as right as the exact one, and other bits."""
    return (a.double() @ b.double().t()).float()


PLANTED: dict[str, dict[str, Any]] = {
    "linear": {"linear": lambda x, weight, bias: wide_mm(x, weight)},
    "logits": {"logits": wide_mm},
    "silu": {"silu": lambda x: (x.double() * x.double().sigmoid()).float()},
    "mean_square": {"mean_square": lambda x: x.double().square().mean(-1, keepdim=True).float()},
    "quantized gemm": {},
    "attention": {},
}


@pytest.mark.parametrize("planted", PLANTED)
def test_another_rounding_in_one_host_shows(
    planted: str, sampled: tuple[Pair, list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the zeros of this file are not for lack of sight."""
    pair, rollouts = sampled
    ops = replace(EXACT, **PLANTED[planted])
    for module in pair.trainer.decoder.modules():
        if hasattr(module, "ops"):
            monkeypatch.setattr(module, "ops", ops)
    if planted == "quantized gemm":
        # Sums of 64 products of 4-bit codes are exact in any order, so a bit is planted.
        monkeypatch.setattr(gemm, "fixed_tile_mm", lambda a, b: wide_mm(a, b) * (1 + 2**-22))
    if planted == "attention":
        monkeypatch.setattr(ExactPackedAttention, "forward", PackedAttention.forward)
    d = differences(rollouts, score(pair, batch_of(rollouts)))
    # The last bits: of log-probs of size 1 to 10, or a flipped code.
    assert 0.0 < np.abs(d).max() < 1.0


def test_vllm_and_the_trainer_take_the_same_log_softmax() -> None:
    """Rows of any batch, divided by their temperature; vLLM's sampler against the trainer's."""
    logits = torch.randn(40, 288, generator=torch.Generator().manual_seed(0)) * 4
    targets = torch.arange(40)
    for temperature in (1.0, 0.7, 1.3):
        ours, _ = token_log_probs(lambda x: x, logits, targets, temperature, chunk_tokens=7)
        for first, end in ((0, 1), (3, 20), (0, 40)):
            rows = slice(first, end)
            scaled = Sampler.apply_temperature(
                logits[rows].clone(), torch.full((end - first,), temperature), all_random=True
            )
            theirs = Sampler.compute_logprobs(scaled).gather(-1, targets[rows, None])[:, 0]
            assert torch.equal(theirs, ours[rows])
