"""What trainer and generator in two Ray actors cost on one shared device, in parts.

    python -m benchmarks.shared_gpu MODEL_FOLDER [--consistency exact] [--tokens 512]

Start; then, per round, a weight sync and its parts, sampling, the release of memory and a trainer
step; then sampling inside the actor and, once the actors are gone, the same in this process, which
is the path through Ray against none. One JSON line per measurement. Prompts are random tokens.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fos_rl.runtime.cluster import Cluster, actor_environment, build_generator, plan_placement

# Before torch is imported: OpenMP reads its variables once.
actor_environment()

import numpy as np  # noqa: E402
import ray  # noqa: E402
import torch  # noqa: E402

from fos_rl.config import RunConfig, parse_config  # noqa: E402
from fos_rl.generator.folder_weights import FolderWeights  # noqa: E402
from fos_rl.model.hf import read_architecture  # noqa: E402
from fos_rl.model.sync import sync  # noqa: E402
from fos_rl.spec import ModelSpec  # noqa: E402
from fos_rl.types import Prompt, Rollout  # noqa: E402
from tests.support.pair import batch_of  # noqa: E402

PROMPTS, GROUP, PROMPT_TOKENS = 16, 8, 100


def say(what: str, **values: object) -> None:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
    print(json.dumps({"what": what, **rounded}), flush=True)


def timed(seconds: dict[str, float], name: str, call: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = call()
    seconds[name] = time.perf_counter() - begin
    return result


def prompts_of(number: int, vocab_size: int) -> list[Prompt]:
    draw = random.Random(number)
    return [
        Prompt(
            id=str(i),
            token_ids=[draw.randrange(3, vocab_size) for _ in range(PROMPT_TOKENS)],
            text="",
            answer="",
        )
        for i in range(PROMPTS)
    ]


def num_tokens(groups: list[list[Rollout]]) -> int:
    return sum(len(rollout.response_ids) for group in groups for rollout in group)


def measure_sync(cluster: Cluster) -> dict[str, float]:
    """Seconds of a whole sync, and of its parts where the generator reads the trainer's memory."""
    trainer, generator = cluster.trainer, cluster.generator
    seconds: dict[str, float] = {}
    timed(seconds, "sync", lambda: sync(trainer, [generator]))
    timed(seconds, "begin", generator.begin_weight_sync)
    shared = timed(seconds, "share", trainer.shared_weights)
    if not timed(seconds, "load", lambda: generator.load_shared_weights(shared)):
        for bucket in trainer.export_weights():
            generator.load_weight_bucket(bucket)
    sums = timed(seconds, "trainer sums", trainer.weight_checksums)
    version = trainer.weights_version()
    timed(seconds, "finish", lambda: generator.finish_weight_sync(version, sums))
    return seconds


def through_ray(config: RunConfig, spec: ModelSpec, folder: Path, rounds: int) -> None:
    with Cluster(config, spec, folder, plan_placement(config, torch.cuda.device_count())) as c:
        say("start", text=c.started)
        for number in range(rounds):
            seconds = measure_sync(c)
            prompts = prompts_of(number, spec.architecture.vocab_size)
            groups = timed(
                seconds, "generate", lambda p=prompts, n=number: c.generator.generate(p, n)
            )
            timed(seconds, "generator.release", c.generator.release_memory)
            rollouts = [rollout for group in groups for rollout in group]
            result = timed(seconds, "train", lambda r=rollouts: c.trainer.step(batch_of(r)))
            timed(seconds, "trainer.release", c.trainer.release_memory)
            theirs = np.concatenate([np.array(r.log_probs, np.float32) for r in rollouts])
            d = np.abs(np.concatenate(result.log_probs) - theirs)
            say(
                "through Ray",
                round=number,
                tokens_per_s=num_tokens(groups) / seconds["generate"],
                **{"|d| mean": float(d.mean()), "|d| max": float(d.max())},
                entropy=result.metrics["policy/entropy"],
                surprise=-float(theirs.mean()),
                **seconds,
            )
        sync(c.trainer, [c.generator])
        for number in range(rounds):
            prompts = prompts_of(number, spec.architecture.vocab_size)
            rate = ray.get(c.generator.actor.__ray_call__.remote(_rate, prompts, number))
            say("inside the actor", round=number, tokens_per_s=rate)


def _rate(actor: Any, prompts: list[Prompt], seed: int) -> float:
    begin = time.perf_counter()
    return num_tokens(actor.target.generate(prompts, seed)) / (time.perf_counter() - begin)


def in_process(config: RunConfig, spec: ModelSpec, folder: Path, rounds: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds: dict[str, float] = {}
    generator = timed(
        seconds, "engine", lambda: build_generator(spec, folder, config, device, False)
    )
    timed(seconds, "folder sync", lambda: sync(FolderWeights(spec, folder), [generator]))
    say("in process", **seconds)
    for number in range(rounds):
        prompts = prompts_of(number, spec.architecture.vocab_size)
        begin = time.perf_counter()
        rate = num_tokens(generator.generate(prompts, number)) / (time.perf_counter() - begin)
        say("in process", round=number, tokens_per_s=rate)
    generator.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--consistency", default="fast", choices=["fast", "exact"])
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--tokens", type=int, default=512, help="response tokens at most")
    parser.add_argument("--microbatch-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tree = {
        "model": {
            "path": str(args.model),
            "consistency": args.consistency,
            "precision": {"recipe": args.recipe},
        },
        "data": {"type": "vowels"},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "max_new_tokens": args.tokens,
            "max_prompt_tokens": 2 * PROMPT_TOKENS,
        },
        "trainer": {"microbatch_tokens": args.microbatch_tokens},
    }
    config = parse_config(tree)
    spec = ModelSpec(
        architecture=read_architecture(args.model),
        precision=config.model.precision,
        consistency=config.model.consistency,
    )
    through_ray(config, spec, args.model, args.rounds)
    in_process(config, spec, args.model, args.rounds)


if __name__ == "__main__":
    main()
