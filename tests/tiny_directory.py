"""A tiny Hugging Face model directory: random Llama weights in safetensors, config.json, and a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tpu_infer.models.config import from_hf_config
from tpu_infer.weights.checkpoint import expected_tensors

CONTEXT = 64
EOS = 256
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
}


def write_tiny_directory(path: Path) -> Path:
    """Write the model and return its path."""
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    shapes = expected_tensors(from_hf_config(CONFIG, name="tiny", source="config.json"))
    weights = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path
