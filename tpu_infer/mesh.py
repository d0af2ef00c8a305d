"""The device mesh: one logical axis rule table, from which every array's sharding follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_infer.errors import MeshError

TENSOR = "tensor"

# Logical axis of an array -> mesh axis. An axis that is not here is replicated.
RULES: dict[str, str] = {"kv_heads": TENSOR, "hidden": TENSOR, "vocab": TENSOR}

type Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class MeshSpec:
    """How many devices share one copy of the model."""

    tensor: int = 1


def make_mesh(spec: MeshSpec, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over the first devices. Raises MeshError when there are too few."""
    found = list(jax.devices() if devices is None else devices)
    if spec.tensor > len(found):
        raise MeshError(
            f"mesh.tensor = {spec.tensor} needs {spec.tensor} devices, and there are {len(found)}; "
            f"set mesh.tensor to {len(found)} or less."
        )
    return Mesh(np.array(found[: spec.tensor]), (TENSOR,))


def partition(axes: Axes) -> PartitionSpec:
    """Where an array with these logical axes is split."""
    return PartitionSpec(*(RULES.get(axis) if axis else None for axis in axes))


def sharding(mesh: Mesh, axes: Axes) -> NamedSharding:
    """The sharding on `mesh` of an array with these logical axes."""
    return NamedSharding(mesh, partition(axes))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def kv_repeats(*, tensor: int, query_heads: int, kv_heads: int, hidden: int) -> int:
    """How often each KV head is replicated so that every device has a whole one.

    Raises MeshError when `tensor` does not divide the heads or the hidden width.
    """
    possible = [
        n
        for n in range(1, min(query_heads, hidden) + 1)
        if query_heads % n == hidden % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    for name, size in (("query heads", query_heads), ("hidden width", hidden)):
        if size % tensor:
            raise MeshError(f"mesh.tensor = {tensor} does not divide the model's {size} {name}; possible: {possible}.")
    if tensor not in possible:
        raise MeshError(
            f"mesh.tensor = {tensor} and the model's {kv_heads} KV heads: one must be a multiple of the other; "
            f"possible: {possible}."
        )
    return max(1, tensor // kv_heads)
