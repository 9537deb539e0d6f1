"""Exact mode through real Ray and real vLLM: two processes, and not a bit between them."""

from pathlib import Path

import pytest

from fos_rl.config import parse_config
from fos_rl.launch import train
from fos_rl.runs import read_metrics


@pytest.mark.slow
def test_log_probs_are_equal_to_the_last_bit_across_processes(tmp_path: Path) -> None:
    """Two steps of experts in four-over-six, an update between them, prompts split at 64 tokens."""
    tree = {
        "model": {
            "path": "random:qwen3_moe",
            "consistency": "exact",
            "precision": {"recipe": "nvfp4_four_over_six", "compute_dtype": "float32"},
        },
        "data": {"type": "vowels"},
        "steps": 2,
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 8,
            "max_new_tokens": 48,
            "max_prompt_tokens": 128,
            "temperature": 0.9,
        },
        "trainer": {"lr": 1e-3, "num_gpus": 0, "num_threads": 1},
        "generator": {
            "kv_cache_gib": 0.2,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "num_gpus": 0,
            "num_threads": 1,
        },
    }
    run = train(parse_config(tree), tmp_path / "run")
    steps = read_metrics(run)
    assert [m["mismatch/log_prob_abs_diff/max"] for m in steps] == [0.0, 0.0]
    assert all(m["trainer/grad_norm"] > 0 for m in steps)
    tokens = [m["rollout/response_length/mean"] * 32 for m in steps]
    assert sum(tokens) >= 2000
