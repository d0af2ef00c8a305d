"""What frontend and engine say to each other. Token ids only; text belongs to the frontend.

Every message is a msgspec struct with a tag, so the same stream works in one process and between two.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from tpu_infer.types import FinishReason


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Start one sequence (one choice of one request)."""

    id: str  # unique among live sequences; the frontend's own, never a client's
    prompt_ids: list[int]
    max_tokens: int  # at least 1; prompt and answer fit the context
    stop_ids: list[int]  # any of these, once sampled, ends the sequence
    temperature: float
    top_k: int  # 0: all
    top_p: float
    min_p: float
    seed: int  # int64, always set: the frontend draws one where the user gave none
    choice: int = 0  # enters the randomness beside the seed
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Forget a sequence and free what it holds; nothing is answered. An unknown id is ignored."""

    id: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the engine's loop: live sequences get a Failed."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Tokens committed for one sequence, in order. The stop token, if one ended it, is the last of them."""

    id: str
    token_ids: list[int]
    logprobs: list[float] | None = None  # of each token
    top_ids: list[list[int]] | None = None  # of each token: the best ids, best first
    top_logprobs: list[list[float]] | None = None
    finish: FinishReason | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """One sequence ended without an answer."""

    id: str
    code: str  # "capacity", "non_finite", "engine"
    message: str


class Died(msgspec.Struct, frozen=True, kw_only=True, tag="died"):
    """The engine is gone; every live sequence has failed and nothing more is taken."""

    message: str


type ToEngine = Submit | Cancel | Stop
type FromEngine = Tokens | Failed | Died


class EngineLink(Protocol):
    """The frontend's end of the line to an engine."""

    def send(self, message: ToEngine) -> None:
        """Queue a message, from any thread. Raises EngineDeadError when the engine is gone."""
        ...

    def subscribe(self, receive: Callable[[list[FromEngine]], None]) -> None:
        """Name the one receiver; it is called on the engine's thread with a step's messages, and must not block."""
        ...
