"""What a user asks for and gets back: requests, sampling parameters, deltas, results."""

import math
from collections.abc import Callable
from enum import StrEnum

import msgspec

from tpu_infer.errors import RequestError

# Told how a long part goes on: its name, units (bytes, programs, seconds) done, and how many there are if known.
type Progress = Callable[[str, int, int | None], None]

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"  # end of sequence, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the model's context, is used up
    CANCELLED = "cancelled"  # the caller left


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Names, defaults and ranges are those that vLLM's users know.

    Raises RequestError (with `param`) when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all tokens
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: up to the model's context
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _integer("top_k", self.top_k, -1, INT32_MAX)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, INT64_MIN, INT64_MAX)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, INT32_MAX)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false.", param=name, code="invalid_type")
        self._check_stops()

    def _check_stops(self) -> None:
        if len(self.stop_strings) > MAX_STOPS:
            raise RequestError(f"stop may hold at most {MAX_STOPS} strings.", param="stop")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise RequestError("stop must hold strings that are not empty.", param="stop")
            check_text("stop", text)
        if len(self.stop_token_ids or ()) > MAX_STOPS:
            raise RequestError(f"stop_token_ids may hold at most {MAX_STOPS} ids.", param="stop_token_ids")
        for token in self.stop_token_ids or ():
            _integer("stop_token_ids", token, 0, INT32_MAX)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever form it was given in."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, as text or token ids, and how to continue it. `id` is the service's own."""

    id: str
    prompt: str | list[int]
    params: SamplingParams


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token and its natural log-probability under the model's unmodified distribution."""

    token_id: int
    logprob: float


class PositionLogprobs(msgspec.Struct, frozen=True):
    """One generated position: the chosen token, and the best ones asked for, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one choice. `text` never ends in half a character or half a stop string."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for end of sequence


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One finished choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request; `outputs[i]` is choice i."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


def check_text(param: str, text: str) -> None:
    """Refuse text that is no Unicode text: a lone surrogate has no UTF-8 form and would fail far from its cause."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param} holds a lone surrogate at position {error.start}; send valid Unicode text.",
            param=param,
            code="invalid_unicode",
        ) from None


def _number(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number.", param=name, code="invalid_type")
    inside = (low < value if open_below else low <= value) and value <= high
    if not (inside and math.isfinite(value)):
        bracket = "(" if open_below else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value}.", param=name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer.", param=name, code="invalid_type")
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}.", param=name)
