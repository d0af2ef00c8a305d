"""The runner: compiles every program ahead of time, holds device state, launches steps, fetches results."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_infer.errors import ConfigError
from tpu_infer.mesh import replicated
from tpu_infer.models.cache import KVGroup
from tpu_infer.models.decoder import DecoderSpec, Params
from tpu_infer.programs.buckets import Lattice
from tpu_infer.programs.compiles import CompileWatch
from tpu_infer.programs.lowering import (
    ForwardSpec,
    OpenSlotsSpec,
    ProgramSpec,
    SampleSpec,
    cache_structs,
    lower,
)
from tpu_infer.programs.sampler import Sampled
from tpu_infer.programs.steps import SlotState, SlotValues
from tpu_infer.step import Limits, OpenSlots, SamplerFlags, StepInputs, StepKind, StepOutputs, StepShape, buffer_size
from tpu_infer.types import Progress

GREEDY = SamplerFlags()
RANDOM = SamplerFlags(random=True)
FILTERED = SamplerFlags(random=True, filtered=True)


def sampler_variants(*, logprobs: bool = True) -> tuple[SamplerFlags, ...]:
    """The variants to compile: each way of choosing, with and without log-probabilities."""
    plain = (GREEDY, RANDOM, FILTERED)
    if not logprobs:
        return plain
    return plain + tuple(SamplerFlags(flags.random, flags.filtered, True) for flags in plain)


@dataclass(frozen=True)
class ExecutorSpec:
    """What an executor is built for."""

    decoder: DecoderSpec
    cache: tuple[KVGroup, ...]
    lattice: Lattice
    limits: Limits
    samplers: tuple[SamplerFlags, ...]
    top_logprobs: int

    def programs(self) -> list[ProgramSpec]:
        """Every program that can be launched, longest compilations first."""
        slots = self.limits.slots
        steps = [ForwardSpec(self.decoder, self.cache, slots, shape) for shape in reversed(self.lattice.shapes())]
        samplers = [self.sample_spec(rows, flags) for rows in self.lattice.row_counts() for flags in self.samplers]
        return [*steps, *samplers, OpenSlotsSpec(slots)]

    def sample_spec(self, rows: int, flags: SamplerFlags) -> SampleSpec:
        """The program that samples `rows` rows."""
        width, vocab = self.decoder.config.vocab_size, self.limits.vocab_size
        return SampleSpec(rows, self.limits.slots, width, vocab, flags, self.top_logprobs)


@dataclass(frozen=True)
class Launched:
    """A forward pass on its way: what its sampler needs."""

    step: int
    inputs: StepInputs
    logits_RV: jax.Array
    row_fields_4R: jax.Array


class StepFuture:
    """A sampled step's result, already on its way to the host."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled
        for array in jax.tree.leaves(sampled):
            array.copy_to_host_async()

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return all(array.is_ready() for array in jax.tree.leaves(self._sampled))

    def result(self) -> StepOutputs:
        """Wait for the device and fetch."""
        token_ids, finite, *rest = (None if array is None else np.asarray(array) for array in self._sampled)
        assert token_ids is not None
        assert finite is not None
        return StepOutputs(token_ids=token_ids, finite=finite, logprobs=rest[0], top_ids=rest[1], top_logprobs=rest[2])


