"""Ragged paged attention against the oracle: every implementation, every mix of rows.

Cache entries that nobody has written, and rows at fault, hold NaN keys and huge values, so that reading them shows.
(Values are finite in any cache: the op writes no others, since a masked weight of 0 does not silence NaN.)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.reference import RaggedBatch, ragged_paged_attention

from . import oracle

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"xla": ragged_paged_attention}

LAYERS, LAYER = 2, 1
ROWS, TOKENS = 6, 160  # more than two blocks of 64 queries
ROW_TOKENS = 640  # the longest row: more than two blocks of 256 cached tokens
SHARED_PAGES = 3
HUGE = 2.0**100

# bfloat16 keeps 8 bits, and the values mixed are of size 1 to 4.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-6}


@dataclass(frozen=True)
class Variant:
    """One compilation: sizes, dtype and options."""

    head: int = 64
    page: int = 8
    group: int = 3
    kv_heads: int = 2
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    with_sinks: bool = False

    @property
    def columns(self) -> int:
        return ROW_TOKENS // self.page

    @property
    def pages(self) -> int:
        return ROWS * self.columns + 2

    @property
    def scale(self) -> float:
        return self.head**-0.5

    def sinks(self) -> np.ndarray | None:
        return np.linspace(-1, 3, self.group * self.kv_heads, dtype=np.float32) if self.with_sinks else None


MAIN = Variant()
VARIANTS = {
    "causal": MAIN,
    "head 80, page 16, group 8": Variant(head=80, page=16, group=8, kv_heads=1),
    "head 128, page 64, group 1": Variant(head=128, page=64, group=1),
    "bfloat16": Variant(head=128, page=16, dtype="bfloat16"),
    "short window": Variant(window=5, group=1),
    "long window": Variant(window=300, page=64, group=8, kv_heads=1),
    "soft cap": Variant(soft_cap=2.0, page=16),
    "sinks": Variant(with_sinks=True, page=64),
    "all": Variant(window=20, soft_cap=5.0, with_sinks=True, dtype="bfloat16", head=80),
}


@dataclass(frozen=True)
class Row:
    """`cached` tokens stand in the cache, `queries` follow; `cut` of those lie past the limit."""

    cached: int
    queries: int
    cut: int = 0
    poisoned: bool = False  # its cached keys and its inputs are NaN


@dataclass(frozen=True)
class Case:
    """A batch and all arrays that go with it."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cache: np.ndarray
    batch: oracle.Batch
    poisoned_T: np.ndarray


