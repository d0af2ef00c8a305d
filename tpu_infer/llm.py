"""Offline use in Python, and the assembly of a service from its parts."""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import Mesh

from tpu_infer.config import Config, SchedulerOptions, load_config
from tpu_infer.engine.thread import EngineThread
from tpu_infer.errors import CacheDirectoryError, CapacityError, ConfigError
from tpu_infer.frontend import Frontend
from tpu_infer.mesh import MeshSpec, make_mesh
from tpu_infer.metrics import Metrics
from tpu_infer.models.cache import KVGroup
from tpu_infer.models.decoder import DecoderSpec, LayerForm
from tpu_infer.programs.buckets import make_lattice
from tpu_infer.programs.compiles import CompileWatch
from tpu_infer.programs.executor import Executor, ExecutorSpec, sampler_variants
from tpu_infer.step import Limits
from tpu_infer.text.tokenizer import Tokenizer
from tpu_infer.types import MAX_LOGPROBS, Progress, Request, RequestOutput, SamplingParams
from tpu_infer.weights.checkpoint import Checkpoint
from tpu_infer.weights.gguf import GGUFCheckpoint
from tpu_infer.weights.hub import default_cache_dir, resolve
from tpu_infer.weights.load import load_params
from tpu_infer.weights.open import open_checkpoint

CPU_CACHE_BYTES = 2 << 30  # what the cache takes on a CPU unless told otherwise
DEVICE_SHARE = 0.9  # of a device's free memory; the rest is for programs' temporaries
MIN_PAD_ROWS = 2  # XLA:CPU multiplies one bfloat16 row eight times slower than two


def silent(phase: str, done: int, total: int | None) -> None:
    """A Progress for those who don't listen."""


@dataclass
class Service:
    """A running engine with its frontend; `phases` are the seconds that each part of the start took."""

    frontend: Frontend
    tokenizer: Tokenizer
    engine: EngineThread
    executor: Executor
    metrics: Metrics
    checkpoint: Checkpoint
    phases: dict[str, float]

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()
        self.executor.watch.close()


def start_service(config: Config, progress: Progress = silent) -> Service:
    """Fetch, load, compile and start: every part wired together."""
    clock = _Clock()
    cache_dir = Path(config.compile.cache_dir) if config.compile.cache_dir else default_cache_dir()
    path = resolve(config.model.model or None, cache_dir=cache_dir, progress=progress)
    clock.lap("fetch")
    enable_compilation_cache(cache_dir)
    mesh = make_mesh(MeshSpec(config.mesh.tensor))
    clock.lap("device")
    with open_checkpoint(path) as checkpoint:
        tokenizer = _tokenizer(checkpoint)
        clock.lap("tokenizer")
        decoder = decoder_spec(config, checkpoint, mesh)
        spec = plan_executor(config, decoder, tokenizer.vocab_size, mesh)
        params = load_params(checkpoint, decoder, mesh, progress)
    clock.lap("weights")
    metrics = Metrics()
    executor = Executor(spec, params, mesh, CompileWatch(metrics, forbid=config.compile.forbid_compiles))
    executor.compile_all(progress)
    clock.lap("programs")
    engine = EngineThread(executor, metrics, prefill_chunk=config.scheduler.prefill_chunk or None)
    limits = spec.limits
    eos_ids = tokenizer.eos_ids | frozenset(checkpoint.config.eos_ids)
    frontend = Frontend(
        engine, tokenizer, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size, eos_ids=eos_ids
    )
    engine.start()
    return Service(frontend, tokenizer, engine, executor, metrics, checkpoint, clock.phases)


def decoder_spec(config: Config, checkpoint: Checkpoint, mesh: Mesh) -> DecoderSpec:
    """Dtype and form of the layers, by the mesh's devices where the configuration says auto."""
    device = mesh.devices.flat[0]
    cpu = device.platform == "cpu"
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if cpu else "bfloat16"
    # A scan copies each layer's weights in every step on XLA:CPU, and lays them out anew on tpu7x.
    unrolled = cpu or "7x" in device.device_kind.lower()
    automatic: LayerForm = "unroll" if unrolled else "scan"
    forms: dict[str, LayerForm] = {"auto": automatic, "scan": "scan", "unroll": "unroll"}
    spec = DecoderSpec(checkpoint.config, dtype, forms[config.model.layers], config.mesh.tensor)
    assert spec.stored_kv_heads  # refuses a mesh that does not divide the model, before anything is loaded
    return spec


