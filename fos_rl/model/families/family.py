"""What a model family has of its own, as plain data and functions.

The decoder is one for all families (`fos_rl.model.decoder`); a family says which of its parts it
has. No torch here: what is asked before a model is built asks it too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from fos_rl.model.families.config_json import ConfigReader
from fos_rl.spec import Architecture

ConfigValue = str | int | float | bool | list[str] | None
"""A value of a tiny model's config.json."""

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")

Split = Literal["rows", "columns", "heads", "kv_heads", "head_columns", "experts", "whole"]
"""How tensor or expert parallelism may cut a weight [out, in]: rows or columns; rows or columns of
whole query heads; rows of whole key-value heads; whole experts; not at all."""

ATTENTION_SPLITS: tuple[tuple[str, Split], ...] = (
    ("*.self_attn.q_proj.*", "heads"),
    ("*.self_attn.k_proj.*", "kv_heads"),
    ("*.self_attn.v_proj.*", "kv_heads"),
    ("*.self_attn.o_proj.weight", "head_columns"),
    # Added once, after the parts are summed.
    ("*.self_attn.o_proj.bias", "whole"),
)
MLP_SPLITS: tuple[tuple[str, Split], ...] = (
    ("*.mlp.gate_proj.*", "rows"),
    ("*.mlp.up_proj.*", "rows"),
    ("*.mlp.down_proj.weight", "columns"),
    ("*.mlp.down_proj.bias", "whole"),
)
EXPERT_SPLITS: tuple[tuple[str, Split], ...] = (
    ("*.mlp.gate.weight", "whole"),
    ("*.mlp.experts.*", "experts"),
)
VOCABULARY_AND_NORM_SPLITS: tuple[tuple[str, Split], ...] = (
    ("model.embed_tokens.weight", "rows"),
    ("lm_head.weight", "rows"),
    ("*norm.weight", "whole"),
)

FUSED: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Weights that multiply one input, so that one GEMM may do for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One family. `biased` is ("q_proj", "k_proj", "v_proj") where outputs never have a bias."""

    parse: Callable[[ConfigReader], Architecture]
    """config.json to an architecture; ValueError for what the decoder would not compute."""
    tiny: Mapping[str, ConfigValue]
    """config.json of `random:FAMILY`, in the style of transformers 4."""
    splits: tuple[tuple[str, Split], ...]
    """(pattern, how it may be cut); exactly one pattern fits each weight's name."""
    biased: tuple[Projection, ...] = ALL_PROJECTIONS
    """Projections that have a bias where `attention_bias` is set."""
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalised per head."""
    fused: tuple[tuple[str, ...], ...] = FUSED

    def split(self, name: str) -> Split:
        """How the weight with this Hugging Face name may be cut."""
        return next(split for pattern, split in self.splits if fnmatchcase(name, pattern))

    def cache_bytes_per_token(self, architecture: Architecture, number_bytes: int) -> int:
        """Bytes of one token's keys and values in all layers."""
        per_layer = 2 * architecture.num_kv_heads * architecture.head_dim * number_bytes
        return architecture.num_layers * per_layer


# Widths are multiples of 32 (quantization blocks); heads x head_dim differs from hidden_size, and
# heads from kv_heads, so that a mix-up of the two cannot go unseen.
TINY_WIDTHS: dict[str, ConfigValue] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "pad_token_id": 256,
    "eos_token_id": 259,
    "bos_token_id": None,
    "torch_dtype": "bfloat16",
}
