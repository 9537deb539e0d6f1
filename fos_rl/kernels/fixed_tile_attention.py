"""Causal attention over a paged key-value cache, one result per query whatever is computed beside
it.

Trainer and generator call this one function in exact mode: vLLM with its pages, the trainer with
its packed keys as pages of one token. Keys are taken in tiles of a fixed size that begin at the
sequence's first token, so the order of additions depends on the query's position alone: a decode
step, a chunk of a prefill and a training batch agree to the last bit. A tile that is wholly after
a query changes nothing of it: its maximum stays, its sums are multiplied by exp2(0) = 1 and get 0
added.
"""

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32
from torch import Tensor

BLOCK_QUERIES, BLOCK_KEYS = 64, 64


def paged_attention(
    q: Float[Tensor, "tokens heads head_dim"],
    k_cache: Float[Tensor, "blocks block_size kv_heads head_dim"],
    v_cache: Float[Tensor, "blocks block_size kv_heads head_dim"],
    block_table: Int32[Tensor, "sequences max_blocks"],
    query_bounds: Int32[Tensor, " bounds"],
    seq_lens: Int32[Tensor, " sequences"],
    max_query_len: int,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Attention of the last query_bounds[s + 1] - query_bounds[s] tokens of each sequence s.

    Query i of n in sequence s has position seq_lens[s] - n + i and sees keys 0 to that position;
    key j is in block_table[s, j // block_size] at j % block_size. Scores (scaled by
    head_dim ** -0.5), softmax and sums are fp32; probabilities are rounded to the values' dtype
    before they multiply them, as in FlashAttention; one rounding at the end.

    All tensors are on one CUDA device. The last dim of q and of the caches is contiguous. Tokens
    past query_bounds[-1] get 0.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    padded_group = triton.next_power_of_2(group)
    out = torch.zeros(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
    sequences = seq_lens.shape[0]
    if tokens == 0 or sequences == 0:
        return out
    # The heads that share a key head are rows of one tile, so that a decode step fills it better.
    grid = (triton.cdiv(max_query_len * padded_group, BLOCK_QUERIES), sequences, kv_heads)
    _paged_attention_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        block_table,
        query_bounds,
        seq_lens,
        math.log2(math.e) * head_dim**-0.5,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        block_table.stride(0),
        k_cache.shape[1],
        heads,
        head_dim,
        group,
        padded_group,
        triton.next_power_of_2(head_dim),
        BLOCK_QUERIES,
        BLOCK_KEYS,
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit(do_not_specialize=["table_stride", "k_block_stride", "v_block_stride"])
def _paged_attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_table,
    query_bounds,
    seq_lens,
    scale,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    block_size,
    heads,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    sequence, kv_head = tl.program_id(1), tl.program_id(2)
    TOKENS: tl.constexpr = BLOCK_QUERIES // PADDED_GROUP
    first_query = tl.load(query_bounds + sequence)
    num_queries = tl.load(query_bounds + sequence + 1) - first_query
    first_token = tl.program_id(0) * TOKENS
    if first_token >= num_queries:
        return
    context = tl.load(seq_lens + sequence) - num_queries

    row = tl.arange(0, BLOCK_QUERIES)
    token = first_token + row // PADDED_GROUP
    member = row % PADDED_GROUP
    used = (token < num_queries) & (member < GROUP)
    position = context + token
    dim = tl.arange(0, BLOCK_DIM)
    inside_head = dim < HEAD_DIM
    query_row = (first_query + token).to(tl.int64)
    head = kv_head * GROUP + member
    queries = tl.load(
        q + (query_row * q_token_stride + head * q_head_stride)[:, None] + dim[None, :],
        mask=used[:, None] & inside_head[None, :],
        other=0.0,
    )

    maximum = tl.full((BLOCK_QUERIES,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), dtype=tl.float32)
    num_keys = context + tl.minimum(first_token + TOKENS, num_queries)
    for start in range(0, num_keys, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        exists = key < num_keys
        block = tl.load(
            block_table + sequence * table_stride + key // block_size, mask=exists, other=0
        ).to(tl.int64)
        slot = (key % block_size).to(tl.int64)
        keys = tl.load(
            k_cache
            + (block * k_block_stride + slot * k_slot_stride + kv_head * k_head_stride)[None, :]
            + dim[:, None],
            mask=inside_head[:, None] & exists[None, :],
            other=0.0,
        )
        values = tl.load(
            v_cache
            + (block * v_block_stride + slot * v_slot_stride + kv_head * v_head_stride)[:, None]
            + dim[None, :],
            mask=exists[:, None] & inside_head[None, :],
            other=0.0,
        )
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        # Key 0 is in every query's first tile, so the maximum is finite from there on. Rows past
        # the last query see what they may: nothing is stored of them.
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        decay = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        mixed = tl.dot(
            weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee"
        )
        maximum = new_maximum
    result = mixed / total[:, None]
    tl.store(
        out + (query_row * heads + head)[:, None] * HEAD_DIM + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=used[:, None] & inside_head[None, :],
    )
