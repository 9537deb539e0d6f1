"""Keys of a `config.json`, read with their rules, and what the families' parsers share.

In the style of transformers 4 (`rope_theta`, `rope_scaling`) and of transformers 5
(`rope_parameters`).
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from fos_rl.files.reading import is_number
from fos_rl.spec import Architecture, Family, RopeScaling


class ConfigReader:
    """Keys of one config.json; null counts as absent."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config = config
        self.source = source

    def required(self, key: str) -> Any:
        """The key's value; ValueError where it is missing or null."""
        value = self.config.get(key)
        if value is None:
            raise ValueError(f"{self.source}: {key} is missing; add it as transformers writes it")
        return value

    def optional(self, key: str, default: Any) -> Any:
        """The key's value; the default where it is missing or null."""
        value = self.config.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; required where there is no default."""
        value = self.required(key) if default is None else self.optional(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, "give a whole number of at least 1")
        return value

    def positive(self, key: str, default: float) -> float:
        """A finite number above 0, or a ValueError that names the key."""
        value = self.optional(key, default)
        if not is_number(value) or not 0 < value < float("inf"):
            self.refuse(key, "give a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false, or a ValueError that names the key."""
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
        """An object, empty by default, or a ValueError that names the key."""
        value = self.optional(key, {})
        if not isinstance(value, dict):
            self.refuse(key, "give an object, as transformers writes it")
        return value

    def refuse(self, key: str, remedy: str, value: Any = None) -> NoReturn:
        """ValueError that names file, key and value, with the remedy."""
        value = self.config.get(key) if value is None else value
        raise ValueError(f"{self.source}: {key} = {value!r} is not supported; {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Key and value heads, and the width of every head."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The fields of an `Architecture` about experts; those of a dense model by default."""

    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: tuple[int, ...] = ()


def decoder_architecture(
    reader: ConfigReader,
    family: Family,
    *,
    heads: Heads,
    default_max_positions: int,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    experts: Experts | None = None,
) -> Architecture:
    """An Architecture of what a family found in its own way, and of the keys that all share."""
    theta, scaling = _rope(reader)
    experts = experts or Experts()
    return Architecture(
        family=family,
        vocab_size=reader.whole("vocab_size"),
        hidden_size=reader.whole("hidden_size"),
        intermediate_size=reader.whole("intermediate_size"),
        num_layers=reader.whole("num_hidden_layers"),
        num_heads=reader.whole("num_attention_heads"),
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=reader.positive("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=reader.whole("max_position_embeddings", default_max_positions),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
        num_experts=experts.num_experts,
        num_experts_per_token=experts.num_experts_per_token,
        moe_intermediate_size=experts.moe_intermediate_size,
        norm_topk_prob=experts.norm_topk_prob,
        dense_layers=experts.dense_layers,
    )


def attention_heads(
    reader: ConfigReader,
    *,
    default_kv_heads: int | None = None,
    default_head_dim: int | None = None,
) -> Heads:
    """Heads, with what the family's class of transformers assumes for an absent key: None for
    as many key-value heads as heads, and for hidden_size / num_attention_heads."""
    hidden_size = reader.whole("hidden_size")
    num_heads = reader.whole("num_attention_heads")
    num_kv_heads = reader.whole("num_key_value_heads", default_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        reader.refuse(
            "num_key_value_heads", f"it must divide num_attention_heads = {num_heads}", num_kv_heads
        )
    if default_head_dim is None:
        if reader.optional("head_dim", None) is None and hidden_size % num_heads:
            reader.refuse(
                "hidden_size", f"without head_dim, num_attention_heads = {num_heads} must divide it"
            )
        # At least 1: a head_dim that is given may be larger than hidden_size // num_heads.
        default_head_dim = max(1, hidden_size // num_heads)
    head_dim = reader.whole("head_dim", default_head_dim)
    if head_dim % 2:
        reader.refuse("head_dim", "rotary embeddings need an even head_dim", head_dim)
    return Heads(num_kv_heads=num_kv_heads, head_dim=head_dim)


def experts(reader: ConfigReader) -> Experts:
    """The experts of a model that has some."""
    # transformers 5 writes num_local_experts where version 4 wrote num_experts.
    key = "num_local_experts" if "num_local_experts" in reader.config else "num_experts"
    step = reader.whole("decoder_sparse_step", 1)
    listed = reader.entries("mlp_only_layers", int)
    num_experts = reader.whole(key, 128)
    per_token = reader.whole("num_experts_per_tok", 8)
    if per_token > num_experts:
        reader.refuse("num_experts_per_tok", f"use 1 to {key} = {num_experts}", per_token)
    layers = range(reader.whole("num_hidden_layers"))
    return Experts(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        moe_intermediate_size=reader.whole("moe_intermediate_size", 768),
        norm_topk_prob=reader.flag("norm_topk_prob", False),
        dense_layers=tuple(i for i in layers if i in listed or (i + 1) % step),
    )


def refuse_unsupported(reader: ConfigReader) -> None:
    """ValueError for settings of config.json that the decoder does not compute."""
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


def _rope(reader: ConfigReader) -> tuple[float, RopeScaling | None]:
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
