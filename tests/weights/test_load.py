"""Loading: layers in their places, little read ahead, progress that adds up."""

import threading
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.models import tiny
from tpu_infer.mesh import MeshSpec, make_mesh
from tpu_infer.models.config import LayerGroup, LayerKind
from tpu_infer.models.decoder import DecoderSpec, LayerForm
from tpu_infer.weights.load import READERS, load_params

CONFIG = tiny.config(
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=True,
    layer_groups=(LayerGroup(2, (LayerKind(4), LayerKind())), LayerGroup(1, (LayerKind(9),))),
)
TENSORS = tiny.random_tensors(CONFIG)


def silent(phase: str, done: int, total: int | None) -> None: ...


def load(form: LayerForm, *, dtype: str = "float32", tensor: int = 1) -> Any:
    spec = DecoderSpec(CONFIG, dtype, form, tensor)
    return load_params(tiny.MemoryCheckpoint(CONFIG, TENSORS), spec, make_mesh(MeshSpec(tensor)), silent)


def layer(params: Any, index: int, form: LayerForm) -> Any:
    """One layer's weights, whichever way layers are kept."""
    group, place = (1, 0) if index == 4 else (0, index)
    layers = params["groups"][group]["layers"]
    if form == "unroll":
        return layers[place]
    return jax.tree.map(lambda stacked: stacked[place // 2], layers[place % 2 if group == 0 else 0])


@pytest.mark.parametrize("form", ["scan", "unroll"])
def test_layers_hold_the_checkpoints_tensors(form: LayerForm):
    """Those whose layout is the checkpoint's; of matrices, the decoder's logits tell."""
    params = load(form)
    np.testing.assert_array_equal(params["embedding"], TENSORS["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"], TENSORS["lm_head.weight"])
    np.testing.assert_array_equal(params["norm"]["scale"], TENSORS["model.norm.weight"])
    for index in range(CONFIG.layers):
        found, prefix = layer(params, index, form), f"model.layers.{index}."
        np.testing.assert_array_equal(found["attention_norm"]["scale"], TENSORS[prefix + "input_layernorm.weight"])
        np.testing.assert_array_equal(found["mlp_norm"]["scale"], TENSORS[prefix + "post_attention_layernorm.weight"])
        np.testing.assert_array_equal(found["mlp"]["gate_up_bias"][0], TENSORS[prefix + "mlp.gate_proj.bias"])
        np.testing.assert_array_equal(found["mlp"]["down_bias"], TENSORS[prefix + "mlp.down_proj.bias"])
        np.testing.assert_array_equal(found["attention"]["out_bias"], TENSORS[prefix + "self_attn.o_proj.bias"])


@pytest.mark.parametrize(("tensor", "stored"), [(1, 2), (4, 4), (8, 8)])
def test_queries_are_grouped_under_their_kv_head_and_its_replicas(tensor: int, stored: int):
    """Seen in the bias, [KV heads, queries and key and value, head size]."""
    bias = layer(load("scan", tensor=tensor), 3, "scan")["attention"]["qkv_bias"]
    q, k, v = (TENSORS[f"model.layers.3.self_attn.{part}_proj.bias"].reshape(-1, 8) for part in "qkv")
    np.testing.assert_array_equal(bias[:, :-2].reshape(8, 8), q)
    np.testing.assert_array_equal(bias[:, -2], np.repeat(k, stored // 2, axis=0))
    np.testing.assert_array_equal(bias[:, -1], np.repeat(v, stored // 2, axis=0))


def test_weights_come_in_the_dtype_asked_for():
    loaded, exact = load("scan", dtype="bfloat16"), load("scan")
    for array, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(exact), strict=True):
        assert array.dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(array, wanted.astype(jax.numpy.bfloat16))


@pytest.mark.parametrize("form", ["scan", "unroll"])
def test_progress_adds_up_to_the_parameters_bytes(form: LayerForm):
    told: list[tuple[str, int, int | None]] = []
    spec = DecoderSpec(CONFIG, "float32", form, 4)
    params = load_params(
        tiny.MemoryCheckpoint(CONFIG, TENSORS), spec, make_mesh(MeshSpec(4)), lambda *args: told.append(args)
    )
    total = sum(array.nbytes for array in jax.tree.leaves(params))
    assert told[0] == ("weights", 0, total)
    assert told[-1] == ("weights", total, total)
    done = [count for _, count, _ in told]
    assert len(done) == len(jax.tree.leaves(params)) + 1
    assert done == sorted(set(done))


class Counting(tiny.MemoryCheckpoint):
    """Counts reads, and lets a consumer wait until there are so many."""

    def __init__(self) -> None:
        # Without biases and with one reading per norm, most leaves are made of one or two tensors.
        super().__init__(PLAIN, tiny.random_tensors(PLAIN))
        self.reads = 0
        self.changed = threading.Condition()

    def read(self, name: str) -> np.ndarray:
        with self.changed:
            self.reads += 1
            self.changed.notify_all()
        return super().read(name)

    def wait_for_more_than(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.reads > count, timeout=0.05)


PLAIN = replace(tiny.config(), layers=24, layer_groups=(LayerGroup(24, (LayerKind(),)),))


def test_little_is_read_ahead_of_a_slow_consumer():
    checkpoint = Counting()
    spec = DecoderSpec(PLAIN, "float32", "unroll")
    leaves, most_tensors = 0, 3  # of one leaf: Q, K and V

    def progress(phase: str, done: int, total: int | None) -> None:
        nonlocal leaves
        if done:
            leaves += 1
        if leaves < 8:
            assert not checkpoint.wait_for_more_than((leaves + 2 * READERS) * most_tensors)

    load_params(checkpoint, spec, make_mesh(MeshSpec()), progress)
    assert checkpoint.reads == len(checkpoint.tensors)


def test_a_reading_that_fails_ends_the_loading():
    class Broken(tiny.MemoryCheckpoint):
        def read(self, name: str) -> np.ndarray:
            if name == "model.layers.2.mlp.up_proj.weight":
                raise OSError("the disk is gone")
            return super().read(name)

    spec = DecoderSpec(CONFIG, "float32", "scan")
    with pytest.raises(OSError, match="the disk is gone"):
        load_params(Broken(CONFIG, TENSORS), spec, make_mesh(MeshSpec()), silent)
