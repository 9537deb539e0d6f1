"""`config.json` of a Hugging Face folder, read into an Architecture, in the style of transformers 4
(`rope_theta`, `rope_scaling`) and of transformers 5 (`rope_parameters`)."""

from pathlib import Path
from typing import Any, NoReturn, get_args

from fos_rl.files.reading import is_number, read_json_object
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
    return parse_architecture(read_json_object(path, "download it again"), str(path))


def parse_architecture(config: dict[str, Any], source: str = "config.json") -> Architecture:
    """An Architecture from the keys of a config.json; `source` names it in errors."""
    reader = _Reader(config, source)
    family = reader.required("model_type")
    if family not in get_args(Family):
        reader.refuse("model_type", f"use one of {', '.join(get_args(Family))}")
    _refuse_unsupported(reader)
    num_layers = reader.whole("num_hidden_layers")
    hidden_size = reader.whole("hidden_size")
    num_heads = reader.whole("num_attention_heads")
    num_kv_heads, head_dim = _heads(reader, family, hidden_size, num_heads)
    theta, scaling = _rope(reader)
    # A Llama with experts is `fos_rl.tools.upcycle`'s; transformers knows no such model.
    has_experts = family == "qwen3_moe" or "num_experts" in config
    moe = _experts(reader, num_layers) if has_experts else {}
    return Architecture(
        family=family,
        vocab_size=reader.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=reader.whole(
            "max_position_embeddings", 2048 if family == "llama" else 32768
        ),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        attention_bias=reader.flag("attention_bias", False),
        mlp_bias=family == "llama" and reader.flag("mlp_bias", False),
        **moe,
    )


def _heads(reader: "_Reader", family: Family, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """(num_kv_heads, head_dim), with what each class of transformers assumes for an absent key."""
    default_kv_heads = {"llama": num_heads, "qwen3": 32, "qwen3_moe": 4}[family]
    num_kv_heads = reader.whole("num_key_value_heads", default_kv_heads)
    if num_heads % num_kv_heads:
        reader.refuse(
            "num_key_value_heads", f"it must divide num_attention_heads = {num_heads}", num_kv_heads
        )
    if family != "qwen3" and reader.optional("head_dim", None) is None and hidden_size % num_heads:
        reader.refuse(
            "hidden_size", f"without head_dim, num_attention_heads = {num_heads} must divide it"
        )
    # At least 1: a head_dim that is given may be larger than hidden_size // num_heads.
    default_head_dim = 128 if family == "qwen3" else max(1, hidden_size // num_heads)
    head_dim = reader.whole("head_dim", default_head_dim)
    if head_dim % 2:
        reader.refuse("head_dim", "rotary embeddings need an even head_dim", head_dim)
    return num_kv_heads, head_dim


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

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; required where there is no default."""
        value = self.required(key) if default is None else self.optional(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "give a whole number of at least 1")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.optional(key, default)
        if not is_number(value) or not 0 < value < float("inf"):
            self.refuse(key, "give a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.optional(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "give true or false")
        return value

    def entries(self, key: str, kind: type) -> list[Any]:
        """A list of values of a kind; empty when absent."""
        values = self.optional(key, [])
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            self.refuse(key, f"give a list of {kind.__name__}")
        return values

    def table(self, key: str) -> dict[str, Any]:
        value = self.optional(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "give an object, as transformers writes it")
        return value

    def refuse(self, key: str, remedy: str, value: Any = None) -> NoReturn:
        value = self.config.get(key) if value is None else value
        raise ValueError(f"{self.source}: {key} = {value!r} is not supported; {remedy}")


def _refuse_unsupported(reader: _Reader) -> None:
    other = "use a model without it"
    if reader.optional("hidden_act", "silu") != "silu":
        reader.refuse("hidden_act", "the decoder's MLP uses silu; " + other)
    if reader.optional("use_sliding_window", False) and reader.optional("sliding_window", 0):
        reader.refuse("use_sliding_window", "every layer attends to all earlier tokens; " + other)
    if set(reader.entries("layer_types", str)) - {"full_attention"}:
        reader.refuse("layer_types", "every layer attends to all earlier tokens; " + other)
    if reader.optional("quantization_config", None):
        reader.refuse(
            "quantization_config",
            "masters need unquantized weights; take the bf16 checkpoint and set model.precision",
        )


def _rope(reader: _Reader) -> tuple[float, RopeScaling | None]:
    old_style = reader.optional("rope_parameters", None) is None
    name = "rope_scaling" if old_style else "rope_parameters"
    parameters = reader.table(name)
    theta = parameters.get("rope_theta", reader.optional("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    partial = parameters.get("partial_rotary_factor", reader.optional("partial_rotary_factor", 1.0))
    if not is_number(theta) or not 0 < theta < float("inf"):
        reader.refuse("rope_theta", "give a number above 0", theta)
    if partial != 1.0:
        reader.refuse("partial_rotary_factor", "the whole head is rotated; use 1.0", partial)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        reader.refuse(name, "use rope_type default or llama3")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    wrong = [k for k in keys if not is_number(parameters.get(k)) or not parameters[k] > 0]
    if wrong:
        reader.refuse(name, f"rope_type llama3 needs a number above 0 for {', '.join(wrong)}")
    return theta, RopeScaling(**{key: parameters[key] for key in keys})


def _experts(reader: _Reader, num_layers: int) -> dict[str, Any]:
    # transformers 5 writes num_local_experts where version 4 wrote num_experts.
    key = "num_local_experts" if "num_local_experts" in reader.config else "num_experts"
    step = reader.whole("decoder_sparse_step", 1)
    listed = reader.entries("mlp_only_layers", int)
    num_experts = reader.whole(key, 128)
    per_token = reader.whole("num_experts_per_tok", 8)
    if per_token > num_experts:
        reader.refuse("num_experts_per_tok", f"use 1 to {key} = {num_experts}", per_token)
    dense = [layer for layer in range(num_layers) if layer in listed or (layer + 1) % step]
    return {
        "num_experts": num_experts,
        "num_experts_per_token": per_token,
        "moe_intermediate_size": reader.whole("moe_intermediate_size", 768),
        "norm_topk_prob": reader.flag("norm_topk_prob", False),
        "dense_layers": tuple(dense),
    }
