"""Modules of the default dtype and device whose values are not set: a decoder's get loaded.

torch's own constructors draw random values first, seconds for a model that is then overwritten.
"""

import torch
from torch import nn

from fos_rl.model.ops import Linear, Ops


def linear(ops: Ops, in_features: int, out_features: int, *, bias: bool) -> Linear:
    """`Linear(ops, in_features, out_features)` with unset weights."""
    device = torch.empty(0).device
    with torch.device("meta"):
        module = Linear(ops, in_features, out_features, bias=bias)
    return module.to_empty(device=device)


def embedding(num_embeddings: int, width: int) -> nn.Embedding:
    """`nn.Embedding(num_embeddings, width)` with unset weights."""
    device = torch.empty(0).device
    return nn.Embedding(num_embeddings, width, device="meta").to_empty(device=device)
