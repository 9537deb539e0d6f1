"""What the numerics benchmarks share: arms, a pair on the same tokens, result files."""

import datetime
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

import tests.conftest  # noqa: F401 (environment of vLLM, before its import)
from benchmarks.quantized_linear import RESULTS, describe
from fos_rl.config import (
    AlgorithmConfig,
    GeneratorConfig,
    RolloutConfig,
    TrainerConfig,
    parse_config,
)
from fos_rl.data.problems import load_problems
from fos_rl.data.prompts import PromptSet
from fos_rl.model.tiny import write_tiny_model
from fos_rl.spec import Bf16, ComputeDtype, FourOverSix, Mxfp8, Nvfp4, Precision
from fos_rl.trainer.trainer import GrpoTrainer
from fos_rl.types import Prompt, Rollout, TrainBatch
from tests.support.pair import Pair, batch_of

ARMS = {
    "bf16": (Bf16, {}),
    "mxfp8": (Mxfp8, {}),
    "nvfp4": (Nvfp4, {"weight_block": "1x16"}),
    "four_over_six": (FourOverSix, {"weight_block": "1x16"}),
    "nvfp4 per tensor": (Nvfp4, {"weight_block": "1x16", "row_scaled_activation": False}),
    "four_over_six per tensor": (
        FourOverSix,
        {"weight_block": "1x16", "row_scaled_activation": False},
    ),
}
DTYPES: tuple[ComputeDtype, ...] = ("float32", "bfloat16")


def precision(arm: str, dtype: ComputeDtype) -> Precision:
    recipe, knobs = ARMS[arm]
    return recipe(compute_dtype=dtype, **knobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sampled tokens of one model: `num_prompts` prompts, `group_size` responses each."""

    num_prompts: int
    group_size: int
    max_new_tokens: int
    max_num_seqs: int = 64

    @property
    def rollout(self) -> RolloutConfig:
        return RolloutConfig(
            group_size=self.group_size,
            max_new_tokens=self.max_new_tokens,
            max_prompt_tokens=128,
        )


@contextmanager
def synced_pair(folder: Path, recipe: Precision, workload: Workload) -> Iterator[Pair]:
    """Trainer and generator of a model folder, after the first weight sync."""
    # One micro-batch: the trainer's tokens are one flat batch in the batch's order.
    trainer = TrainerConfig(microbatch_tokens=1_000_000)
    engine = GeneratorConfig(kv_cache_gib=0.5, max_num_seqs=workload.max_num_seqs)
    pair = Pair(folder, recipe, workload.rollout, AlgorithmConfig(), trainer, engine)
    try:
        pair.sync()
        yield pair
    finally:
        pair.close()
        # Engine and model refer to each other; the next pair needs their memory.
        del pair
        gc.collect()


def tiny_folder(family: str, scratch: Path) -> Path:
    return write_tiny_model(family, scratch / family, seed=0)


def byte_prompts(workload: Workload) -> list[Prompt]:
    """Random bytes, 8 to 60 of them."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 61, workload.num_prompts)
    return [
        Prompt(id=str(i), token_ids=rng.integers(0, 256, n).tolist(), text="", answer="")
        for i, n in enumerate(lengths)
    ]


def chat_prompts(folder: Path, workload: Workload) -> list[Prompt]:
    """Arithmetic questions in the model's chat template."""
    tree = {
        "model": {"path": str(folder)},
        "data": {"type": "arithmetic", "difficulty": 3},
        "rollout": {"prompts_per_step": workload.num_prompts},
    }
    config = parse_config(tree)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return PromptSet(load_problems(config.data, 0), tokenizer, config).batch(0)


@torch.no_grad()
def score(pair: Pair, batch: TrainBatch) -> list[np.ndarray]:
    """The trainer's log-probs of a batch, packed as one."""
    return [values.cpu().numpy() for values in pair.trainer._score(batch)]


def differences(ours: Sequence[np.ndarray], rollouts: Sequence[Rollout]) -> np.ndarray:
    """Trainer minus generator, all tokens, fp64."""
    theirs = [np.array(r.log_probs, dtype=np.float32) for r in rollouts]
    return np.concatenate(ours).astype(np.float64) - np.concatenate(theirs).astype(np.float64)


def statistics(d: np.ndarray) -> dict[str, float]:
    size = np.abs(d)
    return {
        "tokens": size.size,
        "mean": float(size.mean()),
        "p50": float(np.quantile(size, 0.5)),
        "p99": float(np.quantile(size, 0.99)),
        "max": float(size.max()),
        "bit_equal_frac": float((d == 0).mean()),
    }


def unquantized(pair: Pair, folder: Path, batch: TrainBatch) -> list[np.ndarray]:
    """Log-probs that the same weights give without quantization, in the same compute dtype."""
    old = pair.trainer
    plain = Bf16(compute_dtype=old.spec.precision.compute_dtype)
    spec = old.spec.model_copy(update={"precision": plain})
    pair.trainer = GrpoTrainer(spec, folder, old.rollout, old.algorithm, old.config, old.device)
    try:
        return score(pair, batch)
    finally:
        pair.trainer = old


def sampled(pair: Pair, prompts: list[Prompt]) -> tuple[list[Rollout], TrainBatch]:
    rollouts = pair.generate(prompts)
    return rollouts, batch_of(rollouts)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table with the first row's keys as columns."""

    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    keys = list(rows[0])
    lines = ["| " + " | ".join(keys) + " |", "|" + " --- |" * len(keys)]
    for row in rows:
        lines.append("| " + " | ".join(cell(row.get(key, "")) for key in keys) + " |")
    return "\n".join(lines) + "\n"


def write_results(name: str, command: str, tables: dict[str, list[dict[str, Any]]]) -> None:
    """results/NAME.json and NAME.md, with date, device and command."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": describe(torch.device("cpu")),
        "torch": torch.__version__,
        "command": command,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps({**about, **tables}, indent=2) + "\n")
    parts = [f"{key}: {value}\n" for key, value in about.items()]
    parts += [f"\n## {title}\n\n{markdown(rows)}" for title, rows in tables.items()]
    (RESULTS / f"{name}.md").write_text("\n".join(parts))
