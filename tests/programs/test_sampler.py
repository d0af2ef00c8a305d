"""The sampler against sorted numpy, and its draws against the distribution they claim to come from."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_infer.programs.sampler import Sampled, SamplingRows, keep_min_p, keep_top_k, keep_top_p, sample
from tpu_infer.step import SamplerFlags

GREEDY = SamplerFlags()
RANDOM = SamplerFlags(random=True)
FILTERED = SamplerFlags(random=True, filtered=True)
ALL = SamplerFlags(random=True, filtered=True, logprobs=True, masked=True)

DRAWS = 4096
FEW, WIDTH, VOCAB, TOP = 32, 70, 67, 5  # the last word of a mask is partly used; three ids are padding

_sample = jax.jit(sample, static_argnames=("flags", "vocab", "top"))


def draw(
    logits: np.ndarray,
    *,
    flags: SamplerFlags = FILTERED,
    vocab: int | None = None,
    masks: np.ndarray | None = None,
    seeds: Any = None,
    choice: Any = 0,
    position: Any = 0,
    temperature: Any = 1.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
) -> Any:
    """Sample [R, V] logits into a Sampled of numpy arrays; fields given as one number are every row's. Rows' seeds
    differ unless given."""
    rows = len(logits)
    seeds = np.asarray(range(rows) if seeds is None else seeds, np.uint64)
    words = np.broadcast_to(np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], -1), (rows, 2))

    def column(value: Any, dtype: Any) -> Any:
        return np.broadcast_to(np.asarray(value, dtype), (rows,))

    fields: tuple[Any, ...] = (
        words.astype(np.uint32),
        column(choice, np.int32),
        column(position, np.int32),
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        column(min_p, np.float32),
    )
    sampled: Sampled = _sample(
        np.asarray(logits, np.float32),
        SamplingRows(*fields),
        masks,
        flags=flags,
        vocab=vocab or logits.shape[1],
        top=TOP,
    )
    return jax.tree.map(np.asarray, sampled)


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weight / weight.sum()


def kept(
    logits: np.ndarray, *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0, slack: float = 0.0
) -> np.ndarray:
    """Ids that a row's filters leave, in their order; `slack` moves thresholds on probabilities, to allow rounding."""
    logits = np.asarray(logits, np.float64).copy()
    if min_p:
        logits[softmax(logits) < min_p * softmax(logits).max() * (1 - slack)] = -np.inf
    if 0 < top_k < len(logits):
        logits[logits < np.sort(logits)[-top_k]] = -np.inf
    if top_p < 1:
        order = np.argsort(-logits)
        mass = np.cumsum(softmax(logits)[order])
        last = min(int(np.searchsorted(mass, top_p + slack)), len(logits) - 1)
        logits[logits < logits[order[last]]] = -np.inf
    return np.isfinite(logits)


# Tie-heavy rows, and rows with all logits apart.
_TIED = st.lists(st.integers(-6, 6).map(lambda i: i / 2), min_size=VOCAB, max_size=VOCAB).map(np.array)
_APART = st.integers(0, 2**31).map(lambda seed: 3 * np.random.default_rng(seed).standard_normal(VOCAB))
_ROW = st.one_of(_TIED, _APART).map(lambda row: row.astype(np.float32))

_top_k, _top_p, _min_p = jax.jit(keep_top_k), jax.jit(keep_top_p), jax.jit(keep_min_p)


def filtered(function: Any, row: np.ndarray, values: list[Any], dtype: type) -> list[np.ndarray]:
    """Which ids each of the values leaves of the row; what is left has its own logits."""
    logits = np.tile(row, (FEW, 1))
    column = np.resize(np.asarray(values, dtype), FEW)
    result = np.asarray(function(logits, column))
    left = np.isfinite(result)
    np.testing.assert_array_equal(result[left], logits[left])
    return list(left[: len(values)])


@settings(deadline=None, max_examples=40)
@given(row=_ROW, values=st.lists(st.integers(0, VOCAB + 5) | st.just(2**31 - 1), min_size=1, max_size=FEW))
def test_top_k(row: np.ndarray, values: list[int]):
    for value, left in zip(values, filtered(_top_k, row, values, np.int32), strict=True):
        np.testing.assert_array_equal(left, kept(row, top_k=value), str(value))
        assert left.sum() >= min(value or VOCAB, VOCAB)


