"""The engine in a thread of its own, behind messages."""

import logging
import queue
import threading
from collections.abc import Callable

from tpu_infer.engine.engine import Engine
from tpu_infer.errors import EngineDeadError
from tpu_infer.messages import Cancel, Died, Failed, FromEngine, Stop, Submit, ToEngine
from tpu_infer.metrics import Metrics
from tpu_infer.step import Runner

logger = logging.getLogger(__name__)


class EngineThread:
    """An EngineLink to an engine in this process. `subscribe`, then `start`; `close` when done."""

    def __init__(self, runner: Runner, metrics: Metrics, *, prefill_chunk: int | None = None) -> None:
        self._engine = Engine(runner, self._deliver, metrics, prefill_chunk=prefill_chunk)
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is queued once `_ended` is set
        self._ended: str | None = None  # why the engine takes no more
        self._receive: Callable[[list[FromEngine]], None] | None = None
        self._thread = threading.Thread(target=self._run, name="tpu-infer-engine", daemon=True)

    def start(self) -> None:
        """Start the loop; the receiver must be known by now."""
        assert self._receive is not None, "subscribe before start"
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        """Queue a message, from any thread. Raises EngineDeadError when the engine is gone."""
        with self._lock:
            if self._ended is not None:
                raise EngineDeadError(self._ended)
            self._inbox.put(message)

    def subscribe(self, receive: Callable[[list[FromEngine]], None]) -> None:
        """Name the one receiver; it is called on the engine's thread and must not block."""
        self._receive = receive

    def close(self, timeout: float | None = None) -> bool:
        """Stop the loop, failing live sequences, and wait for it; returns whether it ended within `timeout` seconds."""
        with self._lock:
            if self._ended is None:
                self._inbox.put(Stop())
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the engine died")
            message = f"The engine died of {type(error).__name__}; its log says more. Restart the service."
            self._end(message)
            self._deliver([Died(message=message)])
        else:
            self._end("The engine was stopped.")

    def _loop(self) -> None:
        work = False
        while self._take_messages(wait=not work):
            work = self._engine.step()

    def _take_messages(self, *, wait: bool) -> bool:
        """Handle all queued messages, first waiting for one if `wait`; False when one of them was Stop."""
        try:
            while True:
                message = self._inbox.get(block=wait)
                wait = False
                if isinstance(message, Stop):
                    return False
                self._handle(message)
        except queue.Empty:
            return True

    def _handle(self, message: Submit | Cancel) -> None:
        if isinstance(message, Submit):
            self._engine.submit(message)
        else:
            self._engine.cancel(message.id)

    def _end(self, message: str) -> None:
        """Refuse what comes from now on, and fail what has come: live sequences and those still in the inbox."""
        with self._lock:
            self._ended = message
        self._engine.fail_all(message)
        while not self._inbox.empty():
            queued = self._inbox.get()
            if isinstance(queued, Submit):
                self._deliver([Failed(id=queued.id, code="engine", message=message)])

    def _deliver(self, messages: list[FromEngine]) -> None:
        assert self._receive is not None, "subscribe before start"
        self._receive(messages)
