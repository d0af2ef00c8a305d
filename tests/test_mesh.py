"""Which meshes fit a model, and what the errors say about those that don't."""

import re

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_infer.errors import MeshError
from tpu_infer.mesh import TENSOR, MeshSpec, kv_repeats, make_mesh, partition, replicated, sharding

_SIZES = st.integers(1, 12)


def _ok(tensor: int, query_heads: int, kv_heads: int, hidden: int) -> bool:
    whole = query_heads % tensor == hidden % tensor == 0
    return whole and (kv_heads % tensor == 0 or tensor % kv_heads == 0)


@given(tensor=st.integers(1, 40), kv_heads=_SIZES, group=_SIZES, hidden=st.integers(1, 96))
def test_each_device_gets_whole_heads_or_the_error_lists_what_would_do(
    tensor: int, kv_heads: int, group: int, hidden: int
):
    query_heads = kv_heads * group
    if _ok(tensor, query_heads, kv_heads, hidden):
        repeats = kv_repeats(tensor=tensor, query_heads=query_heads, kv_heads=kv_heads, hidden=hidden)
        assert kv_heads * repeats % tensor == 0
        assert query_heads % (kv_heads * repeats) == 0
        assert repeats == 1 or kv_heads * repeats == tensor, "no more replicas than needed"
        return
    with pytest.raises(MeshError, match=rf"mesh.tensor = {tensor} .*possible: \[") as caught:
        kv_repeats(tensor=tensor, query_heads=query_heads, kv_heads=kv_heads, hidden=hidden)
    listed = re.findall(r"\d+", str(caught.value).split("possible:")[1])
    assert [int(n) for n in listed] == [n for n in range(1, 145) if _ok(n, query_heads, kv_heads, hidden)]


def test_the_error_names_what_does_not_divide():
    for numbers, name in (
        ((5, 8, 2, 60), "8 query heads"),
        ((4, 8, 2, 30), "30 hidden"),
        ((4, 12, 6, 48), "6 KV heads"),
    ):
        with pytest.raises(MeshError, match=name):
            kv_repeats(tensor=numbers[0], query_heads=numbers[1], kv_heads=numbers[2], hidden=numbers[3])


def test_the_first_devices_are_taken():
    assert list(make_mesh(MeshSpec(2)).devices.flat) == jax.devices()[:2]
    assert list(make_mesh(MeshSpec(1), jax.devices()[3:]).devices.flat) == [jax.devices()[3]]
    assert make_mesh(MeshSpec(8)).shape == {TENSOR: 8}


def test_too_many_devices_are_refused():
    with pytest.raises(MeshError, match=r"needs 9 devices, and there are 8; set mesh.tensor to 8 or less"):
        make_mesh(MeshSpec(9))


def test_axes_without_a_rule_are_replicated():
    assert tuple(partition((None, "kv_heads", "layers", "hidden", "vocab"))) == (None, TENSOR, None, TENSOR, TENSOR)
    mesh = make_mesh(MeshSpec(4))
    assert sharding(mesh, ("vocab", None)).shard_shape((8, 3)) == (2, 3)
    assert replicated(mesh).shard_shape((8, 3)) == (8, 3)