@settings(deadline=None, max_examples=40)
@given(row=_ROW, values=st.lists(st.floats(1e-6, 1.0) | st.sampled_from([1.0, 0.5]), min_size=1, max_size=FEW))
def test_top_p(row: np.ndarray, values: list[float]):
    for value, left in zip(values, filtered(_top_p, row, values, np.float32), strict=True):
        least, most = (kept(row, top_p=value, slack=slack) for slack in (-1e-5, 1e-5))
        assert (least <= left).all(), value
        assert (left <= most).all(), value
        assert left[row.argmax()]


@settings(deadline=None, max_examples=40)
@given(row=_ROW, values=st.lists(st.floats(0.0, 1.0) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=FEW))
def test_min_p(row: np.ndarray, values: list[float]):
    for value, left in zip(values, filtered(_min_p, row, values, np.float32), strict=True):
        least, most = (kept(row, min_p=value, slack=slack) for slack in (-1e-5, 1e-5))
        assert (least <= left).all(), value
        assert (left <= most).all(), value
        assert left[row.argmax()]


def test_ties_with_the_last_one_kept_are_kept():
    row = np.array([1.0, 2.0, 2.0, 2.0, 2.0] + [-30.0] * (VOCAB - 5), np.float32)
    (top_k,) = filtered(_top_k, row, [2], np.int32)
    (top_p,) = filtered(_top_p, row, [0.3], np.float32)
    assert np.flatnonzero(top_k).tolist() == np.flatnonzero(top_p).tolist() == [1, 2, 3, 4]


def test_neighbouring_floats_are_told_apart():
    row = (1.0 + np.arange(VOCAB) * 2.0**-23).astype(np.float32)
    for sign in (1, -1):
        (left,) = filtered(_top_k, sign * row, [3], np.int32)
        assert left.sum() == 3


PROBABILITIES = np.array([0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.03, 0.02, 0.01])
LOGITS = np.tile(np.log(np.random.default_rng(0).permutation(PROBABILITIES)), (DRAWS, 1))

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.6},
    "top-p when hot": {"top_p": 0.6, "temperature": 2.0},
    "min-p": {"min_p": 0.25},
    "min-p when cold": {"min_p": 0.25, "temperature": 0.5},
    # The three best have 0.46, 0.31, 0.23 of each other: 0.45 keeps one, and would keep two were top-p first.
    "top-k, then top-p": {"top_k": 3, "top_p": 0.45},
    # 0.3, 0.2, 0.15 pass min-p; the same then.
    "min-p, then top-p": {"min_p": 0.4, "top_p": 0.45},
    "all": {"min_p": 0.1, "top_k": 7, "top_p": 0.9, "temperature": 1.3},
}


def expected(temperature: float = 1.0, **filters: Any) -> np.ndarray:
    scaled = LOGITS[0] / temperature
    return softmax(np.where(kept(scaled, **filters), scaled, -np.inf))


def assert_drawn_from(tokens: np.ndarray, probability: np.ndarray) -> None:
    """Pearson's chi-squared is within five standard deviations of its mean; nothing impossible is drawn."""
    counts = np.bincount(tokens, minlength=len(probability))
    possible = probability > 0
    assert counts[~possible].sum() == 0
    wanted = probability[possible] * len(tokens)
    freedom = possible.sum() - 1
    statistic = ((counts[possible] - wanted) ** 2 / wanted).sum()
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 1e-9, (statistic, freedom)


def test_orders_of_filters_differ_in_the_cases():
    assert (expected(top_k=3, top_p=0.45) > 0).sum() == 1
    assert (expected(top_p=0.45) > 0).sum() == 2
    assert (expected(min_p=0.4, top_p=0.45) > 0).sum() == 1


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_their_distribution_over_seeds(name: str):
    setting = SETTINGS[name]
    assert_drawn_from(draw(LOGITS, **setting).token_R, expected(**setting))


@pytest.mark.parametrize("field", ["position", "choice", "seeds"])
def test_draws_have_their_distribution_over(field: str):
    """One field counts up, the others stand still; for seeds it is the high word that does."""
    counted = np.arange(DRAWS, dtype=np.int64) << (32 if field == "seeds" else 0)
    tokens = draw(LOGITS, flags=RANDOM, **{"seeds": [7] * DRAWS, field: counted}).token_R
    assert_drawn_from(tokens, expected())


