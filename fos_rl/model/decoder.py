"""The decoder that trainer and generator run: the families of `fos_rl.model.families`.

Tokens are flat: [tokens], whatever sequences they belong to. Only the inner attention knows about
sequences, and it is the only module that is not shared: packed variable-length attention in the
trainer, paged attention in vLLM. Parameters carry Hugging Face's names, except that a layer's
experts are stacked (`fos_rl.model.hf` names them one by one).

Precision: parameters and activations have the dtype the decoder was built with or cast to.
RMSNorm, rotation, router, softmax and expert combination compute in fp32 and round once; logits
stay in fp32.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fos_rl.model.families import family_of
from fos_rl.model.moe import SparseMlp
from fos_rl.model.ops import OPS, Ops
from fos_rl.model.rope import RotaryTable, rotate
from fos_rl.model.uninitialized import embedding, linear
from fos_rl.spec import Architecture, ModelSpec

AttentionFactory = Callable[[int], nn.Module]
"""layer index -> module called as attention(q [tokens, heads, head_dim], k [tokens, kv_heads,
head_dim], v [tokens, kv_heads, head_dim]) -> [tokens, heads, head_dim], scaled by
head_dim ** -0.5, causal, tokens in the order given."""


class Decoder(nn.Module):
    """A causal language model without its inner attention. Parameters are uninitialised until
    `fos_rl.model.hf.load_hf_weights` fills them."""

    def __init__(self, spec: ModelSpec, attention: AttentionFactory) -> None:
        super().__init__()
        self.spec = spec
        architecture = spec.architecture
        self.ops = ops = OPS[spec.consistency]
        self.model = Backbone(architecture, attention, ops)
        self.lm_head: nn.Linear | None = None
        if not architecture.tie_word_embeddings:
            self.lm_head = linear(
                ops, architecture.hidden_size, architecture.vocab_size, bias=False
            )

    def embed(self, token_ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Input embeddings, in the parameters' dtype."""
        return self.model.embed_tokens(token_ids)

    def forward(
        self, token_ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Hidden states after the final norm; `logits` makes predictions of them.

        Args:
            positions: each token's place in its own sequence, from 0, below
                max_position_embeddings.
        """
        return self.model(self.embed(token_ids), positions)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """fp32 logits: a bf16 logit is so coarse that log-probs above 0 come out.

        Call it on the rows that are needed, a chunk at a time: nothing else in the decoder is as
        large.
        """
        return self.ops.logits(hidden, self.head_weight)

    @property
    def head_weight(self) -> Float[Tensor, "vocab hidden"]:
        """The output head's weight, which is the embedding when the two are tied."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.weight


class Backbone(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, architecture: Architecture, attention: AttentionFactory, ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = embedding(architecture.vocab_size, architecture.hidden_size)
        self.layers = nn.ModuleList(
            Layer(architecture, layer, attention(layer), ops)
            for layer in range(architecture.num_layers)
        )
        self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, ops)
        self.rotary = RotaryTable(architecture)

    def forward(
        self, hidden: Float[Tensor, "tokens hidden"], positions: Int[Tensor, " tokens"]
    ) -> Float[Tensor, "tokens hidden"]:
        """Hidden states of packed tokens after the last norm."""
        cos_sin = self.rotary.on(hidden.device)[positions]  # [tokens, 2, head_dim / 2]
        for layer in self.layers:
            hidden = layer(hidden, cos_sin)
        return self.norm(hidden)


class Layer(nn.Module):
    """hidden + attention(norm(hidden)), then the same with the MLP."""

    def __init__(
        self, architecture: Architecture, layer: int, attention: nn.Module, ops: Ops
    ) -> None:
        super().__init__()
        width, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps, ops)
        self.self_attn = SelfAttention(architecture, attention, ops)
        self.post_attention_layernorm = RMSNorm(width, eps, ops)
        is_moe = architecture.is_moe_layer(layer)
        self.mlp = (SparseMlp if is_moe else DenseMlp)(architecture, ops)

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        cos_sin: Float[Tensor, "tokens 2 half"],
    ) -> Float[Tensor, "tokens hidden"]:
        """Attention and MLP, each added to the residual stream."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos_sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class SelfAttention(nn.Module):
    """Projections, per-head norms (`qk_norm`) and rotation around the given inner attention.

    Head counts follow from the projections' widths, so a shard of the heads needs no other code.
    """

    def __init__(self, architecture: Architecture, attention: nn.Module, ops: Ops) -> None:
        super().__init__()
        self.head_dim = head_dim = architecture.head_dim
        family, width = family_of(architecture), architecture.hidden_size
        biased = family.biased if architecture.attention_bias else ()
        q_width = architecture.num_heads * head_dim
        kv_width = architecture.num_kv_heads * head_dim
        self.q_proj = linear(ops, width, q_width, bias="q_proj" in biased)
        self.k_proj = linear(ops, width, kv_width, bias="k_proj" in biased)
        self.v_proj = linear(ops, width, kv_width, bias="v_proj" in biased)
        self.o_proj = linear(ops, q_width, width, bias="o_proj" in biased)
        self.qk_norm = family.qk_norm
        if self.qk_norm:
            self.q_norm = RMSNorm(head_dim, architecture.rms_norm_eps, ops)
            self.k_norm = RMSNorm(head_dim, architecture.rms_norm_eps, ops)
        self.inner = attention

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        cos_sin: Float[Tensor, "tokens 2 half"],
    ) -> Float[Tensor, "tokens hidden"]:
        """Attention of packed tokens; positions come as cosines and sines."""
        q = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [tokens, heads, head_dim]
        k = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [tokens, kv_heads, head_dim]
        v = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [tokens, kv_heads, head_dim]
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = self.inner(rotate(q, cos_sin), rotate(k, cos_sin), v)  # [tokens, heads, head_dim]
        return self.o_proj(mixed.flatten(-2))


class DenseMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, architecture: Architecture, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        width, inner = architecture.hidden_size, architecture.intermediate_size
        self.gate_proj = linear(ops, width, inner, bias=architecture.mlp_bias)
        self.up_proj = linear(ops, width, inner, bias=architecture.mlp_bias)
        self.down_proj = linear(ops, inner, width, bias=architecture.mlp_bias)

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """down(silu(gate(hidden)) * up(hidden))."""
        return self.down_proj(self.ops.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dim, in fp32, rounded once."""

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """x / sqrt(mean(x^2) + eps) * weight in fp32, then one rounding to x's dtype."""
        wide = x.float()
        scale = torch.rsqrt(self.ops.mean_square(wide) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)
