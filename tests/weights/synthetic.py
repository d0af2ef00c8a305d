"""Tiny checkpoints of the Llama family, written with the formats' own libraries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

V, D, F, LAYERS, N, K, H = 48, 32, 64, 2, 4, 2, 8

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GGUF_METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 128,
    "llama.embedding_length": D,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": F,
    "llama.attention.head_count": N,
    "llama.attention.head_count_kv": K,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.vocab_size": V,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def hf_tensors(*, tied: bool = False) -> dict[str, np.ndarray]:
    """Random float32 tensors under their Hugging Face names."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (D,),
            f"{prefix}post_attention_layernorm.weight": (D,),
            f"{prefix}self_attn.q_proj.weight": (N * H, D),
            f"{prefix}self_attn.k_proj.weight": (K * H, D),
            f"{prefix}self_attn.v_proj.weight": (K * H, D),
            f"{prefix}self_attn.o_proj.weight": (D, N * H),
            f"{prefix}mlp.gate_proj.weight": (F, D),
            f"{prefix}mlp.up_proj.weight": (F, D),
            f"{prefix}mlp.down_proj.weight": (D, F),
        }
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


_GGUF_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """Row h*H + i of half 0 goes to h*H + 2i, of half 1 to h*H + 2i + 1: what llama.cpp's converter does to Q and K."""
    result = np.empty_like(array)
    half = array.shape[0] // heads // 2
    for head in range(heads):
        for i in range(half):
            result[head * 2 * half + 2 * i] = array[head * 2 * half + i]
            result[head * 2 * half + 2 * i + 1] = array[head * 2 * half + half + i]
    return result


def gguf_tensors(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face tensors as the converter would write them."""
    result = {}
    for name, array in tensors.items():
        written = array
        if "q_proj" in name:
            written = permute(array, N)
        if "k_proj" in name:
            written = permute(array, K)
        for hf, short in _GGUF_PARTS.items():
            name = name.replace(hf, short)
        result[name] = written
    return result


type RawTensor = tuple[np.ndarray, gguf.GGMLQuantizationType]  # bytes [..., row bytes] of a quantised kind


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | RawTensor],
    *,
    alignment: int | None = None,
) -> Path:
    """Write a GGUF file; Python's ints become uint32, floats float32."""
    writer = gguf.GGUFWriter(path, str(metadata.get("general.architecture", "llama")))
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_hf(
    directory: Path, config: Mapping[str, Any] = HF_CONFIG, tensors: Mapping[str, np.ndarray] | None = None
) -> Path:
    """Write a model directory with one safetensors file."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors if tensors is not None else hf_tensors()), directory / "model.safetensors")
    return directory
