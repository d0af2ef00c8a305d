"""What all tests share: eight CPU devices, one compilation cache, the real model, and no compiling while serving."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import pytest

from tpu_infer.weights.hub import default_cache_dir, resolve

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The built-in model's file, fetched where it is not there yet."""
    return resolve(None, cache_dir=default_cache_dir(), progress=lambda phase, done, total: None)


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """Greedy tokens of the built-in model in float32, by transformers, with their log-probabilities."""
    return json.loads((DATA / "smollm2_greedy.json").read_text())["cases"]


@pytest.fixture(scope="module")
def make_llm(smollm2_gguf: Path) -> Iterator[Callable[..., Any]]:
    """Build an LLM of the built-in model in which a compilation after ready kills the engine, and so fails the test."""
    from tpu_infer import LLM  # noqa: PLC0415 - jax reads the environment set above

    built: list[LLM] = []

    def make(**options: Any) -> LLM:
        built.append(LLM(smollm2_gguf, dtype="float32", forbid_compiles=True, **options))
        return built[-1]

    yield make
    for llm in built:
        llm.close()
        assert llm.service.executor.watch.count == 0, "a program was compiled while serving"
