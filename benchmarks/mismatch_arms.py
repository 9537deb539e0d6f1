"""Generator against trainer, log-prob by log-prob, for every precision, model and dtype.

    python -m benchmarks.mismatch_arms
    python -m benchmarks.mismatch_arms --model models/SmolLM2-135M-Instruct --dtypes float32

`batch_mean` and `batch_max` are of the trainer against itself: each sequence scored packed with all
others and alone. A per-tensor activation scale shows there, without a trainer.
`quantization_mean` is the yardstick: how far quantization itself moves the trainer's log-probs.
"""

import argparse
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arms import (
    ARMS,
    DTYPES,
    Workload,
    byte_prompts,
    chat_prompts,
    differences,
    precision,
    sampled,
    score,
    statistics,
    synced_pair,
    tiny_folder,
    unquantized,
    write_results,
)
from fos_rl.types import Prompt, TrainBatch
from tests.support.pair import Pair


def batch_dependence(pair: Pair, batch: TrainBatch, together: list[np.ndarray]) -> np.ndarray:
    """Log-probs of the first sequences scored alone, minus those of the whole batch."""
    alone = []
    for i in range(min(16, batch.num_sequences)):
        one = TrainBatch(
            token_ids=batch.token_ids[i : i + 1],
            prompt_lengths=batch.prompt_lengths[i : i + 1],
            generator_log_probs=batch.generator_log_probs[i : i + 1],
            advantages=batch.advantages[i : i + 1],
        )
        alone += score(pair, one)
    return np.concatenate(alone).astype(np.float64) - np.concatenate(together[: len(alone)])


def row(
    model: str, folder: Path, arm: str, dtype: Any, workload: Workload, prompts: list[Prompt]
) -> dict[str, Any]:
    with synced_pair(folder, precision(arm, dtype), workload) as pair:
        rollouts, batch = sampled(pair, prompts)
        ours = score(pair, batch)
        d = differences(ours, rollouts)
        packing = np.abs(batch_dependence(pair, batch, ours))
        plain = np.concatenate(unquantized(pair, folder, batch))
        quantization = np.abs(np.concatenate(ours).astype(np.float64) - plain)
    return {
        "model": model,
        "compute": dtype,
        "arm": arm,
        **statistics(d),
        "batch_mean": float(packing.mean()),
        "batch_max": float(packing.max()),
        "quantization_mean": float(quantization.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder instead of the two tiny models")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    workload = Workload(
        num_prompts=arguments.prompts,
        group_size=arguments.group_size,
        max_new_tokens=arguments.new_tokens,
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model:
            prompts = chat_prompts(arguments.model, workload)
            models = {arguments.model.name: arguments.model}
        else:
            prompts = byte_prompts(workload)
            models = {f: tiny_folder(f, Path(scratch)) for f in ("qwen3", "qwen3_moe")}
        for name, folder in models.items():
            for dtype in arguments.dtypes:
                for arm in arguments.arms:
                    start = time.perf_counter()
                    rows.append(row(name, folder, arm, dtype, workload, prompts))
                    print(f"{time.perf_counter() - start:.0f} s  {rows[-1]}", flush=True)
    command = shlex.join(["python", "-m", "benchmarks.mismatch_arms", *sys.argv[1:]])
    stem = f"mismatch_arms_{arguments.model.name}" if arguments.model else "mismatch_arms"
    write_results(stem, command, {"mismatch": rows})


if __name__ == "__main__":
    main()
