import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpu_infer.errors import ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from tpu_infer.models.config import FrequencyFactors
from tpu_infer.weights.gguf import GGUFCheckpoint

from .synthetic import GGUF_METADATA, D, F, H, N, gguf_tensors, hf_tensors, permute, write_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", GGUF_METADATA, gguf_tensors(hf_tensors()))


def test_tensors_come_back_under_hugging_face_names_with_rows_in_order(model: Path) -> None:
    written = hf_tensors()
    with GGUFCheckpoint(model) as checkpoint:
        assert set(checkpoint.tensors) == set(written)
        for name, array in written.items():
            np.testing.assert_array_equal(checkpoint.read(name), array)
            assert checkpoint.tensors[name].shape == array.shape
        assert checkpoint.total_bytes == sum(array.nbytes for array in written.values())
        assert checkpoint.config.name == "tiny"


def test_q_and_k_biases_are_put_in_order_too(tmp_path: Path) -> None:
    biases = np.arange(N * H, dtype=np.float32)
    extra = {}
    for layer in range(2):
        extra[f"blk.{layer}.attn_q.bias"] = permute(biases, N)
        extra[f"blk.{layer}.attn_k.bias"] = np.zeros(16, np.float32)
        extra[f"blk.{layer}.attn_v.bias"] = np.arange(16, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", GGUF_METADATA, gguf_tensors(hf_tensors()) | extra)
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config.attention_bias
    assert not checkpoint.config.attention_output_bias
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.bias"), biases)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.v_proj.bias"), np.arange(16))


def test_half_precision_keeps_its_dtype(tmp_path: Path) -> None:
    tensors: dict = dict(gguf_tensors(hf_tensors()))
    tensors["output_norm.weight"] = np.linspace(0, 1, D, dtype=np.float16)
    brain = np.linspace(0, 1, F * D, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(F, D)
    tensors["blk.1.ffn_up.weight"] = (brain.view(np.uint8), Kind.BF16)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", GGUF_METADATA, tensors))
    norm = checkpoint.read("model.norm.weight")
    assert norm.dtype == np.float16
    np.testing.assert_array_equal(norm, tensors["output_norm.weight"])
    up = checkpoint.read("model.layers.1.mlp.up_proj.weight")
    assert up.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(up, brain)


def test_arrays_outlive_the_checkpoint(model: Path) -> None:
    checkpoint = GGUFCheckpoint(model)
    norm = checkpoint.read("model.norm.weight")
    checkpoint.close()
    np.testing.assert_array_equal(norm, hf_tensors()["model.norm.weight"])
    with pytest.raises(KeyError):
        checkpoint.read("model.norm.weight")


def test_tied_embeddings_and_frequency_factors(tmp_path: Path) -> None:
    tensors = gguf_tensors(hf_tensors(tied=True)) | {"rope_freqs.weight": np.array([1, 1, 2, 8], np.float32)}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", GGUF_METADATA, tensors))
    assert checkpoint.config.tied_embeddings
    assert checkpoint.config.rope.scaling == FrequencyFactors((1.0, 1.0, 2.0, 8.0))


def test_metadata_is_plain_python(tmp_path: Path) -> None:
    tokens = [f"token {i} ẞ" for i in range(48)]
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.5] * 48,
        "tokenizer.ggml.token_type": [1] * 47 + [3],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    path = write_gguf(tmp_path / "m.gguf", GGUF_METADATA | extra, gguf_tensors(hf_tensors()))
    metadata = GGUFCheckpoint(path).metadata
    for key, value in extra.items():
        assert metadata[key] == value
        assert type(metadata[key]) is type(value)
    assert type(metadata["tokenizer.ggml.scores"][0]) is float
    assert type(metadata["tokenizer.ggml.token_type"][0]) is int


def test_other_alignments(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GGUF_METADATA, gguf_tensors(hf_tensors()), alignment=256)
    checkpoint = GGUFCheckpoint(path)
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), hf_tensors()["lm_head.weight"])


