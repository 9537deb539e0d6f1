"""What the trained models of a study know when they are run in bf16, one engine for all of them.

    python experiments/four_bit_rl/eval_bf16.py runs/four_bit_rl

Writes eval_bf16.json into each run folder that holds a trained model: the run's own evaluation sets
and seeds, bf16 instead of the arm's precision. Some seconds per run after the engine's start.
"""

import argparse
import json
from pathlib import Path

from fos_rl.runtime.cluster import actor_environment

actor_environment()  # before torch is imported

from transformers import AutoTokenizer  # noqa: E402

from fos_rl.config import load_config  # noqa: E402
from fos_rl.data.eval_sets import load_eval_sets  # noqa: E402
from fos_rl.evaluation.evaluate import Evaluator  # noqa: E402
from fos_rl.generator.engine import VllmGenerator  # noqa: E402
from fos_rl.generator.folder_weights import FolderWeights  # noqa: E402
from fos_rl.model.hf import read_architecture  # noqa: E402
from fos_rl.model.sync import sync  # noqa: E402
from fos_rl.spec import ModelSpec  # noqa: E402


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, metavar="STUDY_FOLDER")
    runs = sorted(path.parent for path in parser.parse_args().study.glob("*/seed_*/model"))
    first = load_config(runs[0] / "config.toml")
    spec = ModelSpec(architecture=read_architecture(runs[0] / "model"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = VllmGenerator(spec, runs[0] / "model", first.rollout, first.generator, device)
    for run in runs:
        config = load_config(run / "config.toml")
        assert config.eval is not None
        sets = load_eval_sets(config, AutoTokenizer.from_pretrained(run / "model"))
        sync(FolderWeights(spec, run / "model"), [generator])
        with Evaluator(config, sets) as evaluator:
            results = evaluator.results(config.eval, generator)
        metrics = {key: value for result in results for key, value in result.metrics().items()}
        (run / "eval_bf16.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print(run, metrics, flush=True)
    generator.close()


if __name__ == "__main__":
    main()
