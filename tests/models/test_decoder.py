"""The decoder against a numpy Llama, in every shape of the family; scanned and unrolled; its tree and its axes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from pallas_kernels.reference import RaggedBatch
from tpu_infer.errors import MeshError
from tpu_infer.mesh import MeshSpec, make_mesh
from tpu_infer.models.config import (
    FrequencyFactors,
    LayerGroup,
    LayerKind,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
)
from tpu_infer.models.decoder import DecoderSpec, LayerForm
from tpu_infer.programs.lowering import param_structs
from tpu_infer.weights.load import load_params

from . import reference, tiny

TOLERANCE = 1e-4
PAGE, PAGES, COLUMNS, TOKENS = 8, 16, 8, 32

# The plain configuration, untied and with linear rope, is the one of the programs' tests.
CONFIGS = {
    "tied, biases of Q, K and V, Llama 3 rope": tiny.config(
        tied_embeddings=True, attention_bias=True, rope=RopeConfig(500.0, Llama3Scaling(8.0, 1.0, 4.0, 32))
    ),
    "windows in a pattern, a second group, other biases, rope factors": tiny.config(
        layer_groups=(LayerGroup(2, (LayerKind(window=5), LayerKind())), LayerGroup(1, (LayerKind(window=9),))),
        attention_output_bias=True,
        mlp_bias=True,
        rope=RopeConfig(1000.0, FrequencyFactors((1.0, 2.0, 8.0, 32.0))),
    ),
}
MIXED = CONFIGS["windows in a pattern, a second group, other biases, rope factors"]
PROMPTS = [[5, 1, 33, 9, 60, 2, 2, 17, 40, 41, 3], [7], [50 - i for i in range(20)]]


def silent(phase: str, done: int, total: int | None) -> None: ...


def decoder(config: ModelConfig, form: LayerForm, mesh: Mesh) -> tuple[DecoderSpec, Any]:
    spec = DecoderSpec(config, "float32", form, mesh.size)
    return spec, load_params(tiny.MemoryCheckpoint(config, tiny.random_tensors(config)), spec, mesh, silent)


def forward(spec: DecoderSpec, mesh: Mesh) -> Callable[..., Any]:
    """(logits of every token, caches) of a step."""

    @jax.jit
    def call(params: Any, tokens: Any, caches: Any, batch: RaggedBatch) -> Any:
        graph, _ = spec.split
        model = nnx.merge(graph, params)
        hidden, caches = model.hidden(tokens, caches, batch, decode_only=False, mesh=mesh)
        return model.logits(hidden), caches

    return call


def prefill(
    call: Callable[..., Any], spec: DecoderSpec, params: Any, prompts: list[list[int]], chunk: int
) -> list[np.ndarray]:
    """Each prompt's logits [T, V], all prompts in one batch, at most `chunk` tokens of each in a step."""
    (group,) = spec.kv_groups(pages=PAGES * len(prompts), page_size=PAGE, dtype="float32")
    caches = (jnp.zeros(group.shape),)
    tables = np.random.default_rng(1).permutation(group.pages).reshape(len(prompts), -1)[:, :COLUMNS]
    found: list[list[np.ndarray]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        chunks = [prompt[start : start + chunk] for prompt in prompts]
        offsets = np.cumsum([0, *map(len, chunks)])
        tokens = np.zeros(TOKENS, np.int32)
        tokens[: offsets[-1]] = [token for part in chunks for token in part]
        starts = np.full(len(prompts), start, np.int32)
        limits = np.full(len(prompts), COLUMNS * PAGE, np.int32)
        batch = RaggedBatch(*(jnp.asarray(part, jnp.int32) for part in (tables, starts, limits, offsets)))
        logits, caches = call(params, tokens, caches, batch)
        for row, rows_logits in enumerate(found):
            rows_logits.append(np.asarray(logits)[offsets[row] : offsets[row + 1]])
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_numpy(name: str):
    config, mesh = CONFIGS[name], make_mesh(MeshSpec())
    spec, params = decoder(config, "scan", mesh)
    tensors, call = tiny.random_tensors(config), forward(spec, mesh)
    for chunk in (TOKENS, 6):  # whole (32 tokens hold all three), and in pieces that read what the last one cached
        for prompt, logits in zip(PROMPTS, prefill(call, spec, params, PROMPTS, chunk), strict=True):
            wanted = reference.logits(config, tensors, prompt)
            np.testing.assert_allclose(logits, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_each_setting_changes_the_logits():
    """Else the test above would not see one that is ignored."""
    tensors = tiny.random_tensors(MIXED)
    before = reference.logits(MIXED, tensors, PROMPTS[0])
    without_biases = {name: array * ("bias" not in name) for name, array in tensors.items()}
    assert np.abs(reference.logits(MIXED, without_biases, PROMPTS[0]) - before).max() > 0.1
    for change in ({"layer_groups": (LayerGroup(5, (LayerKind(),)),)}, {"rope": RopeConfig(1000.0)}):
        other = replace(MIXED, **change)
        assert np.abs(reference.logits(other, tensors, PROMPTS[0]) - before).max() > 0.1


def test_unrolled_layers_are_the_scanned_ones():
    config, mesh = MIXED, make_mesh(MeshSpec())
    spec, params = decoder(config, "unroll", mesh)
    tensors = tiny.random_tensors(config)
    for prompt, logits in zip(PROMPTS, prefill(forward(spec, mesh), spec, params, PROMPTS, TOKENS), strict=True):
        np.testing.assert_allclose(logits, reference.logits(config, tensors, prompt), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("form", ["scan", "unroll"])
@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_shapes_axes_and_shardings_are_one_tree(form: LayerForm, tensor: int):
    mesh = make_mesh(MeshSpec(tensor))
    spec, params = decoder(tiny.config(attention_bias=True, mlp_bias=True), form, mesh)
    structs = param_structs(spec, mesh)
    assert jax.tree.structure(structs) == jax.tree.structure(params)
    for struct, array in zip(jax.tree.leaves(structs), jax.tree.leaves(params), strict=True):
        assert (struct.shape, struct.dtype, struct.sharding) == (array.shape, array.dtype, array.sharding)
    split = [array.addressable_shards[0].data.size * tensor == array.size for array in jax.tree.leaves(params)]
    assert all(split) if tensor == 1 else 0 < sum(split) < len(split)


def test_kv_heads_are_replicated_so_that_each_device_has_one():
    for tensor, stored in ((1, 2), (2, 2), (4, 4), (8, 8)):
        spec = DecoderSpec(tiny.PLAIN, "float32", "scan", tensor)
        assert spec.stored_kv_heads == stored
        assert spec.kv_groups(pages=3, page_size=4, dtype="float32")[0].shape == (2, 3, stored, 4, 16)


def test_a_mesh_that_does_not_divide_is_refused():
    with pytest.raises(MeshError, match=r"8 query heads.*\[1, 2, 4, 8\]"):
        _ = DecoderSpec(tiny.PLAIN, "float32", "scan", 3).stored_kv_heads


def test_page_bytes_are_the_arrays_bytes():
    (group,) = DecoderSpec(tiny.PLAIN, "bfloat16", "scan", 8).kv_groups(pages=3, page_size=4, dtype="bfloat16")
    assert group.page_bytes * 3 == np.prod(group.struct().shape) * 2
