"""GGUF files: metadata, tensor table and tensors, with every length checked against the file before it is used.

The header is parsed here and not by the gguf package, which trusts the file and takes seconds for a vocabulary; the
package gives the kinds' block sizes and their dequantisation.
"""

import hashlib
import math
import os
import re
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from tpu_infer.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from tpu_infer.models.config import from_gguf_metadata
from tpu_infer.weights.checkpoint import TensorInfo, check

VERSIONS = (2, 3)
_PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
KINDS = (*_PLAIN, *_QUANTISED)

# Real headers hold a few ten thousand strings; the bounds keep a hostile one from filling the memory.
_MAX_HEADER_BYTES = 128 << 20
_MAX_ARRAY = 1 << 22
_MAX_ENTRIES = 1 << 16
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
_ROW_ELEMENTS = 16384

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: _U32,
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: _U64,
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]*)\.([a-z_]+)\.(weight|bias)")
_TOP_PATTERN = re.compile(r"([a-z_]+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class _Stored:
    """A tensor's place: `start` is its first byte in the file."""

    info: TensorInfo
    kind: GGMLQuantizationType
    start: int


class GGUFCheckpoint:
    """An open GGUF file of the Llama family; see weights.checkpoint.Checkpoint.

    `metadata` has the file's keys as plain Python values (numbers, strings, lists), for the tokenizer.
    Raises ModelNotFoundError, ModelFileError (truncated, foreign, contradictory) and UnsupportedModelError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        header = _Header(memoryview(self._data), path)
        self.metadata = header.metadata
        self.digest = hashlib.sha256(self._data[: header.data_start].tobytes() + _U64.pack(self._data.size)).hexdigest()
        by_gguf_name = {tensor.info.name: tensor for tensor in header.tensors}
        self.config = from_gguf_metadata(
            self.metadata,
            by_gguf_name,
            name=path.stem,
            source=str(path),
            rope_factors=self._rope_factors(by_gguf_name.get(_ROPE_FACTORS)),
        )
        self._stored = _renamed(header.tensors, path)
        self.tensors = {name: tensor.info for name, tensor in self._stored.items()}
        self.total_bytes = sum(info.nbytes for info in self.tensors.values())
        check(self)

    def read(self, name: str) -> np.ndarray:
        """One tensor by its Hugging Face name: a read-only view where it is stored plain, else new float32."""
        array = self._array(self._stored[name])
        if name.endswith((".q_proj.weight", ".q_proj.bias")):
            return _halves(array, self.config.query_heads)
        if name.endswith((".k_proj.weight", ".k_proj.bias")):
            return _halves(array, self.config.kv_heads)
        return array

    def close(self) -> None:
        """Let go of the file; it is unmapped when the last array read from it is gone."""
        self._data = np.empty(0, np.uint8)
        self._stored = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _array(self, tensor: _Stored) -> np.ndarray:
        raw = self._data[tensor.start : tensor.start + tensor.info.nbytes]
        plain = _PLAIN.get(tensor.info.dtype)
        if plain is not None:
            return raw.view(plain).reshape(tensor.info.shape)
        return dequantize(raw.reshape(_wide_rows(tensor), -1), tensor.kind).reshape(tensor.info.shape)

    def _rope_factors(self, tensor: _Stored | None) -> tuple[float, ...] | None:
        return None if tensor is None else tuple(self._array(tensor).astype(np.float32).ravel().tolist())


class _Header:
    """Metadata and tensor table, read front to back; no byte is looked at past `limit`."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self._data = data
        self._path = path
        self._limit = min(len(data), _MAX_HEADER_BYTES)
        self._at = 0
        tensor_count, metadata_count = self._preamble()
        self.metadata = self._metadata(metadata_count)
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = self._alignment()
        self.data_start = -(-self._at // alignment) * alignment
        self.tensors = [self._placed(*entry, alignment) for entry in entries]
        self._check_overlap()

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._path}: {problem}.")

    def _preamble(self) -> tuple[int, int]:
        magic = bytes(self._data[:4])
        if magic != b"GGUF":
            raise self.fail(f"not a GGUF file: it starts with {magic!r}")
        self._at = 4
        version = self._unpack(_U32)
        if version and version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{self._path}: a big-endian GGUF file; known: little-endian.")
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{self._path}: GGUF version {version} is not supported; known: {', '.join(map(str, VERSIONS))}."
            )
        counts = self._unpack(_U64), self._unpack(_U64)
        for count, what in zip(counts, ("tensors", "metadata entries"), strict=True):
            if count > _MAX_ENTRIES:
                raise self.fail(f"it claims {count} {what}; at most {_MAX_ENTRIES} are allowed")
        return counts

    def _take(self, size: int) -> int:
        """Step over `size` bytes and give the place where they start."""
        start = self._at
        if size > self._limit - start:
            raise self.fail(
                f"the header ends after byte {self._limit}, {size} bytes were expected at byte {start}: "
                "the file is truncated or damaged; fetch it again"
            )
        self._at = start + size
        return start

    def _unpack(self, layout: struct.Struct) -> Any:
        return layout.unpack_from(self._data, self._take(layout.size))[0]

    def _text(self) -> str:
        size = self._unpack(_U64)
        start = self._take(size)
        try:
            return str(self._data[start : start + size], "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"the string at byte {start} is not UTF-8") from None

    def _metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self._text()
            if key in values:
                raise self.fail(f"metadata key {reprlib.repr(key)} stands there twice")
            values[key] = self._value(self._value_type(key), key)
        return values

    def _value_type(self, key: str) -> GGUFValueType:
        code = self._unpack(_U32)
        try:
            return GGUFValueType(code)
        except ValueError:
            raise self.fail(f"metadata key {reprlib.repr(key)} has the unknown type {code}") from None

    def _value(self, kind: GGUFValueType, key: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._unpack(_SCALARS[kind])
        items = self._value_type(key)
        count = self._unpack(_U64)
        if items == GGUFValueType.ARRAY or count > _MAX_ARRAY:
            raise self.fail(
                f"metadata key {reprlib.repr(key)} is an array of arrays or of more than {_MAX_ARRAY} values"
            )
        if items == GGUFValueType.STRING:
            return [self._text() for _ in range(count)]
        layout = _SCALARS[items]
        start = self._take(count * layout.size)
        return [item for (item,) in layout.iter_unpack(self._data[start : self._at])]

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or value < 1 or value & (value - 1) or value > _MAX_HEADER_BYTES:
            raise self.fail(f"general.alignment must be a power of two, got {reprlib.repr(value)}")
        return value

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, row-major shape, kind code, offset; nothing but the counts is checked yet."""
        name = self._text()
        dims = self._unpack(_U32)
        if not 1 <= dims <= _MAX_DIMS:
            raise self.fail(f"tensor {reprlib.repr(name)} has {dims} dimensions; 1 to {_MAX_DIMS} are allowed")
        shape = tuple(self._unpack(_U64) for _ in range(dims))[::-1]
        return name, shape, self._unpack(_U32), self._unpack(_U64)

    def _placed(self, name: str, shape: tuple[int, ...], code: int, offset: int, alignment: int) -> _Stored:
        kind = self._kind(name, code)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        if not elements or shape[-1] % block:
            raise self.fail(f"tensor {reprlib.repr(name)} of kind {kind.name} cannot have the shape {list(shape)}")
        nbytes = elements // block * block_bytes
        start = self.data_start + offset
        if offset % alignment:
            raise self.fail(f"tensor {reprlib.repr(name)} stands at {offset}, no multiple of {alignment}")
        if start + nbytes > len(self._data):
            raise self.fail(
                f"tensor {reprlib.repr(name)} needs bytes {start} to {start + nbytes}, the file has {len(self._data)}: "
                "it is truncated or damaged; fetch it again"
            )
        return _Stored(TensorInfo(name, shape, kind.name, nbytes), kind, start)

    def _kind(self, name: str, code: int) -> GGMLQuantizationType:
        known = ", ".join(KINDS)
        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise UnsupportedModelError(
                f"{self._path}: tensor {reprlib.repr(name)} has the unknown kind {code}; known: {known}."
            ) from None
        if kind.name not in KINDS:
            raise UnsupportedModelError(
                f"{self._path}: tensor {reprlib.repr(name)} has the kind {kind.name}; known: {known}."
            )
        return kind

    def _check_overlap(self) -> None:
        end = 0
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise self.fail(f"tensor {reprlib.repr(tensor.info.name)} overlaps another")
            end = tensor.start + tensor.info.nbytes


def _map(path: Path) -> np.ndarray:
    """The file's bytes, mapped read-only: uint8 [size]."""
    if not os.path.exists(path):
        raise ModelNotFoundError(f"{path}: no such file.")
    if not os.path.isfile(path):
        raise ModelFileError(f"{path}: not a GGUF file but a directory or a device.")
    try:
        return np.asarray(np.memmap(path, np.uint8, "r"))
    except ValueError:
        raise ModelFileError(f"{path}: the file is empty; fetch it again.") from None
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}.") from error


def _wide_rows(tensor: _Stored) -> int:
    """How many rows to cut a tensor's blocks into: dequantize takes 16 at a time, which is slow for short rows."""
    block, _ = GGML_QUANT_SIZES[tensor.kind]
    blocks = math.prod(tensor.info.shape) // block
    return math.gcd(blocks, 1 << (blocks * block // _ROW_ELEMENTS).bit_length())


def _renamed(tensors: list[_Stored], path: Path) -> dict[str, _Stored]:
    """The tensors under their Hugging Face names; names that have none are kept, for the check to find."""
    renamed: dict[str, _Stored] = {}
    for tensor in tensors:
        info = tensor.info
        name = _hf_name(info.name)
        if name in renamed:
            raise ModelFileError(f"{path}: tensor {reprlib.repr(info.name)} stands there twice.")
        renamed[name] = _Stored(TensorInfo(name, info.shape, info.dtype, info.nbytes), tensor.kind, tensor.start)
    return renamed


def _hf_name(name: str) -> str:
    layer = _LAYER_PATTERN.fullmatch(name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    top = _TOP_PATTERN.fullmatch(name)
    if top and top[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[top[1]]}.{top[2]}"
    return name


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of Q's and K's rows: partners in rotation are neighbours there, half a head apart here."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
