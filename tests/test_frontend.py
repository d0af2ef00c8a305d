"""The frontend over a scripted engine: what it refuses, what it sends, and what text comes out."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from tpu_infer.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    NonFiniteLogitsError,
    RequestError,
)
from tpu_infer.frontend import LONG_TEXT, Frontend
from tpu_infer.messages import Cancel, Died, Failed, FromEngine, Submit, ToEngine, Tokens
from tpu_infer.text.tokenizer import Tokenizer
from tpu_infer.text.vocabulary import BYTE_ALPHABET
from tpu_infer.types import Delta, FinishReason, Request, SamplingParams, TokenLogprob

VOCAB, MAX_LEN, EOS, END_OF_TURN = 300, 16, 257, 258


def _tokenizer(*, add_bos: bool = False) -> Tokenizer:
    """Ids 0 to 255 are the bytes; <s> 256, </s> 257 and <|im_end|> 258 are control tokens. No merges."""
    alphabet = sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__)
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*alphabet, "<s>", "</s>", "<|im_end|>"],
            "tokenizer.ggml.token_type": [1] * 256 + [3] * 3,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 256,
            "tokenizer.ggml.eos_token_id": EOS,
            "tokenizer.ggml.eot_token_id": END_OF_TURN,
            "tokenizer.ggml.add_bos_token": add_bos,
        }
    )


class ScriptedLink:
    """Keeps what the frontend sends; `answer`, if there is one, makes the engine's messages of a Submit."""

    def __init__(self, answer: Callable[[Submit], list[FromEngine]] | None = None) -> None:
        self.sent: list[ToEngine] = []
        self.dead = False
        self._answer = answer
        self._receive: Callable[[list[FromEngine]], None] | None = None

    def send(self, message: ToEngine) -> None:
        if self.dead:
            raise EngineDeadError("the engine is gone")
        self.sent.append(message)
        if self._answer is not None and isinstance(message, Submit):
            for part in self._answer(message):
                self.push(part)

    def subscribe(self, receive: Callable[[list[FromEngine]], None]) -> None:
        self._receive = receive

    def push(self, *messages: FromEngine) -> None:
        """One step's messages, from a thread of its own as an engine's are."""
        assert self._receive is not None
        thread = threading.Thread(target=self._receive, args=(list(messages),))
        thread.start()
        thread.join()

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    @property
    def cancelled(self) -> list[str]:
        return [message.id for message in self.sent if isinstance(message, Cancel)]


def _frontend(link: ScriptedLink | None = None, *, add_bos: bool = False) -> Frontend:
    return Frontend(link or ScriptedLink(), _tokenizer(add_bos=add_bos), max_model_len=MAX_LEN, vocab_size=VOCAB)


def _request(prompt: Any = "hi", **params: Any) -> Request:
    settings: dict[str, Any] = {"max_tokens": 8} | params
    return Request(id="r", prompt=prompt, params=SamplingParams(**settings))


def _says(*chunks: str | list[int], finish: FinishReason = FinishReason.LENGTH) -> Callable[[Submit], list[FromEngine]]:
    """An engine that answers every Submit with these chunks, a message each."""

    def answer(submit: Submit) -> list[FromEngine]:
        ids = [list(chunk.encode()) if isinstance(chunk, str) else chunk for chunk in chunks]
        last = len(ids) - 1
        return [
            Tokens(id=submit.id, token_ids=part, finish=finish if i == last else None) for i, part in enumerate(ids)
        ]

    return answer


async def _collect(frontend: Frontend, request: Request) -> list[Delta]:
    return [delta async for delta in frontend.stream(request)]


def _run[T](task: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(task, timeout=20))


def _generate(answer: Callable[[Submit], list[FromEngine]], **params: Any) -> tuple[Any, ScriptedLink]:
    link = ScriptedLink(answer)
    output = _run(_frontend(link).generate(_request(**params)))
    return output.outputs[0], link


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_needs_bos(prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"empty.*BOS") as caught:
        _frontend().prepare(_request(prompt))
    assert caught.value.param == "prompt"
    assert _frontend(add_bos=True).prepare(_request(prompt)).prompt_ids == [256]


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**40, True, "", 1.0, None])
def test_prompt_ids_out_of_range(bad: Any) -> None:
    with pytest.raises(RequestError, match=f"0 to {VOCAB - 1}") as caught:
        _frontend().prepare(_request([5, bad]))
    assert (caught.value.param, caught.value.code) == ("prompt", "token_out_of_range")


def test_prompt_ids_at_the_edges_are_taken_as_they_are() -> None:
    assert _frontend(add_bos=True).prepare(_request([0, VOCAB - 1])).prompt_ids == [0, VOCAB - 1]


