"""What auto chooses, by hand: enough for a step's responses, less where memory is short."""

from pathlib import Path

import pytest

from fos_rl.config import parse_config
from fos_rl.generator.cache_size import chosen_cache_gib
from fos_rl.model.hf import read_architecture
from fos_rl.model.tiny import write_tiny_model
from fos_rl.run_folder.auto_values import with_chosen_values, with_values_of
from fos_rl.spec import Bf16, ModelSpec

TREE = {
    "model": {"path": "random:llama"},
    "data": {"type": "vowels"},
    "rollout": {
        "prompts_per_step": 32,
        "group_size": 100,
        "max_prompt_tokens": 4000,
        "max_new_tokens": 90,
    },
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder: Path = write_tiny_model("llama", tmp_path_factory.mktemp("model"), seed=0)
    precision = Bf16(compute_dtype="float32")
    return ModelSpec(architecture=read_architecture(folder), precision=precision)


def _chosen(spec: ModelSpec, memory_gib: float, max_num_seqs: int, device: str = "cpu") -> float:
    config = parse_config({**TREE, "generator": {"max_num_seqs": max_num_seqs}})
    return chosen_cache_gib(
        config.rollout,
        config.generator,
        spec,
        device=device,
        memory_gib=memory_gib,
        with_trainer=True,
    )


def test_all_responses_of_a_step_have_room(spec: ModelSpec) -> None:
    """1,536 bytes per token (2 x 2 heads x 32 numbers x 4 bytes x 3 layers); 4,090 tokens take 128
    pages of 32 on a CPU, 256 of 16 on a GPU: 6,291,456 bytes per sequence, 600 MiB for 100."""
    assert _chosen(spec, 64, 100) == 0.59
    assert _chosen(spec, 64, 100, "cuda") == 0.59
    # No more than 3,200 are asked for: 18.75 GiB, of which a quarter of 64 GiB is less.
    assert _chosen(spec, 128, 10_000) == 18.75
    assert _chosen(spec, 64, 10_000) == pytest.approx(16.0, abs=0.01)


def test_weights_and_states_come_first(spec: ModelSpec) -> None:
    """Under 1M parameters, of 20 bytes with the trainer's: 80 % of 2 GiB less them."""
    assert 1.58 <= _chosen(spec, 2, 10_000, "cuda") <= 1.6


def test_chosen_once_and_found_by_a_resumed_run(spec: ModelSpec) -> None:
    config = parse_config(TREE)
    assert config.generator.kv_cache_gib == "auto"
    machine = {"device": "cpu", "memory_gib": 64.0, "shares_device": True}
    chosen = with_chosen_values(config, spec, **machine)
    assert chosen.generator.kv_cache_gib == 1.5
    assert with_chosen_values(chosen, spec, **{**machine, "memory_gib": 1.0}) == chosen
    assert with_values_of(config, chosen) == chosen