class Executor:
    """Implements `step.Runner` on a mesh. Build it with `compile_all` before use."""

    def __init__(self, spec: ExecutorSpec, params: Params, mesh: Mesh, watch: CompileWatch) -> None:
        self.spec, self.mesh, self.watch = spec, mesh, watch
        self._params = params
        self._whole = replicated(mesh)
        self._programs: dict[ProgramSpec, jax.stages.Compiled] = {}
        self._caches = tuple(_zeros(struct) for struct in cache_structs(spec.cache, mesh))
        self._state: SlotState = jax.tree.map(
            lambda leaf: _zeros(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._whole)),
            SlotState.struct(spec.limits.slots),
        )

    @property
    def limits(self) -> Limits:
        return self.spec.limits

    def shape_for(self, kind: StepKind, rows: int, tokens: int, pages: tuple[int, ...]) -> StepShape:
        """The smallest compiled bucket that holds this much."""
        return self.spec.lattice.shape_for(kind, rows, tokens, pages)

    def compile_all(self, progress: Progress) -> None:
        """Compile every program, in threads, then call each once; afterwards nothing may compile."""
        specs = self.spec.programs()
        progress("programs", 0, len(specs))
        for done, (spec, program) in enumerate(_compile(specs, self.mesh), start=1):
            self._programs[spec] = program
            progress("programs", done, len(specs))
        self._warm_up()

    def open_slots(self, command: OpenSlots) -> None:
        """Write the sampling fields of newly taken slots."""
        values = slot_values(command, self.limits.slots)
        with self.watch.serving():
            self._state = self._programs[OpenSlotsSpec(self.limits.slots)](self._state, values)

    def forward(self, inputs: StepInputs) -> Launched:
        """Launch a step's forward pass."""
        spec = ForwardSpec(self.spec.decoder, self.spec.cache, self.limits.slots, inputs.shape)
        with self.watch.serving():
            logits_RV, row_fields_4R, self._caches, self._state = self._programs[spec](
                self._params, self._caches, self._state, inputs.buffer
            )
        return Launched(inputs.step, inputs, logits_RV, row_fields_4R)

    def sample(self, pending: Launched, masks: np.ndarray | None = None) -> StepFuture:
        """Launch a forward pass's sampler; `masks` as in step.SampleStep. ConfigError for a variant not compiled."""
        flags = pending.inputs.sampler
        if flags.masked != (masks is not None):
            raise ConfigError("masks", "are given exactly when the step's sampler flags say masked.")
        program = self._programs.get(self.spec.sample_spec(pending.inputs.shape.rows, flags))
        if program is None:
            raise ConfigError("samplers", f"{flags} was not compiled; this runner has {self.spec.samplers}.")
        with self.watch.serving():
            sampled, self._state = program(pending.logits_RV, pending.row_fields_4R, masks, self._state)
            return StepFuture(sampled)

    def _warm_up(self) -> None:
        """One real call of every program: padding rows only, so no state changes."""
        slots = self.limits.slots
        nothing: list[int] = []
        self.open_slots(
            OpenSlots(slots=nothing, seeds=nothing, choices=nothing, temperature=[], top_k=nothing, top_p=[], min_p=[])
        )
        launched: dict[int, Launched] = {}
        for shape in self.spec.lattice.shapes():
            buffer = np.zeros(buffer_size(shape), np.int32)
            inputs = StepInputs(step=0, shape=shape, sampler=GREEDY, buffer=buffer)
            inputs.view("slots")[:] = slots
            launched[shape.rows] = self.forward(inputs)
        for rows, pending in launched.items():
            for flags in self.spec.samplers:
                program = self._programs[self.spec.sample_spec(rows, flags)]
                words = -(-self.spec.decoder.config.vocab_size // 32)
                masks = np.full((rows, words), 0xFFFFFFFF, np.uint32) if flags.masked else None
                with self.watch.serving():
                    sampled, self._state = program(pending.logits_RV, pending.row_fields_4R, masks, self._state)
                    StepFuture(sampled).result()


def slot_values(command: OpenSlots, slots: int) -> SlotValues:
    """The command as fixed-size arrays; unused rows name a slot past the end."""
    count = len(command.slots)

    def padded(values: list[int] | list[float], dtype: type, fill: int = 0) -> np.ndarray:
        array = np.full(slots, fill, dtype)
        array[:count] = values
        return array

    seeds_B2 = np.zeros((slots, 2), np.uint32)
    words = np.asarray(command.seeds, np.int64).view(np.uint64)
    seeds_B2[:count, 0], seeds_B2[:count, 1] = words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)
    return SlotValues(
        padded(command.slots, np.int32, fill=slots),
        seeds_B2,
        padded(command.choices, np.int32),
        padded(command.temperature, np.float32),
        padded(command.top_k, np.int32),
        padded(command.top_p, np.float32),
        padded(command.min_p, np.float32),
    )


def _compile(specs: list[ProgramSpec], mesh: Mesh) -> Iterable[tuple[ProgramSpec, jax.stages.Compiled]]:
    """Lower in turn, since tracing is Python, and compile in threads, since XLA is not."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        futures = {pool.submit(_lower_and_compile, spec, mesh): spec for spec in specs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()


def _lower_and_compile(spec: ProgramSpec, mesh: Mesh) -> jax.stages.Compiled:
    return lower(spec, mesh).compile()


def _zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    make = partial(jnp.zeros, struct.shape, struct.dtype)
    return jax.jit(make, out_shardings=struct.sharding)()