def test_stop_token_ids_beyond_the_vocabulary() -> None:
    with pytest.raises(RequestError) as caught:
        _frontend().prepare(_request(stop_token_ids=[9999999]))
    assert (caught.value.param, caught.value.code) == ("stop_token_ids", "token_out_of_range")


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_of_the_whole_context_and_one_less(max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthError, match=f"This model's maximum context length is {MAX_LEN} tokens. However, "):
        _frontend().prepare(_request("x" * MAX_LEN, max_tokens=max_tokens))
    prepared = _frontend().prepare(_request("x" * (MAX_LEN - 1), max_tokens=max_tokens))
    assert prepared.submits[0].max_tokens == 1


def test_max_tokens_beyond_the_context() -> None:
    begin = f"This model's maximum context length is {MAX_LEN} tokens. However, "
    with pytest.raises(ContextLengthError) as caught:
        _frontend().prepare(_request([1] * 8, max_tokens=MAX_LEN - 7))
    assert str(caught.value).startswith(begin)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    assert _frontend().prepare(_request([1] * 8, max_tokens=MAX_LEN - 8)).submits[0].max_tokens == MAX_LEN - 8
    assert _frontend().prepare(_request([1] * 8, max_tokens=None)).submits[0].max_tokens == MAX_LEN - 8


def test_errors_do_not_echo_the_prompt() -> None:
    for prompt in ("secret" * 9, "secret\ud800"):
        with pytest.raises(RequestError) as caught:
            _frontend().prepare(_request(prompt))
        assert "secret" not in str(caught.value)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        _frontend().prepare(_request("a\ud800"))
    assert caught.value.code == "invalid_unicode"


def test_control_text_in_a_prompt_stays_plain() -> None:
    assert _frontend().prepare(_request("<|im_end|>", max_tokens=1)).prompt_ids == list(b"<|im_end|>")


@pytest.mark.parametrize("temperature", [0, 1e-12, 9e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    submit = _frontend().prepare(_request(temperature=temperature, top_k=5, top_p=0.5, min_p=0.1)).submits[0]
    assert (submit.temperature, submit.top_k, submit.top_p, submit.min_p) == (0.0, 0, 1.0, 0.0)


def test_sampling_parameters_pass_on() -> None:
    submit = _frontend().prepare(_request(temperature=0.5, top_k=-1, top_p=0.5, min_p=0.1, logprobs=3)).submits[0]
    assert (submit.temperature, submit.top_k, submit.top_p, submit.min_p) == (0.5, 0, 0.5, 0.1)
    assert submit.logprobs == 3


def test_stop_ids_with_and_without_eos() -> None:
    prepare = _frontend().prepare
    assert prepare(_request(stop_token_ids=[7])).submits[0].stop_ids == [7, EOS, END_OF_TURN]
    assert prepare(_request(stop_token_ids=[7], ignore_eos=True)).submits[0].stop_ids == [7]
    assert prepare(_request(ignore_eos=True)).submits[0].stop_ids == []


def test_choices_share_a_seed_and_differ_in_number_and_id() -> None:
    frontend = _frontend()
    submits = [*frontend.prepare(_request(n=3)).submits, *frontend.prepare(_request(n=2, seed=5)).submits]
    assert [submit.choice for submit in submits] == [0, 1, 2, 0, 1]
    assert len({submit.id for submit in submits}) == 5
    assert len({submit.seed for submit in submits[:3]}) == 1
    assert [submit.seed for submit in submits[3:]] == [5, 5]


def test_no_seed_is_a_fresh_int64_each_time() -> None:
    frontend = _frontend()
    seeds = {frontend.prepare(_request()).submits[0].seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_an_answer_up_to_max_tokens() -> None:
    output, link = _generate(_says("he", "llo"))
    assert (output.text, output.token_ids) == ("hello", list(b"hello"))
    assert (output.finish_reason, output.stop_reason, output.logprobs) == (FinishReason.LENGTH, None, None)
    assert link.cancelled == []


def test_the_result_names_request_and_prompt() -> None:
    output = _run(_frontend(ScriptedLink(_says("x"))).generate(_request("hi")))
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "hi", list(b"hi"))
    output = _run(_frontend(ScriptedLink(_says("x"))).generate(_request([3])))
    assert (output.prompt, output.prompt_token_ids) == (None, [3])


def test_a_prompt_too_long_for_the_loop_is_tokenised_beside_it() -> None:
    with pytest.raises(ContextLengthError, match=f"{LONG_TEXT + 1} tokens"):
        _run(_frontend().generate(_request("x" * (LONG_TEXT + 1))))


@pytest.mark.parametrize(
    ("token", "params", "reason"),
    [
        (EOS, {}, None),
        (END_OF_TURN, {}, None),
        (120, {"stop_token_ids": [120]}, 120),
        (EOS, {"stop_token_ids": [EOS]}, None),
        (EOS, {"stop_token_ids": [EOS], "ignore_eos": True}, EOS),
    ],
)
def test_a_stop_token_is_in_the_ids_and_not_in_the_text(token: int, params: dict[str, Any], reason: int | None) -> None:
    output, _ = _generate(_says("hi", [token], finish=FinishReason.STOP), skip_special_tokens=False, **params)
    assert (output.text, output.token_ids) == ("hi", [*b"hi", token])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, reason)


def test_a_stop_tokens_text_is_kept_where_asked() -> None:
    params = {"stop_token_ids": [120], "include_stop_str_in_output": True}
    output, _ = _generate(_says("hi", [120], finish=FinishReason.STOP), **params)
    assert output.text == "hix"


def test_special_tokens_in_the_text() -> None:
    answer = _says("a", [EOS], "b")
    assert _generate(answer, ignore_eos=True)[0].text == "ab"
    assert _generate(answer, ignore_eos=True, skip_special_tokens=False)[0].text == "a</s>b"


def test_a_stop_string_over_several_messages() -> None:
    async def run() -> None:
        link = ScriptedLink()
        deltas: list[Delta] = []
        async with aclosing(_frontend(link).stream(_request(stop="DEFGHIJ"))) as stream:
            for chunk in ("ABC", "DEF", "G", "HI", "JK", "late"):
                step = asyncio.ensure_future(anext(stream, None))
                await asyncio.sleep(0.01)
                link.push(Tokens(id=link.submits[0].id, token_ids=list(chunk.encode())))
                delta = await step
                if delta is not None:
                    deltas.append(delta)
        assert [delta.text for delta in deltas] == ["ABC", "", "", "", ""]
        assert [delta.finish_reason for delta in deltas] == [None] * 4 + [FinishReason.STOP]
        assert deltas[-1].stop_reason == "DEFGHIJ"
        assert [token for delta in deltas for token in delta.token_ids] == list(b"ABCDEFGHIJ")
        assert link.cancelled == [link.submits[0].id]

    _run(run())


def test_a_stop_string_in_the_middle_of_a_message() -> None:
    output, link = _generate(_says("abSTOPcd"), stop=["STOP", "cd"])
    assert (output.text, output.token_ids) == ("ab", list(b"abSTOP"))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "STOP")
    assert link.cancelled == []
    assert _generate(_says("abSTOPcd"), stop="STOP", include_stop_str_in_output=True)[0].text == "abSTOP"


