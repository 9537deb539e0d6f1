"""The shared decoder as a vLLM model: only the inner attention is vLLM's own, in fast mode."""

from collections.abc import Iterable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.registry import ModelRegistry

from fos_rl.generator.exact_attention import ExactAttentionBackend
from fos_rl.generator.routing_record import RoutingRecord
from fos_rl.model.convert import build_decoder
from fos_rl.model.hf import load_hf_weights
from fos_rl.spec import ModelSpec

ARCHITECTURE = "FosRLForCausalLM"
SPEC_KEY = "fos_rl_spec"


class PagedAttention(nn.Module):
    """vLLM's attention over its paged key-value cache, called as the decoder calls it."""

    def __init__(self, spec: ModelSpec, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        architecture = spec.architecture
        self.head_dim = architecture.head_dim
        # vLLM finds the layer's cache by this prefix.
        self.attn = Attention(
            architecture.num_heads,
            architecture.head_dim,
            architecture.head_dim**-0.5,
            num_kv_heads=architecture.num_kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=prefix,
            attn_backend=ExactAttentionBackend if spec.consistency == "exact" else None,
        )

    def forward(
        self,
        q: Float[Tensor, "tokens heads head_dim"],
        k: Float[Tensor, "tokens kv_heads head_dim"],
        v: Float[Tensor, "tokens kv_heads head_dim"],
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Attention over vLLM's paged cache, [tokens, heads, head_dim] as q."""
        mixed = self.attn(q.flatten(1), k.flatten(1), v.flatten(1))
        return mixed.unflatten(-1, (-1, self.head_dim))


class FosRLForCausalLM(nn.Module):
    """vLLM's model interface around `Decoder`; the spec travels in vLLM's `additional_config`."""

    is_text_generation_model = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        spec = ModelSpec.model_validate(cast(dict, vllm_config.additional_config)[SPEC_KEY])
        self.decoder = build_decoder(
            spec,
            lambda layer: PagedAttention(
                spec, vllm_config, f"{prefix}layers.{layer}.self_attn.attn"
            ),
        )
        self.routing: RoutingRecord | None = None
        if spec.architecture.num_experts:
            self.routing = RoutingRecord(self.decoder, vllm_config)

    def embed_input_ids(self, input_ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """The decoder's embeddings."""
        return self.decoder.embed(input_ids)

    def forward(
        self,
        input_ids: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
        **_: object,
    ) -> Float[Tensor, "tokens hidden"]:
        """Final hidden states; NotImplementedError for inputs other than token ids."""
        if intermediate_tensors is not None or inputs_embeds is not None:
            raise NotImplementedError("pipeline parallelism and input embeddings are not supported")
        return self.decoder(input_ids, positions)

    def compute_logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens v"]:
        """The decoder's logits, [tokens, vocab]."""
        return self.decoder.logits(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load Hugging Face tensors; returns the names of all parameters."""
        load_hf_weights(self.decoder, weights)
        return {name for name, _ in self.named_parameters()}


def register() -> None:
    """Make the decoder known to vLLM in this process."""
    ModelRegistry.register_model(ARCHITECTURE, FosRLForCausalLM)
