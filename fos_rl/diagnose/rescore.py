"""Stored rollouts scored again, under their own arm or another, and their difference explained."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fos_rl.config import RunConfig
from fos_rl.diagnose.attribution import (
    Attribution,
    Finding,
    attribute,
    kernel_noise_of,
    response_lengths,
    typical_of,
)
from fos_rl.diagnose.flips import differences, find_flips, nudge_size, what_flips
from fos_rl.diagnose.hypotheses import Question, Untested, remaining
from fos_rl.diagnose.records import Record, as_batch, sample_records
from fos_rl.diagnose.scorer import Forward, run_forward
from fos_rl.diagnose.weight_versions import WeightVersions, weights_of_run
from fos_rl.model.hf import read_architecture, resolve_model
from fos_rl.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """An arm, ready to score with any weights that exist."""

    config: RunConfig
    spec: ModelSpec
    model_folder: Path
    versions: WeightVersions
    device: torch.device

    def forward(self, records: Sequence[Record], version: int) -> Forward:
        """What scores the records with the weights of a policy version."""
        return Forward(
            config=self.config,
            model_folder=self.model_folder,
            spec=self.spec,
            weights=self.versions.sources[version](),
            batch=as_batch(records),
            device=self.device,
        )


@contextmanager
def open_scene(config: RunConfig, run: Path | None) -> Iterator[Scene]:
    """The configured arm with the weights that the run has stored, or the initial ones alone; on a
    GPU where there is one and the config allows it."""
    with tempfile.TemporaryDirectory(prefix="fos-rl-") as scratch:
        folder = resolve_model(config.model.path, random_folder=Path(scratch), seed=config.seed)
        spec = model_spec(config, folder)
        on_gpu = config.trainer.device != "cpu" and torch.cuda.is_available()
        yield Scene(
            config=config,
            spec=spec,
            model_folder=folder,
            versions=weights_of_run(run, spec, folder),
            device=torch.device("cuda" if on_gpu else "cpu"),
        )


def model_spec(config: RunConfig, folder: Path) -> ModelSpec:
    """The spec that trainer and generator of a config are built from."""
    # Every field of the model's settings that the spec knows, such as precision.
    shared = {
        name: getattr(config.model, name)
        for name in ModelSpec.model_fields
        if name != "architecture"
    }
    return ModelSpec(architecture=read_architecture(folder), **shared)


def recorded_log_probs(records: Sequence[Record], actor: str) -> np.ndarray | None:
    """All tokens' log-probs of the trainer or generator; None where any record lacks them."""
    values = [getattr(record, actor) for record in records]
    return None if any(v is None for v in values) else np.concatenate(values)


def explain_step(
    scene: Scene, records: Sequence[Record], version: int, max_tokens: int
) -> list[Attribution]:
    """Why each actor's log-probs of a step are not those of the arm; the generator's first.

    Weights of the step's version may be gone. The trainer's own log-probs then replace the
    arm's, and only other versions of the weights can be tested.
    """
    records = sample_records(records, max_tokens)
    if version not in scene.versions.sources:
        return _without_weights(scene, records, version)
    forward = scene.forward(records, version)
    scored = run_forward(forward)
    noise = kernel_noise_of(forward, scored.log_probs)
    found = []
    for actor in ("generator", "trainer"):
        recorded = recorded_log_probs(records, actor)
        if recorded is not None:
            question = Question(forward=forward, scored=scored, recorded=recorded)
            found.append(attribute(actor, question, noise, scene.versions, version))
    return found


def _without_weights(scene: Scene, records: Sequence[Record], version: int) -> list[Attribution]:
    generator, trainer = (recorded_log_probs(records, h) for h in ("generator", "trainer"))
    if generator is None or trainer is None:
        return []
    forward = scene.forward(records, 0)
    lengths = response_lengths(forward)
    found = differences(trainer, generator, lengths)
    initial = run_forward(forward).log_probs
    noise = kernel_noise_of(forward, initial)
    findings = []
    for other in scene.versions.sources:
        weights = scene.versions.sources[other]()
        scored = initial if other == 0 else run_forward(forward.but(weights=weights)).log_probs
        # Weights that the trainer's log-probs do not tell from its own are not another version.
        if remaining(scored, trainer) < found.mean / 2:
            continue
        left = remaining(scored, generator)
        findings.append(
            Finding(
                cause="stale weights",
                detail=f"all weights were those of {scene.versions.name(other)}",
                remaining=left,
                typical=typical_of(scored, generator, lengths),
                explained=1 - left / found.mean if found.mean else 0.0,
            )
        )
    reason = (
        f"the weights of policy version {version} are gone; set trainer.save_every to keep them"
    )
    return [
        Attribution(
            actor="generator",
            tokens=len(generator),
            found=found,
            noise=noise,
            flips=find_flips(
                found,
                noise,
                what_flips(forward),
                lambda: nudge_size(forward, initial, lengths),
            ),
            findings=sorted(findings, key=lambda finding: finding.remaining),
            untested=[Untested(cause="every other cause", reason=reason)],
        )
    ]
