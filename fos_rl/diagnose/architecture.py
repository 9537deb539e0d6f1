"""Causes in how the model is run: tokens, positions, attention, norms, routing."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fos_rl.diagnose.hypotheses import Hypothesis, Question, from_forward
from fos_rl.diagnose.scorer import Forward, Weights, run_forward
from fos_rl.model import moe
from fos_rl.model.decoder import Decoder, RMSNorm
from fos_rl.model.families import family_of
from fos_rl.model.moe import SparseMlp
from fos_rl.model.rope import RotaryTable
from fos_rl.spec import Architecture
from fos_rl.trainer.packing import MicroBatch
from fos_rl.types import TrainBatch

_THETAS = (10_000.0, 500_000.0, 1_000_000.0)


def prompts(question: Question) -> Iterator[Hypothesis]:
    """Other tokens before the response."""
    forward = question.forward
    lengths = forward.batch.prompt_lengths
    shortest, longest = min(lengths), max(lengths)
    if shortest > 1:
        for detail, cut in (
            ("the prompt's first token was missing", lambda ids: ids[1:]),
            ("the prompt's last token was missing", lambda ids: ids[:-1]),
            ("the prompt was missing but for its last token", lambda ids: ids[-1:]),
        ):
            yield _with_prompts("prompt", detail, forward, cut)
    kept = 1
    while (kept := kept * 2) < longest:
        detail = f"the prompt was cut to its last {kept} tokens"
        yield _with_prompts("prompt", detail, forward, lambda ids, n=kept: ids[-n:])
        detail = f"the prompt was cut to its first {kept} tokens"
        yield _with_prompts("prompt", detail, forward, lambda ids, n=kept: ids[:n])


def positions(question: Question) -> Iterator[Hypothesis]:
    """Positions and the borders between packed sequences.

    A constant added to all positions of a sequence turns nothing: the rotation is relative.
    """
    forward = question.forward
    edits: dict[str, Callable[[MicroBatch], Tensor]] = {
        "positions restart at 0 with the response": _restarting,
        "positions are all 0": lambda m: torch.zeros_like(m.positions),
    }
    for detail, edit in edits.items():
        yield from_forward(
            "positions",
            detail,
            forward.but(edit_microbatch=lambda m, edit=edit: replace(m, positions=edit(m))),
        )
    if forward.batch.num_sequences > 1:
        yield from_forward(
            "packing leak",
            "packed sequences attended to those before them",
            forward.but(edit_microbatch=lambda m: replace(m, lengths=[sum(m.lengths)])),
        )


def rotary(question: Question) -> Iterator[Hypothesis]:
    """Other rotary frequencies, or another layout of the pairs."""
    forward, architecture = question.forward, question.forward.spec.architecture
    for theta in _THETAS:
        if theta != architecture.rope_theta:
            other = architecture.model_copy(update={"rope_theta": theta})
            yield _with_rotary(f"rope_theta was {theta:g}", forward, other)
    if architecture.rope_scaling is not None:
        plain = architecture.model_copy(update={"rope_scaling": None})
        yield _with_rotary("rope_scaling was ignored", forward, plain)
    yield from_forward(
        "rotary embedding",
        "neighbouring elements were rotated as pairs (interleaved)",
        forward.but(weights=_interleaved(forward.weights, architecture)),
    )


def attention(question: Question) -> Iterator[Hypothesis]:
    """The inner attention: scale, window, cache precision, mask."""
    forward, architecture = question.forward, question.forward.spec.architecture
    usual = architecture.head_dim**-0.5
    scales = {
        "hidden_size / num_heads": (architecture.hidden_size / architecture.num_heads) ** -0.5,
        "1": 1.0,
        "1 / head_dim": 1 / architecture.head_dim,
    }
    for name, scale in scales.items():
        if scale != usual:
            factor = scale / usual
            yield _with_attention(
                "attention scale",
                f"attention was scaled by {name}"
                + (" ** -0.5" if name.startswith("hidden") else ""),
                forward,
                lambda q, k, v, f=factor: (q * f, k, v),
            )
    yield _with_attention(
        "key-value cache precision",
        "keys and values were kept in fp8 (E4M3)",
        forward,
        lambda q, k, v: (q, _fp8(k), _fp8(v)),
    )


def norms(question: Question) -> Iterator[Hypothesis]:
    """Other epsilons of RMSNorm, and queries and keys that have no norm."""
    forward = question.forward
    for eps in (1e-5, 1e-6, 1e-8):
        if eps != forward.spec.architecture.rms_norm_eps:
            yield from_forward(
                "norm epsilon",
                f"rms_norm_eps was {eps:g}",
                forward.but(edit_decoder=lambda d, eps=eps: _set_eps(d, eps)),
            )
    if family_of(forward.spec.architecture).qk_norm:
        yield from_forward(
            "query and key norms",
            "queries and keys were not normalised",
            forward.but(edit_decoder=_no_qk_norm),
        )


def routing(question: Question) -> Iterator[Hypothesis]:
    """The router's precision, number of experts, gates and ties."""
    forward, architecture = question.forward, question.forward.spec.architecture
    if not architecture.num_experts:
        return
    k, rescaled = architecture.num_experts_per_token, architecture.norm_topk_prob
    changes: dict[str, RouteChange] = {
        f"gates were {'not ' if rescaled else ''}rescaled to sum to 1": _other_norm,
        "the router multiplied in bf16": _bf16_router,
        "every token took the runner-up in place of its last expert": _runner_up,
    }
    for detail, change in changes.items():
        edit = forward.but(edit_decoder=lambda d, c=change: _reroute(d, c))
        yield from_forward("routing", detail, edit)
    for other in (k - 1, k + 1):
        if 0 < other <= architecture.num_experts:
            edit = forward.but(edit_decoder=lambda d, n=other: _set_experts_per_token(d, n))
            yield from_forward("routing", f"each token took {other} experts", edit)
    yield Hypothesis(
        cause="routing",
        detail="near-tied experts were chosen the other way",
        log_probs=lambda: _near_ties(question),
    )


