"""The command line. Options come from config.py, so that every flag, default and help text stands in one place."""

import asyncio
import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tpu_infer.config import Config, config_file, load_config, options
from tpu_infer.errors import TpuInferError
from tpu_infer.llm import Service, start_service
from tpu_infer.types import Request, SamplingParams
from tpu_infer.weights.hub import default_cache_dir, resolve

app = typer.Typer(help="LLM inference on Cloud TPU, and on a CPU.", no_args_is_help=True, add_completion=False)
notes = Console(stderr=True, highlight=False)

CHAT_TOKENS = 512
INTERRUPTED = 130

_CONFIG_HELP = "TOML file, or the name of one that ships (default, laptop); flags win"
# `model` is a flag of the commands' own; the others these commands, which run one sequence, decide for themselves.
_HIDDEN = ("model", "max_num_seqs", "logprobs")


class Bars:
    """Progress of the long parts of a start, on standard error: bytes, programs, seconds."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, phase: str, done: int, total: int | None) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=total, amount="")
        amount = f"{done:,}" + (f" of {total:,}" if total else "")
        self._progress.update(self._tasks[phase], completed=done, total=total, amount=amount)


@contextmanager
def progress_bars() -> Iterator[Bars]:
    """Bars that vanish when the block is left."""
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=notes, transient=True) as progress:
        yield Bars(progress)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every option of config.py; it gets the resulting Config as `config`."""
    signature = inspect.signature(command)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "config"]
    added = [
        inspect.Parameter(
            "config_file",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option("--config", help=_CONFIG_HELP)],
        ),
        *(_option_parameter(part, option) for part, option in options() if option.name not in _HIDDEN),
        inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
    ]

    def run(**values: Any) -> None:
        ctx: typer.Context = values.pop("ctx")
        file = values.pop("config_file")
        names = [option.name for _, option in options() if option.name in values]
        given = {name: values.pop(name) for name in names if _on_command_line(ctx, name)}
        values = {name: value for name, value in values.items() if name not in names}
        command(**values, config=load_config(config_file(file) if file else None, given))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + added
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option_parameter(part: str, option: Any) -> inspect.Parameter:
    flag = "--" + option.name.replace("_", "-")
    flags = f"{flag}/--no-{flag[2:]}" if isinstance(option.default, bool) else flag
    info = typer.Option(flags, help=option.metadata["help"], rich_help_panel=f"{part} options", show_default=True)
    kind = type(option.default)
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=Annotated[kind, info]
    )


