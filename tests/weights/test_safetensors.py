import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tpu_infer.errors import ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from tpu_infer.weights.open import open_checkpoint
from tpu_infer.weights.safetensors import SafetensorsCheckpoint

from .synthetic import GGUF_METADATA, HF_CONFIG, D, F, V, gguf_tensors, hf_tensors, write_gguf, write_hf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "tiny")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = write_hf(tmp_path / "sharded")
    (directory / "model.safetensors").unlink()
    items = list(hf_tensors().items())
    shards = {"model-1.safetensors": dict(items[:8]), "model-2.safetensors": dict(items[8:])}
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    _write_index(directory, {name: file for file, tensors in shards.items() for name in tensors})
    return directory


def _write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _index(directory: Path) -> dict[str, str]:
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("layout", ["model", "sharded"])
def test_tensors_come_back(layout: str, request: pytest.FixtureRequest) -> None:
    written = hf_tensors()
    with open_checkpoint(request.getfixturevalue(layout)) as checkpoint:
        assert set(checkpoint.tensors) == set(written)
        with ThreadPoolExecutor(4) as pool:
            arrays = list(pool.map(checkpoint.read, written))
    for array, expected in zip(arrays, written.values(), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_half_precision_keeps_its_dtype(tmp_path: Path) -> None:
    tensors = hf_tensors()
    tensors["model.norm.weight"] = np.linspace(0, 1, D, dtype=np.float16)
    brain = np.linspace(0, 1, F * D).astype(ml_dtypes.bfloat16).reshape(F, D)
    tensors["model.layers.0.mlp.up_proj.weight"] = brain
    checkpoint = SafetensorsCheckpoint(write_hf(tmp_path / "m", tensors=tensors))
    assert checkpoint.read("model.norm.weight").dtype == np.float16
    up = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    assert up.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(up, brain)
    assert checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].nbytes == F * D * 2


def test_tied_embeddings_may_repeat_the_head(tmp_path: Path) -> None:
    tied = HF_CONFIG | {"tie_word_embeddings": True}
    for tensors in (hf_tensors(tied=True), hf_tensors(tied=False)):
        assert SafetensorsCheckpoint(write_hf(tmp_path / "m", tied, tensors)).config.tied_embeddings


def test_old_rotary_tables_are_ignored(tmp_path: Path) -> None:
    tables = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    SafetensorsCheckpoint(write_hf(tmp_path / "m", tensors=hf_tensors() | tables))


def test_generation_config_adds_ends_of_sequence(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert SafetensorsCheckpoint(model).config.eos_ids == (2, 7)


def test_digest_follows_headers_and_config(model: Path, tmp_path: Path) -> None:
    first = SafetensorsCheckpoint(model).digest
    assert SafetensorsCheckpoint(write_hf(tmp_path / "copy")).digest == first
    assert SafetensorsCheckpoint(write_hf(tmp_path / "b", HF_CONFIG | {"rms_norm_eps": 1e-6})).digest != first
    half = {name: array.astype(np.float16) for name, array in hf_tensors().items()}
    assert SafetensorsCheckpoint(write_hf(tmp_path / "c", tensors=half)).digest != first


# What a checkpoint must hold.


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = hf_tensors()
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ModelFileError, match=r"missing tensors: model\.layers\.1\.mlp\.down_proj\.weight \[32, 64\]"):
        SafetensorsCheckpoint(write_hf(tmp_path / "m", tensors=tensors))


def test_missing_head_of_an_untied_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"lm_head\.weight"):
        SafetensorsCheckpoint(write_hf(tmp_path / "m", tensors=hf_tensors(tied=True)))


