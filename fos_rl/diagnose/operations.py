"""A decoder's forward as a list of operations, each with what it reads and how to run it again.

Trainer and generator run one decoder, so an operation has one name in both. Feeding it the other's
input separates a difference that it makes from one that it passes on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fos_rl.model import moe
from fos_rl.model.decoder import Decoder, DenseMlp, Layer
from fos_rl.model.moe import SparseMlp
from fos_rl.model.rope import rotate

DENSE_MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "rope_q", "rope_k", "attention")
COLUMNS = (
    "input_layernorm",
    *ATTENTION,
    "o_proj",
    "post_attention_layernorm",
    "router",
    "experts",
    *DENSE_MLP,
)
"""Operations of a layer in the order in which it runs them; a layer has those of its family."""

Trace = dict[str, Tensor]
"""Output of each operation by name ("embed_tokens", "layers.3.q_proj"), a row per token; also
"positions", "token_ids" and the residual stream that each norm reads ("norm.in")."""


def operations(decoder: Decoder) -> list[str]:
    """Names in execution order, from `embed_tokens` to `logits`."""
    names = ["embed_tokens"]
    for number, layer in enumerate(_layers(decoder)):
        names += [f"layers.{number}.{op}" for op in COLUMNS if _has(layer, op)]
    return [*names, "norm", "logits"]


def run_operation(decoder: Decoder, name: str, trace: Trace) -> Tensor:
    """What this decoder's operation makes of the inputs recorded in a trace of either decoder.

    "attention" needs the decoder's inner attention to know the trace's sequences.
    """
    if name == "embed_tokens":
        return decoder.embed(trace["token_ids"])
    if name == "norm":
        return decoder.model.norm(trace["norm.in"])
    if name == "logits":
        return decoder.logits(trace["norm"])
    layer, op, prefix = split_name(decoder, name)

    def at(other: str) -> Tensor:
        return trace[prefix + other]

    attention = layer.self_attn
    match op:
        case "input_layernorm" | "post_attention_layernorm":
            return getattr(layer, op)(at(f"{op}.in"))
        case "q_proj" | "k_proj" | "v_proj":
            return getattr(attention, op)(at("input_layernorm"))
        case "q_norm" | "k_norm":
            return getattr(attention, op)(_heads(attention.head_dim, at(f"{op[0]}_proj")))
        case "rope_q" | "rope_k":
            kind = op[-1]
            heads = _heads(attention.head_dim, at(f"{kind}_proj"))
            cos_sin = decoder.model.rotary.on(heads.device)[trace["positions"]]
            return rotate(at(f"{kind}_norm") if attention.qk_norm else heads, cos_sin)
        case "attention":
            values = _heads(attention.head_dim, at("v_proj"))
            return attention.inner(at("rope_q"), at("rope_k"), values)
        case "o_proj":
            return attention.o_proj(at("attention").flatten(-2))
        case "router":
            return _route_again(cast(SparseMlp, layer.mlp), at("post_attention_layernorm"))
        case "experts":
            return layer.mlp(at("post_attention_layernorm"))
        case "gate_proj" | "up_proj":
            return getattr(layer.mlp, op)(at("post_attention_layernorm"))
        case _:
            mlp = cast(DenseMlp, layer.mlp)
            return mlp.down_proj(mlp.ops.silu(at("gate_proj")) * at("up_proj"))


def quantizer_inputs(decoder: Decoder) -> Iterator[tuple[str, str, Callable[[Trace], Tensor]]]:
    """(site, module name, its input from a trace) for linears, those that share an input once.

    Experts come with what enters their gate and up projections.
    """
    for number, layer in enumerate(_layers(decoder)):
        prefix = f"layers.{number}."
        sites: dict[str, tuple[str, Callable[[Trace], Tensor]]] = {
            "q/k/v_proj": ("self_attn.q_proj", lambda t, p=prefix: t[f"{p}input_layernorm"]),
            "o_proj": ("self_attn.o_proj", lambda t, p=prefix: t[f"{p}attention"].flatten(-2)),
        }
        if isinstance(layer.mlp, SparseMlp):
            name = "experts gate/up"
            sites[name] = ("mlp.experts", lambda t, p=prefix: t[f"{p}post_attention_layernorm"])
        else:
            sites["gate/up_proj"] = (
                "mlp.gate_proj",
                lambda t, p=prefix: t[f"{p}post_attention_layernorm"],
            )
            sites["down_proj"] = (
                "mlp.down_proj",
                lambda t, p=prefix, silu=layer.mlp.ops.silu: (
                    silu(t[f"{p}gate_proj"]) * t[f"{p}up_proj"]
                ),
            )
        for site, (module, read) in sites.items():
            yield prefix + site, f"model.{prefix}{module}", read


def dense_gates(
    experts: Int[Tensor, "tokens k"], gates: Float[Tensor, "tokens k"], num_experts: int
) -> Float[Tensor, "tokens experts"]:
    """A router's gates, 0 for the experts it did not choose."""
    return gates.new_zeros(gates.shape[0], num_experts).scatter_(1, experts, gates)


@contextmanager
def seeing_routes(see: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Calls `see(experts, gates)` with what every router of this process chooses."""
    original = moe.route

    def seen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        experts, gates = original(*args, **kwargs)
        see(experts, gates)
        return experts, gates

    # The choice is a local of the MLP's forward, which no module hook reaches.
    moe.route = seen
    try:
        yield
    finally:
        moe.route = original


def _route_again(mlp: SparseMlp, hidden: Tensor) -> Tensor:
    chosen: list[Tensor] = []
    with seeing_routes(lambda *route: chosen.extend(route)):
        mlp(hidden)
    return dense_gates(chosen[0], chosen[1], mlp.gate.weight.shape[0])


def split_name(decoder: Decoder, name: str) -> tuple[Layer, str, str]:
    """("layers.3.q_proj") -> (the layer, "q_proj", "layers.3.")."""
    _, number, op = name.split(".", 2)
    return _layers(decoder)[int(number)], op, f"layers.{number}."


def _layers(decoder: Decoder) -> list[Layer]:
    return cast("list[Layer]", list(decoder.model.layers))


def _has(layer: Layer, op: str) -> bool:
    if op in ("q_norm", "k_norm"):
        return layer.self_attn.qk_norm
    sparse = isinstance(layer.mlp, SparseMlp)
    if op in ("router", "experts"):
        return sparse
    return not (sparse and op in DENSE_MLP)


def _heads(head_dim: int, flat: Tensor) -> Tensor:
    return flat.unflatten(-1, (-1, head_dim))


def concatenate(traces: list[Trace], order: list[int]) -> Trace:
    """The rows of several forwards as one, in a given order."""
    index = torch.tensor(order)
    return {
        name: torch.cat([trace[name] for trace in traces])[index.to(first.device)]
        for name, first in traces[0].items()
    }
