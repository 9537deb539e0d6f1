"""Exact mode through real Ray and real vLLM: two processes, and not a bit between them.

Axes: family (dense, experts) x recipe; two pairs always run, and the others in one process in
tests/generator/test_exact.py. Prompts are shorter and longer than a cache block (32
tokens), half of them share a prefix of 300 tokens that is computed once and then hit in the cache,
and an engine step takes 128 tokens, so that prompts are split and share steps with decoding. Two
policy versions.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest

from fos_rl.config import RunConfig, parse_config
from fos_rl.model.hf import read_architecture
from fos_rl.model.sync import sync
from fos_rl.model.tiny import write_tiny_model
from fos_rl.runtime.cluster import Cluster, plan_placement
from fos_rl.spec import Family, ModelSpec
from tests.support.pair import batch_of, random_prompts

RECIPES = {
    "bf16": {},
    "mxfp8": {"recipe": "mxfp8"},
    "nvfp4": {"recipe": "nvfp4"},
    "four_over_six": {"recipe": "nvfp4_four_over_six", "weight_block": "1x16"},
}


def exact_config(folder: Path, recipe: str) -> RunConfig:
    return parse_config(
        {
            "model": {
                "path": str(folder),
                "consistency": "exact",
                "precision": {"compute_dtype": "float32", **RECIPES[recipe]},
            },
            "data": {"type": "vowels"},
            "rollout": {
                "group_size": 4,
                "max_new_tokens": 48,
                "max_prompt_tokens": 512,
                "temperature": 0.8,
            },
            "trainer": {
                "lr": 1e-3,
                "microbatch_tokens": 2048,
                "device": "cpu",
                "num_threads": 1,
            },
            "generator": {
                "kv_cache_gib": 0.2,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 128,
                "device": "cpu",
                "num_threads": 1,
            },
        }
    )


ALWAYS = {("qwen3", "four_over_six"), ("qwen3_moe", "mxfp8")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        pytest.param(*pair, marks=[] if pair in ALWAYS else pytest.mark.long)
        for pair in itertools.product(("qwen3", "qwen3_moe"), RECIPES)
    ],
)
def test_log_probs_are_equal_to_the_last_bit(family: Family, recipe: str, tmp_path: Path) -> None:
    folder = write_tiny_model(family, tmp_path / "model", seed=0)
    config = exact_config(folder, recipe)
    spec = ModelSpec(
        architecture=read_architecture(folder),
        precision=config.model.precision,
        consistency="exact",
    )
    tokens = 0
    with Cluster(config, spec, folder, plan_placement(config, 0)) as cluster:
        for version, prompts in enumerate((random_prompts(8), random_prompts(4))):
            sync(cluster.trainer, [cluster.generator])
            groups = cluster.generator.generate(prompts, seed=version)
            rollouts = [rollout for group in groups for rollout in group]
            result = cluster.trainer.step(batch_of(rollouts))
            assert result.policy_version == version + 1
            assert result.metrics["trainer/grad_norm"] > 0
            theirs = np.concatenate([np.array(r.log_probs, np.float64) for r in rollouts])
            d = np.concatenate(result.log_probs).astype(np.float64) - theirs
            assert np.isfinite(d).all()
            assert np.abs(d).max() == 0.0, f"{(d != 0).sum()} of {d.size} log-probs differ"
            tokens += d.size
    assert tokens >= 2000
