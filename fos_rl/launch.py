"""From a config to a finished run: check everything, start the hosts, drive the loop."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from fos_rl.cluster import Cluster, Placement, plan_placement
from fos_rl.config import RunConfig, load_config, run_config_file
from fos_rl.console import RunConsole
from fos_rl.data.eval_sets import EvalSet, load_eval_sets
from fos_rl.data.problems import load_problems
from fos_rl.data.prompts import PromptSet
from fos_rl.data.verifiers import VerifierPool
from fos_rl.evaluate import Evaluator
from fos_rl.grpo import NoLearningSignal, grpo_steps
from fos_rl.loggers import start_loggers
from fos_rl.model.hf import parse_architecture, read_architecture, resolve_model
from fos_rl.model.machine import check_precision
from fos_rl.parallel import check_parallel, is_parallel, refuse_parallel
from fos_rl.runs import RunFolder, describe_environment, read_metrics
from fos_rl.spec import Architecture, ModelSpec
from fos_rl.trainer.checkpoint import checkpoint_folder, latest_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that has passed every check that needs no actor."""

    model_folder: Path
    spec: ModelSpec
    prompts: PromptSet
    eval_sets: list[EvalSet]
    placement: Placement
    notes: list[str]


@contextmanager
def planned(config: RunConfig) -> Iterator[Plan]:
    """Read the model and the data; a random model lives as long as the plan does.

    Raises:
        ValueError: for whatever in the config cannot work here.
    """
    with tempfile.TemporaryDirectory(prefix="fos-rl-") as scratch:
        placement = plan_placement(config, count_gpus(config))
        folder = resolve_model(config.model.path, random_folder=Path(scratch), seed=config.seed)
        spec, model_notes = _check_model(config, read_architecture(folder), placement)
        problems = load_problems(config.data, config.seed)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts = PromptSet(problems, tokenizer, config)
        eval_sets = load_eval_sets(config, tokenizer)
        yield Plan(
            model_folder=folder,
            spec=spec,
            prompts=prompts,
            eval_sets=eval_sets,
            placement=placement,
            notes=[
                *model_notes,
                f"data       {prompts.summary}",
                *(f"eval       {eval_set.summary}" for eval_set in eval_sets),
                *([] if is_parallel(config) else [f"placement  {placement.describe()}"]),
            ],
        )


def check_without_model(config: RunConfig, architecture: Path) -> list[str]:
    """What can be checked where the model is not at hand: everything that its config.json tells.

    Args:
        architecture: a config.json that stands in for the model's.

    Raises:
        ValueError: for whatever in the config cannot work with such a model.
    """
    if not architecture.is_file():
        raise ValueError(f"--architecture {architecture}: no such file; give a model's config.json")
    keys = json.loads(architecture.read_text())
    placement = plan_placement(config, count_gpus(config))
    _, notes = _check_model(config, parse_architecture(keys, str(architecture)), placement)
    return [*notes, "unchecked  tokenizer, data and eval sets, which need the model's own files"]


def _check_model(
    config: RunConfig, architecture: Architecture, placement: Placement
) -> tuple[ModelSpec, list[str]]:
    """The spec both hosts run, and what a user should know about it."""
    spec = ModelSpec(
        architecture=architecture,
        precision=config.model.precision,
        consistency=config.model.consistency,
    )
    if config.algorithm.router_replay and not architecture.num_experts:
        raise ValueError(
            f"algorithm.router_replay = true: {config.model.path} has no experts whose choice "
            "could be replayed; leave it out, or choose a mixture of experts"
        )
    devices = _known_devices(config, placement)
    precision = spec.precision
    return spec, [
        f"model      {config.model.path} ({architecture.family}), contract {spec.contract_hash()}",
        f"precision  {precision.recipe}, {precision.compute_dtype} activations",
        *check_precision(spec, config.trainer.backward_override, devices),
        *check_parallel(config, spec),
    ]


def train(config: RunConfig, out: Path) -> Path:
    """Run GRPO in a new folder; returns it. Ctrl-C leaves it readable."""
    return _run(config, lambda environment: RunFolder.create(out, config, environment))


def resume(run: Path, overrides: Sequence[str] = ()) -> Path:
    """Go on with a run from its newest checkpoint, under its own config.

    Raises:
        ValueError: when there is no run or no checkpoint.
    """
    config = load_config(run_config_file(run), overrides)
    checkpoint, step = latest_checkpoint(run)
    if step >= config.steps:
        raise ValueError(
            f"{run} has finished its {config.steps} steps; pass --set steps=N to go further"
        )
    return _run(
        config, lambda environment: RunFolder.reopen(run, step, environment), checkpoint, step
    )


def _run(
    config: RunConfig,
    open_folder: Callable[[dict[str, Any]], RunFolder],
    checkpoint: Path | None = None,
    first_step: int = 0,
) -> Path:
    refuse_parallel(config)
    console = RunConsole(config.steps, first_step)
    with console.doing("reading model and data"), planned(config) as plan:
        for note in plan.notes:
            console.say(note)
        verifier = VerifierPool(config.reward, plan.prompts.verifier)
        evaluator = Evaluator(config, plan.eval_sets)
        journal = open_folder(
            describe_environment(contract=plan.spec.contract_hash(), verifier=verifier.name)
        )
        folder = journal.path
        console.say(f"run folder {folder}")
        loggers = [journal.metrics, *start_loggers(config, folder), console.step]
        with console.doing("starting trainer and generator"):
            cluster = Cluster(config, plan.spec, plan.model_folder, plan.placement)
        with cluster, verifier, evaluator, console.live():
            if checkpoint is not None:
                cluster.load_checkpoint(checkpoint)
                console.say(f"resumed from {checkpoint}")
            steps = grpo_steps(
                config,
                plan.prompts,
                cluster,
                verifier,
                cluster,
                cluster.sync_weights,
                journal,
                first_step,
            )
            try:
                for record in steps:
                    record = evaluator.add_to(record, cluster)
                    for log in loggers:
                        log(record)
                    done = record.step + 1
                    if config.trainer.save_every and done % config.trainer.save_every == 0:
                        cluster.save_checkpoint(checkpoint_folder(folder, done))
            except NoLearningSignal:
                # What was learned before the signal ran dry is kept.
                _replace_model(cluster, folder / "model")
                raise
            _replace_model(cluster, folder / "model")
    console.summary(read_metrics(folder), str(folder))
    console.say(f"model {folder / 'model'}")
    return folder


def _replace_model(cluster: Cluster, folder: Path) -> None:
    """Write the trained model; a resumed run replaces the one it wrote before."""
    shutil.rmtree(folder, ignore_errors=True)
    cluster.save_model(folder)


def _known_devices(config: RunConfig, placement: Placement) -> set[str]:
    """Device types of the hosts; a GPU of a remote cluster is only known there."""
    gpus = (placement.trainer_gpus, placement.generator_gpus)
    devices = {"cuda" if number else "cpu" for number in gpus}
    return devices if config.cluster.address == "local" else devices - {"cuda"}


def count_gpus(config: RunConfig) -> int:
    """GPUs of this machine, or of the running cluster that the run would join."""
    if config.cluster.address != "local":
        from fos_rl.cluster import cluster_gpus

        return cluster_gpus(config)
    import torch

    return torch.cuda.device_count()
