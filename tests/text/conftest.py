"""Small made-up tokenizers of both kinds, and the real one of SmolLM2."""

from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import settings

from tpu_infer.text.tokenizer import Tokenizer
from tpu_infer.text.vocabulary import BYTE_ALPHABET

settings.register_profile("text", deadline=None)  # a busy machine is no failure
settings.load_profile("text")

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_byte_level_fields() -> dict[str, Any]:
    """256 bytes, five merges, three control tokens (<s>, <|im_start|>, <|im_end|>) and a user-defined <think>."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
    normal = [*BYTE_ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    tokens = ["<s>", "<|im_start|>", "<|im_end|>", "<think>", *normal]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * len(normal),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


SCORES = {"▁": -20.0, "a": -21.0, "b": -22.0, "c": -23.0, "ab": -1.0, "bc": -2.0, "abc": -3.0, "▁a": -4.0, "▁ab": -5.0}


def make_sentencepiece_fields() -> dict[str, Any]:
    """<unk>, <s>, </s>, a user-defined double line feed, 256 bytes, and the pieces of SCORES."""
    tokens = ["<unk>", "<s>", "</s>", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256)), *SCORES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 4] + [6] * 256 + [1] * len(SCORES),
        "tokenizer.ggml.scores": [0.0] * 260 + list(SCORES.values()),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture
def byte_level_fields() -> dict[str, Any]:
    return make_byte_level_fields()


@pytest.fixture
def sentencepiece_fields() -> dict[str, Any]:
    return make_sentencepiece_fields()


@pytest.fixture(scope="session")
def sentencepiece_scores() -> dict[str, float]:
    return SCORES


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(make_byte_level_fields())


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_gguf(make_sentencepiece_fields())


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    reader = gguf.GGUFReader(smollm2_gguf)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    return Tokenizer.from_gguf(fields)