def test_digest_follows_the_header_and_the_size(model: Path, tmp_path: Path) -> None:
    same = GGUFCheckpoint(write_gguf(tmp_path / "b.gguf", GGUF_METADATA, gguf_tensors(hf_tensors()))).digest
    other = write_gguf(tmp_path / "c.gguf", GGUF_METADATA | {"general.note": "x"}, gguf_tensors(hf_tensors()))
    assert GGUFCheckpoint(model).digest == same
    assert GGUFCheckpoint(other).digest != same
    model.write_bytes(model.read_bytes() + b"\0")
    assert GGUFCheckpoint(model).digest != same


# The quantised kinds, block by block, as ggml's format description has them.


def _half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, "<f2", 1, at)[0])


def _nibbles(block: bytes, at: int) -> list[int]:
    """16 bytes: the low halves are values 0 to 15, the high ones 16 to 31."""
    low = [byte & 15 for byte in block[at : at + 16]]
    return low + [byte >> 4 for byte in block[at : at + 16]]


def _fifth_bits(block: bytes, at: int) -> list[int]:
    bits = int.from_bytes(block[at : at + 4], "little")
    return [(bits >> i & 1) << 4 for i in range(32)]


def _q4_0(block: bytes) -> list[float]:
    return [_half(block, 0) * (q - 8) for q in _nibbles(block, 2)]


def _q4_1(block: bytes) -> list[float]:
    return [_half(block, 0) * q + _half(block, 2) for q in _nibbles(block, 4)]


def _q5_0(block: bytes) -> list[float]:
    return [_half(block, 0) * ((q | h) - 16) for q, h in zip(_nibbles(block, 6), _fifth_bits(block, 2), strict=True)]


def _q5_1(block: bytes) -> list[float]:
    values = zip(_nibbles(block, 8), _fifth_bits(block, 4), strict=True)
    return [_half(block, 0) * (q | h) + _half(block, 2) for q, h in values]


def _q8_0(block: bytes) -> list[float]:
    return [_half(block, 0) * q for q in struct.unpack("<32b", block[2:])]


