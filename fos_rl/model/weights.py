"""A decoder's weights under their Hugging Face names, and safetensors folders in and out."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fos_rl.model.decoder import Decoder
from fos_rl.model.moe import Experts
from fos_rl.model.weight_files import INDEX, open_safetensors, summary, weight_files
from fos_rl.spec import ModelSpec

SHARD_BYTES = 4_000_000_000


def named_hf_weights(
    decoder: nn.Module, instead: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every weight as (Hugging Face name, view into the parameter), in the decoder's order.

    Args:
        instead: tensors of some parameters' names and shapes, such as their gradients, to be named
            in place of all the weights.

    Stacked experts come one by one, as `...mlp.experts.3.gate_proj.weight`; a tied head comes once,
    as the embedding. Writing into a view (`view.copy_`) writes the parameter.
    """
    for module_name, module in decoder.named_modules():
        if ".self_attn.inner" in module_name:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            data = parameter.detach()
            if instead is not None:
                if f"{module_name}.{name}" not in instead:
                    continue
                data = instead[f"{module_name}.{name}"]
            if isinstance(module, Experts):
                for expert, view in enumerate(data.unbind()):
                    yield f"{module_name}.{expert}.{name}.weight", view
            else:
                yield f"{module_name}.{name}", data


def hf_weight_shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    """The shape of every weight of a model, by Hugging Face name, without allocating it."""
    with torch.device("meta"):
        decoder = Decoder(spec, lambda layer: nn.Identity())
    return {name: view.shape for name, view in named_hf_weights(decoder)}


def load_hf_weights(decoder: Decoder, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Fill every parameter from (Hugging Face name, tensor) pairs; returns the names that came.

    Tensors are cast to the parameters' dtype and device. Saved rotary frequencies are skipped.
    A tied decoder accepts `lm_head.weight` when it equals the embedding.

    Raises:
        ValueError: naming every unknown, repeated, missing or wrongly shaped tensor. Those that
            fit have been loaded by then.
    """
    views = dict(named_hf_weights(decoder))
    loaded: set[str] = set()
    problems: list[str] = []
    tied_head: Tensor | None = None
    for name, tensor in weights:
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name in loaded:
            problems.append(f"{name}: came twice")
        elif name == "lm_head.weight" and decoder.spec.architecture.tie_word_embeddings:
            tied_head = tensor
        elif name not in views:
            problems.append(f"{name}: the decoder has no such weight")
        elif tensor.shape != views[name].shape:
            want, got = tuple(views[name].shape), tuple(tensor.shape)
            problems.append(f"{name}: shape {got}, the decoder needs {want}")
        else:
            views[name].copy_(tensor)
        loaded.add(name)
    problems += [f"{name}: missing" for name in views if name not in loaded]
    if tied_head is not None and not _equals_embedding(tied_head, views):
        problems.append(
            "lm_head.weight: differs from model.embed_tokens.weight, but config.json says "
            "tie_word_embeddings"
        )
    if problems:
        raise ValueError("weights do not fit the model:\n" + summary(problems))
    return loaded


def read_weights(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, CPU tensor) of each weight in a folder's safetensors, read one at a time.

    Raises:
        ValueError: when the folder holds no safetensors, not all that its index names, or a file
            that is cut off or damaged.
    """
    folder = Path(folder)
    for path in weight_files(folder):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def write_weights(
    weights: Iterable[tuple[str, Tensor]], folder: Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Save (name, tensor) pairs as bf16 safetensors, in shards with an index when one is too few.

    At most one shard is held in memory.
    """
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        path = folder / f"shard-{len(shards)}"
        save_file(pending, path, metadata={"format": "pt"})
        # safetensors leaves files that only their owner reads.
        path.chmod(0o644)
        shards.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        num_bytes = 2 * tensor.numel()
        if pending and pending_bytes + num_bytes > shard_bytes:
            flush()
            pending_bytes = 0
        # A copy even of a bf16 CPU tensor: safetensors refuses views that share storage.
        pending[name] = torch.empty(tensor.shape, dtype=torch.bfloat16, device="cpu").copy_(
            tensor.detach()
        )
        pending_bytes += num_bytes
        total_bytes += num_bytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _equals_embedding(head: Tensor, views: dict[str, Tensor]) -> bool:
    embedding = views["model.embed_tokens.weight"]
    return torch.equal(head.to(embedding), embedding)
