"""Reads a Llama GGUF into float32 arrays under Hugging Face names, for the peers that the benchmarks compare against.

It shares no code with the service's own readers, so that a fault in those cannot hide in both sides of a comparison.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama, under the names of Hugging Face's config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float

    def to_config(self) -> dict[str, object]:
        """The config.json of this shape, with tied embeddings and no end of sequence."""
        return asdict(self) | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
        }


@dataclass(frozen=True)
class Checkpoint:
    """A model's shape and its tensors; matrices stand [out, in]."""

    shape: LlamaShape
    tensors: dict[str, np.ndarray]


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def read_checkpoint(path: Path) -> Checkpoint:
    """Dequantise a GGUF of a Llama with tied embeddings to float32. Raises ValueError on any other."""
    reader = gguf.GGUFReader(path)
    shape = _read_shape(reader)
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        tensors[_name(tensor.name)] = _rows_for_halves(tensor.name, values, shape)
    return Checkpoint(shape, tensors)


def _read_shape(reader: gguf.GGUFReader) -> LlamaShape:
    def value(key: str):
        field = reader.get_field(key)
        if field is None:
            raise ValueError(f"the GGUF has no {key}; the benchmark's peers take a Llama")
        return field.contents()

    hidden, heads = value("llama.embedding_length"), value("llama.attention.head_count")
    return LlamaShape(
        hidden_size=hidden,
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=value("llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        vocab_size=value("llama.vocab_size"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=value("llama.rope.freq_base"),
    )


def _name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, layer, part, suffix = (name.split(".") + [""] * 4)[:4]
    if block != "blk" or part not in _LAYER_NAMES or suffix != "weight":
        raise ValueError(f"tensor {name} is none of a Llama with tied embeddings")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _rows_for_halves(name: str, values: np.ndarray, shape: LlamaShape) -> np.ndarray:
    """GGUF orders the rows of Q and K for a rope that turns neighbours; the peers turn halves."""
    if not name.endswith(("attn_q.weight", "attn_k.weight")):
        return values
    heads = values.shape[0] // shape.head_dim
    paired = values.reshape(heads, shape.head_dim // 2, 2, values.shape[1])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)
