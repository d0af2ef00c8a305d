"""Program specifications and the one `lower`: whoever serves, plans or tests compiles the very same programs."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from tpu_infer.mesh import replicated, sharding
from tpu_infer.models.cache import CACHE_AXES, KVGroup
from tpu_infer.models.decoder import AxesLeaf, DecoderSpec, Params
from tpu_infer.programs.steps import ROW_FIELDS, SlotState, SlotValues, forward, open_slots, sample_rows
from tpu_infer.step import SamplerFlags, StepShape, buffer_size


@dataclass(frozen=True)
class ForwardSpec:
    """One bucket's forward pass."""

    decoder: DecoderSpec
    cache: tuple[KVGroup, ...]
    slots: int
    shape: StepShape


@dataclass(frozen=True)
class SampleSpec:
    """One sampler variant for one number of rows. `vocab` ids can be drawn, of `width` logits."""

    rows: int
    slots: int
    width: int
    vocab: int
    flags: SamplerFlags
    top: int


@dataclass(frozen=True)
class OpenSlotsSpec:
    """Writing slots' sampling fields."""

    slots: int


type ProgramSpec = ForwardSpec | SampleSpec | OpenSlotsSpec


def param_structs(decoder: DecoderSpec, mesh: Mesh) -> Params:
    """The parameter tree as shapes with their shardings on the mesh."""
    _, shapes = decoder.split
    axes = jax.tree.leaves(decoder.axes, is_leaf=lambda leaf: isinstance(leaf, AxesLeaf))
    structs = [
        _placed(struct, sharding(mesh, leaf.axes)) for struct, leaf in zip(jax.tree.leaves(shapes), axes, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), structs)


def cache_structs(cache: tuple[KVGroup, ...], mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The cache arrays as shapes with their shardings."""
    return tuple(_placed(group.struct(), sharding(mesh, CACHE_AXES)) for group in cache)


def lower(spec: ProgramSpec, mesh: Mesh) -> jax.stages.Lowered:
    """Lower a program for the mesh's devices, which need not be attached (an ahead-of-time topology will do)."""
    whole = replicated(mesh)

    def struct(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def state(slots: int) -> SlotState:
        return jax.tree.map(lambda leaf: _placed(leaf, whole), SlotState.struct(slots))

    match spec:
        case ForwardSpec():
            graph, _ = spec.decoder.split
            caches = cache_structs(spec.cache, mesh)
            function = partial(forward, graph=graph, shape=spec.shape, mesh=mesh)
            outputs = (whole, whole, jax.tree.map(lambda leaf: leaf.sharding, caches), whole)
            program = jax.jit(function, donate_argnums=(1, 2), out_shardings=outputs)
            buffer = struct((buffer_size(spec.shape),), jnp.int32)
            return program.lower(param_structs(spec.decoder, mesh), caches, state(spec.slots), buffer)
        case SampleSpec():
            function = partial(sample_rows, flags=spec.flags, vocab=spec.vocab, top=spec.top)
            words = -(-spec.width // 32)
            mask = struct((spec.rows, words), jnp.uint32) if spec.flags.masked else None
            logits, fields = struct((spec.rows, spec.width), jnp.float32), struct((ROW_FIELDS, spec.rows), jnp.int32)
            program = jax.jit(function, donate_argnums=(3,), out_shardings=whole)
            return program.lower(logits, fields, mask, state(spec.slots))
        case OpenSlotsSpec():
            slot_state = state(spec.slots)
            values = SlotValues(struct((spec.slots,), jnp.int32), *slot_state[-len(SlotValues._fields) + 1 :])
            program = jax.jit(open_slots, donate_argnums=(0,), out_shardings=whole)
            return program.lower(slot_state, values)


def _placed(struct: jax.ShapeDtypeStruct, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=place)