# A choice counts as near-tied when the last expert's gate exceeds the runner-up's by less.
_TIE = 0.05

RouteArguments = dict[str, Any]
Route = Callable[..., tuple[Tensor, Tensor]]
RouteChange = Callable[[Route, Tensor, Tensor, RouteArguments], tuple[Tensor, Tensor]]
"""(original route, hidden, router weight, its keywords) -> (experts, gates)."""


def _reroute(decoder: Decoder, change: RouteChange, layer: int | None = None) -> None:
    """Let the routers, or one layer's, choose as `change` says."""
    for number, block in enumerate(decoder.model.layers):
        mlp: Any = block.mlp
        if isinstance(mlp, SparseMlp) and layer in (None, number):
            mlp.forward = _rerouted(mlp.forward, change)


def _rerouted(forward: Callable[[Tensor], Tensor], change: RouteChange) -> Any:
    def run(hidden: Tensor) -> Tensor:
        original = moe.route
        # The choice is a local of the MLP's forward; it is replaced while this MLP runs.
        moe.route = lambda hidden, weight, **kw: change(original, hidden, weight, kw)
        try:
            return forward(hidden)
        finally:
            moe.route = original

    return run


def _other_norm(route: Route, hidden: Tensor, weight: Tensor, kw: RouteArguments) -> Any:
    return route(hidden, weight, **{**kw, "norm_topk_prob": not kw["norm_topk_prob"]})


def _bf16_router(route: Route, hidden: Tensor, weight: Tensor, kw: RouteArguments) -> Any:
    logits = F.linear(hidden.to(torch.bfloat16), weight.to(torch.bfloat16))
    # Rounded logits through the same softmax and choice: an identity as the router's weight.
    identity = torch.eye(logits.shape[1], device=logits.device)
    return route(logits.float(), identity, **kw)


def _set_experts_per_token(decoder: Decoder, number: int) -> None:
    for module in decoder.modules():
        if isinstance(module, SparseMlp):
            module.num_experts_per_token = number


def _runner_up(route: Route, hidden: Tensor, weight: Tensor, kw: RouteArguments) -> Any:
    return _swap_last(route, hidden, weight, kw, threshold=np.inf)


def _swap_near_ties(route: Route, hidden: Tensor, weight: Tensor, kw: RouteArguments) -> Any:
    return _swap_last(route, hidden, weight, kw, threshold=_TIE)


