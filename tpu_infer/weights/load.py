"""Stream a checkpoint's tensors into the decoder's parameter tree, each placed on the mesh as soon as it is read."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_infer.mesh import sharding
from tpu_infer.models.decoder import AxesLeaf, DecoderSpec, Params
from tpu_infer.types import Progress
from tpu_infer.weights.checkpoint import Checkpoint

READERS = 2  # dequantising is NumPy work that lets go of the interpreter lock

_PLAIN: dict[tuple[str, ...], str] = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
    ("attention", "out_bias"): "self_attn.o_proj.bias",
    ("mlp", "down_bias"): "mlp.down_proj.bias",
}
_TOP: dict[tuple[str, ...], str] = {
    ("embedding",): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head",): "lm_head.weight",
}


def load_params(checkpoint: Checkpoint, spec: DecoderSpec, mesh: Mesh, progress: Progress) -> Params:
    """The parameter tree on the mesh. `progress` hears of parameter bytes placed."""
    _, shapes = spec.split
    flat, tree = jax.tree_util.tree_flatten_with_path(shapes)
    axes = jax.tree.leaves(spec.axes, is_leaf=lambda leaf: isinstance(leaf, AxesLeaf))
    total = sum(struct.size * struct.dtype.itemsize for _, struct in flat)
    source = _Source(checkpoint, spec)
    names = [tuple(key.key for key in path) for path, _ in flat]
    placed: list[jax.Array] = []
    done = 0
    progress("weights", 0, total)
    with ThreadPoolExecutor(READERS) as pool:
        for array, (_, struct), leaf in zip(_ahead(pool, source.read, names), flat, axes, strict=True):
            assert array.shape == struct.shape, (array.shape, struct.shape)
            placed.append(jax.device_put(array.astype(struct.dtype, copy=False), sharding(mesh, leaf.axes)))
            done += struct.size * struct.dtype.itemsize
            progress("weights", done, total)
    return jax.tree.unflatten(tree, placed)


def _ahead[T, U](pool: ThreadPoolExecutor, work: Callable[[T], U], items: list[T]) -> Iterator[U]:
    """Results in order, with no more than a few items read ahead of the consumer."""
    waiting = [pool.submit(work, item) for item in items[: 2 * READERS]]
    rest = iter(items[2 * READERS :])
    try:
        while waiting:
            result = waiting.pop(0).result()
            for item in rest:
                waiting.append(pool.submit(work, item))
                break
            yield result
    finally:
        for future in waiting:
            future.cancel()


class _Source:
    """Parameter leaves made from a checkpoint's tensors, on the host."""

    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec) -> None:
        self.checkpoint, self.spec, self.config = checkpoint, spec, spec.config
        self.kv_heads = spec.stored_kv_heads
        self.group = self.config.query_heads // self.kv_heads
        self.dtype = np.dtype(jax.numpy.dtype(spec.dtype))

    def read(self, path: tuple[Any, ...]) -> np.ndarray:
        """One leaf, in its final dtype and layout."""
        if path in _TOP:
            return self._tensor(_TOP[path])
        _, group, _, index, *name = path
        layers = self._layers(group, index)
        leaves = [self._layer_leaf(layer, tuple(name)) for layer in layers]
        return np.stack(leaves) if self.spec.form == "scan" else leaves[0]

    def _layers(self, group: int, index: int) -> range:
        """The checkpoint's layers that one leaf of a layer stack holds."""
        groups = self.config.layer_groups
        first = sum(before.repeats * len(before.pattern) for before in groups[:group])
        if self.spec.form == "unroll":
            return range(first + index, first + index + 1)
        period = len(groups[group].pattern)
        return range(first + index, first + groups[group].repeats * period, period)

    def _tensor(self, name: str) -> np.ndarray:
        return self.checkpoint.read(name).astype(self.dtype, copy=False)

    def _layer_leaf(self, layer: int, name: tuple[str, ...]) -> np.ndarray:
        prefix = f"model.layers.{layer}."
        if name in _PLAIN:
            return self._tensor(prefix + _PLAIN[name])
        match name:
            case ("attention", "qkv"):
                return self._qkv(prefix, ".weight")
            case ("attention", "qkv_bias"):
                return self._qkv(prefix, ".bias")
            case ("attention", "out"):
                out_DX = self._tensor(prefix + "self_attn.o_proj.weight")
                return out_DX.reshape(-1, self.kv_heads, self.group, self.config.head_dim)
            case ("mlp", "gate_up"):
                return np.stack([self._tensor(prefix + f"mlp.{part}_proj.weight") for part in ("gate", "up")])
            case ("mlp", "gate_up_bias"):
                return np.stack([self._tensor(prefix + f"mlp.{part}_proj.bias") for part in ("gate", "up")])
            case ("mlp", "down"):
                return self._tensor(prefix + "mlp.down_proj.weight")
        raise KeyError(name)

    def _qkv(self, prefix: str, kind: str) -> np.ndarray:
        """[K, G + 2, H, D] (a bias lacks D): by KV head its queries, its key, its value; KV heads replicated."""
        heads, head = self.config.kv_heads, self.config.head_dim
        q, k, v = (self._tensor(prefix + f"self_attn.{part}_proj{kind}") for part in "qkv")
        rest = q.shape[1:]
        repeats = self.kv_heads // heads
        q_KGHD = q.reshape(self.kv_heads, self.group, head, *rest)
        kv = [np.repeat(part.reshape(heads, 1, head, *rest), repeats, axis=0) for part in (k, v)]
        return np.concatenate([q_KGHD, *kv], axis=1)