def _scale_and_min(packed: bytes, group: int) -> tuple[int, int]:
    """Eight 6-bit scales and minima in twelve bytes."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    high = packed[group + 4]
    return (high & 15) | (packed[group - 4] >> 6) << 4, (high >> 4) | (packed[group] >> 6) << 4


def _q4_k(block: bytes) -> list[float]:
    values = []
    for group in range(8):
        scale, low = _scale_and_min(block[4:16], group)
        for i in range(32):
            q = block[16 + group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            values.append(_half(block, 0) * scale * q - _half(block, 2) * low)
    return values


def _q5_k(block: bytes) -> list[float]:
    values = []
    for group in range(8):
        scale, low = _scale_and_min(block[4:16], group)
        for i in range(32):
            q = block[48 + group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            q |= (block[16 + i] >> group & 1) << 4
            values.append(_half(block, 0) * scale * q - _half(block, 2) * low)
    return values


def _q6_k(block: bytes) -> list[float]:
    values = []
    for index in range(256):
        part, rest = divmod(index, 128)
        quarter, i = divmod(rest, 32)
        low = block[part * 64 + quarter % 2 * 32 + i] >> (4 * (quarter // 2)) & 15
        high = block[128 + part * 32 + i] >> (2 * quarter) & 3
        scale = struct.unpack_from("<b", block, 192 + index // 16)[0]
        values.append(_half(block, 208) * scale * ((low | high << 4) - 32))
    return values


# Kind: its independent reading of one block, and where a block's half-precision scales stand.
REFERENCE: dict[Kind, tuple[Callable[[bytes], list[float]], tuple[int, ...]]] = {
    Kind.Q4_0: (_q4_0, (0,)),
    Kind.Q4_1: (_q4_1, (0, 2)),
    Kind.Q5_0: (_q5_0, (0,)),
    Kind.Q5_1: (_q5_1, (0, 2)),
    Kind.Q8_0: (_q8_0, (0,)),
    Kind.Q4_K: (_q4_k, (0, 2)),
    Kind.Q5_K: (_q5_k, (0, 2)),
    Kind.Q6_K: (_q6_k, (208,)),
}


@pytest.mark.parametrize("kind", REFERENCE, ids=lambda kind: kind.name)
def test_quantised_kinds_match_their_format(kind: Kind, tmp_path: Path) -> None:
    dequantise, scales = REFERENCE[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 24, 512
    random = np.random.default_rng(kind.value)
    blocks = random.integers(0, 256, (rows * columns // block, block_bytes), dtype=np.uint8)
    for at in scales:
        blocks[:, at : at + 2] = random.normal(0, 0.1, len(blocks)).astype("<f2")[:, None].view(np.uint8)
    tensors: dict = dict(gguf_tensors(_wide_tensors(columns, rows)))
    tensors["blk.0.ffn_gate.weight"] = (blocks.reshape(rows, -1), kind)
    metadata = GGUF_METADATA | {"llama.embedding_length": columns, "llama.feed_forward_length": rows}
    metadata |= {"llama.attention.key_length": H, "llama.attention.value_length": H}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    array = checkpoint.read("model.layers.0.mlp.gate_proj.weight")
    assert array.dtype == np.float32
    assert checkpoint.tensors["model.layers.0.mlp.gate_proj.weight"].dtype == kind.name
    expected = np.array([dequantise(part.tobytes()) for part in blocks]).reshape(rows, columns)
    np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5)


def _wide_tensors(width: int, hidden: int) -> dict[str, np.ndarray]:
    result = {}
    for name, array in hf_tensors().items():
        shape = [width if size == D else hidden if size == F else size for size in array.shape]
        if "q_proj" in name:
            shape[0] = N * H
        if "o_proj" in name:
            shape[1] = N * H
        result[name] = np.zeros(shape, np.float32)
    return result


def test_a_permuted_quantised_matrix_is_put_in_order(tmp_path: Path) -> None:
    tensors: dict = dict(gguf_tensors(hf_tensors()))
    rows = gguf.quants.quantize(hf_tensors()["model.layers.0.self_attn.q_proj.weight"], Kind.Q8_0)
    tensors["blk.0.attn_q.weight"] = (permute(rows, N), Kind.Q8_0)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", GGUF_METADATA, tensors))
    array = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(array, gguf.quants.dequantize(rows, Kind.Q8_0))


# What is refused.


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGU",
        b"GGUF",
        b"PK\x03\x04" + bytes(100),
        b"hello, this is text\n" * 10,
        struct.pack("<Q", 40) + b"{}" * 40,
    ],
    ids=["empty", "short", "magic only", "zip", "text", "safetensors"],
)
def test_foreign_files_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"m\.gguf"):
        GGUFCheckpoint(path)


def test_directories_and_absent_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="directory"):
        GGUFCheckpoint(tmp_path)
    with pytest.raises(ModelNotFoundError, match="absent"):
        GGUFCheckpoint(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError):
        GGUFCheckpoint(Path("/dev/null"))


def _patched(path: Path, at: int, new: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)
    return path


def _entry(path: Path, name: str) -> int:
    """Where a tensor's entry goes on after its name."""
    return path.read_bytes().index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


@pytest.mark.parametrize("version", [0, 1, 4, 0x03000000])
def test_other_versions(model: Path, version: int) -> None:
    with pytest.raises(UnsupportedModelError, match=r"known: (2, 3|little)"):
        GGUFCheckpoint(_patched(model, 4, struct.pack("<I", version)))


@pytest.mark.parametrize("at", [8, 16], ids=["tensors", "metadata"])
@pytest.mark.parametrize("count", [2**63, 2**16 + 1])
def test_absurd_counts(model: Path, at: int, count: int) -> None:
    with pytest.raises(ModelFileError, match=f"claims {count} "):
        GGUFCheckpoint(_patched(model, at, struct.pack("<Q", count)))


