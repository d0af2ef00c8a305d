"""The async face of an engine: requests in, deltas of text out.

The frontend checks and tokenises, sends one Submit for each choice, and turns the engine's token ids into text: it
detokenises, finds stop strings, and cancels what nobody waits for. It belongs to one asyncio loop, the one given or
the one that runs at the first request; only the engine's callback comes from another thread.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from tpu_infer.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    NonFiniteLogitsError,
    RequestError,
    TpuInferError,
)
from tpu_infer.messages import Cancel, Died, EngineLink, Failed, FromEngine, Submit, Tokens
from tpu_infer.text.detokenizer import IncrementalDetokenizer, StopChecker
from tpu_infer.text.tokenizer import Tokenizer
from tpu_infer.types import (
    CompletionOutput,
    Delta,
    FinishReason,
    PositionLogprobs,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

GREEDY_BELOW = 1e-5  # a smaller temperature would overflow the logits
LONG_TEXT = 8192  # characters; tokenising them takes about two milliseconds


@dataclass(frozen=True)
class Prepared:
    """A request as the engine will see it: one Submit for each choice, in order."""

    params: SamplingParams
    prompt_ids: list[int]
    submits: list[Submit]


class Frontend:
    """Serves requests through an engine. All methods but the constructor run on its loop.

    `max_model_len` is what prompt and answer of one sequence may hold, in tokens; `vocab_size` is the width of the
    model's logits; `eos_ids` end an answer and are the tokenizer's unless given.
    """

    def __init__(
        self,
        link: EngineLink,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_ids: frozenset[int] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._link = link
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids
        self._loop = loop
        self._numbers = itertools.count()
        self._live: dict[str, _Choice] = {}
        self._died: str | None = None
        link.subscribe(self._receive)

    @property
    def alive(self) -> bool:
        """False once the engine has stopped; every request is then refused with EngineDeadError."""
        return self._died is None

    def prepare(self, request: Request) -> Prepared:
        """Check and tokenise a request without sending anything.

        Raises RequestError for a prompt or parameter that can't be served, ContextLengthError for one too long.
        """
        params = request.params
        prompt_ids = self._prompt_ids(request.prompt)
        max_tokens = self._max_tokens(len(prompt_ids), params.max_tokens)
        stop_ids = set(self._checked_ids(params.stop_token_ids or [], "stop_token_ids"))
        if not params.ignore_eos:
            stop_ids |= self._eos_ids
        greedy = params.temperature < GREEDY_BELOW
        seed = secrets.randbits(64) - 2**63 if params.seed is None else params.seed
        submits = [
            Submit(
                id=f"s{next(self._numbers)}",
                prompt_ids=prompt_ids,
                max_tokens=max_tokens,
                stop_ids=sorted(stop_ids),
                temperature=0.0 if greedy else params.temperature,
                top_k=0 if greedy else max(params.top_k, 0),
                top_p=1.0 if greedy else params.top_p,
                min_p=0.0 if greedy else params.min_p,
                seed=seed,
                choice=choice,
                logprobs=params.logprobs,
            )
            for choice in range(params.n)
        ]
        return Prepared(params, prompt_ids, submits)

    async def stream(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Yield what each choice gains, as it comes; the last delta of a choice has its finish reason.

        A consumer that is slower than the engine gets fewer, longer deltas. Leaving the iteration cancels what is
        unfinished (close the iterator, or cancel the task). Raises what `prepare` raises, and EngineDeadError,
        NonFiniteLogitsError or EngineError where the engine fails.
        """
        async with aclosing(self._run(await self._prepared(request))) as deltas:
            async for delta in deltas:
                yield delta

    async def generate(self, request: Request) -> RequestOutput:
        """The whole answer; raises what `stream` raises. Cancelling the task cancels the request."""
        prepared = await self._prepared(request)
        deltas: list[list[Delta]] = [[] for _ in prepared.submits]
        async with aclosing(self._run(prepared)) as stream:
            async for delta in stream:
                deltas[delta.index].append(delta)
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt if isinstance(request.prompt, str) else None,
            prompt_token_ids=prepared.prompt_ids,
            outputs=[_joined(parts) for parts in deltas],
        )

    async def _prepared(self, request: Request) -> Prepared:
        """`prepare`, beside the loop where the text is long enough to hold up the other requests."""
        if isinstance(request.prompt, str) and len(request.prompt) > LONG_TEXT:
            return await asyncio.to_thread(self.prepare, request)
        return self.prepare(request)

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        text = prompt if isinstance(prompt, str) else ""
        ids = prompt if isinstance(prompt, list) and prompt else self._tokenizer.encode(text)
        if not ids:
            raise RequestError(
                "The prompt is empty, and this model has no BOS token to begin from; send at least one token.",
                param="prompt",
                code="empty_prompt",
            )
        return self._checked_ids(ids, "prompt")

    def _checked_ids(self, ids: list[int], param: str) -> list[int]:
        for position, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"{param} must hold token ids, integers from 0 to {self._vocab_size - 1}; "
                    f"the entry at position {position} is none.",
                    param=param,
                    code="token_out_of_range",
                )
        return list(ids)

    def _max_tokens(self, prompt: int, wanted: int | None) -> int:
        limit = self._max_model_len
        begin = f"This model's maximum context length is {limit} tokens. However, "
        if prompt >= limit:
            raise ContextLengthError(
                f"{begin}the prompt has {prompt} tokens, which leaves no room for an answer; shorten the prompt.",
                param="prompt",
            )
        if wanted is not None and prompt + wanted > limit:
            raise ContextLengthError(
                f"{begin}{prompt + wanted} were asked for: {prompt} in the prompt and {wanted} for the answer; "
                "shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        return limit - prompt if wanted is None else wanted

    async def _run(self, prepared: Prepared) -> AsyncGenerator[Delta, None]:
        self._bind()
        ready = asyncio.Event()
        choices = {submit.id: self._choice(prepared.params, submit, ready) for submit in prepared.submits}
        self._live |= choices
        try:
            for submit in prepared.submits:
                self._link.send(submit)
            waiting = list(choices.values())
            while waiting:
                await ready.wait()
                ready.clear()
                for choice in waiting:
                    delta = choice.take()
                    if delta is not None:
                        yield delta
                waiting = [choice for choice in waiting if not choice.taken]
        finally:
            for key in choices.keys() & self._live.keys():
                self._forget(key)

    def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop  # first, so that an engine that dies from here on is heard of
        assert self._loop is loop, "a Frontend serves one asyncio loop"
        if self._died is not None:
            raise EngineDeadError(self._died)

    def _choice(self, params: SamplingParams, submit: Submit, ready: asyncio.Event) -> "_Choice":
        # The answer continues the prompt, so a space before its first word is its own.
        text = IncrementalDetokenizer(self._tokenizer, skip_special=params.skip_special_tokens, at_start=False)
        stops = StopChecker(params.stop_strings, include=params.include_stop_str_in_output)
        named = frozenset(params.stop_token_ids or ())
        own = named if params.ignore_eos else named - self._eos_ids
        return _Choice(submit.choice, text, stops, own, params.include_stop_str_in_output, ready)

    def _forget(self, key: str) -> None:
        """Nobody waits for this sequence any more: have the engine free what it holds."""
        del self._live[key]
        with suppress(EngineDeadError):
            self._link.send(Cancel(id=key))

    def _receive(self, messages: list[FromEngine]) -> None:
        """On the engine's thread: hand one step's messages to the loop."""
        for message in messages:
            if isinstance(message, Died):
                self._died = message.message
        if self._loop is not None:
            with suppress(RuntimeError):  # a closed loop: nobody is left to tell
                self._loop.call_soon_threadsafe(self._deliver, messages)

    def _deliver(self, messages: list[FromEngine]) -> None:
        for message in messages:
            if isinstance(message, Died):
                for choice in self._live.values():
                    choice.fail(EngineDeadError(message.message))
                self._live.clear()
            elif message.id in self._live:
                self._deliver_one(message)

    def _deliver_one(self, message: Tokens | Failed) -> None:
        choice = self._live[message.id]
        if isinstance(message, Failed):
            choice.fail(_error_of(message))
            del self._live[message.id]
            return
        choice.add(message)
        if message.finish is not None:
            del self._live[message.id]
        elif choice.finish is not None:
            self._forget(message.id)


@dataclass
class _Choice:
    """One sequence on its way out. What the consumer has not taken yet is kept as one delta that grows."""

    index: int
    detokenizer: IncrementalDetokenizer
    stops: StopChecker
    own_stop_ids: frozenset[int]  # those that are named as stop_reason
    include_stop: bool
    ready: asyncio.Event
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: TpuInferError | None = None
    taken: bool = False  # the last delta, or the error, has reached the consumer
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    def fail(self, error: TpuInferError) -> None:
        self.error = error
        self.ready.set()

    def add(self, message: Tokens) -> None:
        """Take tokens up to the one that completes a stop string, if one does."""
        stop_token = message.finish is FinishReason.STOP and not self.include_stop
        last = len(message.token_ids) - 1
        for position, token in enumerate(message.token_ids):
            self.token_ids.append(token)
            self._add_logprobs(message, position)
            if not (stop_token and position == last):
                self.texts.append(self.stops.push(self.detokenizer.push((token,))))
            if self.stops.matched is not None:
                break
        if message.finish is not None or self.stops.matched is not None:
            self._end(message)
        self.ready.set()

    def take(self) -> Delta | None:
        """All that is new, or None; raises the sequence's error."""
        if self.error is not None:
            raise self.error
        if self.taken or not (self.token_ids or self.finish):
            return None
        delta = Delta(
            index=self.index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=self.logprobs or None,
            finish_reason=self.finish,
            stop_reason=self.stop_reason,
        )
        self.texts, self.token_ids, self.logprobs = [], [], []
        self.taken = self.finish is not None
        return delta

    def _end(self, message: Tokens) -> None:
        if self.stops.matched is None:
            self.texts.append(self.stops.push(self.detokenizer.finish()))
            self.texts.append(self.stops.finish())
        self.finish = message.finish
        if self.stops.matched is not None:
            self.finish, self.stop_reason = FinishReason.STOP, self.stops.matched
        elif message.finish is FinishReason.STOP and message.token_ids[-1] in self.own_stop_ids:
            self.stop_reason = message.token_ids[-1]

    def _add_logprobs(self, message: Tokens, position: int) -> None:
        if message.logprobs is None:
            return
        top: list[TokenLogprob] = []
        if message.top_ids is not None and message.top_logprobs is not None:
            pairs = zip(message.top_ids[position], message.top_logprobs[position], strict=True)
            top = [TokenLogprob(token, logprob) for token, logprob in pairs]
        chosen = TokenLogprob(message.token_ids[position], message.logprobs[position])
        self.logprobs.append(PositionLogprobs(chosen, top))


def _error_of(failed: Failed) -> TpuInferError:
    if failed.code == "capacity":
        return RequestError(failed.message, param="prompt", code="capacity")
    errors: Mapping[str, type[EngineError]] = {"non_finite": NonFiniteLogitsError, "engine": EngineDeadError}
    return errors.get(failed.code, EngineError)(failed.message)


def _joined(deltas: list[Delta]) -> CompletionOutput:
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    last = deltas[-1]
    assert last.finish_reason is not None, "a stream ends with a finish reason"
    return CompletionOutput(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=logprobs or None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
