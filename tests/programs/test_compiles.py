"""A compilation counts when it happens on the thread that serves, while it serves, and then only."""

import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest

from tpu_infer.errors import CompileAfterReadyError
from tpu_infer.metrics import Metrics
from tpu_infer.programs.compiles import CompileWatch

ONES = np.ones(3, np.float32)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def make_watch(metrics: Metrics) -> Iterator[Callable[[bool], CompileWatch]]:
    made: list[CompileWatch] = []

    def make(forbid: bool) -> CompileWatch:
        made.append(CompileWatch(metrics, forbid=forbid))
        return made[-1]

    yield make
    for watch in made:
        watch.close()


def compile_something() -> None:
    jax.jit(lambda x: x + 1)(ONES)  # a new function each time, so never cached


def counted(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("tpu_infer_compiles_after_ready_total")


def test_forbidden(metrics: Metrics, make_watch: Callable[[bool], CompileWatch]):
    watch = make_watch(True)
    with pytest.raises(CompileAfterReadyError, match="while serving"), watch.serving():
        compile_something()
    assert watch.count == counted(metrics) == 1
    compile_something()
    assert watch.count == 1, "no longer serving, although it left by an exception"


def test_only_counted(metrics: Metrics, make_watch: Callable[[bool], CompileWatch], caplog: pytest.LogCaptureFixture):
    watch = make_watch(False)
    compile_something()
    assert watch.count == counted(metrics) == 0
    with watch.serving():
        compile_something()
        compile_something()
    assert watch.count == counted(metrics) == 2
    assert "compiled while serving" in caplog.text


def test_calling_what_is_compiled_is_no_compilation(make_watch: Callable[[bool], CompileWatch]):
    program = jax.jit(lambda x: x + 1).lower(ONES).compile()
    program(ONES)
    with make_watch(True).serving():
        program(ONES)


def test_other_threads_may_compile(metrics: Metrics, make_watch: Callable[[bool], CompileWatch]):
    watch = make_watch(True)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            compile_something()
        except CompileAfterReadyError as error:
            failures.append(error)

    with watch.serving():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not failures
    assert watch.count == counted(metrics) == 0


def test_closed_it_hears_nothing(metrics: Metrics):
    watch = CompileWatch(metrics, forbid=True)
    watch.close()
    with watch.serving():
        compile_something()
    assert watch.count == 0
