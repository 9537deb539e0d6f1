"""From a config to a finished run: check everything, start the actors, drive the loop."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fos_rl.config import OUTDATED_MODEL, RunConfig
from fos_rl.data.eval_sets import EvalSet, load_eval_sets, trained_on_note
from fos_rl.data.problems import load_problems
from fos_rl.data.prompts import PromptSet
from fos_rl.evaluation.evaluate import Evaluator
from fos_rl.files.lock import run_lock
from fos_rl.files.reading import read_json_object
from fos_rl.files.whole import replace_folder
from fos_rl.grpo import NoLearningSignal, grpo_steps
from fos_rl.model.hf import (
    hf_weight_shapes,
    parse_architecture,
    read_architecture,
    resolve_model,
)
from fos_rl.model.machine import check_precision, device_memory_gib
from fos_rl.model.tokenizer import check_tokenizer, load_tokenizer
from fos_rl.model.weight_files import check_weights
from fos_rl.rewards.verifiers import VerifierPool
from fos_rl.run_folder.auto_values import with_chosen_values
from fos_rl.run_folder.folder import RunFolder, describe_environment, read_metrics
from fos_rl.run_folder.loggers import check_loggers, start_loggers
from fos_rl.run_folder.preflight import (
    Space,
    check_cache,
    check_head_size,
    check_lengths,
    check_output,
    describe_first_prompt,
    needed_space,
    remote_unknowns,
)
from fos_rl.run_folder.reopen import reopen
from fos_rl.run_folder.resume_plan import plan_resume
from fos_rl.run_folder.run_console import RunConsole
from fos_rl.runtime.cluster import Cluster, Placement, plan_placement
from fos_rl.runtime.parallel import check_parallel, is_parallel, refuse_parallel
from fos_rl.spec import Architecture, ModelSpec
from fos_rl.trainer.checkpoint import checkpoint_folder
from fos_rl.trainer.dead_model import at_step
from fos_rl.types import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that has passed every check that needs no actor.

    config: the run's, with the values that `auto` has chosen.
    """

    config: RunConfig
    model_folder: Path
    spec: ModelSpec
    prompts: PromptSet
    eval_sets: list[EvalSet]
    placement: Placement
    space: Space
    notes: list[str]
    unchecked: list[str]
    """What only the actors can tell."""


CHECKED = (
    "settings",
    "config.json",
    "names, shapes and types of the weights",
    "tokenizer",
    "head size",
    "context",
    "key-value cache",
    "data",
    "first prompt",
    "loggers",
    "output folder",
    "disk",
)
"""What `planned` checks of a run."""


@contextmanager
def planned(config: RunConfig, *, out: Path | None = None, first_step: int = 0) -> Iterator[Plan]:
    """Read the model and the data; a random model lives as long as the plan does.

    Args:
        out: the run folder, which may not exist yet; None where no run is to be written.
        first_step: of a resumed run.

    Raises:
        ValueError: for whatever in the config cannot work here.
    """
    logger_unknowns = [] if out is None else check_loggers(config)
    with tempfile.TemporaryDirectory(prefix="fos-rl-") as scratch:
        placement = plan_placement(config, count_gpus(config))
        folder = resolve_model(config.model.path, random_folder=Path(scratch), seed=config.seed)
        config, spec, model_notes, unknowns = _check_model(
            config, read_architecture(folder), placement
        )
        shapes = hf_weight_shapes(spec)
        tied_head = spec.architecture.tie_word_embeddings
        weights = check_weights(folder, shapes, tied_head=tied_head)
        tokenizer = load_tokenizer(folder)
        tokens = check_tokenizer(tokenizer, folder, spec.architecture.vocab_size)
        problems = load_problems(config.data, config.seed)
        prompts = PromptSet(problems, tokenizer, config)
        first_prompt = describe_first_prompt(prompts.prompts, prompts.batch(0)[0])
        eval_sets = load_eval_sets(config, tokenizer)
        space = needed_space(config, shapes, prompts.counts.longest, first_step)
        output = []
        if out is not None:
            free = check_output(out, space.certain, "the model and the checkpoints")
            output.append(f"output     {out}: {space}; {free}")
        if config.cluster.address != "local":
            unknowns += remote_unknowns(config.cluster.address, folder, bool(placement.num_gpus))
        yield Plan(
            config=config,
            model_folder=folder,
            spec=spec,
            prompts=prompts,
            eval_sets=eval_sets,
            placement=placement,
            space=space,
            notes=[
                *model_notes,
                f"weights    {weights}",
                f"tokenizer  {tokens}",
                f"data       {prompts.summary}",
                f"prompt     {first_prompt}",
                *(
                    f"eval       {eval_set.summary}{trained_on_note(eval_set, prompts.prompts)}"
                    for eval_set in eval_sets
                ),
                *([] if is_parallel(config) else [f"placement  {placement.describe()}"]),
                *output,
            ],
            unchecked=[*unknowns, *logger_unknowns, "memory", "values of the weights"],
        )


