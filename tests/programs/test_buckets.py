"""The lattice of shapes covers every step and is never larger than what was asked for."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_infer.programs.buckets import Lattice, ladder, make_lattice
from tpu_infer.step import StepKind, StepShape


@given(low=st.integers(1, 100), high=st.integers(1, 5000), factor=st.integers(2, 5))
def test_a_ladder_climbs_by_the_factor_and_ends_at_the_top(low: int, high: int, factor: int):
    steps = ladder(low, high, factor)
    assert steps[-1] == high
    assert steps[0] == min(low, high)
    for lower, upper in pairwise(steps):
        assert lower < upper <= lower * factor
        assert upper in (lower * factor, high)


@st.composite
def lattices(draw: st.DrawFn) -> tuple[Lattice, dict[str, int]]:
    slots = draw(st.integers(1, 80))
    budget = draw(st.integers(slots, 3000))
    options = {
        "slots": slots,
        "token_budget": budget,
        "pages_per_row": draw(st.integers(1, 300)),
        "min_rows": draw(st.sampled_from([1, 1, 2])),
        "min_tokens": draw(st.sampled_from([1, 16, 32])),
        "pages_factor": draw(st.sampled_from([0, 2, 4])),
    }
    return make_lattice(**options), options


def fits(shape: StepShape, kind: StepKind, rows: int, tokens: int, pages: int) -> bool:
    return shape.kind == kind and rows <= shape.rows and tokens <= shape.tokens and pages <= shape.pages[0]


def size(shape: StepShape) -> tuple[Any, ...]:
    return shape.tokens, shape.rows, shape.pages


@given(made=lattices(), data=st.data())
def test_every_step_gets_the_smallest_compiled_shape_that_holds_it(
    made: tuple[Lattice, dict[str, int]], data: st.DataObject
):
    lattice, options = made
    rows = data.draw(st.integers(1, options["slots"]))
    kind: StepKind = data.draw(st.sampled_from(["decode", "prefill"]))
    tokens = rows if kind == "decode" else data.draw(st.integers(rows, options["token_budget"]))
    pages = data.draw(st.integers(1, options["pages_per_row"]))
    shape = lattice.shape_for(kind, rows, tokens, (pages,))
    assert fits(shape, kind, rows, tokens, pages)
    candidates = [other for other in lattice.shapes() if fits(other, kind, rows, tokens, pages)]
    assert shape in candidates
    # Smallest in tokens, then rows, then pages; and in each of them alone.
    assert size(shape) == min(map(size, candidates))
    assert shape.rows == min(other.rows for other in candidates)
    assert shape.pages == min(other.pages for other in candidates)


@given(made=lattices())
def test_nothing_is_larger_than_asked_for_or_compiled_twice(made: tuple[Lattice, dict[str, int]]):
    lattice, options = made
    shapes = lattice.shapes()
    assert len(set(shapes)) == len(shapes)
    most_rows = max(options["slots"], options["min_rows"])
    for shape in shapes:
        assert options["min_rows"] <= shape.rows <= most_rows
        assert shape.pages[0] <= options["pages_per_row"]
        if shape.kind == "decode":
            assert shape.tokens == shape.rows
        else:
            assert shape.tokens <= options["token_budget"]
    assert {shape.rows for shape in shapes} <= set(lattice.row_counts())


@given(made=lattices(), data=st.data())
def test_no_shape_is_compiled_for_nothing(made: tuple[Lattice, dict[str, int]], data: st.DataObject):
    """Each is the answer to the step that fills it, unless min_rows pads that."""
    lattice, options = made
    shape = data.draw(st.sampled_from(lattice.shapes()))
    rows = min(shape.rows, shape.tokens, options["slots"])
    assert lattice.shape_for(shape.kind, rows, shape.tokens, shape.pages) == shape


def test_few_rows_share_a_bucket_and_many_double():
    lattice = make_lattice(slots=32, token_budget=512, pages_per_row=64)
    assert lattice.decode_rows == (1, 8, 16, 32)
    assert lattice.prefill_rows == (1, 32)
    assert lattice.prefill_tokens == (32, 128, 512)
    assert lattice.pages == ((64,),)


def test_more_than_the_largest_bucket_is_a_fault_of_the_caller():
    with pytest.raises(AssertionError, match="largest bucket"):
        make_lattice(slots=2, token_budget=8, pages_per_row=4).shape_for("decode", 3, 3, (1,))
