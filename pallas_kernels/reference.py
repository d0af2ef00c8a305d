"""XLA twins of the Pallas kernels: the implementation on CPU and GPU, and the oracle beside the kernels.

The paged cache of a KV group is one stacked array `cache_LPKSC`: L layers, P pages, K KV heads, S tokens a page, and
C = 2H lanes that hold a token's key in [0, H) and its value in [H, 2H). A head's page is one contiguous tile, and a
head of 64 fills TPU's 128 lanes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

# Queries of one row that are attended to together, and cached tokens read at a time: both fit a core's L2 cache.
QUERY_BLOCK = 64
KV_BLOCK = 256

# Scores of masked positions. Finite, so that a fully masked block gives exp(0) * 0 and not NaN.
_MASKED = -1e30


class RaggedBatch(NamedTuple):
    """Which tokens of a step belong to which row, and where their keys and values live.

    Row r owns query tokens query_offsets[r] to query_offsets[r + 1], at positions starts[r], starts[r] + 1, ...
    A token at a position >= limits[r] is not part of the row: it is not written, and its output is not defined.
    """

    tables_RP: Array  # int32: the row's pages, in order
    starts_R: Array  # int32: position of the row's first query token
    limits_R: Array  # int32: tokens that the row's reserved pages may hold
    query_offsets_R1: Array  # int32 [R + 1], cumulative; a padding row repeats its predecessor


def ragged_paged_attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    cache_LPKSC: Array,
    layer: Array,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: Array | None = None,
    decode_only: bool = False,
) -> tuple[Array, Array]:
    """Write this step's keys and values into their pages, then attend causally: (out_TNH, cache).

    Rows may be decode rows (one query), verify rows (a few) and prompt chunks, in any mix; those with one query are
    cheapest when they come first. `window` counts the tokens seen, the query's own included. `soft_cap` bounds
    scores by cap * tanh(score / cap). `sinks_N` are logits that take part in each head's softmax and carry no value.
    `decode_only` promises that every row has exactly one query, and leaves out the code for the others.
    Scores and sums are float32; the output has q's dtype. Query head n reads KV head n // (N / K).
    """
    cache_LPKSC = write_kv(k_TKH, v_TKH, cache_LPKSC, layer, batch)
    attend = _Attend(q_TNH, cache_LPKSC, layer, batch, scale, window, soft_cap, sinks_N)
    if decode_only:
        return attend.single_rows(jnp.zeros_like(q_TNH), q_TNH.shape[0]), cache_LPKSC
    query_lens_R = jnp.diff(batch.query_offsets_R1)
    singles = jnp.sum(jnp.cumprod((query_lens_R == 1).astype(jnp.int32)))
    out_TNH = attend.blocks(jnp.zeros_like(q_TNH), query_lens_R, singles)
    return attend.single_rows(out_TNH, singles), cache_LPKSC


def token_rows(query_offsets_R1: Array, tokens: int) -> Array:
    """The row of each query token, int32 [tokens]; R for tokens past the last row."""
    # Compared with every end: a binary search would be a loop of its own in each program.
    return jnp.sum(query_offsets_R1[1:] <= jnp.arange(tokens)[:, None], axis=-1, dtype=jnp.int32)


def token_positions(batch: RaggedBatch, tokens: int) -> tuple[Array, Array, Array]:
    """(row_T, position_T, valid_T) of each query token; rows are clipped to R - 1 where not valid."""
    rows = batch.starts_R.shape[0]
    row_T = token_rows(batch.query_offsets_R1, tokens)
    inside_T = row_T < rows
    row_T = jnp.minimum(row_T, rows - 1)
    position_T = batch.starts_R[row_T] + jnp.arange(tokens, dtype=jnp.int32) - batch.query_offsets_R1[row_T]
    return row_T, position_T, inside_T & (position_T < batch.limits_R[row_T])


def write_kv(k_TKH: Array, v_TKH: Array, cache_LPKSC: Array, layer: Array, batch: RaggedBatch) -> Array:
    """Write each valid token's key and value at its position in its row's pages; returns the cache.

    A loop of in-place updates: XLA:CPU would turn a scatter into the same loop, with many more instructions.
    """
    page_size = jnp.int32(cache_LPKSC.shape[3])
    row_T, position_T, valid_T = token_positions(batch, k_TKH.shape[0])
    column_T = jnp.minimum(lax.div(position_T, page_size), batch.tables_RP.shape[1] - 1)
    page_T, offset_T = batch.tables_RP[row_T, column_T], lax.rem(position_T, page_size)
    kv_TKC = jnp.concatenate([k_TKH, v_TKH], axis=-1).astype(cache_LPKSC.dtype)
    zero = jnp.int32(0)

    def body(token: Array, cache_LPKSC: Array) -> Array:
        place = (layer, page_T[token], zero, offset_T[token], zero)
        new = kv_TKC[token][None, None, :, None, :]
        old = lax.dynamic_slice(cache_LPKSC, place, new.shape)
        return lax.dynamic_update_slice(cache_LPKSC, jnp.where(valid_T[token], new, old), place)

    return lax.fori_loop(0, batch.query_offsets_R1[-1], body, cache_LPKSC)


class _Attend:
    """The flash loops over one layer's pages: their cost follows the real lengths, not the table's width."""

    def __init__(
        self,
        q_TNH: Array,
        cache_LPKSC: Array,
        layer: Array,
        batch: RaggedBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_N: Array | None,
    ) -> None:
        layers, pages, kv_heads, page_size, lanes = cache_LPKSC.shape
        self.q_TNH, self.batch = q_TNH, batch
        self.kv_heads, self.page_size, self.head = kv_heads, page_size, lanes // 2
        self.group = q_TNH.shape[1] // kv_heads
        self.scale, self.window, self.soft_cap = scale, window, soft_cap
        self.sinks_KG = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(kv_heads, self.group)
        self.flat_XSC = cache_LPKSC.reshape(layers * pages * kv_heads, page_size, lanes)
        self.first_page = layer * pages
        self.block_pages = max(1, KV_BLOCK // page_size)
        padding = -batch.tables_RP.shape[1] % self.block_pages
        self.tables_RP = jnp.pad(batch.tables_RP, ((0, 0), (0, padding)))

    def _read_block(self, row: Array, block: Array) -> Array:
        """Cached tokens [block * KV_BLOCK, ...) of a row as [K, tokens, C]."""
        pages = lax.dynamic_slice(self.tables_RP, (row, block * self.block_pages), (1, self.block_pages))[0]
        index = (self.first_page + pages)[None, :] * self.kv_heads + jnp.arange(self.kv_heads)[:, None]
        tokens = self.block_pages * self.page_size
        return self.flat_XSC[index].reshape(self.kv_heads, tokens, 2 * self.head)

    def _row(self, row: Array, q_KGQH: Array, first_position: Array, queries: Array) -> Array:
        """Softmax attention of one row's `queries` consecutive positions, float32 [K, G, Q, H]."""
        block_tokens = self.block_pages * self.page_size
        width = q_KGQH.shape[2]
        q_KGQH = q_KGQH.astype(jnp.float32) * self.scale
        position_Q = first_position + jnp.arange(width)
        length = jnp.minimum(first_position + queries, self.batch.limits_R[row])
        first_block = 0
        if self.window is not None:
            first_block = jnp.maximum(first_position - self.window + 1, 0) // block_tokens

        def body(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            max_KGQ, sum_KGQ, out_KGQH = state
            cached_S = block * block_tokens + jnp.arange(block_tokens)
            # Past the length may lie another row's NaN, and 0 * NaN would carry it over.
            kv_KSC = jnp.where(cached_S[:, None] < length, self._read_block(row, block).astype(jnp.float32), 0.0)
            score_KGQS = _scores(q_KGQH, kv_KSC[..., : self.head])
            if self.soft_cap is not None:
                score_KGQS = self.soft_cap * jnp.tanh(score_KGQS / self.soft_cap)
            seen_QS = (cached_S <= position_Q[:, None]) & (cached_S < length)
            if self.window is not None:
                seen_QS &= cached_S > position_Q[:, None] - self.window
            score_KGQS = jnp.where(seen_QS, score_KGQS, _MASKED)
            new_max_KGQ = jnp.maximum(max_KGQ, score_KGQS.max(-1))
            keep_KGQ = jnp.exp(max_KGQ - new_max_KGQ)
            weight_KGQS = jnp.where(seen_QS, jnp.exp(score_KGQS - new_max_KGQ[..., None]), 0.0)
            out_KGQH = out_KGQH * keep_KGQ[..., None] + _mix(weight_KGQS, kv_KSC[..., self.head :])
            return new_max_KGQ, sum_KGQ * keep_KGQ + weight_KGQS.sum(-1), out_KGQH

        shape = q_KGQH.shape[:3]
        if self.sinks_KG is None:
            start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros(q_KGQH.shape))
        else:
            sinks_KGQ = jnp.broadcast_to(self.sinks_KG[..., None], shape)
            start = (sinks_KGQ, jnp.ones(shape), jnp.zeros(q_KGQH.shape))
        blocks = lax.div(length + jnp.int32(block_tokens - 1), jnp.int32(block_tokens))
        _, sum_KGQ, out_KGQH = lax.fori_loop(first_block, blocks, body, start)
        return out_KGQH / jnp.maximum(sum_KGQ, 1e-30)[..., None]

    def single_rows(self, out_TNH: Array, count: Array | int) -> Array:
        """Rows 0 to count - 1, each with one query: query token r is row r's."""
        shape = (1, self.kv_heads, self.group, 1, self.head)

        def body(row: Array, out_TNH: Array) -> Array:
            q_1NH = lax.dynamic_slice_in_dim(self.q_TNH, row, 1)
            out_KGQH = self._row(row, q_1NH.reshape(shape)[0], self.batch.starts_R[row], jnp.int32(1))
            return lax.dynamic_update_slice_in_dim(out_TNH, out_KGQH.reshape(q_1NH.shape).astype(out_TNH.dtype), row, 0)

        return lax.fori_loop(0, count, body, out_TNH)

    def blocks(self, out_TNH: Array, query_lens_R: Array, singles: Array) -> Array:
        """Rows from `singles` on, QUERY_BLOCK queries at a time, in order of their tokens."""
        tokens, _, head = out_TNH.shape
        rows = query_lens_R.shape[0]
        q_TNH = jnp.pad(self.q_TNH, ((0, QUERY_BLOCK), (0, 0), (0, 0)))
        blocks_R = jnp.where(jnp.arange(rows) < singles, 0, -(-query_lens_R // QUERY_BLOCK))
        ends_R = jnp.cumsum(blocks_R)

        def body(item: Array, out_TNH: Array) -> Array:
            row = jnp.searchsorted(ends_R, item, side="right").astype(jnp.int32)
            done = (item - (ends_R[row] - blocks_R[row])) * QUERY_BLOCK
            first = self.batch.query_offsets_R1[row] + done
            q_QNH = lax.dynamic_slice_in_dim(q_TNH, first, QUERY_BLOCK)
            q_KGQH = q_QNH.reshape(QUERY_BLOCK, self.kv_heads, self.group, head).transpose(1, 2, 0, 3)
            queries = jnp.minimum(query_lens_R[row] - done, QUERY_BLOCK)
            out_KGQH = self._row(row, q_KGQH, self.batch.starts_R[row] + done, queries)
            out_QNH = out_KGQH.transpose(2, 0, 1, 3).reshape(q_QNH.shape).astype(out_TNH.dtype)
            # What lies past the row's last query is overwritten by the next item, whose tokens stand there.
            return lax.dynamic_update_slice_in_dim(out_TNH, out_QNH, first, 0)

        padded = jnp.pad(out_TNH, ((0, QUERY_BLOCK), (0, 0), (0, 0)))
        return lax.fori_loop(0, ends_R[-1], body, padded)[:tokens]


def _scores(q_KGQH: Array, k_KSH: Array) -> Array:
    if q_KGQH.shape[2] == 1:  # one query: a multiply and a sum beat XLA:CPU's small matrix products
        return (q_KGQH * k_KSH[:, None, :, :]).sum(-1)[:, :, None, :]
    return jnp.einsum("kgqh,ksh->kgqs", q_KGQH, k_KSH, precision=lax.Precision.HIGHEST)


def _mix(weight_KGQS: Array, v_KSH: Array) -> Array:
    if weight_KGQS.shape[2] == 1:
        return (weight_KGQS[:, :, 0, :, None] * v_KSH[:, None, :, :]).sum(2)[:, :, None, :]
    return jnp.einsum("kgqs,ksh->kgqh", weight_KGQS, v_KSH, precision=lax.Precision.HIGHEST)