def plan_executor(config: Config, decoder: DecoderSpec, vocab: int, mesh: Mesh) -> ExecutorSpec:
    """Sizes of the cache and shapes of the programs. Raises ConfigError and CapacityError."""
    scheduler, page_size = config.scheduler, config.cache.page_size
    length = _model_len(scheduler, decoder)
    one_page = decoder.kv_groups(pages=1, page_size=page_size, dtype=decoder.dtype)[0].page_bytes // decoder.tensor
    pages = _cache_pages(config, one_page, length, _free_bytes(mesh, decoder))
    length = min(length, pages * page_size)
    cache: tuple[KVGroup, ...] = decoder.kv_groups(pages=pages, page_size=page_size, dtype=decoder.dtype)
    cpu_bfloat16 = decoder.dtype == "bfloat16" and mesh.devices.flat[0].platform == "cpu"
    budget = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    lattice = make_lattice(
        slots=scheduler.max_num_seqs,
        token_budget=budget,
        pages_per_row=-(-length // page_size),
        min_rows=MIN_PAD_ROWS if cpu_bfloat16 else 1,
    )
    limits = Limits(
        slots=scheduler.max_num_seqs,
        token_budget=budget,
        page_size=page_size,
        pages=(pages,),
        max_model_len=length,
        vocab_size=min(vocab, decoder.config.vocab_size),
    )
    return ExecutorSpec(
        decoder, cache, lattice, limits, sampler_variants(logprobs=config.compile.logprobs), MAX_LOGPROBS
    )


def enable_compilation_cache(cache_dir: Path) -> None:
    """Keep compiled programs between runs. Raises CacheDirectoryError when the directory cannot be used."""
    directory = cache_dir / "programs"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheDirectoryError(f"{directory}: {error.strerror}; name another with --cache-dir.") from None
    if not os.access(directory, os.W_OK):
        raise CacheDirectoryError(f"{directory} cannot be written; name another with --cache-dir.")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class LLM:
    """A model for offline use, shaped as vLLM's users know it.

    `model` is a GGUF file, a directory with safetensors, a Hugging Face name, or None for the built-in model. Further
    options are those of config.py by name (`max_num_seqs=8`, `max_model_len=2048`, `cache_pages=...`).
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        tensor_parallel_size: int = 1,
        progress: Progress = silent,
        **options: Any,
    ) -> None:
        flags = {"model": str(model or ""), "dtype": dtype, "tensor": tensor_parallel_size, **options}
        self.service = start_service(load_config(flags=flags), progress)
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tpu-infer-llm", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.service.tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, in their order. Prompts are texts or lists of token ids; one `params` serves all, a list
        goes prompt by prompt. Raises RequestError when a request is wrong; then none is answered."""
        listed = _prompt_list(prompts)
        each = _params_list(params, len(listed))
        requests = [
            Request(id=str(next(self._numbers)), prompt=prompt, params=one)
            for prompt, one in zip(listed, each, strict=True)
        ]
        return self._wait(self._generate(requests))

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Answer one conversation: messages with role and content, through the model's chat template."""
        return self.generate([self.tokenizer.encode_chat(messages)], params)

    def close(self) -> None:
        """Stop the engine; the model's memory is free once the object is gone."""
        if self._loop.is_closed():
            return
        self.service.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _generate(self, requests: list[Request]) -> list[RequestOutput]:
        frontend = self.service.frontend
        for request in requests:
            frontend.prepare(request)  # a wrong request is refused before any is started
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(frontend.generate(request)) for request in requests]
        return [task.result() for task in tasks]

    def _wait[T](self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


def _prompt_list(prompts: Any) -> list[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return [item if isinstance(item, str) else list(item) for item in listed]


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError("params", f"there are {len(params)} for {count} prompts; give one, or one for each.")
    return list(params)


class _Clock:
    """Seconds of each phase, between laps."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = now - self._last
        self._last = now


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if isinstance(checkpoint, GGUFCheckpoint):
        return Tokenizer.from_gguf(checkpoint.metadata)
    return Tokenizer.from_directory(checkpoint.path)


def _model_len(scheduler: SchedulerOptions, decoder: DecoderSpec) -> int:
    context = decoder.config.context_length
    if scheduler.max_model_len > context:
        raise ConfigError(
            "scheduler.max_model_len", f"is {scheduler.max_model_len}, and the model's context {context}."
        )
    return scheduler.max_model_len or context


def _free_bytes(mesh: Mesh, decoder: DecoderSpec) -> int:
    """Bytes per device left for the cache once the weights are there. Raises CapacityError when they don't fit."""
    _, shapes = decoder.split
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)) // decoder.tensor
    device = mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    free = int((stats["bytes_limit"] - stats["bytes_in_use"]) * DEVICE_SHARE) if stats else _host_free_bytes()
    if device.platform == "cpu":
        free //= decoder.tensor  # CPU devices share one memory
    if weights > free:
        raise CapacityError(
            f"The weights need {weights:,} bytes per device and {free:,} are free; use more devices (--tensor), "
            f"a smaller model, or --dtype bfloat16.",
            needed_bytes=weights,
            available_bytes=free,
        )
    return free - weights


def _host_free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cache_pages(config: Config, page_bytes: int, length: int, free: int) -> int:
    """How many pages to allocate; CapacityError when they don't fit, or one full sequence would not."""
    options, page_size = config.cache, config.cache.page_size
    one_sequence = -(-length // page_size)
    if options.cache_pages:
        pages, room = options.cache_pages, free
    else:
        room = min(free, options.cache_bytes or (CPU_CACHE_BYTES if jax.default_backend() == "cpu" else free))
        pages = max(one_sequence, min(one_sequence * config.scheduler.max_num_seqs, room // page_bytes))
    if pages * page_bytes > room:
        fits = room // page_bytes * page_size
        raise CapacityError(
            f"The KV cache needs {pages * page_bytes:,} bytes per device and has {room:,}. Set --max-model-len to "
            f"{fits} or less, raise --cache-bytes, lower --cache-pages, or use more devices (--tensor).",
            needed_bytes=pages * page_bytes,
            available_bytes=room,
        )
    return pages