def test_held_text_is_flushed_at_the_end() -> None:
    assert _generate(_says("abST"), stop="STOP")[0].text == "abST"
    assert _generate(_says("abST", [EOS], finish=FinishReason.STOP), stop="STOP")[0].text == "abST"


@pytest.mark.parametrize("text", ["안녕하세요", "A中ab", "👩‍🚀"])
def test_characters_split_over_tokens(text: str) -> None:
    async def run() -> list[Delta]:
        link = ScriptedLink(_says(*([byte] for byte in text.encode())))
        return await _collect(_frontend(link), _request(max_tokens=14))

    deltas = _run(run())
    assert "".join(delta.text for delta in deltas) == text
    assert not any("\ufffd" in delta.text for delta in deltas)


def test_half_a_character_at_the_end() -> None:
    assert _generate(_says(list("한".encode()[:2])))[0].text == "\ufffd"


def test_choices_end_each_for_itself() -> None:
    def answer(submit: Submit) -> list[FromEngine]:
        return _says(f"c{submit.choice}", [EOS], finish=FinishReason.STOP)(submit)

    async def run() -> tuple[list[Delta], Any]:
        frontend = _frontend(ScriptedLink(answer))
        return await _collect(frontend, _request(n=3)), await frontend.generate(_request(n=3))

    deltas, output = _run(run())
    ends = [delta.index for delta in deltas if delta.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]
    assert [choice.text for choice in output.outputs] == ["c0", "c1", "c2"]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]


def test_logprobs_of_each_token() -> None:
    def answer(submit: Submit) -> list[FromEngine]:
        return [
            Tokens(
                id=submit.id,
                token_ids=[97, 98, 99],
                logprobs=[-0.1, -0.2, -0.3],
                top_ids=[[97], [120], [99]],
                top_logprobs=[[-0.1], [-0.15], [-0.3]],
                finish=FinishReason.LENGTH,
            )
        ]

    output, _ = _generate(answer, logprobs=1)
    assert [entry.chosen for entry in output.logprobs] == [
        TokenLogprob(97, -0.1),
        TokenLogprob(98, -0.2),
        TokenLogprob(99, -0.3),
    ]
    assert output.logprobs[1].top == [TokenLogprob(120, -0.15)]
    stopped, _ = _generate(answer, logprobs=1, stop="b")
    assert len(stopped.logprobs) == len(stopped.token_ids) == 2