def test_unexpected_tensors(tmp_path: Path) -> None:
    extra = {f"model.layers.0.adapter.{i}": np.ones(1, np.float32) for i in range(5)}
    with pytest.raises(ModelFileError, match=r"does not have: .*adapter\.0.* and 2 more"):
        SafetensorsCheckpoint(write_hf(tmp_path / "m", tensors=hf_tensors() | extra))


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = hf_tensors() | {"lm_head.weight": np.ones((D, V), np.float32)}
    with pytest.raises(ModelFileError, match=r"lm_head\.weight has shape \[32, 48\].*\[48, 32\]"):
        SafetensorsCheckpoint(write_hf(tmp_path / "m", tensors=tensors))


def test_unsupported_dtype(tmp_path: Path) -> None:
    tensors = hf_tensors() | {"lm_head.weight": np.ones((V, D), np.int8)}
    with pytest.raises(UnsupportedModelError, match=r"lm_head.*I8.*known: F32, F16, BF16"):
        SafetensorsCheckpoint(write_hf(tmp_path / "m", tensors=tensors))


# What is refused.


def test_absent_and_empty_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="absent"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


def test_a_single_file_is_refused_with_advice(model: Path) -> None:
    with pytest.raises(ModelFileError, match="name its directory"):
        open_checkpoint(model / "model.safetensors")


def test_pickles_are_refused_by_name(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*only safetensors and GGUF"):
        open_checkpoint(model)


def test_a_directory_of_gguf_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GGUF_METADATA, gguf_tensors(hf_tensors()))
    with pytest.raises(ModelFileError, match="name the file itself"):
        open_checkpoint(tmp_path)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.config.name == "m"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "\xff", '{"a":' * 100_000], ids=["empty", "list", "cut", "latin", "deep"]
)
def test_bad_config(model: Path, text: str) -> None:
    (model / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_checkpoint(model)


def test_missing_config(model: Path) -> None:
    (model / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config\.json: the file is missing"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "x", 3]
)
def test_index_that_leaves_the_directory(sharded: Path, file: Any) -> None:
    _write_index(sharded, _index(sharded) | {"lm_head.weight": file})
    with pytest.raises(ModelFileError, match=r"not the name of a \.safetensors file"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_a_map(sharded: Path, weight_map: Any) -> None:
    _write_index(sharded, weight_map)
    with pytest.raises(ModelFileError, match="weight_map"):
        open_checkpoint(sharded)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-2\.safetensors: the file is missing"):
        open_checkpoint(sharded)


def test_index_that_names_the_wrong_shard(sharded: Path) -> None:
    weight_map = _index(sharded)
    name = next(name for name, file in weight_map.items() if file == "model-2.safetensors")
    _write_index(sharded, weight_map | {name: "model-1.safetensors"})
    with pytest.raises(ModelFileError, match=r"model-1\.safetensors: .*lists"):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    weight_map = _index(sharded)
    save_file(hf_tensors(), sharded / "model-2.safetensors")
    _write_index(sharded, weight_map)
    with pytest.raises(ModelFileError, match="another shard"):
        open_checkpoint(sharded)


def test_truncated_anywhere(model: Path) -> None:
    file = model / "model.safetensors"
    data = file.read_bytes()
    for size in [0, 1, 7, 8, 9, 200, 1000, *range(2000, len(data), 5003), len(data) - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(ModelFileError, match=r"model\.safetensors"):
            open_checkpoint(model)


def _with_header(file: Path, change: Any) -> None:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_overlapping_tensors(model: Path) -> None:
    def overlap(header: Any) -> None:
        one, two = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
        header[one]["data_offsets"] = header[two]["data_offsets"]

    _with_header(model / "model.safetensors", overlap)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        open_checkpoint(model)


@pytest.mark.parametrize("length", [2**63, 2**40, 10**8])
def test_absurd_header_length(model: Path, length: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        open_checkpoint(model)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 2400), st.integers(0, 255)), min_size=1, max_size=3))
def test_damaged_headers_give_typed_errors_or_whole_models(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    directory = write_hf(tmp_path / "damaged")
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    for at, value in flips:
        data[at] = value
    file.write_bytes(data)
    try:
        checkpoint = open_checkpoint(directory)
    except ModelError:
        return
    for name in checkpoint.tensors:
        checkpoint.read(name)
