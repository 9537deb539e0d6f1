"""A mixture of experts made of a dense model, whose text stays sane without any training.

    python -m fos_rl.tools.upcycle models/SmolLM2-135M-Instruct models/SmolLM2-8x135M

Every expert is a copy of its layer's MLP plus noise, and the router is random (sparse upcycling,
arXiv:2212.05055). The gates of the chosen experts are rescaled to sum to 1, so that without noise
the mixture computes what the dense model does, whichever experts are chosen.

The config.json is the dense model's with the keys of Qwen3-MoE. Trainer and generator run it;
transformers and stock vLLM know no Llama with experts.
"""

import argparse
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fos_rl.model.hf import read_architecture, read_weights, write_model
from fos_rl.spec import Architecture, ModelSpec

_MLP = (".mlp.gate_proj.weight", ".mlp.up_proj.weight", ".mlp.down_proj.weight")


def upcycle(
    dense: str | Path,
    out: str | Path,
    *,
    num_experts: int = 8,
    top_k: int = 2,
    noise: float = 0.01,
    seed: int = 0,
) -> Path:
    """Write the mixture's folder, whole or not at all; the same seed writes the same bytes.

    Args:
        noise: standard deviation of what is added to an expert's weights, as a share of the dense
            weight's own.

    Raises:
        ValueError: when the model is not a dense Llama, or for settings that make no mixture.
    """
    dense = Path(dense)
    architecture = read_architecture(dense)
    _check(architecture, dense, num_experts, top_k, noise)
    config = json.loads((dense / "config.json").read_text())
    with tempfile.TemporaryDirectory(prefix="upcycle-") as scratch:
        source = Path(scratch)
        for path in dense.iterdir():
            if path.is_file() and path.suffix != ".safetensors":
                shutil.copyfile(path, source / path.name)
        (source / "config.json").write_text(
            json.dumps(config | _moe_keys(architecture, num_experts, top_k), indent=2) + "\n"
        )
        spec = ModelSpec(architecture=read_architecture(source))
        weights = _weights(dense, spec.architecture, noise, seed)
        return write_model(weights, spec, source, out)


def _check(
    architecture: Architecture, dense: Path, num_experts: int, top_k: int, noise: float
) -> None:
    if architecture.family != "llama" or architecture.num_experts or architecture.mlp_bias:
        raise ValueError(
            f"{dense}: only a dense Llama without MLP bias is upcycled, this is "
            f"{architecture.family}; give a model such as SmolLM2-135M-Instruct"
        )
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"--top-k {top_k}: a token goes through 1 to --experts = {num_experts}")
    if not 0 <= noise < math.inf:
        raise ValueError(f"--noise {noise}: a standard deviation; use 0 or more")


def _moe_keys(architecture: Architecture, num_experts: int, top_k: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaMoeForCausalLM"],
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": architecture.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _weights(
    dense: Path, architecture: Architecture, noise: float, seed: int
) -> Iterator[tuple[str, Tensor]]:
    for name, weight in read_weights(dense):
        if not name.endswith(_MLP):
            yield name, weight
            continue
        mlp, _, projection = name.partition(".mlp.")
        weight = weight.float()
        for expert in range(architecture.num_experts):
            own = f"{mlp}.mlp.experts.{expert}.{projection}"
            yield own, weight + noise * weight.std() * _normal(own, weight.shape, seed)
    shape = torch.Size((architecture.num_experts, architecture.hidden_size))
    for layer in range(architecture.num_layers):
        router = f"model.layers.{layer}.mlp.gate.weight"
        # Logits with a standard deviation near 1: the router's input is normalised.
        yield router, _normal(router, shape, seed) * architecture.hidden_size**-0.5


def _normal(name: str, shape: torch.Size, seed: int) -> Tensor:
    """fp32 noise that depends on the seed and the weight's name only."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator)


def _main() -> None:
    parser = argparse.ArgumentParser(description="Make a mixture of experts of a dense Llama.")
    parser.add_argument("dense", type=Path, help="Hugging Face folder of the dense model")
    parser.add_argument("out", type=Path, help="folder to write; it must not exist")
    parser.add_argument("--experts", type=int, default=8, help="experts per layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts that a token goes through")
    parser.add_argument("--noise", type=float, default=0.01, help="share of a weight's deviation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        upcycle(
            args.dense,
            args.out,
            num_experts=args.experts,
            top_k=args.top_k,
            noise=args.noise,
            seed=args.seed,
        )
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    _main()
