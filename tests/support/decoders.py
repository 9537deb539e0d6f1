"""Small decoders for the model tests, and transformers' own class of the same weights."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from fos_rl.model import families
from fos_rl.model.decoder import Decoder
from fos_rl.model.hf import load_hf_weights, parse_architecture
from fos_rl.model.packed_attention import PackedSequences, packed_attention
from fos_rl.model.tiny import tiny_config, tiny_weights
from fos_rl.spec import ModelSpec

FAMILIES = list(families.FAMILIES)


class Packed:
    """A decoder with its packed sequences, called on a list of token sequences."""

    def __init__(self, config: dict[str, Any], seed: int = 0) -> None:
        self.config = config
        self.spec = ModelSpec(architecture=parse_architecture(config))
        self.weights = tiny_weights(self.spec, seed)
        self.sequences = PackedSequences()
        self.decoder = Decoder(self.spec, packed_attention(self.sequences))
        load_hf_weights(self.decoder, self.weights.items())

    def hidden(self, samples: list[Tensor]) -> Tensor:
        self.sequences.set([len(sample) for sample in samples])
        device = self.decoder.model.embed_tokens.weight.device
        return self.decoder(torch.cat(samples).to(device), self.sequences.positions(device))

    def log_probs(self, samples: list[Tensor]) -> Tensor:
        return self.decoder.logits(self.hidden(samples)).log_softmax(dim=-1)


def tiny(family: str, **changes: Any) -> Packed:
    return Packed({**tiny_config(family), **changes})


def random_samples(*lengths: int, seed: int = 0, vocab: int = 288) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def transformers_model(packed: Packed) -> nn.Module:
    """transformers' class with the same weights, fp32, plain attention."""
    config = AutoConfig.for_model(**packed.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    state = {name: tensor.float() for name, tensor in packed.weights.items()}
    own = dict(model.named_parameters())
    for name, parameter in own.items():
        parameter.data.copy_(_find(name, state))
    return model


def _find(name: str, state: dict[str, Tensor]) -> Tensor:
    """A parameter of transformers 5, whose experts are stacked as [E, 2 I, D] and [E, D, I]."""
    if name in state:
        return state[name]
    stem, kind = name.rsplit(".", 1)
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    num_experts = sum(key.startswith(stem) and key.endswith("down_proj.weight") for key in state)
    stacked = [
        torch.stack([state[f"{stem}.{e}.{part}.weight"] for e in range(num_experts)])
        for part in parts
    ]
    return torch.cat(stacked, dim=1)