def check_without_model(config: RunConfig, architecture: Path) -> list[str]:
    """What can be checked where the model is not available: everything that its config.json tells.

    Args:
        architecture: a config.json that replaces the model's.

    Raises:
        ValueError: for whatever in the config cannot work with such a model.
    """
    keys = read_json_object(architecture, "give --architecture a model's config.json")
    placement = plan_placement(config, count_gpus(config))
    parsed = parse_architecture(keys, str(architecture))
    _, _, notes, unknowns = _check_model(config, parsed, placement)
    needs_model = "weights, tokenizer, data and eval sets, which need the model's own files"
    return [*notes, f"unchecked  {'; '.join([*unknowns, needs_model, 'output folder', 'memory'])}"]


def _check_model(
    config: RunConfig, architecture: Architecture, placement: Placement
) -> tuple[RunConfig, ModelSpec, list[str], list[str]]:
    """The spec that trainer and generator run, what a user should know about it, and what only the
    actors can tell."""
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
    lengths = check_lengths(config, architecture)
    trainer, generator = _device(placement.trainer_gpus), _device(placement.generator_gpus)
    config = with_chosen_values(
        config,
        spec,
        device=generator,
        memory_gib=_memory_gib(config, generator),
        shares_device=placement.colocated or trainer == generator == "cpu",
    )
    check_cache(config, spec, generator)
    unknowns = check_head_size(
        spec,
        trainer=trainer if trainer in devices else None,
        generator=generator if generator in devices else None,
    )
    notes = [
        f"model      {config.model.path} ({architecture.family}), contract {spec.contract_hash()}",
        f"precision  {precision.recipe}, {precision.compute_dtype} activations",
        *check_precision(
            spec,
            config.trainer.backward_override,
            devices,
            cuda_graphs=config.generator.cuda_graphs,
        ),
        *check_parallel(config, spec),
        f"lengths    {lengths}",
        f"cache      {config.generator.kv_cache_gib:g} GiB for keys and values",
    ]
    return config, spec, notes, unknowns


def train(config: RunConfig, out: Path) -> Path:
    """Run GRPO in a new folder; returns it. Ctrl-C leaves it readable."""
    refuse_parallel(config)
    console = RunConsole(config.steps)
    with _parts(config, console, out) as parts:
        config = parts.plan.config
        journal = RunFolder.create(out, config, parts.environment())
        console.say(f"run folder {journal.path}")
        with run_lock(journal.path, console.say), _start(config, parts, console) as cluster:
            _go(config, parts, cluster, journal, console)
    return journal.path