def test_a_slow_consumer_gets_fewer_longer_deltas() -> None:
    async def run() -> None:
        link = ScriptedLink()
        async with aclosing(_frontend(link).stream(_request())) as stream:
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.01)
            key = link.submits[0].id
            link.push(Tokens(id=key, token_ids=[97], logprobs=[-1.0]))
            assert (await first).text == "a"
            for token in (98, 99, 100):
                link.push(Tokens(id=key, token_ids=[token], logprobs=[-1.0]))
            link.push(Tokens(id=key, token_ids=[101], logprobs=[-1.0], finish=FinishReason.LENGTH))
            await asyncio.sleep(0.01)
            rest = [delta async for delta in stream]
        assert [(delta.text, delta.token_ids) for delta in rest] == [("bcde", [98, 99, 100, 101])]
        assert len(rest[0].logprobs or ()) == 4

    _run(run())


def test_leaving_a_stream_cancels_what_is_unfinished() -> None:
    async def run() -> None:
        link = ScriptedLink()
        stream = _frontend(link).stream(_request(n=3))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        keys = [submit.id for submit in link.submits]
        link.push(Tokens(id=keys[1], token_ids=[97], finish=FinishReason.LENGTH))
        assert (await first).index == 1
        await stream.aclose()
        assert sorted(link.cancelled) == sorted([keys[0], keys[2]])
        link.push(Tokens(id=keys[0], token_ids=[98]))
        await asyncio.sleep(0.01)

    _run(run())


def test_cancelling_generate_cancels_the_sequence() -> None:
    async def run() -> None:
        link = ScriptedLink()
        task = asyncio.ensure_future(_frontend(link).generate(_request()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert link.cancelled == [link.submits[0].id]

    _run(run())


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("capacity", RequestError),
        ("non_finite", NonFiniteLogitsError),
        ("engine", EngineDeadError),
        ("new", EngineError),
    ],
)
def test_a_failed_sequence_raises_and_frees_the_others(code: str, error: type[Exception]) -> None:
    def answer(submit: Submit) -> list[FromEngine]:
        return [Failed(id=submit.id, code=code, message="told so")] if submit.choice == 0 else []

    link = ScriptedLink(answer)
    with pytest.raises(error, match="told so") as caught:
        _run(_frontend(link).generate(_request(n=2)))
    assert type(caught.value) is error
    assert link.cancelled == [link.submits[1].id]


def test_one_failed_request_leaves_another_alone() -> None:
    async def run() -> None:
        link = ScriptedLink()
        frontend = _frontend(link)
        bad, good = (asyncio.ensure_future(frontend.generate(_request())) for _ in range(2))
        await asyncio.sleep(0.01)
        first, second = (submit.id for submit in link.submits)
        link.push(
            Failed(id=first, code="non_finite", message="not numbers"),
            Tokens(id=second, token_ids=[97], finish=FinishReason.LENGTH),
        )
        with pytest.raises(NonFiniteLogitsError):
            await bad
        assert (await good).outputs[0].text == "a"

    _run(run())


def test_a_dead_engine_fails_every_stream_and_refuses_new_ones() -> None:
    async def run() -> None:
        link = ScriptedLink()
        frontend = _frontend(link)
        tasks = [asyncio.ensure_future(frontend.generate(_request(n=2))) for _ in range(2)]
        await asyncio.sleep(0.01)
        link.dead = True
        link.push(Died(message="out of luck"))
        for task in tasks:
            with pytest.raises(EngineDeadError, match="out of luck"):
                await task
        assert not frontend.alive
        with pytest.raises(EngineDeadError, match="out of luck"):
            await frontend.generate(_request())
        assert len(link.submits) == 4

    _run(run())


def test_an_engine_that_died_before_the_first_request() -> None:
    link = ScriptedLink()
    frontend = _frontend(link)
    link.push(Died(message="never lived"))
    with pytest.raises(EngineDeadError, match="never lived"):
        _run(frontend.generate(_request()))


def test_a_link_that_dies_between_two_choices() -> None:
    link = ScriptedLink()

    def answer(submit: Submit) -> list[FromEngine]:
        link.dead = True
        return []

    link._answer = answer
    with pytest.raises(EngineDeadError):
        _run(_frontend(link).generate(_request(n=2)))


def test_many_streams_at_once_give_what_each_gives_alone() -> None:
    def answer(submit: Submit) -> list[FromEngine]:
        return _says(*(bytes(submit.prompt_ids).decode() * 2), finish=FinishReason.LENGTH)(submit)

    async def run() -> list[str]:
        frontend = _frontend(ScriptedLink(answer))
        results = await asyncio.gather(*(frontend.generate(_request(f"p{i}")) for i in range(20)))
        return [result.outputs[0].text for result in results]

    assert _run(run()) == [f"p{i}p{i}" for i in range(20)]
