"""`config.json` of a Hugging Face folder, read into an Architecture, in the style of transformers 4
(`rope_theta`, `rope_scaling`) and of transformers 5 (`rope_parameters`)."""

import json
from pathlib import Path
from typing import Any, get_args

from fos_rl.spec import Architecture, Family, RopeScaling


def read_architecture(folder: str | Path) -> Architecture:
    """The shape of the model in a Hugging Face folder.

    Raises:
        ValueError: for a folder without config.json, and for a model that would not compute what
            the decoder computes; it names the field, its value, the rule and the remedy.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"model.path: {folder} has no config.json; give a Hugging Face folder")
    return parse_architecture(json.loads(path.read_text()), str(path))


def parse_architecture(config: dict[str, Any], source: str = "config.json") -> Architecture:
    """An Architecture from the keys of a config.json; `source` names it in errors."""
    reader = _Reader(config, source)
    family = reader.required("model_type")
    if family not in get_args(Family):
        reader.refuse("model_type", f"use one of {', '.join(get_args(Family))}")
    _refuse_unsupported(reader)
    num_layers = reader.required("num_hidden_layers")
    hidden_size = reader.required("hidden_size")
    num_heads = reader.required("num_attention_heads")
    # What each class of transformers assumes when the key is absent.
    default_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
    default_kv_heads = {"llama": num_heads, "qwen3": 32, "qwen3_moe": 4}[family]
    num_kv_heads = reader.optional("num_key_value_heads", default_kv_heads)
    if num_heads % num_kv_heads:
        reader.refuse("num_key_value_heads", f"it must divide num_attention_heads = {num_heads}")
    head_dim = reader.optional("head_dim", default_head_dim)
    if head_dim % 2:
        reader.refuse("head_dim", "rotary embeddings need an even head_dim")
    theta, scaling = _rope(reader)
    # A Llama with experts is `fos_rl.model.upcycle`'s; transformers knows no such model.
    has_experts = family == "qwen3_moe" or "num_experts" in config
    moe = _experts(reader, num_layers) if has_experts else {}
    return Architecture(
        family=family,
        vocab_size=reader.required("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.required("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.optional("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=reader.optional(
            "max_position_embeddings", 2048 if family == "llama" else 32768
        ),
        tie_word_embeddings=reader.optional("tie_word_embeddings", False),
        attention_bias=reader.optional("attention_bias", False),
        mlp_bias=family == "llama" and reader.optional("mlp_bias", False),
        **moe,
    )


class _Reader:
    """Keys of one config.json; null counts as absent."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def required(self, key: str) -> Any:
        value = self.config.get(key)
        if value is None:
            raise ValueError(f"{self.source}: {key} is missing; add it as transformers writes it")
        return value

    def optional(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def refuse(self, key: str, remedy: str, value: Any = None) -> None:
        value = self.config.get(key) if value is None else value
        raise ValueError(f"{self.source}: {key} = {value!r} is not supported; {remedy}")


def _refuse_unsupported(reader: _Reader) -> None:
    other = "use a model without it"
    if reader.optional("hidden_act", "silu") != "silu":
        reader.refuse("hidden_act", "the decoder's MLP uses silu; " + other)
    if reader.optional("use_sliding_window", False) and reader.optional("sliding_window", 0):
        reader.refuse("use_sliding_window", "every layer attends to all earlier tokens; " + other)
    if set(reader.optional("layer_types", [])) - {"full_attention"}:
        reader.refuse("layer_types", "every layer attends to all earlier tokens; " + other)
    if reader.optional("quantization_config", None):
        reader.refuse(
            "quantization_config",
            "masters need unquantized weights; take the bf16 checkpoint and set model.precision",
        )


def _rope(reader: _Reader) -> tuple[float, RopeScaling | None]:
    parameters = reader.optional("rope_parameters", None)
    name = "rope_parameters" if parameters is not None else "rope_scaling"
    if parameters is None:
        parameters = reader.optional("rope_scaling", {})
    theta = parameters.get("rope_theta", reader.optional("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", reader.optional("partial_rotary_factor", 1.0))
    if partial != 1.0:
        reader.refuse("partial_rotary_factor", "the whole head is rotated; use 1.0", partial)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        reader.refuse(name, "use rope_type default or llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in parameters]
    if missing:
        reader.refuse(name, f"rope_type llama3 needs {', '.join(missing)}")
    return theta, RopeScaling(**{key: parameters[key] for key in keys})


def _experts(reader: _Reader, num_layers: int) -> dict[str, Any]:
    # transformers 5 writes num_local_experts where version 4 wrote num_experts.
    key = "num_local_experts" if "num_local_experts" in reader.config else "num_experts"
    step = reader.optional("decoder_sparse_step", 1)
    listed = reader.optional("mlp_only_layers", [])
    num_experts = reader.optional(key, 128)
    per_token = reader.optional("num_experts_per_tok", 8)
    if not 1 <= per_token <= num_experts:
        reader.refuse("num_experts_per_tok", f"use 1 to {key} = {num_experts}", per_token)
    dense = [layer for layer in range(num_layers) if layer in listed or (layer + 1) % step]
    return {
        "num_experts": num_experts,
        "num_experts_per_token": per_token,
        "moe_intermediate_size": reader.optional("moe_intermediate_size", 768),
        "norm_topk_prob": reader.optional("norm_topk_prob", False),
        "dense_layers": tuple(dense),
    }
