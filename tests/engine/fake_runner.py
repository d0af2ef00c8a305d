"""A Runner in numpy that obeys step.py's contract and asserts that its caller does.

Its cache remembers, for every position written, the token, the position and a running hash of the sequence up to it.
A row's context is read back through its block table, must be one sequence from first to last token, and its hash,
with the slot's sampling fields, gives the next token: a page given to two rows, a position skipped or computed twice,
or a slot opened with another's fields changes tokens or fails an assertion.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from tpu_infer.messages import Submit
from tpu_infer.step import (
    FROM_STATE,
    Command,
    Limits,
    OpenSlots,
    Pending,
    SampleStep,
    StepInputs,
    StepKind,
    StepOutputs,
    StepShape,
    buffer_size,
    encode_command,
)

TOP = 5
_MASK = 2**64 - 1
_WEIGHTS = np.cumprod(np.full(4096, 0x9E3779B97F4A7C15, np.uint64))


def limits(
    *,
    slots: int = 4,
    token_budget: int = 16,
    page_size: int = 4,
    pages: int = 64,
    groups: int = 1,
    max_model_len: int = 64,
) -> Limits:
    """Small limits, as tests want them."""
    return Limits(
        slots=slots,
        token_budget=token_budget,
        page_size=page_size,
        pages=(pages,) * groups,
        max_model_len=max_model_len,
        vocab_size=97,
    )


def next_token(context: Iterable[int], fields: tuple[float, ...], vocab_size: int) -> int:
    """The token that follows a context, under a slot's sampling fields."""
    token_ids = np.array(list(context), np.uint64)
    return _token(int(_hashes(token_ids)[-1]), fields, vocab_size)


def continuation(submit: Submit, limits: Limits) -> list[int]:
    """What an engine must answer to a Submit, worked out without cache, batch or schedule."""
    tokens = list(submit.prompt_ids)
    final = min(len(tokens) + submit.max_tokens, limits.max_model_len)
    while len(tokens) < final:
        tokens.append(next_token(tokens, slot_fields(submit), limits.vocab_size))
        if tokens[-1] in submit.stop_ids:
            break
    return tokens[len(submit.prompt_ids) :]


def slot_fields(submit: Submit) -> tuple[float, ...]:
    """A slot's sampling fields, in the order in which FakeRunner keeps them."""
    return (submit.seed, submit.choice, submit.temperature, submit.top_k, submit.top_p, submit.min_p)


def _hashes(token_ids: np.ndarray) -> np.ndarray:
    """The hash of each prefix, uint64; wraps around."""
    return np.cumsum((token_ids + np.uint64(1)) * _WEIGHTS[: len(token_ids)])


