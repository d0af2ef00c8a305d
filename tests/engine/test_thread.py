import logging
import queue
import threading
from collections.abc import Callable

import pytest

from tpu_infer.engine import EngineThread
from tpu_infer.errors import EngineDeadError
from tpu_infer.messages import Cancel, Died, EngineLink, Failed, FromEngine, Tokens
from tpu_infer.metrics import Metrics

from .fake_runner import FakeRunner, continuation, limits
from .harness import submit

WAIT = 20.0


class Client:
    """A started EngineThread and a queue of what it says."""

    def __init__(self, before_result: Callable[[int], None] = lambda step: None) -> None:
        self.runner = FakeRunner(limits(), before_result=before_result)
        self.thread = EngineThread(self.runner, Metrics())
        self.link: EngineLink = self.thread
        self.messages: queue.SimpleQueue[FromEngine] = queue.SimpleQueue()
        self.threads: set[str] = set()
        self.link.subscribe(self.receive)
        self.thread.start()

    def receive(self, messages: list[FromEngine]) -> None:
        self.threads.add(threading.current_thread().name)
        for message in messages:
            self.messages.put(message)

    def get(self) -> FromEngine:
        return self.messages.get(timeout=WAIT)

    def answer(self) -> list[int]:
        """The tokens up to a finish, of the one live sequence."""
        tokens: list[int] = []
        while True:
            message = self.get()
            assert isinstance(message, Tokens)
            tokens += message.token_ids
            if message.finish is not None:
                return tokens


def test_it_answers_wakes_from_idleness_and_answers_again():
    client = Client()
    for name in ("a", "b"):
        message = submit(name, 5, 6)
        client.link.send(message)
        assert client.answer() == continuation(message, client.runner.limits)
    assert client.threads == {"tpu-infer-engine"}
    assert client.thread.close(WAIT)


def test_closing_fails_what_is_live_and_refuses_more():
    running, release = threading.Event(), threading.Event()

    def block(step: int) -> None:
        running.set()
        assert release.wait(WAIT)

    client = Client(block)
    client.link.send(submit("a", 5, 50))
    assert running.wait(WAIT)
    assert not client.thread.close(0.0), "the loop waits on the device"
    client.link.send(submit("b"))  # behind the Stop: never begun, but answered
    release.set()
    assert client.thread.close(WAIT)
    said = [client.messages.get_nowait() for _ in range(client.messages.qsize())]
    assert {m.id: m.code for m in said if isinstance(m, Failed)} == {"a": "engine", "b": "engine"}
    assert not any(isinstance(m, Died) for m in said)
    with pytest.raises(EngineDeadError, match="stopped"):
        client.link.send(submit("c"))


def test_a_cancelled_sequence_says_no_more():
    first, release = threading.Event(), threading.Event()

    def block(step: int) -> None:
        first.set()
        assert release.wait(WAIT)

    client = Client(block)
    client.link.send(submit("a", 5, 50))
    assert first.wait(WAIT)
    client.link.send(Cancel(id="a"))
    client.link.send(submit("b", 3, 4))
    release.set()
    said: list[FromEngine] = []
    while not (said and isinstance(said[-1], Tokens) and said[-1].finish):
        said.append(client.get())
    assert [m.id for m in said if isinstance(m, Tokens)] == ["a", "b", "b", "b", "b"], "one was on its way already"
    assert client.thread.close(WAIT)


def test_death_fails_the_living_says_so_once_and_refuses_more(caplog: pytest.LogCaptureFixture):
    def break_down(step: int) -> None:
        if step == 2:
            raise RuntimeError("device lost")

    with caplog.at_level(logging.ERROR):
        client = Client(break_down)
        client.link.send(submit("a", 5, 9))
        tokens = [client.get(), client.get()]
        failed, died = client.get(), client.get()
    assert all(isinstance(message, Tokens) for message in tokens)
    assert isinstance(failed, Failed)
    assert (failed.id, failed.code) == ("a", "engine")
    assert isinstance(died, Died)
    assert "RuntimeError" in died.message
    assert "device lost" in caplog.text, "the log has the traceback"
    with pytest.raises(EngineDeadError, match="RuntimeError"):
        client.link.send(submit("b"))
    assert client.thread.close(WAIT)
    assert client.messages.empty()
