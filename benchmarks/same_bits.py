"""Whether two revisions compute the same: metrics of fixed CPU runs, compared to the last bit.

    python benchmarks/same_bits.py REVISION [REVISION]

By default the second is the working tree. Tiny random models train three steps in bf16,
four-over-six, a quantized mixture of experts and exact mode, through Ray and vLLM, under one seed.
What depends on the clock or on memory is left out. Exit status 1 when a number differs or one
revision lacks a metric.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FOUR_OVER_SIX = 'model.precision.recipe="nvfp4_four_over_six"'
RUNS = {
    "bf16": ['model.path="random:llama"'],
    "four_over_six": ['model.path="random:qwen3"', _FOUR_OVER_SIX],
    "mixture": [
        'model.path="random:qwen3_moe"',
        _FOUR_OVER_SIX,
        'model.precision.include=["*.mlp.experts.*"]',
    ],
    "exact": ['model.path="random:qwen3"', _FOUR_OVER_SIX, 'model.consistency="exact"'],
}
COMMON = [
    "steps=3",
    "seed=7",
    "model.precision.compute_dtype=float32",
    'data={type="vowels"}',
    "rollout.prompts_per_step=2",
    "rollout.group_size=4",
    "rollout.max_new_tokens=16",
    "rollout.max_prompt_tokens=128",
    "trainer.lr=1e-3",
    "trainer.num_threads=1",
    "generator.num_threads=1",
    "generator.kv_cache_gib=0.2",
]
_NOT_COMPUTED = ("time/", "throughput/", "memory/")


def metrics_of(checkout: Path, name: str, out: Path) -> list[dict[str, float]]:
    """The metrics of one run of a checkout's code, a dict per step."""
    config = out / f"{name}.toml"
    config.write_text('[model]\npath = "random:llama"\n[data]\ntype = "vowels"\n')
    settings = [word for setting in (*RUNS[name], *COMMON) for word in ("--set", setting)]
    command = [sys.executable, "-m", "fos_rl.cli", "train", str(config), *settings]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    folder = out / name
    subprocess.run(
        [*command, "--out", str(folder)],
        cwd=out,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in row.items() if not k.startswith(_NOT_COMPUTED)} for row in rows]


def all_metrics(revision: str | None, scratch: Path) -> dict[str, list[dict[str, float]]]:
    """The metrics of every run under a revision, or under the working tree."""
    checkout = ROOT
    if revision is not None:
        checkout = scratch / "checkout"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), revision], check=True)
    try:
        found = {}
        for name in RUNS:
            print(f"{revision or 'working tree'}: {name}", file=sys.stderr)
            found[name] = metrics_of(checkout, name, scratch)
        return found
    finally:
        if revision is not None:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


def differences(
    old: list[dict[str, float]], new: list[dict[str, float]]
) -> dict[str, list[tuple[object, object]]]:
    """By metric, the values of the steps where they differ; None where there is none."""
    found: dict[str, list[tuple[object, object]]] = {}
    for before, after in zip(old, new, strict=True):
        for key in before | after:
            pair = (before.get(key), after.get(key))
            if pair[0] != pair[1]:
                found.setdefault(key, []).append(pair)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revisions", nargs="+", metavar="REVISION")
    revisions: list[str | None] = [*parser.parse_args().revisions, None][:2]
    sides = []
    for revision in revisions:
        with tempfile.TemporaryDirectory(prefix="same-bits-") as scratch:
            sides.append(all_metrics(revision, Path(scratch)))
    old, new = sides
    wrong = 0
    for name in RUNS:
        found = differences(old[name], new[name])
        wrong += len(found)
        numbers = sum(len(row) for row in old[name])
        print(f"{name}: {numbers} numbers, {len(found)} metrics differ")
        for key, pairs in found.items():
            print(f"  {key}: {pairs[0][0]!r} -> {pairs[0][1]!r}, in {len(pairs)} steps")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
