"""From a config to a finished run: check everything, start the hosts, drive the loop."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from fos_rl.cluster import Cluster, Placement, plan_placement
from fos_rl.config import RunConfig
from fos_rl.console import RunConsole
from fos_rl.data.problems import load_problems
from fos_rl.data.prompts import PromptSet
from fos_rl.data.verifiers import VerifierPool
from fos_rl.grpo import grpo_steps
from fos_rl.loggers import start_loggers
from fos_rl.model.hf import read_architecture, resolve_model
from fos_rl.runs import RunFolder, describe_environment, new_run_folder, read_metrics
from fos_rl.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that has passed every check that needs no actor."""

    model_folder: Path
    spec: ModelSpec
    prompts: PromptSet
    placement: Placement
    notes: list[str]


@contextmanager
def planned(config: RunConfig) -> Iterator[Plan]:
    """Read the model and the data; a random model lives as long as the plan does.

    Raises:
        ValueError: for whatever in the config cannot work here.
    """
    with tempfile.TemporaryDirectory(prefix="fos-rl-") as scratch:
        placement = plan_placement(config, _count_gpus(config))
        folder = resolve_model(config.model.path, random_folder=Path(scratch), seed=config.seed)
        spec = ModelSpec(architecture=read_architecture(folder), precision=config.model.precision)
        problems = load_problems(config.data, config.seed)
        prompts = PromptSet(problems, AutoTokenizer.from_pretrained(folder), config)
        yield Plan(
            model_folder=folder,
            spec=spec,
            prompts=prompts,
            placement=placement,
            notes=[
                f"model      {config.model.path} ({spec.architecture.family}), contract "
                f"{spec.contract_hash()}",
                f"precision  {spec.precision.recipe}, {spec.precision.compute_dtype} activations",
                f"data       {prompts.summary}",
                f"placement  {placement.describe()}",
            ],
        )


def train(config: RunConfig, out: Path) -> Path:
    """Run GRPO to the end; returns the run folder. Ctrl-C leaves it readable."""
    console = RunConsole(config.steps)
    with console.doing("reading model and data"), planned(config) as plan:
        for note in plan.notes:
            console.say(note)
        folder = new_run_folder(out)
        console.say(f"run folder {folder}")
        verifier = VerifierPool(config.reward, plan.prompts.verifier)
        environment = describe_environment(
            contract=plan.spec.contract_hash(), verifier=verifier.name
        )
        journal = RunFolder(folder, config, environment)
        loggers = [journal.metrics, *start_loggers(config, folder), console.step]
        with console.doing("starting trainer and generator"):
            cluster = Cluster(config, plan.spec, plan.model_folder, plan.placement)
        with cluster, verifier, console.live():
            steps = grpo_steps(
                config, plan.prompts, cluster, verifier, cluster, cluster.sync_weights, journal
            )
            for record in steps:
                for log in loggers:
                    log(record)
    console.summary(read_metrics(folder), str(folder))
    return folder


def _count_gpus(config: RunConfig) -> int:
    if config.cluster.address != "local":
        from fos_rl.cluster import cluster_gpus

        return cluster_gpus(config)
    import torch

    return torch.cuda.device_count()
