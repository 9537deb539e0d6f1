"""How far trainer and generator are apart in fast and in exact mode, and what exactness costs.

    python -m benchmarks.consistency MODEL_FOLDER...      on a GPU, in minutes

For every model, precision and mode: a pair in this process, synced; dapo-math prompts sampled and
trained on; synced again, sampled and trained on again. Mismatch, noise floor and throughput are of
both rounds' tokens, the first round's speed left out (graphs and kernels are compiled in it).
Writes benchmarks/results/consistency_DEVICE.json and .md after every arm.
"""

import argparse
import gc
import sys
import time
import traceback
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.arms import write_results
from fos_rl.algorithms.mismatch import mismatch_metrics, over_floor
from fos_rl.config import (
    AlgorithmConfig,
    GeneratorConfig,
    RolloutConfig,
    TrainerConfig,
    parse_config,
)
from fos_rl.data.problems import load_problems
from fos_rl.data.prompts import PromptSet
from fos_rl.spec import Bf16, Consistency, FourOverSix, Mxfp8, Nvfp4, Precision
from fos_rl.types import Prompt
from tests.support.pair import Pair, batch_of

RECIPES: dict[str, Precision] = {
    "bf16": Bf16(),
    "mxfp8": Mxfp8(),
    "nvfp4": Nvfp4(weight_block="1x16"),
    "four_over_six": FourOverSix(weight_block="1x16"),
}
DATA = "experiments/deepmath/data/dapo_deepmath.jsonl"
PROMPTS, GROUP = 16, 8


def prompts_of(folder: Path, rollout: RolloutConfig) -> list[Prompt]:
    config = parse_config(
        {
            "model": {"path": str(folder)},
            "data": {"type": "dapo_math", "path": DATA},
            "rollout": {
                "prompts_per_step": 2 * PROMPTS,
                "max_prompt_tokens": rollout.max_prompt_tokens,
            },
        }
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return PromptSet(load_problems(config.data, 0), tokenizer, config).batch(0)


def measure(
    folder: Path, recipe: str, consistency: Consistency, tokens: int, device: Any
) -> dict[str, Any]:
    """One row of the table."""
    rollout = RolloutConfig(group_size=GROUP, max_new_tokens=tokens, max_prompt_tokens=512)
    cache_gib = 4.0 if device == "cuda" else 0.5
    pair = Pair(
        folder,
        RECIPES[recipe],
        rollout,
        AlgorithmConfig(),
        TrainerConfig(lr=1e-6, microbatch_tokens=16384),
        GeneratorConfig(kv_cache_gib=cache_gib, max_num_seqs=PROMPTS * GROUP),
        consistency,
        device,
    )
    try:
        prompts = prompts_of(folder, rollout)
        ours, theirs, again, seconds, counts = [], [], [], {}, {}
        for number, some in enumerate((prompts[:PROMPTS], prompts[PROMPTS:])):
            pair.sync()
            start = time.perf_counter()
            rollouts = pair.generate(some, seed=number)
            seconds["generator"] = time.perf_counter() - start
            start = time.perf_counter()
            ours += pair.trainer.step(batch_of(rollouts)).log_probs
            seconds["trainer"] = time.perf_counter() - start
            counts["generator"] = sum(len(r.response_ids) for r in rollouts)
            counts["trainer"] = counts["generator"] + sum(len(r.prompt_ids) for r in rollouts)
            theirs += [np.array(r.log_probs, np.float32) for r in rollouts]
            again += pair.generator.rescore(rollouts)
        metrics = mismatch_metrics(ours, theirs)
        metrics |= mismatch_metrics(again, theirs, prefix="mismatch/floor_")
        metrics |= over_floor(metrics)
        key = "mismatch/log_prob_abs_diff/"
        return {
            "model": folder.name,
            "recipe": recipe,
            "consistency": consistency,
            "tokens": sum(map(len, ours)),
            "mean": metrics[key + "mean"],
            "p99": metrics[key + "p99"],
            "max": metrics[key + "max"],
            "k3": metrics["mismatch/kl_k3"],
            "bit-equal": float((np.concatenate(ours) == np.concatenate(theirs)).mean()),
            "floor": metrics["mismatch/floor_log_prob_abs_diff/mean"],
            "over floor": metrics.get("mismatch/over_floor", ""),
            "generator tokens/s": counts["generator"] / seconds["generator"],
            "trainer tokens/s": counts["trainer"] / seconds["trainer"],
        }
    finally:
        pair.close()
        del pair
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL_FOLDER")
    parser.add_argument("--tokens", type=int, default=128, help="response tokens at most")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--modes", nargs="+", default=get_args(Consistency))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = "python -m benchmarks.consistency " + " ".join(sys.argv[1:])
    rows: list[dict[str, Any]] = []
    failed = False
    for folder in args.models:
        for recipe in args.recipes:
            for mode in args.modes:
                try:
                    rows.append(measure(folder, recipe, mode, args.tokens, device))
                    print(rows[-1], flush=True)
                    write_results(f"consistency_{device}", command, {"consistency": rows})
                except Exception:
                    # The other arms are still worth their time.
                    failed = True
                    traceback.print_exc()
    sys.exit(failed)


if __name__ == "__main__":
    main()
