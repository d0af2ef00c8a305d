"""The paged KV cache: a tuple of groups, each one stacked array over its layers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tpu_infer.mesh import Axes

CACHE_AXES: Axes = ("layers", "pages", "kv_heads", "page", "lanes")


@dataclass(frozen=True)
class KVGroup:
    """Layers that share an allocator and a block table. `kv_heads` are those stored, replicas included."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """cache_LPKSC; at least two pages, since XLA:CPU copies a cache with a leading dimension of one."""
        return (self.layers, max(self.pages, 2), self.kv_heads, self.page_size, 2 * self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and heads."""
        elements = self.layers * self.kv_heads * self.page_size * 2 * self.head_dim
        return elements * jnp.dtype(self.dtype).itemsize

    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the group's array."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))
