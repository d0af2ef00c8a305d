"""Tiny random models of any configuration, held in memory."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from tpu_infer.models.config import LayerGroup, LayerKind, ModelConfig, RopeConfig
from tpu_infer.weights.checkpoint import TensorInfo, expected_tensors

PLAIN = ModelConfig(
    name="tiny",
    architecture="llama",
    vocab_size=64,
    width=32,
    hidden=64,
    layers=2,
    query_heads=8,
    kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    rope=RopeConfig(10_000.0),
    context_length=256,
    tied_embeddings=False,
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    sliding_window=None,
    bos_id=None,
    eos_ids=(),
    layer_groups=(LayerGroup(2, (LayerKind(),)),),
)


def config(**changes: Any) -> ModelConfig:
    """The plain model with other settings; `layers` follows from `layer_groups`."""
    changed = replace(PLAIN, **changes)
    return replace(changed, layers=sum(group.repeats * len(group.pattern) for group in changed.layer_groups))


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights under their Hugging Face names, of sizes that keep activations near 1 and logits apart."""
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in expected_tensors(config).items():
        values = random.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name not in ("model.embed_tokens.weight", "lm_head.weight"):
            values = values * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        tensors[name] = values.astype(np.float32)
    return tensors


class MemoryCheckpoint:
    """A Checkpoint whose tensors are at hand."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> None:
        self.path = Path("memory")
        self.config = config
        self.arrays = dict(tensors)
        self.tensors = {name: TensorInfo(name, array.shape, "F32", array.nbytes) for name, array in tensors.items()}
        self.total_bytes = sum(info.nbytes for info in self.tensors.values())
        self.digest = ""

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None: ...
