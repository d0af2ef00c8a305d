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

QUERY_BLOCK = 64  # queries of one prompt chunk that are attended to together
ROW_GROUP = 8  # rows with one query that are attended to together: what they read should fit a CPU's cache
KV_BLOCK = 128  # cached tokens of a row that are read at a time

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

    Rows may be decode rows (one query), verify rows (a few) and prompt chunks, in any mix and order. `window` counts
    the tokens seen, the query's own included. `soft_cap` bounds scores by cap * tanh(score / cap). `sinks_N` are
    logits that take part in each head's softmax and carry no value. `decode_only` promises that query token r is row
    r's only one, and leaves out the code for others. Scores and sums are float32; the output has q's dtype. Query head
    n reads KV head n // (N / K). A key or value that is no finite number is written as a NaN key and a zero value: its
    own row sees the fault, and whoever gets its page next does not, since masked scores are replaced and values are
    finite wherever this op has written.
    """
    cache_LPKSC = write_kv(k_TKH, v_TKH, cache_LPKSC, layer, batch)
    attend = _Attend(cache_LPKSC, layer, batch, scale, window, soft_cap, sinks_N)
    if decode_only:
        return attend.single_rows(q_TNH, jnp.int32(1)), cache_LPKSC
    query_lens_R = jnp.diff(batch.query_offsets_R1)
    if len(batch.starts_R) == 1:  # one way is enough, and half the code to compile
        return attend.blocks(q_TNH, query_lens_R), cache_LPKSC
    first_R = jnp.minimum(batch.query_offsets_R1[:-1], q_TNH.shape[0] - 1)
    out_RNH = attend.single_rows(q_TNH[first_R], query_lens_R)
    out_TNH = attend.blocks(q_TNH, jnp.where(query_lens_R == 1, 0, query_lens_R))
    row_T, _, _ = token_positions(batch, q_TNH.shape[0])
    return jnp.where((query_lens_R == 1)[row_T][:, None, None], out_RNH[row_T], out_TNH), cache_LPKSC


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
    fault_TK1 = ~(jnp.isfinite(k_TKH) & jnp.isfinite(v_TKH)).all(-1, keepdims=True)
    marked = [jnp.where(fault_TK1, jnp.nan, k_TKH), jnp.where(fault_TK1, 0, v_TKH)]
    kv_TKC = jnp.concatenate(marked, axis=-1).astype(cache_LPKSC.dtype)
    zero = jnp.int32(0)

    def body(token: Array, cache_LPKSC: Array) -> Array:
        place = (layer, page_T[token], zero, offset_T[token], zero)
        new = kv_TKC[token][None, None, :, None, :]
        old = lax.dynamic_slice(cache_LPKSC, place, new.shape)
        return lax.dynamic_update_slice(cache_LPKSC, jnp.where(valid_T[token], new, old), place)

    return lax.fori_loop(0, batch.query_offsets_R1[-1], body, cache_LPKSC)


class _Attend:
    """Flash attention over one layer's pages: its loops follow the rows' real lengths, not the table's width."""

    def __init__(
        self,
        cache_LPKSC: Array,
        layer: Array,
        batch: RaggedBatch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_N: Array | None,
    ) -> None:
        layers, pages, kv_heads, page_size, lanes = cache_LPKSC.shape
        self.batch, self.scale, self.window, self.soft_cap = batch, scale, window, soft_cap
        self.kv_heads, self.head = kv_heads, lanes // 2
        self.sinks_KG = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(kv_heads, -1)
        self.flat_XSC = cache_LPKSC.reshape(layers * pages * kv_heads, page_size, lanes)
        self.block_pages = max(1, KV_BLOCK // page_size)
        self.block_tokens = self.block_pages * page_size
        padding = -batch.tables_RP.shape[1] % self.block_pages
        # Of each row's pages, the index in flat_XSC of KV head 0.
        self.index_RP = jnp.pad(layer * pages + batch.tables_RP, ((0, 0), (0, padding))) * kv_heads

    def single_rows(self, q_RNH: Array, query_lens_R: Array) -> Array:
        """out_RNH of rows with one query, ROW_GROUP of them at a time; the others' output is not defined."""
        rows, heads, head = q_RNH.shape
        lengths_R = jnp.minimum(self.batch.starts_R + 1, self.batch.limits_R)
        lengths_R = jnp.where(query_lens_R == 1, lengths_R, 0)
        q_RKGQH = q_RNH.reshape(rows, self.kv_heads, heads // self.kv_heads, 1, head)
        arguments = (q_RKGQH, self.index_RP, self.batch.starts_R, lengths_R)
        if rows <= ROW_GROUP:
            return self._flash(*arguments).reshape(q_RNH.shape).astype(q_RNH.dtype)
        padded = [jnp.pad(array, [(0, -rows % ROW_GROUP), *[(0, 0)] * (array.ndim - 1)]) for array in arguments]

        def body(group: Array, out_RKGQH: Array) -> Array:
            first = group * ROW_GROUP
            part = self._flash(*(lax.dynamic_slice_in_dim(array, first, ROW_GROUP) for array in padded))
            return lax.dynamic_update_slice_in_dim(out_RKGQH, part, first, 0)

        groups = padded[0].shape[0] // ROW_GROUP
        out_RKGQH = lax.fori_loop(0, groups, body, jnp.zeros(padded[0].shape, jnp.float32))
        return out_RKGQH[:rows].reshape(q_RNH.shape).astype(q_RNH.dtype)

    def blocks(self, q_TNH: Array, query_lens_R: Array) -> Array:
        """out_TNH of rows with several queries, QUERY_BLOCK of them at a time, in order of their tokens."""
        tokens, heads, head = q_TNH.shape
        padding = ((0, QUERY_BLOCK), (0, 0), (0, 0))
        q_TNH = jnp.pad(q_TNH, padding)
        blocks_R = lax.div(query_lens_R + jnp.int32(QUERY_BLOCK - 1), jnp.int32(QUERY_BLOCK))
        ends_R = jnp.cumsum(blocks_R)

        def body(item: Array, out_TNH: Array) -> Array:
            row = jnp.sum(ends_R <= item, dtype=jnp.int32)
            done = (item - (ends_R[row] - blocks_R[row])) * QUERY_BLOCK
            first = self.batch.query_offsets_R1[row] + done
            q_QNH = lax.dynamic_slice_in_dim(q_TNH, first, QUERY_BLOCK)
            q_QKGH = q_QNH.reshape(QUERY_BLOCK, self.kv_heads, heads // self.kv_heads, head)
            start = self.batch.starts_R[row] + done
            queries = jnp.minimum(query_lens_R[row] - done, QUERY_BLOCK)
            length = jnp.minimum(start + queries, self.batch.limits_R[row])
            index_1P = lax.dynamic_slice_in_dim(self.index_RP, row, 1)
            out_KGQH = self._flash(q_QKGH.transpose(1, 2, 0, 3)[None], index_1P, start[None], length[None])[0]
            out_QNH = out_KGQH.transpose(2, 0, 1, 3).reshape(q_QNH.shape).astype(out_TNH.dtype)
            # What lies past the row's last query is written by the next item, or is a single row's.
            return lax.dynamic_update_slice_in_dim(out_TNH, out_QNH, first, 0)

        return lax.fori_loop(0, ends_R[-1], body, jnp.zeros_like(q_TNH))[:tokens]

    def _flash(self, q_BKGQH: Array, index_BP: Array, start_B: Array, length_B: Array) -> Array:
        """Softmax attention of B rows, each with Q consecutive positions from start_B, over length_B cached tokens."""
        queries, head = q_BKGQH.shape[-2:]
        position_BQ = start_B[:, None] + jnp.arange(queries)
        q_BKGQH = q_BKGQH.astype(jnp.float32) * self.scale
        wide = queries == 1
        if wide:  # zeros against the value lanes cost less than cutting the keys out
            q_BKGQH = jnp.concatenate([q_BKGQH, jnp.zeros_like(q_BKGQH)], axis=-1)

        def body(block: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            max_BKGQ, sum_BKGQ, out_BKGQX = state
            kv_BKSC = self._read(index_BP, block)
            k_BKSX, v_BKSX = (kv_BKSC, kv_BKSC) if wide else (kv_BKSC[..., :head], kv_BKSC[..., head:])
            score_BKGQS = _product("bkgqx,bksx->bkgqs", q_BKGQH, k_BKSX)
            if self.soft_cap is not None:
                score_BKGQS = self.soft_cap * jnp.tanh(score_BKGQS / self.soft_cap)
            cached_S = block * self.block_tokens + jnp.arange(self.block_tokens)
            seen_BQS = (cached_S <= position_BQ[:, :, None]) & (cached_S < length_B[:, None, None])
            if self.window is not None:
                seen_BQS &= cached_S > position_BQ[:, :, None] - self.window
            seen_BKGQS = seen_BQS[:, None, None]
            score_BKGQS = jnp.where(seen_BKGQS, score_BKGQS, _MASKED)
            new_max_BKGQ = jnp.maximum(max_BKGQ, score_BKGQS.max(-1))
            keep_BKGQ = jnp.exp(max_BKGQ - new_max_BKGQ)
            weight_BKGQS = jnp.where(seen_BKGQS, jnp.exp(score_BKGQS - new_max_BKGQ[..., None]), 0.0)
            mixed_BKGQX = _product("bkgqs,bksx->bkgqx", weight_BKGQS, v_BKSX)
            sum_BKGQ = sum_BKGQ * keep_BKGQ + weight_BKGQS.sum(-1)
            return new_max_BKGQ, sum_BKGQ, out_BKGQX * keep_BKGQ[..., None] + mixed_BKGQX

        first_block = jnp.int32(0)
        if self.window is not None:
            oldest_B = jnp.where(length_B > 0, jnp.maximum(start_B - (self.window - 1), 0), jnp.iinfo(jnp.int32).max)
            first_block = lax.div(oldest_B.min(), jnp.int32(self.block_tokens))
        blocks = lax.div(length_B.max() + jnp.int32(self.block_tokens - 1), jnp.int32(self.block_tokens))
        shape = q_BKGQH.shape[:4]
        sums, maxima = jnp.zeros(shape), jnp.full(shape, _MASKED)
        if self.sinks_KG is not None:
            sums, maxima = jnp.ones(shape), jnp.broadcast_to(self.sinks_KG[None, :, :, None], shape)
        _, sum_BKGQ, out_BKGQX = lax.fori_loop(first_block, blocks, body, (maxima, sums, jnp.zeros(q_BKGQH.shape)))
        return out_BKGQX[..., -head:] / jnp.maximum(sum_BKGQ, 1e-30)[..., None]

    def _read(self, index_BP: Array, block: Array) -> Array:
        """Cached tokens [block * KV_BLOCK, ...) of each row, float32 [B, K, tokens, C]."""
        index_BX = lax.dynamic_slice_in_dim(index_BP, block * self.block_pages, self.block_pages, axis=1)
        index_BKX = index_BX[:, None, :] + jnp.arange(self.kv_heads)[None, :, None]
        pages_BKXSC = self.flat_XSC[index_BKX]
        return pages_BKXSC.reshape(*index_BKX.shape[:2], self.block_tokens, -1).astype(jnp.float32)


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
