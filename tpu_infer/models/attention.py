"""Grouped-query attention over the paged cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.reference import RaggedBatch, ragged_paged_attention
from tpu_infer.mesh import TENSOR, partition
from tpu_infer.models.cache import CACHE_AXES
from tpu_infer.models.layers import project, rotate, weight

Array = jax.Array


class StepContext(NamedTuple):
    """What all layers of one step share."""

    cos_TH: Array  # [T, H / 2]
    sin_TH: Array
    batch: RaggedBatch


class Attention(nnx.Module):
    """Q, K and V in one product, grouped by KV head: [K, G + 2, H, D], the group's queries first, then K, then V."""

    def __init__(
        self,
        *,
        width: int,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool,
        output_bias: bool,
        window: int | None,
        dtype: str,
        stack: int | None = None,
    ) -> None:
        group = query_heads // kv_heads
        self.qkv = weight((kv_heads, group + 2, head_dim, width), ("kv_heads", None, None, None), dtype, stack)
        self.qkv_bias = (
            weight((kv_heads, group + 2, head_dim), ("kv_heads", None, None), dtype, stack) if bias else None
        )
        self.out = weight((width, kv_heads, group, head_dim), (None, "kv_heads", None, None), dtype, stack)
        self.out_bias = weight((width,), (None,), dtype, stack) if output_bias else None
        self.group, self.window = group, window

    def __call__(
        self, x_TD: Array, cache: Array, layer: Array, step: StepContext, *, decode_only: bool, mesh: Mesh
    ) -> tuple[Array, Array]:
        """(out_TD, cache), the step's keys and values written into the cache's `layer`."""
        qkv_TKXH = project(x_TD, self.qkv[...])
        if self.qkv_bias is not None:
            qkv_TKXH += self.qkv_bias[...]
        rotated = rotate(qkv_TKXH[:, :, :-1], step.cos_TH, step.sin_TH)
        q_TNH = rotated[:, :, : self.group].reshape(x_TD.shape[0], -1, rotated.shape[-1])
        attend = _over_heads(mesh, self.window, decode_only)
        out_TNH, cache = attend(q_TNH, rotated[:, :, self.group], qkv_TKXH[:, :, -1], cache, layer, step.batch)
        out_DX = self.out[...].reshape(x_TD.shape[1], -1)
        out_TD = project(out_TNH.reshape(x_TD.shape[0], -1), out_DX)
        return (out_TD if self.out_bias is None else out_TD + self.out_bias[...]), cache


def _over_heads(mesh: Mesh, window: int | None, decode_only: bool):
    """The attention op, each device on its own heads."""

    def attend(
        q_TNH: Array, k_TKH: Array, v_TKH: Array, cache: Array, layer: Array, batch: RaggedBatch
    ) -> tuple[Array, Array]:
        scale = q_TNH.shape[-1] ** -0.5
        return ragged_paged_attention(
            q_TNH, k_TKH, v_TKH, cache, layer, batch, scale=scale, window=window, decode_only=decode_only
        )

    if mesh.shape[TENSOR] == 1:
        return attend
    heads, pages = P(None, TENSOR, None), partition(CACHE_AXES)
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(heads, heads, heads, pages, P(), P()),
        out_specs=(heads, pages),
        check_vma=False,
    )


def rope_tables(frequencies: Array, position_T: Array) -> tuple[Array, Array]:
    """cos and sin of every position's angles, float32 [T, H / 2]."""
    angle = position_T[:, None].astype(jnp.float32) * frequencies[None, :]
    return jnp.cos(angle), jnp.sin(angle)