def _on_command_line(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _single(config: Config, model: str | None) -> Config:
    """The configuration of a command that runs one sequence and shows no log-probabilities: fewer programs."""
    chosen = replace(config.model, model=model) if model else config.model
    return replace(
        config,
        model=chosen,
        scheduler=replace(config.scheduler, max_num_seqs=1),
        compile=replace(config.compile, logprobs=False),
    )


ModelFlag = Annotated[
    str | None, typer.Option("--model", help="GGUF file, model directory, Hugging Face name; default: the built-in one")
]


@app.command()
@with_options
def generate(
    prompt: Annotated[str, typer.Argument(help="text to continue")],
    config: Config,
    model: ModelFlag = None,
    max_tokens: Annotated[int, typer.Option(help="tokens to generate at most")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="keep the likeliest tokens whose mass reaches this")] = 1.0,
    top_k: Annotated[int, typer.Option(help="keep this many of the likeliest tokens; 0: all")] = 0,
    min_p: Annotated[float, typer.Option(help="keep tokens at least this times as likely as the likeliest")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="makes a sampled answer repeatable")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="send the prompt as a user's message")] = False,
) -> None:
    """Continue one prompt, streaming to the terminal. One sequence runs, whatever max_num_seqs a file names."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    started = time.perf_counter()
    with running_service(_single(config, model)) as service:
        ids = service.tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else None
        answer = asyncio.run(stream_answer(service, Request(id="0", prompt=ids or prompt, params=params)))
        phases = service.phases | {"first token": answer.first_token_seconds}
        total = answer.first_token_at - started
    notes.print("  ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items()), style="dim")
    notes.print(f"to first token {total:.1f} s; {answer.rate}", style="dim")


@app.command()
@with_options
def serve(config: Config, model: ModelFlag = None) -> None:
    """Chat at a prompt on the terminal; Ctrl-D or Ctrl-C ends. One sequence runs, whatever a file names."""
    with running_service(_single(config, model)) as service:
        limits = service.executor.limits
        name = service.checkpoint.config.name
        notes.print(
            f"{name}: {limits.pages[0]:,} pages of {limits.page_size} tokens, context {limits.max_model_len:,}. "
            f"/clear forgets, Ctrl-D ends.",
            markup=False,
        )
        # Lines are read on the main thread, between runs of one loop: a thread that reads could not be interrupted.
        with asyncio.Runner() as runner:
            converse(service, runner)


@app.command()
def fetch(
    model: Annotated[
        str | None, typer.Argument(help="built-in or Hugging Face name; default: the built-in one")
    ] = None,
    cache_dir: Annotated[str, typer.Option(help="where models are kept; empty: the user's cache directory")] = "",
) -> None:
    """Download a model, so that later starts need no network."""
    with progress_bars() as bars:
        path = resolve(model, cache_dir=Path(cache_dir) if cache_dir else default_cache_dir(), progress=bars)
    typer.echo(path)


class Answer:
    """Times of one streamed answer."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first_token_at = self.ended = self.started
        self.tokens = 0
        self.text = ""

    @property
    def first_token_seconds(self) -> float:
        return self.first_token_at - self.started

    @property
    def rate(self) -> str:
        seconds = self.ended - self.first_token_at
        if self.tokens < 2 or seconds <= 0:
            return f"{self.tokens} token"
        return f"{self.tokens} tokens, {(self.tokens - 1) / seconds:.1f} a second"


async def stream_answer(service: Service, request: Request) -> Answer:
    """Print an answer as it comes."""
    answer = Answer()
    async for delta in service.frontend.stream(request):
        if not answer.tokens:
            answer.first_token_at = time.perf_counter()
        answer.tokens += len(delta.token_ids)
        answer.text += delta.text
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    answer.ended = time.perf_counter()
    sys.stdout.write("\n")
    return answer


def converse(service: Service, runner: asyncio.Runner) -> None:
    """A conversation at the terminal: one user, one model."""
    messages: list[dict[str, Any]] = []
    number = 0
    while (line := _ask()) is not None:
        if line.strip() == "/clear":
            messages.clear()
        if not line.strip() or line.strip() == "/clear":
            continue
        messages.append({"role": "user", "content": line})
        number += 1
        try:
            ids = service.tokenizer.encode_chat(messages)
            room = service.executor.limits.max_model_len - len(ids)
            params = SamplingParams(max_tokens=max(1, min(CHAT_TOKENS, room)), temperature=0.7, top_p=0.9)
            request = Request(id=str(number), prompt=ids, params=params)
            answer = runner.run(stream_answer(service, request))
        except TpuInferError as error:
            notes.print(f"{error} (/clear starts anew)", style="red", markup=False)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer.text})


def _ask() -> str | None:
    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


@contextmanager
def running_service(config: Config) -> Iterator[Service]:
    """A started service, stopped when the block is left."""
    with progress_bars() as bars:
        service = start_service(config, bars)
    try:
        yield service
    finally:
        service.close()


def main() -> None:
    """The entry point: a user's error is one line and exit code 1, Ctrl-C is exit code 130."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except TpuInferError as error:
        notes.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        notes.print("interrupted", style="red")
        # Compiler threads cannot be stopped; leaving them be is safe, since nothing is written in place.
        threading.excepthook = lambda _: None
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
