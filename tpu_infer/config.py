"""Configuration: one small frozen dataclass per part, read from one TOML file and from flags, which win.

A key is "part.name", its flag `--name`. Every field's default and help stand here once.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from tpu_infer.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
LAYER_FORMS = ("auto", "scan", "unroll")
MAX_SIZE = 2**31 - 1


def _option(default: Any, text: str, *, low: int = 0, high: int = MAX_SIZE, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and in what numbers."""

    model: str = _option("", "GGUF file, model directory, Hugging Face name or built-in name; empty: the built-in one")
    dtype: str = _option("auto", "weights and activations; auto: float32 on a CPU, else bfloat16", choices=DTYPES)
    layers: str = _option("auto", "how layers are compiled; auto: by the device's kind", choices=LAYER_FORMS)


@dataclass(frozen=True)
class CacheOptions:
    """The paged KV cache."""

    page_size: int = _option(32, "tokens in a page", low=1, high=4096)
    cache_pages: int = _option(0, "pages; 0: as many as all rows can use and cache_bytes holds")
    cache_bytes: int = _option(0, "bytes per device that the cache may take; 0: by the memory there is", high=2**60)


@dataclass(frozen=True)
class SchedulerOptions:
    """What one step may hold."""

    max_num_seqs: int = _option(32, "sequences that run at once", low=1, high=4096)
    max_num_batched_tokens: int = _option(512, "tokens computed in one step at most", low=1, high=2**20)
    max_model_len: int = _option(0, "prompt and answer tokens of one sequence; 0: the model's context")
    prefill_chunk: int = _option(0, "prompt tokens of one sequence in a step; 0: what the step has room for")


@dataclass(frozen=True)
class MeshOptions:
    """How many devices share the model."""

    tensor: int = _option(1, "devices that each layer's heads and hidden width are split over", low=1, high=4096)


@dataclass(frozen=True)
class CompileOptions:
    """How programs are compiled."""

    logprobs: bool = _option(True, "compile the samplers that give log-probabilities")
    forbid_compiles: bool = _option(False, "fail, and not only count, when a program is compiled while serving")
    cache_dir: str = _option("", "models and compiled programs are kept here; empty: the user's cache directory")


@dataclass(frozen=True)
class Config:
    """Everything a service is started with."""

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    mesh: MeshOptions = MeshOptions()
    compile: CompileOptions = CompileOptions()


def options() -> Iterator[tuple[str, Field[Any]]]:
    """(part, field) of every option there is."""
    for part in fields(Config):
        defaults: Any = part.default
        for option in fields(defaults):
            yield part.name, option


def config_file(name: str) -> Path:
    """The file that --config names: a path, or the name of a table that ships with the package."""
    path = Path(name)
    if path.suffix == ".toml" or len(path.parts) > 1:
        return path
    shipped = files("tpu_infer.configs") / "serve"
    names = sorted(entry.name.removesuffix(".toml") for entry in shipped.iterdir() if entry.name.endswith(".toml"))
    if name not in names:
        raise ConfigError("config", f"{name!r} is neither a .toml file nor one of {', '.join(names)}.")
    return Path(str(shipped.joinpath(f"{name}.toml")))


def load_config(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Config:
    """Defaults, then the TOML file's tables, then flags (by option name). ConfigError names the key at fault."""
    config = Config()
    if file is not None:
        config = _with_tables(config, _read(file))
    parts = {option.name: part for part, option in options()}
    for name, value in (flags or {}).items():
        if name not in parts:
            raise ConfigError(name, f"is not an option; there are {', '.join(parts)}.")
        config = _with_option(config, parts[name], name, value)
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), f"is not TOML: {error}.") from None


def _with_tables(config: Config, tables: Mapping[str, Any]) -> Config:
    known = {part.name for part in fields(Config)}
    for part, table in tables.items():
        if part not in known or not isinstance(table, dict):
            raise ConfigError(part, f"is not a table; there are {', '.join(sorted(known))}.")
        for name, value in table.items():
            config = _with_option(config, part, name, value)
    return config


def _with_option(config: Config, part: str, name: str, value: Any) -> Config:
    before: dict[str, Any] = {item.name: item.default for item in fields(Config)}
    found = {option.name: option for option in fields(type(before[part]))}
    if name not in found:
        raise ConfigError(f"{part}.{name}", f"is not an option; {part} has {', '.join(found)}.")
    _check(f"{part}.{name}", value, get_type_hints(type(before[part]))[name], found[name].metadata)
    changed: Any = {part: replace(vars(config)[part], **{name: value})}
    return replace(config, **changed)


def _check(key: str, value: Any, kind: type, rules: Mapping[str, Any]) -> None:
    if type(value) is not kind:
        raise ConfigError(key, f"must be of type {kind.__name__}, got {value!r}.")
    if kind is int and not rules["low"] <= value <= rules["high"]:
        raise ConfigError(key, f"must be from {rules['low']} to {rules['high']}, got {value}.")
    if rules["choices"] and value not in rules["choices"]:
        raise ConfigError(key, f"must be one of {', '.join(rules['choices'])}, got {value!r}.")