def make_case(variant: Variant, rows: list[Row], *, seed: int = 0, shared: bool = False, tokens: int = TOKENS) -> Case:
    """Arrays for `rows`, pages dealt out at random; with `shared`, rows that are long enough share their first ones."""
    random = np.random.default_rng(seed)
    heads = variant.kv_heads * variant.group
    q = random.standard_normal((tokens, heads, variant.head), np.float32)
    k, v = random.standard_normal((2, tokens, variant.kv_heads, variant.head), np.float32)
    tables = random.permutation(variant.pages)[: ROWS * variant.columns].reshape(ROWS, -1)
    tables = np.concatenate([tables] * (-(-len(rows) // ROWS)))[: len(rows)].copy()
    same = [r for r, row in enumerate(rows) if row.cached >= SHARED_PAGES * variant.page and not row.poisoned]
    if shared and same:
        tables[same, :SHARED_PAGES] = tables[same[0], :SHARED_PAGES]
    shape = (LAYERS, variant.pages, variant.kv_heads, variant.page, 2 * variant.head)
    paged = np.full(shape, HUGE, np.float32)
    paged[..., : variant.head] = np.nan
    offsets = np.concatenate([[0], np.cumsum([row.queries for row in rows])])
    poisoned = np.zeros(tokens, bool)
    for index, row in enumerate(rows):
        place = np.arange(row.cached)
        values = random.standard_normal((row.cached, variant.kv_heads, 2 * variant.head), np.float32)
        if not row.poisoned:
            paged[LAYER, tables[index, place // variant.page], :, place % variant.page] = values
        poisoned[offsets[index] : offsets[index + 1]] = row.poisoned
    for array in (q, k, v):
        array[poisoned] = np.nan
        array[offsets[-1] :] = np.nan  # padding tokens
    for index, row in enumerate(rows):  # nor does what lies past a limit matter
        end = offsets[index + 1]
        for array in (q, k, v):
            array[end - row.cut : end] = np.nan
    dtype = jnp.dtype(variant.dtype)
    batch = oracle.Batch(
        tables.astype(np.int32),
        np.array([row.cached for row in rows], np.int32),
        np.array([row.cached + row.queries - row.cut for row in rows], np.int32),
        offsets.astype(np.int32),
    )
    q, k, v, paged = (array.astype(dtype) for array in (q, k, v, paged))
    return Case(q, k, v, paged, batch, poisoned)


@cache
def compiled(implementation: str, variant: Variant, decode_only: bool = False) -> Callable[..., Any]:
    function = IMPLEMENTATIONS[implementation]

    def call(q: Any, k: Any, v: Any, paged: Any, batch: RaggedBatch, sinks: Any) -> Any:
        return function(
            q,
            k,
            v,
            paged,
            jnp.int32(LAYER),
            batch,
            scale=variant.scale,
            window=variant.window,
            soft_cap=variant.soft_cap,
            sinks_N=sinks,
            decode_only=decode_only,
        )

    return jax.jit(call)


def run(implementation: str, variant: Variant, case: Case, *, decode_only: bool = False) -> tuple[np.ndarray, Any]:
    batch = case.batch
    ragged = RaggedBatch(
        *(jnp.asarray(part) for part in (batch.tables_RP, batch.starts_R, batch.limits_R, batch.query_offsets_R1))
    )
    function = compiled(implementation, variant, decode_only)
    out, paged = function(case.q, case.k, case.v, case.cache, ragged, variant.sinks())
    assert out.dtype == case.q.dtype
    return np.asarray(out).astype(np.float64), np.array(paged)


def check(implementation: str, variant: Variant, case: Case, *, decode_only: bool = False) -> None:
    """Outputs of all tokens that count, and the whole cache, are the oracle's."""
    out, paged = run(implementation, variant, case, decode_only=decode_only)
    wanted, wanted_cache = oracle.attention(
        case.q,
        case.k,
        case.v,
        case.cache,
        LAYER,
        case.batch,
        scale=variant.scale,
        window=variant.window,
        soft_cap=variant.soft_cap,
        sinks_N=variant.sinks(),
    )
    head = variant.head
    assert np.isfinite(paged[..., head:].astype(np.float32)).all()
    for token, row, position in case.batch.tokens():
        if case.poisoned_T[token]:  # what a fault leaves in its own row's pages is not defined
            place = LAYER, case.batch.tables_RP[row, position // variant.page], slice(None), position % variant.page
            paged[place] = wanted_cache[place] = 0
    np.testing.assert_array_equal(paged.astype(np.float32), wanted_cache.astype(np.float32))
    counted = np.array([token for token, _, _ in case.batch.tokens() if not case.poisoned_T[token]], int)
    tolerance = TOLERANCE[variant.dtype]
    np.testing.assert_allclose(out[counted], wanted[counted], rtol=tolerance, atol=tolerance)


def padded(*rows: Row) -> list[Row]:
    return [*rows, *[Row(0, 0)] * (ROWS - len(rows))]


MIXES = {
    "decode rows": padded(Row(5, 1), Row(0, 1), Row(255, 1), Row(256, 1), Row(600, 1)),
    "verify rows": padded(Row(3, 2), Row(254, 5), Row(0, 3), Row(511, 4)),
    "a chunk longer than a block of queries": padded(Row(0, 150)),
    "a chunk over several blocks of cached tokens": padded(Row(500, 130)),
    "a chunk that ends a block of queries": padded(Row(7, 64), Row(9, 65)),
    "decode rows, then chunks": padded(Row(40, 1), Row(300, 1), Row(0, 90), Row(200, 33)),
    "single rows after others": padded(Row(12, 7), Row(40, 1), Row(0, 70), Row(300, 1), Row(0, 1)),
    "empty rows among others": [Row(30, 0), Row(30, 1), Row(0, 0), Row(8, 20), Row(0, 0), Row(17, 1)],
    "lengths at page edges": padded(Row(0, 8), Row(8, 8), Row(15, 1), Row(16, 1), Row(7, 1), Row(56, 72)),
    "tokens past the limit": padded(
        Row(8, 1, cut=1), Row(6, 5, cut=3), Row(250, 80, cut=17), Row(16, 4, cut=4), Row(3, 1)
    ),
    "a row of NaN between others": padded(
        Row(20, 1), Row(300, 1, poisoned=True), Row(4, 1), Row(9, 9, poisoned=True), Row(33, 80)
    ),
    "nothing at all": padded(),
}


@pytest.fixture(params=IMPLEMENTATIONS, scope="module")
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("variant", ["causal", "all"])
def test_mixes(implementation: str, variant: str, mix: str):
    check(implementation, VARIANTS[variant], make_case(VARIANTS[variant], MIXES[mix]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(implementation: str, variant: str):
    rows = padded(Row(63, 1), Row(530, 1), Row(0, 70), Row(250, 20), Row(257, 3), Row(31, 4, cut=2))
    check(implementation, VARIANTS[variant], make_case(VARIANTS[variant], rows, shared=True))


def test_rows_with_the_same_prefix_pages(implementation: str):
    shared = SHARED_PAGES * MAIN.page
    rows = padded(Row(shared, 1), Row(shared, 3), Row(shared + 20, 66), Row(400, 1))
    case = make_case(MAIN, rows, shared=True)
    assert (case.batch.tables_RP[:4, :SHARED_PAGES] == case.batch.tables_RP[0, :SHARED_PAGES]).all()
    check(implementation, MAIN, case)


def test_another_layer_is_left_alone(implementation: str):
    case = make_case(MAIN, MIXES["decode rows, then chunks"])
    case.cache[1 - LAYER] = 7.0
    check(implementation, MAIN, case)


@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_fault_reaches_all_later_tokens_of_its_row_and_no_other(implementation: str, name: str, fault: float):
    """Through the cache too: else the row would go on with an answer to another prompt."""
    rows = padded(Row(3, 1), Row(20, 8), Row(5, 6))
    case = make_case(MAIN, rows)
    clean, _ = run(implementation, MAIN, case)
    getattr(case, name)[4, 1, 5] = fault  # row 1's token 3, KV head 1
    out, paged = run(implementation, MAIN, case)
    later, heads = slice(4, 9), slice(MAIN.group, 2 * MAIN.group)
    assert not np.isfinite(out[later, heads]).any()
    out[later, heads] = clean[later, heads]
    np.testing.assert_array_equal(out[:15], clean[:15])
    step = make_case(MAIN, padded(Row(4, 0), Row(28, 1), Row(11, 1)), tokens=TOKENS)
    for part in ("q", "k", "v"):
        getattr(step, part)[:] = 1.0
    step.batch.tables_RP[:] = case.batch.tables_RP
    out, _ = run(implementation, MAIN, replace(step, cache=paged))
    assert not np.isfinite(out[0, heads]).any()
    assert np.isfinite(out[1]).all()


_EDGES = st.sampled_from([0, 1, 7, 8, 63, 64, 255, 256, 257, 511, 512])
_CACHED = _EDGES | st.integers(0, ROW_TOKENS - TOKENS)
_QUERIES = st.sampled_from([0, 1, 1, 1, 2, 5, 8, 64, 65]) | st.integers(0, TOKENS)


@st.composite
def row_lists(draw: st.DrawFn) -> list[Row]:
    rows: list[Row] = []
    left = TOKENS
    for _ in range(ROWS):
        queries = min(draw(_QUERIES), left)
        left -= queries
        cached = min(draw(_CACHED), ROW_TOKENS - queries)
        cut = draw(st.integers(0, queries)) if draw(st.integers(0, 4)) == 4 else 0
        rows.append(Row(cached, queries, cut, draw(st.integers(0, 5)) == 5))
    return rows


# Both compile once for all examples, so an example's time says nothing.
_SETTINGS = settings(deadline=None, max_examples=20)


@_SETTINGS
@given(rows=row_lists(), seed=st.integers(0, 99), shared=st.booleans(), variant=st.sampled_from(["causal", "all"]))
def test_any_mix(implementation: str, rows: list[Row], seed: int, shared: bool, variant: str):
    check(implementation, VARIANTS[variant], make_case(VARIANTS[variant], rows, seed=seed, shared=shared))


@_SETTINGS
@given(cached=st.lists(_CACHED, min_size=ROWS, max_size=ROWS), live=st.integers(0, ROWS), seed=st.integers(0, 99))
def test_decode_only_is_the_general_path(implementation: str, cached: list[int], live: int, seed: int):
    """Padding rows have no query, limit and pages; they stand last."""
    rows = [Row(length, 1) if index < live else Row(0, 0) for index, length in enumerate(cached)]
    case = make_case(MAIN, rows, seed=seed, tokens=ROWS)
    check(implementation, MAIN, case, decode_only=True)
    padding = ((0, TOKENS - ROWS), (0, 0), (0, 0))
    wide = replace(case, **{name: np.pad(getattr(case, name), padding) for name in ("q", "k", "v")})
    out, paged = run(implementation, MAIN, case, decode_only=True)
    general, general_paged = run(implementation, MAIN, wide)
    np.testing.assert_array_equal(paged, general_paged)
    np.testing.assert_allclose(out[:live], general[:live], rtol=TOLERANCE["float32"], atol=TOLERANCE["float32"])
