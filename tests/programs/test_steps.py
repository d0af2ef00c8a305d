"""The pure functions against step.py's contract: what each writes to the slots, and what it leaves alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import tiny
from tpu_infer.mesh import MeshSpec, make_mesh
from tpu_infer.models.decoder import DecoderSpec
from tpu_infer.programs.lowering import ForwardSpec, lower
from tpu_infer.programs.steps import SlotState, SlotValues, open_slots, sample_rows, unpack
from tpu_infer.step import FROM_STATE, SamplerFlags, StepInputs, StepShape, buffer_size
from tpu_infer.weights.load import load_params

from .build import COLUMNS, CONFIG, PAGE, SLOTS, TENSORS, RowInput, silent, step_inputs

PREFILL = StepShape("prefill", SLOTS, 32, (COLUMNS,))
DECODE = StepShape("decode", SLOTS, SLOTS, (COLUMNS,))
PAGES = 8192  # a cache that dwarfs the model


def state(**fields: Any) -> SlotState:
    """A state in which no two numbers are the same."""
    made = {}
    for offset, (name, leaf) in enumerate(SlotState.struct(SLOTS)._asdict().items()):
        values = np.arange(leaf.size).reshape(leaf.shape) + 100 * (offset + 1)
        made[name] = jnp.asarray(fields.get(name, values), leaf.dtype)
    return SlotState(**made)


def as_lists(state: SlotState) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in state._asdict().items()}


def test_the_program_unpacks_what_the_host_packs():
    shape = StepShape("prefill", 3, 8, (5, 2))
    inputs = StepInputs(
        step=0, shape=shape, sampler=SamplerFlags(), buffer=np.arange(buffer_size(shape), dtype=np.int32)
    )
    for name, value in unpack(jnp.asarray(inputs.buffer), shape).items():
        np.testing.assert_array_equal(value, inputs.view(name))


def test_open_slots_writes_the_sampling_fields_of_the_named_slots():
    fields = SlotState._fields[2:]
    ones = {name: np.ones_like(getattr(state(), name)) for name in fields}
    slots = np.array([2, 0, SLOTS, SLOTS], np.int32)
    written = as_lists(jax.jit(open_slots)(state(), SlotValues(slots, **ones)))
    before = as_lists(state())
    for name, values in written.items():
        for slot, value in enumerate(values):
            opened = slot in (0, 2) and name in fields
            assert value == ((ones[name][slot]).tolist() if opened else before[name][slot]), (name, slot)


def test_only_rows_that_sample_get_a_last_token():
    logits = np.full((SLOTS, 16), -5.0, np.float32)
    logits[np.arange(SLOTS), [3, 5, 7, 9]] = 5.0
    row_fields = np.zeros((4, SLOTS), np.int32)
    row_fields[0], row_fields[3] = [2, 0, 3, SLOTS], [1, 0, 1, 1]
    function = jax.jit(partial(sample_rows, flags=SamplerFlags(), vocab=16, top=1))
    sampled, after = function(logits, row_fields, None, state())
    assert np.asarray(sampled.token_R).tolist() == [3, 5, 7, 9]
    wanted = as_lists(state())
    wanted["last_token_B"][2], wanted["last_token_B"][3] = 3, 7
    assert as_lists(after) == wanted


class Program:
    """A compiled forward pass, with a cache of its own for each call."""

    def __init__(self, shape: StepShape, pages: int) -> None:
        self.mesh = make_mesh(MeshSpec())
        self.decoder = DecoderSpec(CONFIG, "float32", "scan")
        self.cache = self.decoder.kv_groups(pages=pages, page_size=PAGE, dtype="float32")
        self.compiled = lower(ForwardSpec(self.decoder, self.cache, SLOTS, shape), self.mesh).compile()
        self.params = load_params(tiny.MemoryCheckpoint(CONFIG, TENSORS), self.decoder, self.mesh, silent)

    def __call__(self, state: SlotState, inputs: StepInputs) -> tuple[np.ndarray, np.ndarray, np.ndarray, SlotState]:
        """(logits, row fields, cache, state)"""
        random = np.random.default_rng(0)
        caches = tuple(jnp.asarray(random.standard_normal(group.shape, np.float32)) for group in self.cache)
        logits, fields, (cache,), after = self.compiled(self.params, caches, state, inputs.buffer)
        return np.asarray(logits), np.asarray(fields), np.asarray(cache), after


@pytest.fixture(scope="module")
def prefill() -> Program:
    return Program(PREFILL, PAGES)


@pytest.fixture(scope="module")
def decode() -> Program:
    return Program(DECODE, SLOTS * COLUMNS)


STATE = {"last_token_B": [9, 8, 7, 6], "length_B": [7, 30, 12, 3]}


def test_lengths_follow_the_rows(prefill: Program):
    rows = [
        RowInput(0, FROM_STATE, []),
        RowInput(3, 0, [1, 2, 3, 4, 5]),
        RowInput(1, 16, [1, 2, 3, 4, 5, 6], limit=20),
    ]
    inputs = step_inputs(PREFILL, rows)
    _, fields, _, after = prefill(state(**STATE), inputs)
    wanted = as_lists(state(**STATE))
    wanted["length_B"] = [8, 20, 12, 5]  # slot 2 is in no row; padding rows touch none
    assert as_lists(after) == wanted
    for name, values in zip(("slots", "starts", "limits", "sample"), fields, strict=True):
        np.testing.assert_array_equal(values, inputs.view(name))


def test_a_decode_row_is_a_chunk_of_its_slots_last_token(prefill: Program, decode: Program):
    rows = [RowInput(2, FROM_STATE, []), RowInput(0, FROM_STATE, [])]
    logits, _, cache, after = prefill(state(**STATE), step_inputs(PREFILL, rows))
    explicit = [RowInput(2, 12, [7]), RowInput(0, 7, [9])]
    same_logits, _, same_cache, same_after = prefill(state(**STATE), step_inputs(PREFILL, explicit))
    np.testing.assert_array_equal(logits[:2], same_logits[:2])
    np.testing.assert_array_equal(cache, same_cache)
    assert as_lists(after) == as_lists(same_after)
    assert (cache != prefill(state(**STATE), step_inputs(PREFILL, []))[2]).any()


def test_a_decode_program_is_a_prefill_program_with_decode_rows(prefill: Program, decode: Program):
    """Their caches differ in size, so each row first caches its own context."""
    rows = [RowInput(2, FROM_STATE, []), RowInput(0, FROM_STATE, [])]
    fresh = {"last_token_B": [9, 8, 7, 6], "length_B": [0, 0, 0, 0]}
    logits, _, _, after = decode(state(**fresh), step_inputs(DECODE, rows))
    same_logits, _, _, same_after = prefill(state(**fresh), step_inputs(PREFILL, rows))
    np.testing.assert_allclose(logits[:2], same_logits[:2], rtol=1e-5, atol=1e-4)
    assert as_lists(after) == as_lists(same_after)


def test_padding_writes_nothing(prefill: Program, decode: Program):
    for program, shape in ((prefill, PREFILL), (decode, DECODE)):
        logits, _, cache, after = program(state(), step_inputs(shape, []))
        assert np.isfinite(logits).all()
        assert as_lists(after) == as_lists(state())
        random = np.random.default_rng(0)
        np.testing.assert_array_equal(cache, random.standard_normal(program.cache[0].shape, np.float32))


def test_the_cache_is_updated_in_place(prefill: Program):
    """A copy of it, whole or of one of its two layers, would show as temporary memory."""
    memory = prefill.compiled.memory_analysis()
    assert memory is not None
    cache_bytes = prefill.cache[0].page_bytes * PAGES
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 4