def _token(prefix_hash: int, fields: tuple[float, ...], vocab_size: int) -> int:
    mixed = prefix_hash
    for value in fields:
        mixed = ((mixed ^ (int(value * 1000) & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed ^= mixed >> 31
    return mixed % vocab_size


def _bucket(value: int, most: int) -> int:
    """The next power of two, or the most there can be."""
    return min(1 << (value - 1).bit_length(), most)


@dataclass
class _Slot:
    fields: tuple[float, ...] | None = None
    length: int = 0
    last_token: int | None = None


@dataclass
class _Group:
    """One KV group's cache, each array [pages, page_size]."""

    token: np.ndarray
    position: np.ndarray
    prefix_hash: np.ndarray


@dataclass
class FakePending:
    step: int
    inputs: StepInputs
    prefix_hashes: list[int | None]  # of each row's context after the step
    contexts: list[int]  # its length


@dataclass
class FakeFuture:
    step: int
    outputs: StepOutputs
    runner: "FakeRunner"
    fetched: bool = False

    def done(self) -> bool:
        return self.fetched

    def result(self) -> StepOutputs:
        self.runner.calls.append(("result", self.step))
        self.runner.before_result(self.step)
        if not self.fetched:
            self.fetched = True
            self.runner.outstanding -= 1
        return self.outputs


@dataclass
class FakeRunner:
    """`poison` (seed to context length): rows of that seed give no finite logits at that length.

    `before_result` is called when a result is waited on: it may raise, block or count.
    """

    limits: Limits
    poison: dict[int, int] = field(default_factory=dict)
    before_result: Callable[[int], None] = lambda step: None
    calls: list[tuple[str, int]] = field(default_factory=list)
    steps: list[StepInputs] = field(default_factory=list)
    stream: list[bytes] = field(default_factory=list)  # every command, encoded
    answers: list[list[int]] = field(default_factory=list)  # of each step
    outstanding: int = 0  # launched and not fetched
    written: int = 0  # tokens computed
    opened: int = 0  # slots opened

    def __post_init__(self) -> None:
        size = self.limits.page_size
        self._groups = [
            _Group(np.full((n, size), -1), np.full((n, size), -1), np.zeros((n, size), np.uint64))
            for n in self.limits.pages
        ]
        self._slots = [_Slot() for _ in range(self.limits.slots)]
        self._pending: FakePending | None = None

    def apply(self, command: Command) -> None:
        """Run one command of a recorded stream."""
        if isinstance(command, OpenSlots):
            self.open_slots(command)
        elif isinstance(command, StepInputs):
            self.outstanding = 0
            self.forward(command)
        else:
            assert self._pending is not None
            assert self._pending.step == command.step
            self.sample(self._pending, command.masks)

    def shape_for(self, kind: StepKind, rows: int, tokens: int, pages: tuple[int, ...]) -> StepShape:
        assert 0 < rows <= self.limits.slots
        assert 0 < tokens <= self.limits.token_budget
        rows = _bucket(rows, self.limits.slots)
        width = -(-self.limits.max_model_len // self.limits.page_size)
        columns = tuple(_bucket(need, width) for need in pages)
        if kind == "decode":
            return StepShape(kind, rows, rows, columns)
        return StepShape(kind, self.limits.slots, _bucket(tokens, self.limits.token_budget), columns)

    def open_slots(self, command: OpenSlots) -> None:
        self.stream.append(encode_command(command))
        fields = zip(
            command.seeds,
            command.choices,
            command.temperature,
            command.top_k,
            command.top_p,
            command.min_p,
            strict=True,
        )
        assert len(set(command.slots)) == len(command.slots) > 0
        for slot, values in zip(command.slots, fields, strict=True):
            self._slots[slot] = _Slot(values)
            self.opened += 1

    def forward(self, inputs: StepInputs) -> FakePending:
        self.stream.append(encode_command(inputs))
        assert inputs.step == len(self.steps), "steps count up by one"
        assert self._pending is None, "the step before was not sampled"
        self.calls.append(("forward", inputs.step))
        self.steps.append(inputs)
        self.outstanding += 1
        assert self.outstanding <= 2, "more than one step in flight while another is launched"
        rows = self._check(inputs)
        chunks = [self._query(inputs, row) for row in range(rows)]
        for group in range(len(self._groups)):
            self._write(inputs, group, chunks)
        hashes = [self._read(inputs, row, chunk) for row, chunk in enumerate(chunks)]
        contexts = [start + len(token_ids) for start, token_ids in chunks]
        self._pending = FakePending(inputs.step, inputs, [*hashes], contexts)
        return self._pending

    def sample(self, pending: Pending, masks: np.ndarray | None = None) -> FakeFuture:
        self.stream.append(encode_command(SampleStep(step=pending.step, masks=masks)))
        assert isinstance(pending, FakePending)
        assert pending is self._pending
        self._pending = None
        self.calls.append(("sample", pending.step))
        inputs, rows = pending.inputs, pending.inputs.shape.rows
        tokens, finite = np.full(rows, -7, np.int32), np.zeros(rows, np.bool_)
        for row, prefix_hash in enumerate(pending.prefix_hashes):
            if inputs.view("sample")[row] and prefix_hash is not None:
                slot = self._slots[inputs.view("slots")[row]]
                assert slot.fields is not None
                slot.last_token = _token(prefix_hash, slot.fields, self.limits.vocab_size)
                tokens[row] = slot.last_token
                finite[row] = self.poison.get(int(slot.fields[0])) != pending.contexts[row]
                self._check_flags(inputs, slot.fields)
        self.answers.append(tokens.tolist())
        return FakeFuture(pending.step, self._outputs(inputs, tokens, finite), self)

    def _outputs(self, inputs: StepInputs, tokens: np.ndarray, finite: np.ndarray) -> StepOutputs:
        if not inputs.sampler.logprobs:
            return StepOutputs(token_ids=tokens, finite=finite)
        top = tokens[:, None] + np.arange(TOP, dtype=np.int32)
        return StepOutputs(
            token_ids=tokens,
            finite=finite,
            logprobs=-tokens.astype(np.float32),
            top_ids=top,
            top_logprobs=-top.astype(np.float32),
        )

    def _check(self, inputs: StepInputs) -> int:
        """Assert the buffer's form; returns how many rows are no padding."""
        shape, slots = inputs.shape, inputs.view("slots")
        assert inputs.buffer.dtype == np.int32
        assert len(inputs.buffer) == buffer_size(shape)
        rows = int((slots < self.limits.slots).sum())
        offsets = inputs.view("query_offsets")
        tokens = int(offsets[-1])
        need = tuple(int((inputs.view("limits")[:rows]).max()) // self.limits.page_size for _ in self._groups)
        assert shape == self.shape_for(shape.kind, rows, tokens, need), "not the smallest bucket"
        assert len(set(slots[:rows].tolist())) == rows, "a slot stands twice"
        assert (slots[rows:] == self.limits.slots).all()
        for name in ("starts", "limits", "sample"):
            assert not inputs.view(name)[rows:].any(), f"padding rows have {name}"
        assert offsets[0] == 0
        assert (np.diff(offsets[: rows + 1]) > 0).all()
        assert (offsets[rows:] == tokens).all()
        if shape.kind == "decode":
            assert (inputs.view("starts")[:rows] == FROM_STATE).all()
        else:
            decode = inputs.view("starts")[:rows] == FROM_STATE
            assert not decode.all(), "a prefill step without a chunk"
            assert (np.diff(decode.astype(int)) <= 0).all(), "decode rows stand first"
        return rows

    def _query(self, inputs: StepInputs, row: int) -> tuple[int, list[int]]:
        """A row's first position and tokens; advances the slot's length."""
        slot = self._slots[inputs.view("slots")[row]]
        begin, end = inputs.view("query_offsets")[row : row + 2].tolist()
        start = int(inputs.view("starts")[row])
        if start == FROM_STATE:
            assert end - begin == 1
            assert inputs.view("sample")[row] == 1
            assert slot.last_token is not None, "a decode row before its prefill"
            start, token_ids = slot.length, [slot.last_token]
        else:
            assert start == slot.length, "a position skipped or computed twice"
            assert slot.last_token is None, "a prompt chunk after sampling"
            token_ids = inputs.view("tokens")[begin:end].tolist()
        slot.length = start + len(token_ids)
        assert slot.length <= inputs.view("limits")[row], "a write at or past the limit"
        assert slot.length < self.limits.max_model_len, "K and V of a token that nothing follows"
        self.written += len(token_ids)
        return start, token_ids

    def _write(self, inputs: StepInputs, group: int, chunks: list[tuple[int, list[int]]]) -> None:
        cache, size = self._groups[group], self.limits.page_size
        taken: set[int] = set()
        for table, (start, token_ids) in zip(inputs.view(f"tables_{group}"), chunks, strict=False):
            pages = {int(table[p // size]) for p in range(start, start + len(token_ids))}
            assert not pages & taken, "two rows write one page"
            taken |= pages
            for position, token in enumerate(token_ids, start):
                at = (table[position // size], position % size)
                before = (table[(position - 1) // size], (position - 1) % size)
                prefix = cache.prefix_hash[before] if position else np.uint64(0)
                cache.token[at], cache.position[at] = token, position
                with np.errstate(over="ignore"):
                    cache.prefix_hash[at] = prefix + np.uint64(token + 1) * _WEIGHTS[position]

    def _read(self, inputs: StepInputs, row: int, chunk: tuple[int, list[int]]) -> int:
        """Read a row's context back from every group; returns the hash of all of it."""
        length = chunk[0] + len(chunk[1])
        hashes = set()
        for group, cache in enumerate(self._groups):
            table = inputs.view(f"tables_{group}")[row]
            assert (table >= 0).all()
            assert (table < self.limits.pages[group]).all()
            positions = np.arange(length)
            at = (table[positions // self.limits.page_size], positions % self.limits.page_size)
            assert (cache.position[at] == positions).all(), "a page was lost"
            assert (cache.prefix_hash[at] == _hashes(cache.token[at].astype(np.uint64))).all(), "sequences are mixed"
            hashes.add(int(cache.prefix_hash[at][-1]))
        assert len(hashes) == 1, "groups differ"
        return hashes.pop()

    def _check_flags(self, inputs: StepInputs, fields: tuple[float, ...]) -> None:
        _, _, temperature, top_k, top_p, min_p = fields
        flags = inputs.sampler
        assert flags.random or temperature == 0
        assert flags.filtered or temperature == 0 or (top_k == 0 and top_p == 1 and min_p == 0)
        assert flags.random or not flags.filtered