@pytest.mark.parametrize("code", [4, 30000], ids=["removed", "unknown"])
def test_unknown_tensor_kinds(model: Path, code: int) -> None:
    at = _entry(model, "output_norm.weight") + 4 + 8
    with pytest.raises(UnsupportedModelError, match=r"output_norm.*known: F32, F16"):
        GGUFCheckpoint(_patched(model, at, struct.pack("<I", code)))


def test_known_but_unsupported_tensor_kind(model: Path) -> None:
    at = _entry(model, "output_norm.weight") + 4 + 8
    with pytest.raises(UnsupportedModelError, match=r"I32; known: F32"):
        GGUFCheckpoint(_patched(model, at, struct.pack("<I", Kind.I32)))


@pytest.mark.parametrize(
    ("skip", "new", "text"),
    [
        (0, struct.pack("<I", 0), "0 dimensions"),
        (0, struct.pack("<I", 5), "5 dimensions"),
        (4, struct.pack("<Q", 0), "cannot have the shape"),
        (4, struct.pack("<Q", 2**62), "truncated"),
        (4, struct.pack("<QQ", 2**32, 2**32), "truncated"),
        (24, struct.pack("<Q", 2**63), "truncated"),
        (24, struct.pack("<Q", 2**20), "truncated"),
        (24, struct.pack("<Q", 4), "no multiple of 32"),
        (24, struct.pack("<Q", 0), "overlaps"),
    ],
    ids=["no dims", "5 dims", "zero", "huge", "overflow", "far", "past the end", "misaligned", "overlap"],
)
def test_bad_tensor_entries(model: Path, skip: int, new: bytes, text: str) -> None:
    at = _entry(model, "blk.1.ffn_up.weight") + skip
    with pytest.raises(ModelFileError, match=text):
        GGUFCheckpoint(_patched(model, at, new))


def test_duplicate_names(model: Path) -> None:
    at = _entry(model, "blk.1.ffn_up.weight") - len("blk.1.ffn_up.weight")
    with pytest.raises(ModelFileError, match="twice"):
        GGUFCheckpoint(_patched(model, at, b"blk.0.ffn_up.weight"))


def test_duplicate_metadata(model: Path) -> None:
    at = model.read_bytes().index(b"tokenizer.ggml.bos_token_id")
    with pytest.raises(ModelFileError, match="twice"):
        GGUFCheckpoint(_patched(model, at, b"tokenizer.ggml.eos_token_id"))


def test_parts_of_a_split_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GGUF_METADATA | {"split.count": 3}, gguf_tensors(hf_tensors()))
    with pytest.raises(UnsupportedModelError, match=r"split\.count"):
        GGUFCheckpoint(path)


def test_truncated_anywhere(model: Path) -> None:
    data = model.read_bytes()
    for size in [*range(0, 3000, 13), *range(3000, len(data) - 40, 997), len(data) - 40]:
        model.write_bytes(data[:size])
        with pytest.raises(ModelFileError):
            GGUFCheckpoint(model)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 2600), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_headers_give_typed_errors_or_whole_models(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_gguf(path, GGUF_METADATA | {"tokenizer.ggml.merges": ["a b", "c d"]}, gguf_tensors(hf_tensors()))
    data = bytearray(path.read_bytes())
    for at, value in flips:
        data[at] = value
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    try:
        checkpoint = GGUFCheckpoint(damaged)
    except ModelError:
        return
    for name in checkpoint.tensors:
        checkpoint.read(name)


def test_the_built_in_model(smollm2_gguf: Path) -> None:
    with GGUFCheckpoint(smollm2_gguf) as checkpoint:
        config = checkpoint.config
        assert (config.vocab_size, config.width, config.hidden, config.layers) == (49152, 576, 1536, 30)
        assert (config.query_heads, config.kv_heads, config.head_dim) == (9, 3, 64)
        assert config.tied_embeddings
        assert config.eos_ids == (2,)
        assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 49152
        names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(8)]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(checkpoint.read, names))
        for name, array in zip(names, together, strict=True):
            assert np.isfinite(array).all()
            np.testing.assert_array_equal(array, checkpoint.read(name))
