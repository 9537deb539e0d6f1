"""The model contract: one architecture and one precision, hashed and compared by both actors.

Everything here can change a log-prob. What cannot (learning rate, batch layout, kernel choice)
belongs to the trainer's or the generator's own settings.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Frozen(BaseModel):
    """Base of every settings model: immutable, and an unknown key is an error.

    A value has the type that is asked for, or is refused: `true` is not a number, "3" neither, and
    infinities and NaN are none that a setting can have.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        strict=True,
        allow_inf_nan=False,
    )


MAX_INT = 2**31 - 1
"""What counts and sizes are held in by torch, vLLM and OpenMP: 32 bits with a sign."""
Positive = Annotated[int, Field(gt=0, le=MAX_INT)]
NotNegative = Annotated[int, Field(ge=0, le=MAX_INT)]
# TOML and JSON have arrays only.
Names = Annotated[tuple[str, ...], Field(strict=False)]


Family = str
"""`model_type` of a config.json; `fos_rl.model.families` has one file for each that runs."""


class RopeScaling(Frozen):
    """`llama3` frequency scaling; absent for plain rotary embeddings."""

    type: Literal["llama3"] = "llama3"
    factor: Annotated[float, Field(gt=0, le=1e6)]
    low_freq_factor: Annotated[float, Field(gt=0, le=1e6)]
    high_freq_factor: Annotated[float, Field(gt=0, le=1e6)]
    original_max_position_embeddings: Positive


class Architecture(Frozen):
    """The shape of a decoder, read from a Hugging Face `config.json` by `fos_rl.model.hf`."""

    family: Family
    vocab_size: Positive
    hidden_size: Positive
    intermediate_size: Positive
    """Width of a dense MLP."""
    num_layers: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)]
    rope_theta: Annotated[float, Field(gt=0, le=1e12)]
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: Positive
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Whether the attention's projections have biases; the family says which of them."""
    mlp_bias: bool = False
    num_experts: NotNegative = 0
    """0 for a dense model."""
    num_experts_per_token: NotNegative = 0
    moe_intermediate_size: NotNegative = 0
    norm_topk_prob: bool = False
    """Whether the chosen experts' gates are rescaled to sum to 1."""
    dense_layers: Annotated[tuple[NotNegative, ...], Field(strict=False)] = ()
    """Layers of a mixture-of-experts model that keep a dense MLP."""

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer of that number has experts."""
        return self.num_experts > 0 and layer not in self.dense_layers


ComputeDtype = Literal["bfloat16", "float32"]


class Bf16(Frozen):
    """No quantization: the baseline arm."""

    recipe: Literal["bf16"] = "bf16"
    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of activations; weights are the bf16-rounded masters in either case."""


class Quantized(Frozen):
    """What every quantized precision has: which layers, and who multiplies."""

    compute_dtype: ComputeDtype = "bfloat16"
    """Dtype of activations between the quantized layers."""
    gemm: Literal["emulated", "native"] = "emulated"
    """emulated: exact 4- or 8-bit operands, fp32 sums, on any device; native: the Blackwell tensor
    core. They round differently, so nothing chooses between them for you."""
    include: Names = ("*",)
    """Patterns of weight names to quantize, as in `*.mlp.experts.*`. Norms, embeddings, router and
    head never are."""
    exclude: Names = ()
    """Patterns taken out again."""
    first_layers_bf16: NotNegative = 0
    """Leading layers that stay in bf16."""
    last_layers_bf16: NotNegative = 0
    """Trailing layers that stay in bf16."""


class Mxfp8(Quantized):
    """OCP MXFP8: E4M3 elements, one E8M0 scale for 32 of them."""

    recipe: Literal["mxfp8"] = "mxfp8"
    scale_mode: Literal["rceil", "floor"] = "rceil"
    """Rounding of the block scale: up, so that nothing saturates, or down (OCP minimum)."""


class Nvfp4(Quantized):
    """Standard NVFP4: E2M1 elements, an E4M3 scale for 16 of them, one fp32 amax above."""

    recipe: Literal["nvfp4"] = "nvfp4"
    row_scaled_activation: bool = True
    """One amax per token. With false, one amax per tensor: a token's codes, and so its log-prob,
    then depend on the other tokens of its batch."""
    weight_block: Literal["16x16", "1x16"] = "16x16"
    """Elements of a weight that share a block scale."""


class FourOverSix(Nvfp4):
    """NVFP4 that encodes each block twice (largest value to 6, or to 4) and keeps the better."""

    recipe: Literal["nvfp4_four_over_six"] = "nvfp4_four_over_six"  # type: ignore[assignment]
    err_mode: Literal["mse", "mae"] = "mse"
    """How the two encodings are compared."""
    e4m3_scale_bound: Literal[256, 448] = 256
    """Largest block scale of the map-to-6 encoding; 256 leaves room for 1.5 times it."""


def _bf16_by_default(value: object) -> object:
    return {"recipe": "bf16", **value} if isinstance(value, dict) else value


Precision = Annotated[
    Annotated[Bf16 | Mxfp8 | Nvfp4 | FourOverSix, Field(discriminator="recipe")],
    BeforeValidator(_bf16_by_default),
]


Consistency = Literal["fast", "exact"]


def check_consistency(consistency: Consistency, precision: Precision) -> None:
    """ValueError where a precision cannot give a token the same bits in every batch."""
    if consistency == "fast" or isinstance(precision, Bf16):
        return
    if precision.gemm == "native":
        raise ValueError(
            "model.precision.gemm = 'native' with model.consistency = 'exact': the library picks a "
            "kernel, and with it the order of additions, by the number of tokens; set gemm = "
            "'emulated', which multiplies the same operands"
        )
    if isinstance(precision, Nvfp4) and not precision.row_scaled_activation:
        raise ValueError(
            "model.precision.row_scaled_activation = false with model.consistency = 'exact': one "
            "amax covers all tokens of a GEMM, so a token's codes depend on the others of its "
            "batch; set it to true, or consistency to 'fast'"
        )


class ModelSpec(Frozen):
    """Architecture plus precision: what trainer and generator must agree on, field by field."""

    architecture: Architecture
    precision: Precision = Bf16()
    consistency: Consistency = "fast"
    """fast: trainer and generator compute as fast as they can, and sums round differently; exact: a
    token's log-prob has the same bits in both."""

    @model_validator(mode="after")
    def _consistency_is_possible(self) -> Self:
        check_consistency(self.consistency, self.precision)
        return self

    def contract(self) -> dict[str, object]:
        """Every field that can change a log-prob, by dotted name.

        Both actors compute it from the spec they were built with, and a run starts only when the
        two are equal.
        """
        return flatten(self.model_dump(mode="json"))

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


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
