"""The one attention of trainer and generator: causal, over a paged key-value cache.

A query's bits are a function of its position and of the keys and values up to it, whatever is
computed beside it: the same in a decode step, in any chunk of a prefill, over vLLM's pages, and
over the trainer's packed keys, which are pages of one token.
"""

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

QUERY_TILE = 16
"""Queries of one CPU tile: positions 16 i to 16 i + 15 of a sequence, so that a query always has
the same place in its tile."""
KEY_SPAN = 128
"""A tile sees its keys padded to a multiple of this, again a function of position alone."""
_KEY_BYTES = 1 << 26


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
    head_dim ** -0.5), softmax and sums are fp32, rounded once to q's dtype. Tokens past
    query_bounds[-1] get 0. No gradient.

    Args:
        k_cache: any view with a contiguous last dim; so is v_cache.
        max_query_len: of the sequences; sizes the grid on CUDA.
    """
    if q.is_cuda:
        from fos_rl.kernels import fixed_tile_attention

        return fixed_tile_attention.paged_attention(
            q, k_cache, v_cache, block_table, query_bounds, seq_lens, max_query_len
        )
    return _paged_attention_cpu(q, k_cache, v_cache, block_table, query_bounds, seq_lens)


@torch.no_grad()
def _paged_attention_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_bounds: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    sequence, position = _places(query_bounds, seq_lens)
    # Tokens come sequence by sequence in the order of positions, so equal tiles are neighbours.
    tiles_a_sequence = int(seq_lens.max()) // QUERY_TILE + 1 if len(sequence) else 1
    tile, tile_of = (sequence * tiles_a_sequence + position // QUERY_TILE).unique_consecutive(
        return_inverse=True
    )
    tile_sequence, first_position = tile // tiles_a_sequence, tile % tiles_a_sequence * QUERY_TILE
    queries = q.new_zeros(len(tile), QUERY_TILE, *q.shape[1:], dtype=torch.float32)
    queries[tile_of, position % QUERY_TILE] = q[: len(sequence)].float()
    mixed = torch.empty_like(queries)
    spans = first_position // KEY_SPAN + 1
    for span in spans.unique().tolist():
        num_keys = span * KEY_SPAN
        at_once = max(1, _KEY_BYTES // (num_keys * k_cache[0, 0].numel() * 4))
        for some in (spans == span).nonzero().squeeze(1).split(at_once):
            block, slot = _keys_of(
                num_keys, tile_sequence[some], block_table, seq_lens, k_cache.shape[1]
            )
            keys, values = k_cache[block, slot].float(), v_cache[block, slot].float()
            mixed[some] = _attend(queries[some], keys, values, first_position[some])
    out = torch.zeros_like(q)
    out[: len(sequence)] = mixed[tile_of, position % QUERY_TILE].to(q.dtype)
    return out


def _places(
    query_bounds: Int[Tensor, " bounds"], seq_lens: Int[Tensor, " sequences"]
) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]]:
    """Each query token's sequence and position."""
    counts = query_bounds.diff().long()
    sequence = torch.arange(len(counts)).repeat_interleave(counts)
    index = torch.arange(len(sequence)) - query_bounds[sequence]
    return sequence, seq_lens[sequence] - counts[sequence] + index


def _keys_of(
    num_keys: int, sequence: Tensor, block_table: Tensor, seq_lens: Tensor, block_size: int
) -> tuple[Int[Tensor, "tiles keys"], Int[Tensor, "tiles keys"]]:
    """Block and slot of each tile's first num_keys keys. Places past a sequence's end, which are
    masked, repeat its last key: another sequence's could hold a NaN."""
    key = torch.minimum(torch.arange(num_keys), seq_lens[sequence].long()[:, None] - 1)
    return block_table[sequence[:, None], key // block_size].long(), key % block_size


def _attend(
    queries: Float[Tensor, "tiles 16 heads head_dim"],
    keys: Float[Tensor, "tiles keys kv_heads head_dim"],
    values: Float[Tensor, "tiles keys kv_heads head_dim"],
    first_position: Int[Tensor, " tiles"],
) -> Float[Tensor, "tiles 16 heads head_dim"]:
    """Two batched products; the heads that share a key head are rows of one matrix."""
    (tiles, _, heads, head_dim), (_, num_keys, kv_heads, _) = queries.shape, keys.shape
    group = heads // kv_heads
    # [tiles * kv_heads, group * 16, head_dim] and [tiles * kv_heads, keys, head_dim]
    rows = queries.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(tiles * kv_heads, group * QUERY_TILE, head_dim)
    keys, values = (x.transpose(1, 2).reshape(-1, num_keys, head_dim) for x in (keys, values))
    scores = torch.bmm(rows, keys.transpose(1, 2)).mul_(head_dim**-0.5)
    position = first_position[:, None] + torch.arange(QUERY_TILE)
    hidden = torch.arange(num_keys) > position[:, :, None]  # [tiles, 16, keys]
    scores = scores.view(tiles, kv_heads * group, QUERY_TILE, num_keys)
    weights = scores.masked_fill_(hidden[:, None], float("-inf")).softmax(dim=-1)
    mixed = torch.bmm(weights.view(tiles * kv_heads, group * QUERY_TILE, num_keys), values)
    return mixed.view(tiles, heads, QUERY_TILE, head_dim).transpose(1, 2)
