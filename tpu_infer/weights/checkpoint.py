"""What every checkpoint reader offers, and the check that a checkpoint holds exactly its model's tensors.

Tensors go by their Hugging Face names ("model.layers.0.self_attn.q_proj.weight"), shapes are row-major, matrices are
[outputs, inputs], and the rotary embedding rotates halves, whatever the file's own conventions.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from tpu_infer.errors import ModelFileError
from tpu_infer.models.config import ModelConfig

# Tables that a program works out by itself; older converters stored them.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rope_freqs.weight")
_LISTED = 3


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as it is stored; `dtype` is spelt as in its file: F32, F16, BF16, Q4_1, ..."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Checkpoint(Protocol):
    """An open checkpoint, also a context manager. `read` may be called from several threads at once."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all tensors."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the metadata, the tensors' names, kinds, shapes and places, and the sizes of the files.

        The weights themselves are not in it: two fine-tunes of one model may share it.
        """
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype (float32, float16, bfloat16); quantised kinds come as float32.

        Possibly a read-only view of the mapped file. KeyError for a name that `tensors` lacks.
        """
        ...

    def close(self) -> None:
        """Let go of the files; arrays that were read stay valid. Nothing can be read afterwards."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors that the model needs."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.width),
        "model.norm.weight": (config.width,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.width)
    layer = _layer_tensors(config)
    for index in range(config.layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def check(checkpoint: Checkpoint) -> None:
    """Raise ModelFileError unless the checkpoint holds its model's tensors, in the right shapes, and no others."""
    expected = expected_tensors(checkpoint.config)
    present = checkpoint.tensors
    missing = [f"{name} {_dims(shape)}" for name, shape in expected.items() if name not in present]
    if missing:
        raise ModelFileError(f"{checkpoint.path}: missing tensors: {_listing(missing)}.")
    for name, shape in expected.items():
        if present[name].shape != shape:
            raise ModelFileError(
                f"{checkpoint.path}: tensor {name} has shape {_dims(present[name].shape)}; "
                f"the model's configuration asks for {_dims(shape)}."
            )
    extra = [reprlib.repr(name) for name in present if name not in expected and not _ignored(name, checkpoint.config)]
    if extra:
        raise ModelFileError(f"{checkpoint.path}: tensors that the model does not have: {_listing(extra)}.")


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, hidden = config.width, config.hidden
    query, kv = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (query, width, config.attention_bias),
        "self_attn.k_proj": (kv, width, config.attention_bias),
        "self_attn.v_proj": (kv, width, config.attention_bias),
        "self_attn.o_proj": (width, query, config.attention_output_bias),
        "mlp.gate_proj": (hidden, width, config.mlp_bias),
        "mlp.up_proj": (hidden, width, config.mlp_bias),
        "mlp.down_proj": (width, hidden, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    for name, (outputs, inputs, bias) in matrices.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
    return shapes


def _ignored(name: str, config: ModelConfig) -> bool:
    # Some writers store the tied head a second time.
    return name.endswith(_IGNORED_SUFFIXES) or (config.tied_embeddings and name == "lm_head.weight")


def _dims(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _listing(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
