"""Watching for compilations: ahead of serving they are the plan, while serving they are a fault."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax.monitoring

from tpu_infer.errors import CompileAfterReadyError
from tpu_infer.metrics import Metrics

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_log = logging.getLogger(__name__)


class CompileWatch:
    """Counts compilations that happen inside `serving()`; with `forbid` they raise CompileAfterReadyError.

    It looks at the thread that serves, so another model that is being built in the same process does not count.
    """

    def __init__(self, metrics: Metrics, *, forbid: bool) -> None:
        self._metrics, self._forbid = metrics, forbid
        self._local = threading.local()
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within this, on this thread, nothing may compile."""
        self._local.serving = True
        try:
            yield
        finally:
            self._local.serving = False

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: object) -> None:
        if event != _COMPILE_EVENT or not self._local.__dict__.get("serving", False):
            return
        self.count += 1
        self._metrics.compiles_after_ready.inc()
        _log.warning("a program was compiled while serving (%.2f s)", duration_secs)
        if self._forbid:
            raise CompileAfterReadyError(f"a program was compiled while serving ({duration_secs:.2f} s)")
