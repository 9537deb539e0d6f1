"""Causes in the weights: another policy version, whole or in part, or mixed-up tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fos_rl.diagnose.hypotheses import Hypothesis, Question, Untested, from_forward
from fos_rl.diagnose.scorer import Weights
from fos_rl.model.convert import build_decoder
from fos_rl.model.hf import load_hf_weights, read_weights
from fos_rl.run_folder.find_checkpoint import checkpoint_steps
from fos_rl.spec import Bf16, ModelSpec
from fos_rl.trainer.checkpoint import STATE, checkpoint_folder, read_state

_PARTS: dict[str, Callable[[str], bool]] = {
    "embedding": lambda n: "embed_tokens" in n,
    "head": lambda n: "lm_head" in n,
    "norms": lambda n: "norm" in n,
    "attention": lambda n: ".self_attn." in n and "norm" not in n,
    "MLPs": lambda n: ".mlp." in n and "experts" not in n,
    "router": lambda n: ".mlp.gate." in n,
    "experts": lambda n: ".experts." in n,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersions:
    """Weights that still exist, by policy version; each is read when asked for."""

    sources: dict[int, Callable[[], Weights]]

    def name(self, version: int) -> str:
        """What a policy version is called in messages."""
        return "the initial model" if version == 0 else f"the checkpoint after step {version - 1}"


def weights_of_run(run: Path | None, spec: ModelSpec, model_folder: Path) -> WeightVersions:
    """The initial model and, of a run, its checkpoints."""
    sources: dict[int, Callable[[], Weights]] = {0: lambda: _initial(spec, model_folder)}
    if run is not None:
        for version in checkpoint_steps(run):
            folder = checkpoint_folder(run, version)
            if (folder / STATE).is_file():
                sources[version] = lambda f=folder: _checkpoint(f)
    return WeightVersions(sources=sources)


def stale_weights(
    question: Question, versions: WeightVersions, current: int
) -> Iterator[Hypothesis | Untested]:
    """Weights of another version, whole, or in one part of the model alone."""
    others = [version for version in versions.sources if version != current]
    if not others:
        yield Untested(
            cause="stale weights",
            reason="there are no weights of another policy version: step 0 has none before it, and "
            "checkpoints are kept only with trainer.save_every",
        )
    for version in others:
        weights, name = versions.sources[version](), versions.name(version)
        if all(torch.equal(weights[n], w) for n, w in question.forward.weights.items()):
            continue
        older = "stale" if version < current else "newer"
        yield from_forward(
            f"{older} weights",
            f"all weights were those of {name}",
            question.forward.but(weights=weights),
        )
        for part, belongs in _PARTS.items():
            chosen = {n: w for n, w in weights.items() if belongs(n)}
            if chosen:
                yield from_forward(
                    f"{older} weights",
                    f"the {part} alone had the weights of {name}",
                    question.forward.but(weights={**question.forward.weights, **chosen}),
                )


def mixed_up_tensors(question: Question) -> Iterator[Hypothesis]:
    """Tensors of one shape loaded in each other's place."""
    weights = question.forward.weights
    for one, other in (("gate_proj", "up_proj"), ("k_proj", "v_proj")):
        swapped = {n: weights[_swap(n, one, other)] for n in weights}
        if all(swapped[n].shape == w.shape for n, w in weights.items()):
            yield from_forward(
                "mixed-up weights",
                f"{one} and {other} were swapped",
                question.forward.but(weights=swapped),
            )
    experts = [n for n in weights if ".experts." in n]
    if experts:
        for detail, order in (
            ("experts were shifted by one", lambda w: w.roll(1, 0)),
            ("experts were in reverse order", lambda w: w.flip(0)),
        ):
            moved = {n: order(weights[n]) if n in experts else weights[n] for n in weights}
            yield from_forward("mixed-up weights", detail, question.forward.but(weights=moved))
    head = "lm_head.weight"
    if head in weights:
        tied = {**weights, head: weights["model.embed_tokens.weight"]}
        detail = "the head was the embedding, as if tied"
        yield from_forward("mixed-up weights", detail, question.forward.but(weights=tied))


def _swap(name: str, one: str, other: str) -> str:
    if one in name:
        return name.replace(one, other)
    return name.replace(other, one)


def _initial(spec: ModelSpec, folder: Path) -> Weights:
    # It holds weights and multiplies nothing, so this CPU's products need not be exact.
    plain = spec.model_copy(
        update={"precision": Bf16(compute_dtype="float32"), "consistency": "fast"}
    )
    decoder = build_decoder(plain, lambda _: nn.Identity())
    decoder.to(torch.float32)
    load_hf_weights(decoder, read_weights(folder))
    return {name: p.detach() for name, p in decoder.named_parameters()}


def _checkpoint(folder: Path) -> Weights:
    return read_state(folder)["masters"]
