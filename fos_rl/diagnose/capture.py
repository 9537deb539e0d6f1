"""What a decoder's forward computes, operation by operation, taken down by hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from fos_rl.diagnose.operations import Trace, dense_gates, seeing_routes
from fos_rl.model.decoder import Decoder, Layer
from fos_rl.model.moe import SparseMlp

Hook = Callable[..., None]


@contextmanager
def capture(decoder: Decoder) -> Iterator[Trace]:
    """Fills the trace in each forward, over the one before. Logits are left to the caller: trainer
    and generator compute them for some rows only.
    """
    trace: Trace = {}
    # The router at work, by the name of its operation.
    running: list[tuple[str, SparseMlp]] = []
    handles: list[Any] = []

    def keep_output(module: Any, name: str) -> None:
        def hook(_module: Any, _inputs: Any, output: Tensor) -> None:
            trace[name] = output.detach()

        handles.append(module.register_forward_hook(hook))

    def before(module: Any, hook: Hook) -> None:
        handles.append(module.register_forward_pre_hook(hook))

    def keep_ids(_: Any, inputs: tuple[Tensor, Tensor]) -> None:
        # The engine reuses these two buffers.
        trace["token_ids"], trace["positions"] = (x.detach().clone() for x in inputs)

    before(decoder, keep_ids)
    keep_output(decoder.model.embed_tokens, "embed_tokens")
    for number, layer in enumerate(cast("list[Layer]", list(decoder.model.layers))):
        _capture_layer(layer, f"layers.{number}.", trace, running, keep_output, before)
    before(decoder.model.norm, _keep_input(trace, "norm.in"))
    keep_output(decoder.model.norm, "norm")

    def keep_gates(experts: Tensor, gates: Tensor) -> None:
        if running:
            name, mlp = running.pop()
            trace[name] = dense_gates(experts, gates.detach(), mlp.gate.weight.shape[0])

    try:
        with seeing_routes(keep_gates):
            yield trace
    finally:
        for handle in handles:
            handle.remove()


def _capture_layer(
    layer: Layer,
    prefix: str,
    trace: Trace,
    running: list[tuple[str, SparseMlp]],
    keep_output: Callable[[Any, str], None],
    before: Callable[[Any, Hook], None],
) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    for name in ("input_layernorm", "post_attention_layernorm"):
        before(getattr(layer, name), _keep_input(trace, f"{prefix}{name}.in"))
        keep_output(getattr(layer, name), prefix + name)
    norms = ("q_norm", "k_norm") if attention.qk_norm else ()
    for name in ("q_proj", "k_proj", "v_proj", *norms, "o_proj"):
        keep_output(getattr(attention, name), prefix + name)

    def keep_rotated(_: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        trace[f"{prefix}rope_q"], trace[f"{prefix}rope_k"] = (x.detach() for x in inputs[:2])

    before(attention.inner, keep_rotated)
    keep_output(attention.inner, f"{prefix}attention")
    if not isinstance(mlp, SparseMlp):
        for name in ("gate_proj", "up_proj", "down_proj"):
            keep_output(getattr(mlp, name), prefix + name)
        return

    before(mlp, lambda *_: running.append((f"{prefix}router", mlp)))
    keep_output(mlp, f"{prefix}experts")


def _keep_input(trace: Trace, name: str) -> Hook:
    def hook(_: Any, inputs: tuple[Tensor]) -> None:
        trace[name] = inputs[0].detach()

    return hook