@pytest.mark.parametrize("field", ["position", "choice", "seeds"])
def test_neighbours_draw_independently(field: str):
    counted = np.arange(DRAWS)
    tokens = draw(LOGITS, flags=RANDOM, **{"seeds": [7] * DRAWS, field: counted}).token_R
    likely = np.argsort(-expected())[:3]  # pairs of the rest are too rare to count
    classes = np.select([tokens == token for token in likely], [0, 1, 2], 3)
    probability = np.append(expected()[likely], 1 - expected()[likely].sum())
    assert_drawn_from(classes[:-1:2] * 4 + classes[1::2], np.outer(probability, probability).ravel())


def test_a_draw_does_not_depend_on_its_batch():
    random = np.random.default_rng(1)
    logits = random.standard_normal((FEW, WIDTH))
    fields: dict[str, Any] = {
        "seeds": random.integers(0, 2**63, FEW),
        "choice": random.integers(0, 128, FEW),
        "position": random.integers(0, 4096, FEW),
        "temperature": random.uniform(0.5, 2, FEW),
        "top_k": random.integers(0, 9, FEW),
        "top_p": random.uniform(0.3, 1, FEW),
        "min_p": random.uniform(0, 0.1, FEW),
    }
    together = draw(logits, **fields).token_R
    order = random.permutation(FEW)
    moved = draw(logits[order], **{name: values[order] for name, values in fields.items()}).token_R
    np.testing.assert_array_equal(moved, together[order])
    few = draw(logits[3:6], **{name: values[3:6] for name, values in fields.items()}).token_R
    np.testing.assert_array_equal(few, together[3:6])


def test_a_filter_that_keeps_all_changes_no_draw():
    """A row without filters draws the same whether or not another row of its batch has one."""
    np.testing.assert_array_equal(draw(LOGITS, flags=RANDOM).token_R, draw(LOGITS, flags=FILTERED).token_R)


def test_seed_choice_and_position_each_change_the_stream():
    same: dict[str, Any] = {"seeds": [5] * FEW, "position": np.arange(FEW), "choice": 0}
    logits = np.zeros((FEW, WIDTH))
    first = draw(logits, **same).token_R
    np.testing.assert_array_equal(draw(logits, **same).token_R, first)
    others = ({"seeds": [6] * FEW}, {"seeds": [5 + 2**32] * FEW}, {"choice": 1}, {"position": np.arange(FEW) + FEW})
    for change in others:
        assert (draw(logits, **{**same, **change}).token_R == first).mean() < 0.5


def test_choice_and_position_are_not_interchangeable():
    logits, seeds = np.zeros((FEW, WIDTH)), [5] * FEW
    first = draw(logits, seeds=seeds, choice=np.arange(FEW), position=40).token_R
    other = draw(logits, seeds=seeds, choice=40, position=np.arange(FEW)).token_R
    assert (first == other).mean() < 0.5


def test_greedy_rows_among_others_take_the_best():
    logits = np.random.default_rng(2).standard_normal((FEW, WIDTH))
    temperature = np.where(np.arange(FEW) % 2, 0.0, 5.0)
    for flags in (GREEDY, RANDOM, FILTERED):
        token = draw(logits, flags=flags, temperature=temperature, top_p=0.9).token_R
        np.testing.assert_array_equal(token[1::2], logits.argmax(-1)[1::2])
    assert (draw(logits, flags=RANDOM, temperature=temperature).token_R[::2] != logits.argmax(-1)[::2]).any()


def test_the_first_of_equal_bests_is_greedy():
    assert (draw(np.zeros((FEW, WIDTH)), flags=GREEDY, temperature=0).token_R == 0).all()


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 2e-38, 1e-40, 1e-45])  # the last two are denormal
@pytest.mark.parametrize("flags", [RANDOM, FILTERED])
def test_a_tiny_temperature_takes_the_best(temperature: float, flags: SamplerFlags):
    logits = 100 * np.random.default_rng(3).standard_normal((FEW, WIDTH)) + 50
    sampled = draw(logits, flags=flags, temperature=temperature, top_p=0.9, top_k=40, min_p=0.01)
    np.testing.assert_array_equal(sampled.token_R, logits.argmax(-1))
    assert sampled.finite_R.all()


