"""The one decoder: embeddings, groups of layers, final norm and head, built from a ModelConfig.

Layers of a group are either scanned over stacked weights (compile time does not grow with depth) or unrolled; the
parameter tree says which: `groups[g].layers[i]` is a layer's weights, or, scanned, a pattern position's weights with
a leading layer axis.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from pallas_kernels.reference import RaggedBatch, token_positions
from tpu_infer.mesh import Axes, kv_repeats
from tpu_infer.models.attention import Attention, StepContext, rope_tables
from tpu_infer.models.cache import KVGroup
from tpu_infer.models.config import LayerGroup, LayerKind, ModelConfig
from tpu_infer.models.layers import GatedMLP, RMSNorm, project, rope_frequencies, weight

Array = jax.Array
LayerForm = Literal["scan", "unroll"]
type Params = Any  # a nested dict of arrays, or of their shapes


@dataclass(frozen=True)
class DecoderSpec:
    """All that decides a decoder's parameter tree and its programs. Hashable."""

    config: ModelConfig
    dtype: str  # of weights and activations
    form: LayerForm
    tensor: int = 1

    @cached_property
    def stored_kv_heads(self) -> int:
        """KV heads with their replicas: at least one for each device."""
        config = self.config
        repeats = kv_repeats(
            tensor=self.tensor, query_heads=config.query_heads, kv_heads=config.kv_heads, hidden=config.hidden
        )
        return config.kv_heads * repeats

    def kv_groups(self, *, pages: int, page_size: int, dtype: str) -> tuple[KVGroup, ...]:
        """The cache's groups: one, with every layer."""
        config = self.config
        return (KVGroup(config.layers, self.stored_kv_heads, config.head_dim, page_size, pages, dtype),)

    @cached_property
    def split(self) -> tuple[Any, Params]:
        """(static graph, parameter tree of ShapeDtypeStruct)."""
        graph, state = nnx.split(Decoder(self))
        return graph, nnx.to_pure_dict(state)

    @cached_property
    def axes(self) -> Params:
        """The parameter tree's logical axes, in the same nesting as its shapes."""
        _, state = nnx.split(Decoder(self))
        return nnx.to_pure_dict(jax.tree.map(_axes_of, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def _axes_of(variable: nnx.Variable) -> "AxesLeaf":
    return AxesLeaf(variable.get_metadata("axes"))


@dataclass(frozen=True)
class AxesLeaf:
    """One array's logical axes, as a leaf of a tree."""

    axes: Axes


class Layer(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, spec: DecoderSpec, kind: LayerKind, stack: int | None) -> None:
        config = spec.config
        self.attention_norm = RMSNorm(config.width, config.norm_eps, spec.dtype, stack)
        self.attention = Attention(
            width=config.width,
            query_heads=config.query_heads,
            kv_heads=spec.stored_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            window=kind.window,
            dtype=spec.dtype,
            stack=stack,
        )
        self.mlp_norm = RMSNorm(config.width, config.norm_eps, spec.dtype, stack)
        self.mlp = GatedMLP(config.width, config.hidden, config.mlp_bias, spec.dtype, stack)

    def __call__(
        self, x_TD: Array, cache: Array, layer: Array, step: StepContext, *, decode_only: bool, mesh: Mesh
    ) -> tuple[Array, Array]:
        attended_TD, cache = self.attention(
            self.attention_norm(x_TD), cache, layer, step, decode_only=decode_only, mesh=mesh
        )
        x_TD = x_TD + attended_TD
        return x_TD + self.mlp(self.mlp_norm(x_TD)), cache


# Jitted inside the step, so that layers of one kind are traced once; XLA inlines the calls.
@partial(jax.jit, static_argnames=("graph", "decode_only", "mesh"))
def _apply_layer(
    params: Params,
    x_TD: Array,
    cache: Array,
    layer: Array,
    step: StepContext,
    *,
    graph: Any,
    decode_only: bool,
    mesh: Mesh,
) -> tuple[Array, Array]:
    return nnx.merge(graph, params)(x_TD, cache, layer, step, decode_only=decode_only, mesh=mesh)


class LayerStack(nnx.Module):
    """One group of layers, scanned or unrolled."""

    def __init__(self, spec: DecoderSpec, group: LayerGroup) -> None:
        self.scanned = spec.form == "scan"
        self.repeats, self.period = group.repeats, len(group.pattern)
        stack = group.repeats if self.scanned else None
        copies = 1 if self.scanned else group.repeats
        self.layers = nnx.List([Layer(spec, kind, stack) for _ in range(copies) for kind in group.pattern])

    def __call__(
        self, x_TD: Array, cache: Array, first: int, step: StepContext, *, decode_only: bool, mesh: Mesh
    ) -> tuple[Array, Array]:
        """Run the layers; `first` is the cache index of the first."""
        parts = [nnx.split(layer) for layer in self.layers]
        apply = partial(_apply_layer, step=step, decode_only=decode_only, mesh=mesh)
        if not self.scanned:
            for index, (graph, state) in enumerate(parts):
                layer = jnp.int32(first + index)
                x_TD, cache = apply(nnx.to_pure_dict(state), x_TD, cache, layer, graph=graph)
            return x_TD, cache

        def body(carry: tuple[Array, Array, Array], params: list[Params]) -> tuple[tuple[Array, Array, Array], None]:
            x_TD, cache, layer = carry
            for offset, (graph, _) in enumerate(parts):
                x_TD, cache = apply(params[offset], x_TD, cache, layer + offset, graph=graph)
            return (x_TD, cache, layer + self.period), None

        stacked = [nnx.to_pure_dict(state) for _, state in parts]
        (x_TD, cache, _), _ = lax.scan(body, (x_TD, cache, jnp.int32(first)), stacked)
        return x_TD, cache


class Decoder(nnx.Module):
    """Token ids to hidden states to logits, over a paged cache."""

    def __init__(self, spec: DecoderSpec) -> None:
        config = spec.config
        vocab_axis = "vocab" if config.vocab_size % spec.tensor == 0 else None
        self.embedding = weight((config.vocab_size, config.width), (vocab_axis, None), spec.dtype)
        self.groups = nnx.List([LayerStack(spec, group) for group in config.layer_groups])
        self.norm = RMSNorm(config.width, config.norm_eps, spec.dtype)
        tied = config.tied_embeddings
        self.head = None if tied else weight((config.vocab_size, config.width), (vocab_axis, None), spec.dtype)
        self.config = config

    def hidden(
        self, token_T: Array, caches: tuple[Array, ...], batch: RaggedBatch, *, decode_only: bool, mesh: Mesh
    ) -> tuple[Array, tuple[Array, ...]]:
        """Normalised hidden states of every query token, x_TD, and the caches written."""
        _, position_T, _ = token_positions(batch, token_T.shape[0])
        frequencies = jnp.asarray(rope_frequencies(self.config.rope, self.config.head_dim))
        step = StepContext(*rope_tables(frequencies, position_T), batch)
        x_TD = self.embedding[...][token_T]
        (cache,) = caches
        first = 0
        for group in self.groups:
            x_TD, cache = group(x_TD, cache, first, step, decode_only=decode_only, mesh=mesh)
            first += group.repeats * group.period
        return self.norm(x_TD), (cache,)

    def logits(self, x_RD: Array) -> Array:
        """float32 logits_RV of normalised hidden states."""
        head_VD = self.embedding if self.head is None else self.head
        return project(x_RD, head_VD[...]).astype(jnp.float32)