def resume(run: Path, overrides: Sequence[str] = (), *, strict: bool = False) -> Path:
    """Go on with a run from its newest whole checkpoint, under its own config.

    Nothing in the folder changes before the checkpoint is loaded.

    Args:
        strict: stop where any checkpoint is damaged, left over or unverified.

    Raises:
        ValueError: when there is no run, no whole checkpoint, another process at work, a setting
            that may not change, or a damaged file.
    """
    if not (run / "config.toml").is_file():
        raise ValueError(
            f"{run} is not a run folder (it has no config.toml), and so has no checkpoint to "
            "resume from; give a folder that fos-rl train wrote"
        )
    notes: list[str] = []
    with run_lock(run, notes.append):
        resumed = plan_resume(run, overrides, strict=strict)
        config = resumed.config
        refuse_parallel(config)
        console = RunConsole(config.steps, resumed.next_step)
        for note in [*notes, *resumed.found.notes]:
            console.say(note)
        with _parts(config, console, run, resumed.next_step) as parts:
            resumed.check_contract(parts.plan.spec)
            config = parts.plan.config
            with _start(config, parts, console) as cluster:
                cluster.trainer.load_checkpoint(resumed.checkpoint.resolve())
                console.say(f"resumed from {resumed.checkpoint}")
                journal, words = reopen(resumed, parts.environment())
                for line in words:
                    console.say(line)
                _go(config, parts, cluster, journal, console, resumed.next_step)
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a run has before its actors start."""

    plan: Plan
    verifier: VerifierPool
    evaluator: Evaluator
    seconds: float

    def environment(self) -> dict[str, Any]:
        contract = self.plan.spec.contract_hash()
        return describe_environment(contract=contract, verifier=self.verifier.name)


@contextmanager
def _parts(
    config: RunConfig, console: RunConsole, out: Path, first_step: int = 0
) -> Iterator[_Parts]:
    begin = time.perf_counter()
    with ExitStack() as stack:
        with console.doing("reading model and data"):
            plan = stack.enter_context(planned(config, out=out, first_step=first_step))
        for note in plan.notes:
            console.say(note)
        verifier = stack.enter_context(VerifierPool(config.reward, plan.prompts.verifier))
        evaluator = stack.enter_context(Evaluator(config, plan.eval_sets))
        seconds = time.perf_counter() - begin
        yield _Parts(plan=plan, verifier=verifier, evaluator=evaluator, seconds=seconds)


def _start(config: RunConfig, parts: _Parts, console: RunConsole) -> Cluster:
    with console.doing("starting trainer and generator"):
        return Cluster(config, parts.plan.spec, parts.plan.model_folder, parts.plan.placement)


def _go(
    config: RunConfig,
    parts: _Parts,
    cluster: Cluster,
    journal: RunFolder,
    console: RunConsole,
    first_step: int = 0,
) -> None:
    """The steps from `first_step` on, and the model at the end."""
    console.say(f"start      model and data {parts.seconds:.1f} s; actors {cluster.started}")
    folder = journal.path
    loggers = [journal.metrics, *start_loggers(config, folder, first_step), console.step]
    steps = grpo_steps(
        config,
        prompts=parts.plan.prompts,
        trainer=cluster.trainer,
        generators=[cluster.generator],
        rewards=parts.verifier,
        journal=journal,
        first_step=first_step,
    )
    with console.live():
        try:
            for record in steps:
                record = parts.evaluator.add_to(record, [cluster.generator])
                for log in loggers:
                    log(record)
                done = record.step + 1
                if config.trainer.save_every and done % config.trainer.save_every == 0:
                    with at_step(record.step):
                        _save_checkpoint(cluster.trainer, config, folder, done)
        except NoLearningSignal:
            # What was learned before the signal ran dry is kept.
            _replace_model(cluster.trainer, folder)
            raise
        with at_step(config.steps - 1):
            _replace_model(cluster.trainer, folder)
    console.summary(read_metrics(folder), str(folder))
    console.say(f"model {folder / 'model'}")


def _save_checkpoint(trainer: Trainer, config: RunConfig, run: Path, next_step: int) -> None:
    folder = checkpoint_folder(run, next_step).resolve()
    trainer.save_checkpoint(folder, config.model_dump(mode="json"))


def _replace_model(trainer: Trainer, run: Path) -> None:
    """Write the trained model; the one of an earlier end stays until this one is whole."""
    new = run / "model.new"
    shutil.rmtree(new, ignore_errors=True)
    trainer.save_model(new.resolve())
    replace_folder(new, run / "model")
    (run / OUTDATED_MODEL).unlink(missing_ok=True)


def _known_devices(config: RunConfig, placement: Placement) -> set[str]:
    """Devices of trainer and generator; a GPU of a remote cluster is only known there."""
    devices = {_device(gpus) for gpus in (placement.trainer_gpus, placement.generator_gpus)}
    return devices if config.cluster.address == "local" else devices - {"cuda"}


def _device(num_gpus: int) -> Literal["cpu", "cuda"]:
    return "cuda" if num_gpus else "cpu"


def _memory_gib(config: RunConfig, device: str) -> float:
    """All memory of the device that the generator is on."""
    if device == "cuda" and config.cluster.address != "local":
        from fos_rl.runtime.cluster import cluster_gpu_gib

        return cluster_gpu_gib(config)
    return device_memory_gib(device)


def count_gpus(config: RunConfig) -> int:
    """GPUs of this machine, or of the running cluster that the run would join."""
    if config.cluster.address != "local":
        from fos_rl.runtime.cluster import cluster_gpus

        return cluster_gpus(config)
    import torch

    return torch.cuda.device_count()
