"""The executor that most tests of the programs share, since compiling it is what takes the time."""

from collections.abc import Iterator

import pytest

from tpu_infer.programs.executor import FILTERED, GREEDY, RANDOM, Executor
from tpu_infer.step import SamplerFlags

from .build import SIZES, make_executor

MASKED = SamplerFlags(masked=True)
LOGPROBS = SamplerFlags(logprobs=True)

type Told = list[tuple[str, int, int | None]]


@pytest.fixture(scope="session")
def told() -> Told:
    """What the executor's progress said; filled once it is there."""
    return []


@pytest.fixture(scope="session")
def executor(told: Told) -> Iterator[Executor]:
    """Several buckets of each kind, and all samplers but those that choose at random and give log-probabilities."""
    samplers = (GREEDY, RANDOM, FILTERED, LOGPROBS, MASKED)
    made = make_executor(lattice=SIZES, samplers=samplers, progress=lambda *words: told.append(words))
    yield made
    made.watch.close()