def test_padding_ids_are_never_drawn():
    logits = np.random.default_rng(4).standard_normal((FEW, WIDTH))
    logits[:, VOCAB:] = [1e30, np.inf, np.nan]
    for temperature in (0.0, 1.0):
        masks = np.full((FEW, 3), 0xFFFFFFFF, np.uint32)
        sampled = draw(logits, flags=ALL, vocab=VOCAB, masks=masks, temperature=temperature, top_k=1)
        np.testing.assert_array_equal(sampled.token_R, logits[:, :VOCAB].argmax(-1))
        assert sampled.finite_R.all()
        assert (sampled.top_id_RN < VOCAB).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_only_what_the_mask_allows_is_drawn(temperature: float):
    random = np.random.default_rng(5)
    allowed = random.random((FEW, WIDTH)) < 0.1
    allowed[np.arange(FEW), random.integers(0, VOCAB, FEW)] = True
    allowed[0] = np.arange(WIDTH) == 31
    allowed[1] = np.arange(WIDTH) == 32
    allowed[2] = np.arange(WIDTH) == VOCAB - 1
    masks = np.zeros((FEW, 3), np.uint32)
    for row, token in zip(*np.nonzero(allowed), strict=True):
        masks[row, token // 32] |= np.uint32(1 << token % 32)
    logits = random.standard_normal((FEW, WIDTH))
    sampled = draw(logits, flags=ALL, vocab=VOCAB, masks=masks, temperature=temperature)
    assert allowed[np.arange(FEW), sampled.token_R].all()
    assert sampled.token_R[:3].tolist() == [31, 32, VOCAB - 1]
    if temperature == 0:
        np.testing.assert_array_equal(sampled.token_R, np.where(allowed, logits, -np.inf)[:, :VOCAB].argmax(-1))
    assert sampled.finite_R.all(), "a forbidden id is no fault of the model"


def test_filters_apply_to_what_the_mask_allows():
    """Top-k of 1 takes the best allowed id, and min-p and top-p compare with it."""
    logits = np.tile(np.linspace(50, 0, WIDTH), (FEW, 1))
    masks = np.zeros((FEW, 3), np.uint32)
    masks[:, 1:] = 0xFFFFFFFF  # ids from 32 on
    for filters in ({"top_k": 1}, {"min_p": 0.9}, {"top_p": 0.01}):
        assert (draw(logits, flags=ALL, vocab=VOCAB, masks=masks, **filters).token_R == 32).all()


def test_logprobs_are_of_the_models_own_distribution():
    random = np.random.default_rng(6)
    logits = (5 * random.standard_normal((FEW, WIDTH))).astype(np.float32)
    masks = random.integers(0, 2**32, (FEW, 3), dtype=np.uint32) | np.uint32(1)
    log_probability = np.log([softmax(row) for row in logits[:, :VOCAB]])
    best = np.argsort(-log_probability, axis=-1)[:, :TOP]
    for temperature in (0.0, 0.3, 2.0):
        setting: dict[str, Any] = {"temperature": temperature, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
        sampled = draw(logits, flags=ALL, vocab=VOCAB, masks=masks, **setting)
        chosen = log_probability[np.arange(FEW), sampled.token_R]
        np.testing.assert_allclose(sampled.logprob_R, chosen, atol=1e-5)
        np.testing.assert_array_equal(sampled.top_id_RN, best)
        np.testing.assert_allclose(sampled.top_logprob_RN, np.take_along_axis(log_probability, best, -1), atol=1e-5)


def test_logprobs_only_when_asked():
    assert draw(np.zeros((2, 9)), flags=GREEDY)[2:] == (None, None, None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("flags", [GREEDY, FILTERED])
def test_rows_that_are_not_finite_are_named_and_others_are_untouched(bad: float, flags: SamplerFlags):
    logits = np.random.default_rng(7).standard_normal((FEW, WIDTH)).astype(np.float32)
    clean = draw(logits, flags=flags, top_p=0.9)
    assert clean.finite_R.all()
    logits[3, 11] = bad
    logits[9] = bad
    sampled = draw(logits, flags=flags, top_p=0.9)
    assert np.flatnonzero(~sampled.finite_R).tolist() == [3, 9]
    others = np.delete(np.arange(FEW), [3, 9])
    np.testing.assert_array_equal(sampled.token_R[others], clean.token_R[others])


@pytest.mark.parametrize("value", [10, 11, 2**31 - 1])
def test_top_k_of_all_or_more_is_no_filter(value: int):
    np.testing.assert_array_equal(draw(LOGITS, top_k=value).token_R, draw(LOGITS).token_R)
