"""Hyperparameters from both formats."""

from typing import Any

import pytest

from tpu_infer.errors import ModelFileError, UnsupportedModelError
from tpu_infer.models.config import (
    FrequencyFactors,
    LayerGroup,
    LayerKind,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    from_gguf_metadata,
    from_hf_config,
)
from tpu_infer.weights.checkpoint import expected_tensors

from .synthetic import GGUF_METADATA, HF_CONFIG

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf(changes: dict[str, Any] | None = None, **generation: Any) -> ModelConfig:
    return from_hf_config(HF_CONFIG | (changes or {}), name="m", source="config.json", generation_config=generation)


def gguf(
    changes: dict[str, Any] | None = None, names: tuple[str, ...] = ("output.weight",), **options: Any
) -> ModelConfig:
    return from_gguf_metadata(GGUF_METADATA | (changes or {}), names, name="m", source="m.gguf", **options)


def test_both_formats_say_the_same() -> None:
    assert hf() == gguf()
    assert hash(hf()) == hash(gguf())
    assert hf().layer_groups == (LayerGroup(2, (LayerKind(None),)),)


def test_defaults_of_hugging_face() -> None:
    bare = {key: value for key, value in HF_CONFIG.items() if key not in ("num_key_value_heads", "rope_theta")}
    config = from_hf_config(bare, name="m", source="config.json")
    assert config.kv_heads == config.query_heads
    assert config.head_dim == config.width // config.query_heads
    assert config.rope == RopeConfig(10_000.0)
    assert not config.tied_embeddings


def test_an_explicit_head_size_need_not_divide_the_width() -> None:
    assert hf({"head_dim": 6, "num_attention_heads": 6}).head_dim == 6


def test_end_ids_are_gathered() -> None:
    assert hf({"eos_token_id": [2, 5]}, eos_token_id=[5, 9]).eos_ids == (2, 5, 9)
    assert hf({"eos_token_id": None, "bos_token_id": None}).eos_ids == ()
    ids = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert gguf(ids).eos_ids == (2, 7)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_scaling": None}, RopeConfig(10_000.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(10_000.0, LinearScaling(4.0))),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
    ],
)
def test_rope_of_hugging_face(fields: dict[str, Any], rope: RopeConfig) -> None:
    assert hf(fields).rope == rope


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"rope.scaling.factor": 4.0}, LinearScaling(4.0)),
        ({"rope.scale_linear": 2.0}, LinearScaling(2.0)),
    ],
)
def test_rope_of_gguf(fields: dict[str, Any], scaling: object) -> None:
    assert gguf({f"llama.{key}": value for key, value in fields.items()}).rope.scaling == scaling


def test_frequency_factors_multiply_with_linear_scaling() -> None:
    scaled = gguf({"llama.rope.scaling.factor": 2.0}, rope_factors=(1.0, 1.0, 4.0, 8.0))
    assert scaled.rope.scaling == FrequencyFactors((2.0, 2.0, 8.0, 16.0))
    for factors in ((1.0,) * 3, (1.0, 1.0, 1.0, 0.0), (1.0, 1.0, 1.0, float("nan"))):
        with pytest.raises(ModelFileError, match="rope_freqs"):
            gguf(rope_factors=factors)


MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def test_mistral() -> None:
    assert hf(MISTRAL).sliding_window == 4096
    assert hf(MISTRAL | {"sliding_window": None}).sliding_window is None
    windowed = hf(MISTRAL | {"sliding_window": 64, "attention_bias": True})
    assert windowed.layer_groups == (LayerGroup(2, (LayerKind(64),)),)
    assert windowed.architecture == "llama"
    assert not windowed.attention_bias


def test_llama_has_no_window() -> None:
    assert hf({"sliding_window": 64}).sliding_window is None
    assert gguf({"llama.attention.sliding_window": 64}).sliding_window == 64


def test_model_type_stands_in_for_architectures() -> None:
    assert hf({"architectures": None}) == hf()
    with pytest.raises(UnsupportedModelError, match=r"'gemma'.*known: llama, mistral"):
        hf({"architectures": None, "model_type": "gemma"})


def test_biases() -> None:
    both = hf({"attention_bias": True, "mlp_bias": True})
    assert both.attention_bias
    assert both.attention_output_bias
    names = expected_tensors(both)
    assert names["model.layers.1.self_attn.k_proj.bias"] == (16,)
    assert names["model.layers.1.mlp.down_proj.bias"] == (32,)
    assert not any(name.endswith("bias") for name in expected_tensors(hf()))
    found = gguf(names=("output.weight", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias"))
    assert (found.attention_bias, found.attention_output_bias, found.mlp_bias) == (False, True, True)


def test_tokens_count_as_the_vocabulary() -> None:
    assert gguf({"llama.vocab_size": None, "tokenizer.ggml.tokens": ["a"] * 99}).vocab_size == 99


def test_equal_values_for_all_layers() -> None:
    assert gguf({"llama.attention.head_count_kv": [2, 2]}) == gguf()
    with pytest.raises(UnsupportedModelError, match="head_count_kv differs between layers"):
        gguf({"llama.attention.head_count_kv": [2, 1]})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "'Qwen2ForCausalLM'.*known: LlamaForCausalLM, MistralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn'.*known: default, linear, llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_hugging_face_options_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        hf(fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"general.architecture": "qwen2"}, "'qwen2'.*known: llama"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'.*known: none or linear"),
        ({"llama.rope.dimension_count": 4}, "dimension_count"),
        ({"llama.attention.value_length": 16}, "value_length"),
        ({"llama.attention.clamp_kqv": 8.0}, "clamp_kqv"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"llama.attention.causal": False}, "causal"),
        ({"split.count": 2}, "split.count"),
    ],
)
def test_what_gguf_options_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        gguf(fields)


BAD_NUMBERS = [None, 0, -1, 1.5, True, "8", [], float("nan"), 2**31]


@pytest.mark.parametrize("value", BAD_NUMBERS)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_bad_sizes_of_hugging_face(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=f"config.json: {key} "):
        hf({key: value})


@pytest.mark.parametrize("value", BAD_NUMBERS)
@pytest.mark.parametrize("key", ["embedding_length", "block_count", "context_length"])
def test_bad_sizes_of_gguf(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError, match=f"m.gguf: llama.{key} "):
        gguf({f"llama.{key}": value})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_key_value_heads": 3}, "no multiple of 3 key-value heads"),
        ({"num_attention_heads": 5}, "no multiple of the 5 query heads"),
        ({"head_dim": 7}, "head size 7 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            "high_freq_factor must be above",
        ),
        ({"eos_token_id": 48}, "token id 48 is outside the vocabulary of 48"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"architectures": []}, "architectures must be a list of names"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers"),
    ],
)
def test_contradictions_of_hugging_face(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named):
        hf(fields)
