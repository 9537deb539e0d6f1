"""The trainer's inner attention: packed sequences of different lengths, none sees another."""

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fos_rl.exact.autograd import ordinary_backward
from fos_rl.exact.paged_attention import paged_attention
from fos_rl.model.decoder import AttentionFactory
from fos_rl.spec import Consistency

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
        self._tables: dict[torch.device, Tensor] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)

    def cu_seqlens(self, device: torch.device) -> Int[Tensor, " bounds"]:
        """int32 boundaries, from 0 to the number of tokens, copied to a device once."""
        if device not in self._on_device:
            bounds = [0, *accumulate(self.lengths)]
            self._on_device[device] = torch.tensor(bounds, dtype=torch.int32, device=device)
        return self._on_device[device]

    def token_table(self, device: torch.device) -> Int[Tensor, "sequences longest"]:
        """int32 packed index of each sequence's j-th token, copied to a device once; what follows
        a sequence's last token has no meaning."""
        if device not in self._tables:
            starts = self.cu_seqlens(device)[:-1, None]
            steps = torch.arange(self.max_length, dtype=torch.int32, device=device)
            self._tables[device] = starts + steps
        return self._tables[device]

    def positions(self, device: torch.device) -> Int[Tensor, " tokens"]:
        """int64 position of each token in its own sequence."""
        parts = [torch.arange(length, device="cpu") for length in self.lengths]
        return torch.cat(parts or [torch.zeros(0, dtype=torch.int64, device="cpu")]).to(device)


def packed_attention(
    sequences: PackedSequences, consistency: Consistency = "fast"
) -> AttentionFactory:
    """The attention factory of a trainer: `Decoder(spec, packed_attention(sequences))`."""
    attention = ExactPackedAttention if consistency == "exact" else PackedAttention
    return lambda layer: attention(sequences)


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
        """Causal attention of each sequence for itself; [tokens, heads, head_dim], as q."""
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


class ExactPackedAttention(PackedAttention):
    """`PackedAttention` whose forward is the very function that the generator calls over its paged
    cache: packed keys and values are a cache with blocks of one token."""

    def forward(
        self,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """The generator's exact attention, with the gradient of the ordinary one."""
        return ordinary_backward(self._paged, super().forward, q, k, v)

    def _paged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bounds = self.sequences.cu_seqlens(q.device)
        return paged_attention(
            q,
            k[:, None],
            v[:, None],
            self.sequences.token_table(q.device),
            bounds,
            bounds.diff(),
            self.sequences.max_length,
        )


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
