"""The numpy contract between engine and programs: commands, shapes, the packed buffer, the Runner.

Everything that changes device state is a `Command` in one ordered stream, and every command is serialisable by
`encode_command` / `decode_command`: one host runs the stream, many hosts run the same stream.

Device state is the paged KV cache and a *SlotState* of `slots` rows, which holds for each running sequence

    last_token   the token that its next decode step takes as input
    length       how many of its tokens have their K and V in the cache
    seed, choice, temperature, top_k, top_p, min_p

and changes only so:

* `OpenSlots` writes the sampling fields of some rows.
* `StepInputs` with start >= 0 (a prompt chunk): the row's tokens come from the buffer, its first position is
  `start`; afterwards length = start + the number of tokens.
* `StepInputs` with start == FROM_STATE (a decode row): token and position are the slot's own last_token and length;
  afterwards length has grown by the tokens accepted.
* `SampleStep` for that step: rows whose `sample` is 1 get a token, which becomes last_token.

So a step can be launched before the result of the one before it is known. The host reserves pages for the most that
a step can accept and states that bound as `limits`; the program never writes K or V at a position >= the limit.
Padding rows have slot == slots (one past the end; writes to it are dropped), no tokens and sample 0.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

FROM_STATE = -1

StepKind = Literal["decode", "prefill"]


class StepShape(msgspec.Struct, frozen=True, order=True):
    """A bucket: the fixed shape of one compiled step program.

    decode: every row has exactly tokens / rows query tokens. prefill: rows share `tokens` query tokens as they like.
    """

    kind: StepKind
    rows: int
    tokens: int
    pages: tuple[int, ...]  # block-table columns per row, one number for each KV group


class SamplerFlags(msgspec.Struct, frozen=True, order=True):
    """What the rows of a step need of the sampler; what no row needs costs nothing."""

    random: bool = False  # a row has temperature > 0
    filtered: bool = False  # a row uses top-k, top-p or min-p (implies random)
    logprobs: bool = False  # a row wants log-probabilities
    masked: bool = False  # a row has a grammar: SampleStep carries masks


class OpenSlots(msgspec.Struct, frozen=True, kw_only=True, tag="open_slots"):
    """Write the sampling fields of slots that new sequences take. The lists are of one length."""

    slots: list[int]
    seeds: list[int]  # int64
    choices: list[int]
    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]


class Field(msgspec.Struct, frozen=True):
    """Where one array of a step stands in the packed buffer (all int32)."""

    name: str
    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        size = 1
        for dim in self.shape:
            size *= dim
        return size


@lru_cache(maxsize=4096)
def layout(shape: StepShape) -> tuple[Field, ...]:
    """The fields of a step's packed int32 buffer, for host and program alike.

    slots [rows]; starts [rows] (first position, or FROM_STATE); limits [rows]; sample [rows] (0 or 1);
    query_offsets [rows + 1] (cumulative query tokens; padding rows repeat the last);
    tokens [tokens] (ids of prompt chunks, in row order; ignored for decode rows);
    tables_g [rows, pages[g]] for each KV group g (page ids; unused entries are 0).
    """
    fields: list[Field] = []
    offset = 0

    def add(name: str, *dims: int) -> None:
        nonlocal offset
        field = Field(name, offset, dims)
        fields.append(field)
        offset += field.size

    for name in ("slots", "starts", "limits", "sample"):
        add(name, shape.rows)
    add("query_offsets", shape.rows + 1)
    add("tokens", shape.tokens)
    for group, pages in enumerate(shape.pages):
        add(f"tables_{group}", shape.rows, pages)
    return tuple(fields)


def buffer_size(shape: StepShape) -> int:
    """int32 words in a step's packed buffer."""
    last = layout(shape)[-1]
    return last.offset + last.size


class StepInputs(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One forward step: its shape and one packed int32 buffer (see `layout`)."""

    step: int  # counts up by one
    shape: StepShape
    sampler: SamplerFlags
    buffer: np.ndarray  # int32 [buffer_size(shape)]

    def view(self, name: str) -> np.ndarray:
        """A writable view of one field."""
        for field in layout(self.shape):
            if field.name == name:
                return self.buffer[field.offset : field.offset + field.size].reshape(field.shape)
        raise KeyError(name)


class SampleStep(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    """Sample the step's rows. `masks` (uint32 [rows, ceil(V / 32)], bit v%32 of word v//32 allows id v) or None."""

    step: int
    masks: np.ndarray | None = None


type Command = OpenSlots | StepInputs | SampleStep


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a step gave, on the host. Rows stand as in the StepInputs; rows with sample 0 hold nothing of use."""

    token_ids: np.ndarray  # int32 [rows]
    finite: np.ndarray  # bool [rows]: the row's logits were all numbers
    logprobs: np.ndarray | None = None  # float32 [rows], of the sampled tokens
    top_ids: np.ndarray | None = None  # int32 [rows, n], best first
    top_logprobs: np.ndarray | None = None  # float32 [rows, n]


class Pending(Protocol):
    """A launched forward pass, not yet sampled."""

    @property
    def step(self) -> int: ...


class Future(Protocol):
    """A launched step's result."""

    def done(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> StepOutputs:
        """Wait for the device and fetch."""
        ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner was built for; the scheduler plans within it."""

    slots: int  # rows that can run at once
    token_budget: int  # query tokens in one step at most
    page_size: int  # tokens in a page
    pages: tuple[int, ...]  # pages of each KV group
    max_model_len: int  # prompt and answer tokens of one sequence at most
    vocab_size: int  # ids below this are valid


class Runner[P: Pending](Protocol):
    """The programs, as the engine sees them. Commands take effect in the order of the calls."""

    @property
    def limits(self) -> Limits: ...

    def shape_for(self, kind: StepKind, rows: int, tokens: int, pages: tuple[int, ...]) -> StepShape:
        """The smallest compiled bucket that holds this much."""
        ...

    def open_slots(self, command: OpenSlots) -> None: ...

    def forward(self, inputs: StepInputs) -> P: ...

    def sample(self, pending: P, masks: np.ndarray | None = None) -> Future: ...


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), value.tobytes()]
    raise TypeError(f"cannot serialise {type(value).__name__}")


_ARRAY_DTYPES = ("<i4", "<u4")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"cannot deserialise {kind.__name__}")
    dtype, shape, data = value
    if dtype not in _ARRAY_DTYPES:
        raise ValueError(f"unexpected array dtype {dtype!r}")
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=_decode_array)

encode_command: Callable[[Command], bytes] = _encoder.encode
decode_command: Callable[[bytes], Command] = _decoder.decode
