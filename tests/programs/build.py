"""A tiny executor, and an engine that is driven on it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tests.models import tiny
from tpu_infer.engine import Engine
from tpu_infer.mesh import MeshSpec, make_mesh
from tpu_infer.messages import Died, Failed, FromEngine, Submit
from tpu_infer.metrics import Metrics
from tpu_infer.models.config import LinearScaling, RopeConfig
from tpu_infer.models.decoder import DecoderSpec, LayerForm
from tpu_infer.programs.buckets import Lattice
from tpu_infer.programs.compiles import CompileWatch
from tpu_infer.programs.executor import GREEDY, Executor, ExecutorSpec, Launched
from tpu_infer.step import FROM_STATE, Limits, OpenSlots, SamplerFlags, StepInputs, StepKind, StepShape, buffer_size
from tpu_infer.weights.load import load_params

VOCAB = 60  # ids from here on are padding: their logits are far above all others, and must never be drawn
POISON = 63  # its embedding is NaN; only a prompt can name it
SLOTS, PAGE, COLUMNS, BUDGET, TOP = 4, 8, 12, 64, 5

CONFIG = tiny.config(rope=RopeConfig(10_000.0, LinearScaling(4.0)))
TENSORS = tiny.random_tensors(CONFIG)
TENSORS["lm_head.weight"][VOCAB:] *= 100
TENSORS["model.embed_tokens.weight"][POISON] = np.nan

SIZES = Lattice((1, SLOTS), (SLOTS,), (16, BUDGET), ((COLUMNS,),))
ONE_SIZE = Lattice((SLOTS,), (SLOTS,), (BUDGET,), ((COLUMNS,),))  # quicker to compile


def silent(phase: str, done: int, total: int | None) -> None: ...


def make_executor(
    *,
    form: LayerForm = "scan",
    tensor: int = 1,
    lattice: Lattice = ONE_SIZE,
    samplers: tuple[SamplerFlags, ...] = (GREEDY,),
    progress: Callable[[str, int, int | None], None] = silent,
) -> Executor:
    """A compiled executor that fails when anything more is compiled while serving."""
    mesh = make_mesh(MeshSpec(tensor))
    decoder = DecoderSpec(CONFIG, "float32", form, tensor)
    pages = SLOTS * COLUMNS
    limits = Limits(
        slots=SLOTS,
        token_budget=BUDGET,
        page_size=PAGE,
        pages=(pages,),
        max_model_len=COLUMNS * PAGE,
        vocab_size=VOCAB,
    )
    cache = decoder.kv_groups(pages=pages, page_size=PAGE, dtype="float32")
    spec = ExecutorSpec(decoder, cache, lattice, limits, samplers, TOP)
    params = load_params(tiny.MemoryCheckpoint(CONFIG, TENSORS), decoder, mesh, silent)
    executor = Executor(spec, params, mesh, CompileWatch(Metrics(), forbid=True))
    executor.compile_all(progress)
    return executor


class Recorded:
    """A runner that keeps the steps it was given, and may claim to have fewer pages than it has."""

    def __init__(self, executor: Executor, pages: int | None = None) -> None:
        self.executor, self.steps = executor, []
        limits = executor.limits
        self.limits = limits if pages is None else msgspec.structs.replace(limits, pages=(pages,))

    def shape_for(self, kind: StepKind, rows: int, tokens: int, pages: tuple[int, ...]) -> StepShape:
        return self.executor.shape_for(kind, rows, tokens, pages)

    def open_slots(self, command: OpenSlots) -> None:
        self.executor.open_slots(command)

    def forward(self, inputs: StepInputs) -> Launched:
        self.steps.append(inputs)
        return self.executor.forward(inputs)

    def sample(self, pending: Launched, masks: np.ndarray | None = None) -> Any:
        return self.executor.sample(pending, masks)

    @property
    def mixed(self) -> int:
        """Steps that computed decode rows and prompt chunks together."""
        return sum(
            len({start == FROM_STATE for start in step.view("starts")[np.diff(step.view("query_offsets")) > 0]}) == 2
            for step in self.steps
        )


@dataclass
class Answers:
    """What an engine said, by sequence id."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    top: dict[str, list[list[int]]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)

    def take(self, messages: list[FromEngine]) -> None:
        for message in messages:
            assert not isinstance(message, Died)
            if isinstance(message, Failed):
                self.failed[message.id] = message.code
                continue
            self.tokens.setdefault(message.id, []).extend(message.token_ids)
            self.logprobs.setdefault(message.id, []).extend(message.logprobs or [])
            self.top.setdefault(message.id, []).extend(message.top_ids or [])

    def value(self, name: str) -> float:
        value = self.metrics.registry.get_sample_value(name)
        assert value is not None
        return value


def drive(runner: Any, *submits: Submit, chunk: int | None = None, late: int = 0) -> Answers:
    """Run sequences to their end; each is submitted `late` steps after the one before it."""
    answers = Answers()
    engine = Engine(runner, answers.take, answers.metrics, prefill_chunk=chunk)
    for message in submits:
        engine.submit(message)
        for _ in range(late):
            engine.step()
    while engine.step():
        pass
    return answers


def submit(sequence_id: str, prompt: list[int], max_tokens: int = 10, **fields: Any) -> Submit:
    plain: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    return Submit(id=sequence_id, prompt_ids=prompt, max_tokens=max_tokens, stop_ids=[], **{**plain, **fields})


@dataclass(frozen=True)
class RowInput:
    """A row of a hand-made step: prompt tokens from `start` on, or none and FROM_STATE for a decode row."""

    slot: int
    start: int
    tokens: list[int]
    sample: int = 1
    limit: int = COLUMNS * PAGE


def step_inputs(shape: StepShape, rows: list[RowInput], flags: SamplerFlags = GREEDY) -> StepInputs:
    """Pack rows; slot s owns COLUMNS pages from s * COLUMNS on, last first."""
    inputs = StepInputs(step=0, shape=shape, sampler=flags, buffer=np.zeros(buffer_size(shape), np.int32))
    inputs.view("slots")[:] = SLOTS
    offsets, tokens = inputs.view("query_offsets"), inputs.view("tokens")
    for index, row in enumerate(rows):
        inputs.view("slots")[index], inputs.view("starts")[index] = row.slot, row.start
        inputs.view("limits")[index], inputs.view("sample")[index] = row.limit, row.sample
        inputs.view("tables_0")[index] = np.arange(COLUMNS)[::-1] + row.slot * COLUMNS
        offsets[index + 1 :] = offsets[index] + max(len(row.tokens), 1)
        tokens[offsets[index] : offsets[index] + len(row.tokens)] = row.tokens
    return inputs
