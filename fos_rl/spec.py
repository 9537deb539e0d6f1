"""The model contract: one architecture and one precision recipe, hashed and compared by both hosts.

Everything here can change a log-prob. What cannot (learning rate, batch layout, kernel choice)
belongs to the trainer's or the generator's own settings.
"""

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Base of every settings model: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


Family = Literal["llama", "qwen3", "qwen3_moe"]


class RopeScaling(Frozen):
    """Llama-3 frequency scaling; absent for plain rotary embeddings."""

    type: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Architecture(Frozen):
    """The shape of a decoder, read from a Hugging Face `config.json` by `fos_rl.model.hf`."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of a dense MLP."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    """0 for a dense model."""
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    """Whether the chosen experts' gates are rescaled to sum to 1."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture-of-experts model that keep a dense MLP."""

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are RMS-normalised per head (the Qwen3 families)."""
        return self.family != "llama"

    def is_moe_layer(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers


class Bf16(Frozen):
    """No quantization: the baseline arm."""

    recipe: Literal["bf16"] = "bf16"
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations on both hosts; weights are the bf16-rounded masters in either case."""


Precision = Bf16


class ModelSpec(Frozen):
    """Architecture plus precision recipe: what both hosts must agree on, field by field."""

    architecture: Architecture
    precision: Precision = Bf16()

    def contract(self) -> dict[str, object]:
        """Every field that can change a log-prob, by dotted name.

        Both actors compute it from the spec they were built with, and a run starts only when the
        two are equal.
        """
        flat: dict[str, object] = {}
        _flatten("", self.model_dump(mode="json"), flat)
        return flat

    def contract_hash(self) -> str:
        """Twelve hex digits of SHA-256 over the sorted contract."""
        text = json.dumps(self.contract(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def contract_difference(ours: dict[str, object], theirs: dict[str, object]) -> list[str]:
    """The fields in which two contracts differ, as `name: ours != theirs`; empty when equal."""
    return [
        f"{key}: {ours.get(key)!r} != {theirs.get(key)!r}"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]


def _flatten(prefix: str, value: object, into: dict[str, object]) -> None:
    if isinstance(value, dict):
        for key, child in value.items():
            _flatten(f"{prefix}.{key}" if prefix else key, child, into)
    else:
        into[prefix] = value