def _swap_last(
    route: Route, hidden: Tensor, weight: Tensor, kw: RouteArguments, threshold: float
) -> tuple[Tensor, Tensor]:
    """Replace the last chosen expert by the next, where their gates are within `threshold`."""
    k = kw["num_experts_per_token"]
    wide = {**kw, "num_experts_per_token": k + 1, "norm_topk_prob": False}
    experts, gates = route(hidden, weight, **wide)
    close = gates[:, k - 1] - gates[:, k] < threshold * gates[:, k - 1]
    experts[close, k - 1], gates[close, k - 1] = experts[close, k], gates[close, k]
    experts, gates = experts[:, :k], gates[:, :k]
    return experts, gates / gates.sum(-1, keepdim=True) if kw["norm_topk_prob"] else gates


def _near_ties(question: Question) -> np.ndarray:
    """For each token the nearest of: no near tie swapped, or those of one layer."""
    best = question.scored.log_probs
    for layer in range(question.forward.spec.architecture.num_layers):
        edit = question.forward.but(edit_decoder=lambda d, n=layer: _reroute(d, _swap_near_ties, n))
        swapped = run_forward(edit).log_probs
        nearer = np.abs(swapped - question.recorded) < np.abs(best - question.recorded)
        best = np.where(nearer, swapped, best)
    return best


def _with_prompts(
    cause: str, detail: str, forward: Forward, cut: Callable[[np.ndarray], np.ndarray]
) -> Hypothesis:
    def edit(batch: TrainBatch) -> TrainBatch:
        pairs = list(zip(batch.token_ids, batch.prompt_lengths, strict=True))
        prompts = [cut(ids[:n]) for ids, n in pairs]
        joined = [np.concatenate([p, ids[n:]]) for p, (ids, n) in zip(prompts, pairs, strict=True)]
        return replace(batch, token_ids=joined, prompt_lengths=[len(p) for p in prompts])

    return from_forward(cause, detail, forward.but(edit_batch=edit))


def _restarting(microbatch: MicroBatch) -> Tensor:
    parts = []
    for length, response in zip(microbatch.lengths, microbatch.response_lengths, strict=True):
        parts += [torch.arange(length - response), torch.arange(response)]
    return torch.cat(parts).to(microbatch.positions)


def _with_rotary(detail: str, forward: Forward, architecture: Architecture) -> Hypothesis:
    def edit(decoder: Decoder) -> None:
        decoder.model.rotary = RotaryTable(architecture)

    return from_forward("rotary embedding", detail, forward.but(edit_decoder=edit))


def _interleaved(weights: Weights, architecture: Architecture) -> Weights:
    """Weights under which the decoder's rotation of halves is one of neighbours.

    Attention sees no permutation of a head's elements that queries and keys share, so the rows that
    make them are permuted instead.
    """
    half = torch.arange(architecture.head_dim).view(-1, 2).T.flatten()  # 0 2 4 .. 1 3 5 ..
    changed = dict(weights)
    for name, weight in weights.items():
        if ".self_attn.q_" in name or ".self_attn.k_" in name:
            heads = weight.unflatten(0, (-1, architecture.head_dim))
            changed[name] = heads[:, half.to(weight.device)].flatten(0, 1)
    return changed


def _with_attention(
    cause: str,
    detail: str,
    forward: Forward,
    change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
) -> Hypothesis:
    def edit(decoder: Decoder) -> None:
        for layer in decoder.model.layers:
            inner: Any = layer.self_attn.inner  # type: ignore[union-attr]
            inner.forward = lambda q, k, v, run=inner.forward: run(*change(q, k, v))

    return from_forward(cause, detail, forward.but(edit_decoder=edit))


def _fp8(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def _set_eps(decoder: Decoder, eps: float) -> None:
    for module in decoder.modules():
        if isinstance(module, RMSNorm):
            module.eps = eps


def _no_qk_norm(decoder: Decoder) -> None:
    for layer in decoder.model.layers:
        layer.self_attn.qk_norm = False  # type: ignore[union-attr]


KINDS = (prompts, positions, rotary, attention, norms, routing)
