"""Three steps of `fos-rl train` for every precision, backward mode and model kind, through Ray.

    python -m benchmarks.train_arms

Step 1's log-probs and loss are the same in all backward modes of an arm; `rollouts_1` and
`rollouts_2` are short digests of the sampled tokens and log-probs of the first two steps.
"""

import argparse
import hashlib
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.arms import ARMS, write_results
from fos_rl.cli import main as fos_rl_main
from fos_rl.run_folder.folder import read_metrics
from fos_rl.spec import Mxfp8

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = ("qwen3", "qwen3_moe")


def modes(arm: str) -> list[str | None]:
    if arm == "bf16":
        return [None]
    recipe, knobs = ARMS[arm]
    row_scaled = recipe is not Mxfp8 and knobs.get("row_scaled_activation", True)
    return [*([] if row_scaled else ["quantized"]), "high_precision", "dequantized"]


def run(family: str, arm: str, mode: str | None, scratch: Path) -> dict[str, Any]:
    recipe, knobs = ARMS[arm]
    settings = {"recipe": recipe().recipe, "compute_dtype": "float32", **knobs}
    overrides = [f"model.path=random:{family}", "trainer.device=cpu", "generator.device=cpu"]
    overrides += [f"model.precision.{key}={str(value).lower()}" for key, value in settings.items()]
    if mode:
        overrides.append(f"trainer.backward_override={mode}")
    out = scratch / f"{family}-{arm}-{mode}".replace(" ", "-")
    arguments = ["train", str(ROOT / "configs" / "tiny_moe.toml"), "--out", str(out)]
    start = time.perf_counter()
    status = fos_rl_main([*arguments, *(part for o in overrides for part in ("--set", o))])
    if status:
        raise RuntimeError(f"{family}, {arm}, {mode}: fos-rl train returned {status}")
    steps = read_metrics(out)
    digests = [
        hashlib.sha256((out / f"rollouts/{step:06d}.jsonl").read_bytes()).hexdigest()[:8]
        for step in range(2)
    ]
    return {
        "model": family,
        "arm": arm,
        "backward": mode or "-",
        "steps": len(steps),
        **{f"mismatch_{i + 1}": m["mismatch/log_prob_abs_diff/mean"] for i, m in enumerate(steps)},
        "loss_1": repr(steps[0]["loss/policy"]),
        "grad_norm_1": steps[0]["trainer/grad_norm"],
        "rollouts_1": digests[0],
        "rollouts_2": digests[1],
        "run_s": round(time.perf_counter() - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", nargs="+", default=[a for a in ARMS if "tensor" not in a])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for family in FAMILIES:
            for arm in arguments.arms:
                for mode in modes(arm):
                    rows.append(run(family, arm, mode, Path(scratch)))
                    print(rows[-1], flush=True)
    command = shlex.join(["python", "-m", "benchmarks.train_arms", *sys.argv[1:]])
    write_results("train_arms", command, {"three steps": rows})


if __name__ == "__main__":
    main()
