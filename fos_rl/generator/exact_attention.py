"""vLLM's attention backend of exact mode: its paged cache, read by the trainer's own function.

The backend is the platform's own in everything but the forward: the cache's layout, the metadata of
a batch and CUDA graphs stay vLLM's. On CUDA it is the Triton one, which takes bf16 and fp32.
"""

from typing import Any

from torch import Tensor
from vllm.platforms import current_platform

from fos_rl.exact.paged_attention import paged_attention

if current_platform.is_cpu():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as PlatformBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as PlatformImpl
else:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend as PlatformBackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl as PlatformImpl


class ExactAttentionImpl(PlatformImpl):  # type: ignore[misc, valid-type]
    """vLLM's attention with the exact computation in place of its kernel."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query and output [tokens, heads, head_dim]; the batch's keys and values are in the cache
        by now. Tokens past num_actual_tokens pad a CUDA graph."""
        if attn_metadata is None:
            # A profiling run.
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        keys, values = cached_keys_and_values(kv_cache)
        output[:tokens] = paged_attention(
            query[:tokens],
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            attn_metadata.max_query_len,
        )
        return output


class CpuExactAttentionImpl(ExactAttentionImpl):
    """Exact attention over the CPU build's cache layout."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write in plain order: vLLM's CPU kernel packs keys for its own reader."""
        keys, values = cached_keys_and_values(kv_cache)
        block, slot = slot_mapping // keys.shape[1], slot_mapping % keys.shape[1]
        keys[block, slot] = key
        values[block, slot] = value


class ExactAttentionBackend(PlatformBackend):  # type: ignore[misc, valid-type]
    """vLLM's attention backend with exact attention in place of its kernel."""

    @staticmethod
    def get_impl_cls() -> type[ExactAttentionImpl]:
        """The class that attends, for this platform's cache layout."""
        return CpuExactAttentionImpl if current_platform.is_cpu() else ExactAttentionImpl


def cached_keys_and_values(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views [blocks, block_size, kv_heads, head_dim] of a layer's cache, whose shape is
    [blocks, 2, block_size, kv_heads, head_dim], or [blocks, kv_heads, block_size, 2 * head_dim] in
    newer versions and on the CPU."""
    if kv_cache.dim() == 5:
        keys, values = kv_cache.unbind(1)
    else:
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return keys, values
