"""The trainer's inner attention: packed sequences of different lengths, none sees another."""

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fos_rl.model.decoder import AttentionFactory

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None


class PackedSequences:
    """Where the sequences of the current micro-batch begin and end; one object for all layers.

    Example: lengths [3, 2] are tokens 0-2 and 3-4; cu_seqlens is [0, 3, 5] and positions are
    [0, 1, 2, 0, 1].
    """

    def __init__(self, lengths: Sequence[int] = ()) -> None:
        self.set(lengths)

    def set(self, lengths: Sequence[int]) -> None:
        """Describe the next micro-batch. Call it before the decoder's forward, and do not call it
        again before its backward when activations are recomputed."""
        self.lengths = list(lengths)
        self._on_device: dict[torch.device, Tensor] = {}

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    def cu_seqlens(self, device: torch.device) -> Int[Tensor, " bounds"]:
        """int32 boundaries, from 0 to the number of tokens, copied to a device once."""
        if device not in self._on_device:
            bounds = [0, *accumulate(self.lengths)]
            self._on_device[device] = torch.tensor(bounds, dtype=torch.int32, device=device)
        return self._on_device[device]

    def positions(self, device: torch.device) -> Int[Tensor, " tokens"]:
        """int64 position of each token in its own sequence."""
        parts = [torch.arange(length, device="cpu") for length in self.lengths]
        return torch.cat(parts or [torch.zeros(0, dtype=torch.int64, device="cpu")]).to(device)


def packed_attention(sequences: PackedSequences) -> AttentionFactory:
    """The attention factory of a trainer: `Decoder(spec, packed_attention(sequences))`."""
    return lambda layer: PackedAttention(sequences)


class PackedAttention(nn.Module):
    """Causal grouped-query attention within each packed sequence, scaled by head_dim ** -0.5.

    On CUDA in bf16 one FlashAttention call covers all sequences; elsewhere each sequence is one
    `scaled_dot_product_attention`, so a packed sample runs the very kernel it would run alone.
    """

    def __init__(self, sequences: PackedSequences) -> None:
        super().__init__()
        self.sequences = sequences

    def forward(
        self,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        assert self.sequences.num_tokens == q.shape[0], (
            f"PackedSequences.set said {self.sequences.num_tokens} tokens, got {q.shape[0]}"
        )
        if not self.sequences.lengths:
            return q
        if varlen_attn is not None and q.is_cuda and q.dtype == torch.bfloat16:
            return _varlen(q, k, v, self.sequences)
        lengths = self.sequences.lengths
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([causal_attention(*part) for part in parts])


def causal_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k: Float[Tensor, "tokens kv_heads head_dim"],
    v: Float[Tensor, "tokens kv_heads head_dim"],
) -> Float[Tensor, "tokens heads head_dim"]:
    """Attention over one sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, head_dim]
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed[0].transpose(0, 1)


def _varlen(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences) -> Tensor:
    assert varlen_attn is not None
    known = inspect.signature(varlen_attn).parameters
    # torch 2.10 spells causal as a flag, later versions as a window of (all, 0).
    causal: dict[str, Any] = (
        {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    )
    if "enable_gqa" in known:
        causal["enable_gqa"] = True
    else:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    bounds, longest = sequences.cu_seqlens(q.device), sequences.max_length
    mixed = varlen_attn(q, k, v, bounds, bounds, longest, longest, **causal)
    assert isinstance(mixed, Tensor)
    return mixed
