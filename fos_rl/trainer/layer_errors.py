"""How far quantization moves each layer's products, measured on a few tokens once a run."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int, Integer
from torch import Tensor

from fos_rl.model.convert import PreparedWeights, QuantizedExperts, QuantizedLinear
from fos_rl.model.decoder import Decoder
from fos_rl.model.unquantized_matmul import fp32_matmul
from fos_rl.quant.grouped_gemm import group_spans

MAX_TOKENS = 128
"""Enough for an error to two digits, and little beside a micro-batch even on a CPU."""


@torch.no_grad()
def layer_errors(
    decoder: Decoder, token_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"]
) -> dict[str, float]:
    """||quantized - exact|| / ||exact|| of each layer, {"layers.0": 0.13}, in order.

    The norms are over all outputs of the layer's quantized linears and experts. `quantized` is what
    this forward computes; `exact` multiplies the very same activations with the unquantized
    weights, in fp32, and is not rounded. So it is the error that the layer adds, without that which
    came in with its input. 0 for a layer that has nothing quantized.

    Needs the inner attention to know the tokens' sequences. Draws no random number and leaves the
    decoder as it was.
    """
    layers = {f"layers.{number}": layer for number, layer in enumerate(decoder.model.layers)}
    sums = {name: torch.zeros(2, dtype=torch.float64, device=token_ids.device) for name in layers}
    handles = [
        module.register_forward_hook(partial(_add_squares, sums[name]))
        for name, layer in layers.items()
        for module in layer.modules()
        if isinstance(module, PreparedWeights)
    ]
    if handles:
        try:
            decoder(token_ids, positions)
        finally:
            for handle in handles:
                handle.remove()
    return {name: _relative(*both.tolist()) for name, both in sums.items()}


def first_tokens(
    sequences: Sequence[Integer[np.ndarray, " _"]], limit: int
) -> list[Integer[np.ndarray, " _"]]:
    """The first sequences, `limit` tokens of them: the last one is cut there.

    Example: lengths [4, 3, 5] and 6 tokens keep [4, 2].
    """
    kept: list[np.ndarray] = []
    for sequence in sequences:
        if limit == 0:
            break
        kept.append(sequence[:limit])
        limit -= len(kept[-1])
    return kept


def _add_squares(
    sums: Float64[Tensor, "2"], module: PreparedWeights, inputs: tuple[Any, ...], output: Tensor
) -> None:
    """A forward hook: adds the squares of error and exact product of each quantized weight."""
    for quantized, exact in _products(module, inputs, output):
        error = quantized.float() - exact
        sums += torch.stack([x.square().sum(dtype=torch.float64) for x in (error, exact)])


def _products(
    module: PreparedWeights, inputs: tuple[Any, ...], output: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """(as computed, exact) product of each quantized weight of a module that has just run."""
    if isinstance(module, QuantizedLinear):
        (x,) = inputs
        exact = fp32_matmul(x, module.weight)
        yield output, exact if module.bias is None else exact + module.bias.float()
        return
    assert isinstance(module, QuantizedExperts)
    rows, ends = inputs
    # The forward keeps neither: they are computed again, to the same bits.
    gate, up = (module.multiply(name, rows, ends) for name in ("gate_proj", "up_proj"))
    products = {
        "gate_proj": (rows, gate),
        "up_proj": (rows, up),
        "down_proj": (module.ops.silu(gate) * up, output),
    }
    for name, weight in module.weights().items():
        x, quantized = products[name]
        yield quantized, _grouped_fp32_matmul(x, weight, ends)


def _grouped_fp32_matmul(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    spans = zip(group_spans(ends.tolist()), weight.unbind(), strict=True)
    parts = [fp32_matmul(rows[a:b], expert) for (a, b), expert in spans if b > a]
    return torch.cat(parts)


def _relative(error: float, exact: float) -> float:
    return math.sqrt(error / exact) if exact else 0.0
