"""Tokens per second on a CPU: the service against peers on the same weights and prompts (`python -m bench.cpu`).

Every engine is a child process that loads once per dtype; rounds go through the engines in turn, since a shared machine
drifts: only the ratios within one run mean anything. Each measurement sends fresh random prompts, the same to all
engines, first for one new token and then others for all of them:

    prefill tokens/s = rows * prompt / seconds(1 new)
    decode tokens/s  = rows * (new - 1) / (seconds(all new) - seconds(1 new))

The table's "elsewhere" says how many CPUs other processes kept busy meanwhile: above 0.1 the figures are worth little.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from safetensors.numpy import save_file

from bench.checkpoint import Checkpoint, read_checkpoint

REPO = Path(__file__).resolve().parent.parent
TORCH_ENV = REPO / ".cache" / "bench-torch"
TORCH_PACKAGES = ("torch==2.13.0", "transformers==5.24.0", "safetensors", "numpy")
ENGINES = ("ours", "bare", "transformers")
MODULES = {"ours": "bench.ours", "bare": "bench.bare_jax", "transformers": "bench.hf_transformers"}
FIRST_ORDINARY_ID = 1000  # ids below may be special tokens
TARGETS = {
    ("bare", "float32"): {1: 0.75, 8: 0.75, 32: 0.75},
    ("bare", "bfloat16"): {1: 0.75, 8: 0.75, 32: 0.75},
    ("transformers", "float32"): {1: 2.0, 8: 2.0, 32: 1.8},
    ("transformers", "bfloat16"): {1: 1.3, 8: 2.0, 32: 2.5},
}


class ChildError(Exception):
    """A child process ended or answered what it should not."""


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    dtype: str
    rows: int


@dataclass(frozen=True)
class Timing:
    """What one engine did in one round of one case."""

    prefill: float  # prompt tokens per second, over all rows
    decode: float  # new tokens per second, over all rows
    first_ids: tuple[int, ...]  # the first new token of each row
    elsewhere: float  # CPUs that other processes kept busy meanwhile, on average


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: Path | None
    rounds: int
    rows: tuple[int, ...]
    dtypes: tuple[str, ...]
    engines: tuple[str, ...]
    prompt: int
    new: int
    threads: int
    json: Path | None


class Child:
    """An engine in a process of its own (bench/child.py)."""

    def __init__(self, engine: str, process: subprocess.Popen[str]) -> None:
        self._engine = engine
        self._process = process
        self._read()

    def run(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        """Seconds and the new ids of each prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if [len(tokens) for tokens in answer["tokens"]] != [new] * len(prompts):
            raise ChildError(f"{self._engine} did not give {new} tokens for each of {len(prompts)} prompts")
        return answer["seconds"], answer["tokens"]

    def cpu_seconds(self) -> float:
        """CPU time that the engine has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(f"the {self._engine} child ended with status {self._process.wait()}; see its output above")
        return json.loads(line)


@contextmanager
def start_child(engine: str, python: Path, model: Path, dtype: str, options: Options) -> Iterator[Child]:
    """Start an engine's child, wait until it has loaded, and end it on leaving."""
    command = [str(python), "-m", MODULES[engine], "--model", str(model), "--dtype", dtype]
    command += ["--max-rows", str(max(options.rows)), "--max-model-len", str(options.prompt + options.new)]
    command += ["--threads", str(options.threads)]
    process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Child(engine, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def builtin_model() -> Path:
    """The built-in model's file, fetched by the service's own command where it is not there yet."""
    command = [sys.executable, "-m", "tpu_infer.cli", "fetch"]
    output = subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Path(output.strip())


def torch_python() -> Path | None:
    """The interpreter of an environment with torch and transformers, made on first use; None if it cannot be."""
    python, complete = TORCH_ENV / "bin" / "python", TORCH_ENV / "complete"
    if complete.exists():
        return python
    base = shutil.which("python3.11")
    if base is None:
        print("transformers: skipped, there is no python3.11 to make its environment with")
        return None
    print(f"transformers: making an environment in {TORCH_ENV.relative_to(REPO)}", flush=True)
    try:
        subprocess.run([base, "-m", "venv", "--clear", str(TORCH_ENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *TORCH_PACKAGES], check=True)
    except subprocess.CalledProcessError as error:
        print(f"transformers: skipped, its environment cannot be made ({error})")
        return None
    complete.touch()
    return python


def write_torch_model(checkpoint: Checkpoint, source: Path) -> Path:
    """The same weights, as a directory that transformers loads; written once for each version of the source file."""
    stat = source.stat()
    directory = TORCH_ENV / "models" / f"{source.stem}-{stat.st_size}-{stat.st_mtime_ns}"
    config = directory / "config.json"
    if not config.exists():
        directory.mkdir(parents=True, exist_ok=True)
        save_file(checkpoint.tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config.write_text(json.dumps(checkpoint.shape.to_config()))
    return directory


def make_prompts(rng: np.random.Generator, rows: int, length: int, vocab: int) -> list[list[int]]:
    return rng.integers(FIRST_ORDINARY_ID, vocab, (rows, length)).tolist()


def busy_cpu_seconds() -> float:
    """CPU time that all processes have used since the machine started."""
    times = psutil.cpu_times()
    return times.user + times.system


def time_child(child: Child, first: list[list[int]], rest: list[list[int]], new: int) -> Timing:
    """Time one new token on `first`, `new` of them on `rest`: other prompts, so that no prefix cache helps."""
    rows, prompt = len(first), len(first[0])
    others = busy_cpu_seconds() - child.cpu_seconds()
    short, tokens = child.run(first, 1)
    long, _ = child.run(rest, new)
    others = busy_cpu_seconds() - child.cpu_seconds() - others
    return Timing(
        prefill=rows * prompt / short,
        decode=rows * (new - 1) / (long - short),
        first_ids=tuple(ids[0] for ids in tokens),
        elsewhere=max(0.0, others / (short + long)),
    )


def measure_dtype(
    options: Options, dtype: str, pythons: dict[str, Path], models: dict[str, Path], vocab: int
) -> dict[Case, dict[str, list[Timing]]]:
    """All rounds of one dtype: by case and engine, one timing for each round."""
    rng = np.random.default_rng(0)
    results: dict[Case, dict[str, list[Timing]]] = {
        Case(dtype, rows): {engine: [] for engine in pythons} for rows in options.rows
    }
    with ExitStack() as stack:
        children = {
            engine: stack.enter_context(start_child(engine, python, models[engine], dtype, options))
            for engine, python in pythons.items()
        }
        for rows in options.rows:  # compile and warm up
            for child in children.values():
                child.run(make_prompts(rng, rows, options.prompt, vocab), 3)
        for number in range(options.rounds):
            for case, timings in results.items():
                first, rest = (make_prompts(rng, case.rows, options.prompt, vocab) for _ in range(2))
                for engine, child in children.items():
                    timings[engine].append(time_child(child, first, rest, options.new))
                rates = ", ".join(f"{engine} {timings[engine][-1].decode:.1f}" for engine in children)
                print(f"round {number + 1}: {dtype}, {case.rows} rows: decode {rates}", flush=True)
    return results


def ratios(mine: list[Timing], theirs: list[Timing]) -> list[float]:
    """Decode speed over a peer's, round by round."""
    return [a.decode / b.decode for a, b in zip(mine, theirs, strict=True)]


def agreement(mine: list[Timing], theirs: list[Timing]) -> float:
    """The share of prompts on which two engines choose the same first token."""
    pairs = [pair for a, b in zip(mine, theirs, strict=True) for pair in zip(a.first_ids, b.first_ids, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def summarise(results: dict[Case, dict[str, list[Timing]]], base: str) -> list[dict]:
    """One record for each case and engine: medians, and for all but `base` its speed over theirs."""
    records = []
    for case, timings in results.items():
        for engine, rounds in timings.items():
            record = asdict(case) | {
                "engine": engine,
                "decode_tokens_per_s": statistics.median(timing.decode for timing in rounds),
                "prefill_tokens_per_s": statistics.median(timing.prefill for timing in rounds),
                "cpus_busy_elsewhere": statistics.median(timing.elsewhere for timing in rounds),
            }
            if engine != base:
                record["ratio"] = statistics.median(ratios(timings[base], rounds))
                record["same_first_token"] = agreement(timings[base], rounds)
                record["target"] = TARGETS[engine, case.dtype].get(case.rows) if base == "ours" else None
            records.append(record)
    return records


def format_record(record: dict) -> str:
    line = f"{record['dtype']:<9} {record['rows']:>4} {record['engine']:<13}"
    line += f"{record['decode_tokens_per_s']:>9.1f} {record['prefill_tokens_per_s']:>10.1f}"
    line += f" {record['cpus_busy_elsewhere']:>9.2f}"
    if "ratio" not in record:
        return line
    ratio, target = record["ratio"], record["target"]
    verdict = "" if target is None else f">= {target:.2f} {'met' if ratio >= target else 'MISSED'}"
    return f"{line} {record['same_first_token']:>10.0%} {ratio:>9.2f} {verdict}"


def print_table(records: list[dict], base: str) -> None:
    title = (
        f"{'dtype':<9} {'rows':>4} {'engine':<13}{'decode/s':>9} {'prefill/s':>10} {'elsewhere':>9} {'same 1st':>10}"
    )
    print(f"\n{title} {base + '/it':>9} target")
    for record in records:
        print(format_record(record))


def print_unmeasured() -> None:
    """Peers that this script has no child for, and whether they are here to be measured by their own tools."""
    llama = shutil.which("llama-bench") or importlib.util.find_spec("llama_cpp")
    for peer, found in (("llama.cpp", llama), ("vLLM", importlib.util.find_spec("vllm"))):
        print(f"{peer}: {'installed, but not measured by this script' if found else 'not installed, not measured'}")


def parse_options() -> Options:
    """Read the command line; the model may come from the environment instead."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    def words(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu", description="Tokens per second on a CPU, against peers."
    )
    parser.add_argument("--model", type=Path, help="a GGUF file of a Llama; default: the built-in model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=numbers, default=(1, 8, 32))
    parser.add_argument("--dtypes", type=words, default=("float32", "bfloat16"))
    parser.add_argument("--engines", type=words, default=ENGINES, help="the first is compared to the others")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens generated for each prompt")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for torch")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = Options(**vars(parser.parse_args()))
    unknown = set(options.engines) - set(ENGINES)
    if unknown:
        parser.error(f"unknown engines {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    return options


def main() -> int:
    """Run the benchmark; the status is 1 if a target was missed."""
    options = parse_options()
    model = options.model or builtin_model()
    checkpoint = read_checkpoint(model)
    pythons = {engine: Path(sys.executable) for engine in options.engines}
    models = dict.fromkeys(options.engines, model)
    if "transformers" in pythons:
        python = torch_python()
        if python is None:
            del pythons["transformers"]
        else:
            pythons["transformers"], models["transformers"] = python, write_torch_model(checkpoint, model)
    results: dict[Case, dict[str, list[Timing]]] = {}
    for dtype in options.dtypes:
        results |= measure_dtype(options, dtype, pythons, models, checkpoint.shape.vocab_size)
    base = next(iter(pythons))
    records = summarise(results, base)
    print_table(records, base)
    print_unmeasured()
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return int(any(record.get("target") and record["ratio"] < record["target"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
