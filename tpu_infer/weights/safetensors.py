"""Directories as Hugging Face lays them out: config.json beside model.safetensors or its indexed shards.

Nothing is ever unpickled and no code of a model directory is run.
"""

import hashlib
import json
import math
import os
import reprlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError, safe_open

from tpu_infer.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from tpu_infer.models.config import from_hf_config
from tpu_infer.weights.checkpoint import TensorInfo, check

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_JSON_BYTES = 64 << 20


class SafetensorsCheckpoint:
    """An open model directory of the Llama family; see weights.checkpoint.Checkpoint.

    Raises ModelNotFoundError, ModelFileError (missing, truncated, contradictory) and UnsupportedModelError.
    """

    def __init__(self, path: Path) -> None:
        if not os.path.isdir(path):
            raise ModelNotFoundError(f"{path}: no such directory.")
        self.path = path
        weight_map = _weight_map(path)
        self.config = from_hf_config(
            _read_json(path / "config.json"),
            name=path.name,
            source=str(path / "config.json"),
            generation_config=_read_json(path / "generation_config.json", optional=True),
        )
        with ExitStack() as stack:
            self._shards: dict[str, safe_open] = {}
            self.tensors: dict[str, TensorInfo] = {}
            for file, names in sorted(weight_map.items()):
                self._add(path / file, names, stack)
            self.digest = _digest(path, sorted(weight_map))
            self.total_bytes = sum(info.nbytes for info in self.tensors.values())
            check(self)
            self._open = stack.pop_all()

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype."""
        return self._shards[name].get_tensor(name)

    def close(self) -> None:
        """Close the files."""
        self._shards = {}
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _add(self, file: Path, listed: set[str], stack: ExitStack) -> None:
        """Open one shard and take its tensors in; `listed` are those that the index says it has."""
        shard = stack.enter_context(_open(file))
        names = set(shard.keys())
        if listed - names:
            raise ModelFileError(f"{file}: {_INDEX} lists {reprlib.repr(min(listed - names))} here, but it is not.")
        for name in sorted(names):
            if name in self._shards:
                raise ModelFileError(f"{file}: tensor {reprlib.repr(name)} is in another shard too.")
            self._shards[name] = shard
            self.tensors[name] = _info(file, name, shard)


def _weight_map(directory: Path) -> dict[str, set[str]]:
    """File name: the tensors that the index says are in it (none are said for a single file)."""
    if (directory / _SINGLE).exists():
        return {_SINGLE: set()}
    if (directory / _INDEX).exists():
        return _indexed(directory / _INDEX)
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{directory}: its weights are pickles ({pickles[0]}), which can run code when they are read; "
            "known: only safetensors and GGUF. Convert them, or use a safetensors copy of the model."
        )
    if any(directory.glob("*.gguf")):
        raise ModelFileError(f"{directory}: a directory of GGUF files; name the file itself.")
    raise ModelFileError(f"{directory}: neither {_SINGLE} nor {_INDEX} is there.")


def _indexed(index: Path) -> dict[str, set[str]]:
    entries = _read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise ModelFileError(f"{index}: weight_map must be an object that names each tensor's file.")
    files: dict[str, set[str]] = {}
    for tensor, file in entries.items():
        # A path would let a model's author have any file of the machine read.
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise ModelFileError(
                f"{index}: {reprlib.repr(file)} is not the name of a .safetensors file in the same directory."
            )
        files.setdefault(file, set()).add(tensor)
    return files


def _open(file: Path) -> safe_open:
    if not file.is_file():
        raise ModelFileError(f"{file}: the file is missing; fetch the model again.")
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ModelFileError(f"{file}: not a whole safetensors file ({error}); fetch it again.") from error
    except OSError as error:
        raise ModelFileError(f"{file}: cannot be read: {error}.") from error


def _info(file: Path, name: str, shard: safe_open) -> TensorInfo:
    view = shard.get_slice(name)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if dtype not in _ITEM_BYTES:
        raise UnsupportedModelError(
            f"{file}: tensor {reprlib.repr(name)} has kind {dtype}, which is not supported; "
            f"known: {', '.join(_ITEM_BYTES)}."
        )
    return TensorInfo(name, shape, dtype, math.prod(shape) * _ITEM_BYTES[dtype])


def _read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object; an empty one for an optional file that is not there."""
    if not file.is_file():
        if optional:
            return {}
        raise ModelFileError(f"{file}: the file is missing; a model directory needs it.")
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise ModelFileError(f"{file}: larger than {_MAX_JSON_BYTES} bytes.")
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{file}: not valid JSON ({error}).") from error
    except OSError as error:
        raise ModelFileError(f"{file}: cannot be read: {error.strerror}.") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{file}: must hold a JSON object.")
    return value


def _digest(directory: Path, shards: list[str]) -> str:
    """SHA-256 over config.json and each shard's name, size and header; the shards were opened and are sound."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for name in shards:
        with (directory / name).open("rb") as file:
            length = file.read(8)
            digest.update(f"{name} {(directory / name).stat().st_size} ".encode())
            digest.update(length + file.read(int.from_bytes(length, "little")))
    return digest.hexdigest()
