"""The pure functions that are compiled: forward, sample, open slots. Each follows the contract in tpu_infer/step.py."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from pallas_kernels.reference import RaggedBatch, token_positions
from tpu_infer.mesh import replicated
from tpu_infer.models.decoder import Params
from tpu_infer.programs.sampler import Sampled, SamplingRows, sample
from tpu_infer.step import FROM_STATE, SamplerFlags, StepShape, layout

Array = jax.Array

ROW_FIELDS = 4  # slots, starts, limits, sample: they lead the buffer, so samplers need no step shape


class SlotState(NamedTuple):
    """What the device keeps of each running sequence; B slots."""

    last_token_B: Array
    length_B: Array
    seed_B2: Array  # uint32: high and low word
    choice_B: Array
    temperature_B: Array
    top_k_B: Array
    top_p_B: Array
    min_p_B: Array

    @classmethod
    def struct(cls, slots: int) -> "SlotState":
        """Shapes and dtypes in the arrays' places."""
        ints: Any = jax.ShapeDtypeStruct((slots,), jnp.int32)
        floats: Any = jax.ShapeDtypeStruct((slots,), jnp.float32)
        seeds: Any = jax.ShapeDtypeStruct((slots, 2), jnp.uint32)
        return cls(ints, ints, seeds, ints, floats, ints, floats, floats)


class SlotValues(NamedTuple):
    """What OpenSlots writes: one row for each slot there is; unused rows name a slot past the end."""

    slot_B: Array | np.ndarray
    seed_B2: Array | np.ndarray
    choice_B: Array | np.ndarray
    temperature_B: Array | np.ndarray
    top_k_B: Array | np.ndarray
    top_p_B: Array | np.ndarray
    min_p_B: Array | np.ndarray


def open_slots(state: SlotState, values: SlotValues) -> SlotState:
    """Write the sampling fields of some slots."""
    slot_B, *fields = values
    kept = state[: len(state) - len(fields)]
    written = [old.at[slot_B].set(new, mode="drop") for old, new in zip(state[len(kept) :], fields, strict=True)]
    return SlotState(*kept, *written)


def forward(
    params: Params,
    caches: tuple[Array, ...],
    state: SlotState,
    buffer: Array,
    *,
    graph: Any,
    shape: StepShape,
    mesh: Mesh,
) -> tuple[Array, Array, tuple[Array, ...], SlotState]:
    """One step's forward pass: (logits_RV float32, row fields int32 [4, R], caches, state)."""
    fields = unpack(buffer, shape)
    slot_R, given_R = fields["slots"], fields["starts"]
    from_state_R = given_R == FROM_STATE
    start_R = jnp.where(from_state_R, _take(state.length_B, slot_R), given_R)
    batch = RaggedBatch(fields["tables_0"], start_R, fields["limits"], fields["query_offsets"])
    row_T, _, _ = token_positions(batch, shape.tokens)
    token_T = jnp.where(from_state_R[row_T], _take(state.last_token_B, slot_R)[row_T], fields["tokens"])

    decoder = nnx.merge(graph, params)
    decode_only = shape.kind == "decode" and shape.tokens == shape.rows
    x_TD, caches = decoder.hidden(token_T, caches, batch, decode_only=decode_only, mesh=mesh)
    last_R = x_TD if decode_only else x_TD[jnp.maximum(batch.query_offsets_R1[1:] - 1, 0)]
    logits_RV = lax.with_sharding_constraint(decoder.logits(last_R), replicated(mesh))

    length_R = jnp.minimum(start_R + jnp.diff(batch.query_offsets_R1), batch.limits_R)
    state = state._replace(length_B=state.length_B.at[slot_R].set(length_R, mode="drop"))
    return logits_RV, buffer[: ROW_FIELDS * shape.rows].reshape(ROW_FIELDS, shape.rows), caches, state


def sample_rows(
    logits_RV: Array,
    row_fields_4R: Array,
    mask_RW: Array | None,
    state: SlotState,
    *,
    flags: SamplerFlags,
    vocab: int,
    top: int,
) -> tuple[Sampled, SlotState]:
    """Sample a forward's logits; rows that sample get their token as the slot's last."""
    slot_R, wanted_R = row_fields_4R[0], row_fields_4R[3]
    rows = SamplingRows(
        seed_R2=_take(state.seed_B2, slot_R),
        choice_R=_take(state.choice_B, slot_R),
        position_R=_take(state.length_B, slot_R),
        temperature_R=_take(state.temperature_B, slot_R),
        top_k_R=_take(state.top_k_B, slot_R),
        top_p_R=_take(state.top_p_B, slot_R),
        min_p_R=_take(state.min_p_B, slot_R),
    )
    sampled = sample(logits_RV, rows, mask_RW, flags=flags, vocab=vocab, top=top)
    target_R = jnp.where(wanted_R > 0, slot_R, state.last_token_B.shape[0])
    return sampled, state._replace(last_token_B=state.last_token_B.at[target_R].set(sampled.token_R, mode="drop"))


def unpack(buffer: Array, shape: StepShape) -> dict[str, Array]:
    """The fields of a packed step buffer, by static slices."""
    return {
        field.name: lax.slice(buffer, (field.offset,), (field.offset + field.size,)).reshape(field.shape)
        for field in layout(shape)
    }


def _take(values_B: Array, slot_R: Array) -> Array:
    """Each row's value; padding rows, whose slot is past the end, get 0."""
    return jnp.take(values_B, slot_R, axis=0, mode="fill", fill_value=0)
