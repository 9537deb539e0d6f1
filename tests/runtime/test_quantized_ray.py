"""Quantized precisions through real Ray and vLLM: equal codes after a step, equal contracts."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import tomli_w

from fos_rl.cli import main
from fos_rl.config import RunConfig, parse_config
from fos_rl.model.sync import sync
from fos_rl.runtime import cluster as cluster_module
from fos_rl.runtime.cluster import Cluster
from fos_rl.runtime.launch import planned
from fos_rl.spec import ModelSpec
from tests.support.pair import batch_of

TREE: dict[str, Any] = {
    "data": {"type": "vowels"},
    "seed": 3,
    "rollout": {
        "prompts_per_step": 2,
        "group_size": 4,
        "max_new_tokens": 8,
        "max_prompt_tokens": 128,
    },
    "trainer": {"lr": 1e-3, "device": "cpu", "num_threads": 1},
    "generator": {"kv_cache_gib": 0.2, "max_num_seqs": 8, "device": "cpu", "num_threads": 1},
}
FOUR_OVER_SIX = {"recipe": "nvfp4_four_over_six", "compute_dtype": "float32"}


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    """A Ray that outlives each cluster: with an address the cluster leaves it running."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def tree(family: str, precision: dict[str, Any]) -> dict[str, Any]:
    model = {"path": f"random:{family}", "precision": precision}
    return {**TREE, "model": model, "cluster": {"address": "auto"}}


def digests(handle: Any, actor: str) -> dict[str, str]:
    """SHA-256 of every code, block scale and global amax in an actor's decoder."""

    # Defined here, so that Ray sends it by value.
    def inside(self: Any) -> dict[str, str]:
        import torch

        from fos_rl.model.convert import named_codes

        def of(decoder: Any) -> dict[str, str]:
            return {
                name: hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
                for name, tensor in named_codes(decoder)
            }

        if actor == "trainer":
            return of(self.target.decoder)
        [result] = self.target._engine.apply_model(lambda model: of(model.decoder))
        return result

    return ray.get(handle.actor.__ray_call__.remote(inside), timeout=120)


def one_step(config: RunConfig, cluster: Cluster, prompts: Any) -> None:
    rollouts = [r for group in cluster.generator.generate(prompts.batch(0), seed=0) for r in group]
    advantages = np.random.default_rng(0).normal(size=len(rollouts))
    result = cluster.trainer.step(batch_of(rollouts, advantages))
    assert result.metrics["trainer/grad_norm"] > 0
    sync(cluster.trainer, [cluster.generator])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "num_tensors"),
    [
        # 3 layers x 7 linears, codes and scales and amax each.
        pytest.param("qwen3", FOUR_OVER_SIX, 63, id="dense"),
        # 3 layers x 3 stacks of experts.
        pytest.param(
            "qwen3_moe",
            {**FOUR_OVER_SIX, "include": ["*.mlp.experts.*"], "weight_block": "1x16"},
            27,
            id="mixture",
        ),
    ],
)
def test_codes_are_equal_after_a_real_step(
    family: str, precision: dict[str, Any], num_tensors: int
) -> None:
    config = parse_config(tree(family, precision))
    with (
        planned(config) as plan,
        Cluster(config, plan.spec, plan.model_folder, plan.placement) as cluster,
    ):
        sync(cluster.trainer, [cluster.generator])
        before = digests(cluster.trainer, "trainer")
        assert digests(cluster.generator, "generator") == before
        one_step(config, cluster, plan.prompts)
        after = digests(cluster.trainer, "trainer")
        assert digests(cluster.generator, "generator") == after
    assert len(after) == num_tensors
    moved = {name for name in after if after[name] != before[name]}
    assert {name for name in after if name.endswith(".codes")} <= moved


def test_actors_of_different_contracts_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line: status 2, and the fields in which they differ."""

    class OtherGenerator:
        """Built with two other knobs; a class defined here travels by value."""

        def __init__(self, spec: ModelSpec, *_: object) -> None:
            other = {"err_mode": "mae", "weight_block": "1x16"}
            precision = spec.precision.model_copy(update=other)
            self.spec = spec.model_copy(update={"precision": precision})

        def contract(self) -> dict[str, object]:
            return self.spec.contract()

    monkeypatch.setattr(cluster_module, "build_generator", OtherGenerator)
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(tree("qwen3", FOUR_OVER_SIX)))
    status = main(["train", str(path), "--out", str(tmp_path / "run")])
    message = capsys.readouterr().err
    assert status == 2
    assert "different contracts (trainer != generator)" in message
    assert "precision.err_mode: 'mse' != 'mae'" in message
    assert "precision.weight_block: '16x16' != '1x16'" in message
    assert "recipe" not in message
    assert not list((tmp_path / "run").glob("rollouts/*"))
