"""Ragged paged attention as its contract says it, in plain numpy loops and float64."""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Batch:
    """RaggedBatch in numpy."""

    tables_RP: Array
    starts_R: Array
    limits_R: Array
    query_offsets_R1: Array

    def tokens(self) -> list[tuple[int, int, int]]:
        """(token, row, position) of every query token that is part of its row."""
        found: list[tuple[int, int, int]] = []
        for row, start in enumerate(self.starts_R.tolist()):
            first, end = self.query_offsets_R1[row : row + 2].tolist()
            for token in range(first, end):
                position = start + token - first
                if position < self.limits_R[row]:
                    found.append((token, row, position))
        return found


def attention(
    q_TNH: Array,
    k_TKH: Array,
    v_TKH: Array,
    cache_LPKSC: Array,
    layer: int,
    batch: Batch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: Array | None = None,
) -> tuple[Array, Array]:
    """(out_TNH float64, NaN where it is not defined; the cache, written, in its own dtype)."""
    cache = cache_LPKSC.copy()
    page_size, head = cache.shape[3], q_TNH.shape[2]
    for token, row, position in batch.tokens():
        page, offset = batch.tables_RP[row, position // page_size], position % page_size
        cache[layer, page, :, offset, :head] = k_TKH[token]
        cache[layer, page, :, offset, head:] = v_TKH[token]
    out = np.full(q_TNH.shape, np.nan)
    group = q_TNH.shape[1] // k_TKH.shape[1]
    for token, row, position in batch.tokens():
        first = 0 if window is None else max(0, position - window + 1)
        seen = np.arange(first, position + 1)
        kv_SKC = cache[layer, batch.tables_RP[row, seen // page_size], :, seen % page_size].astype(np.float64)
        for n in range(q_TNH.shape[1]):
            score_S = kv_SKC[:, n // group, :head] @ q_TNH[token, n].astype(np.float64) * scale
            if soft_cap is not None:
                score_S = soft_cap * np.tanh(score_S / soft_cap)
            sink = -np.inf if sinks_N is None else float(sinks_N[n])
            best = max(float(score_S.max()), sink)
            weight_S = np.exp(score_S - best)
            out[token, n] = weight_S @ kv_SKC[:, n // group, head:] / (weight_S.sum() + np.exp(sink - best))
    return out, cache
