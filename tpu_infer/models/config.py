"""What a model is: its sizes, rotary embedding and layers, read from GGUF metadata or a Hugging Face config.json.

Supported: the Llama family (Llama, and Mistral, which has the same topology). An architecture, or an option of a known
architecture, that would change the model's answers and is not known here is refused by name, never ignored.
"""

import math
import reprlib
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_infer.errors import ModelFileError, UnsupportedModelError

GGUF_ARCHITECTURES = ("llama",)
HF_ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}  # class name: model_type

MAX_LAYERS = 4096
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's RoPE: long waves are slowed by `factor`, short ones kept, those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LinearScaling:
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class FrequencyFactors:
    """Frequency i is divided by factors[i]; as many as half a head's size. GGUF keeps Llama 3.1's scaling so."""

    factors: tuple[float, ...]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over halves of a head: frequency i is base ** (-2i / H), then scaled."""

    base: float
    scaling: Llama3Scaling | LinearScaling | FrequencyFactors | None = None


@dataclass(frozen=True)
class LayerKind:
    """What one layer does differently from others."""

    window: int | None = None  # a query sees itself and window - 1 tokens before; None: all


@dataclass(frozen=True)
class LayerGroup:
    """`pattern` of layers, `repeats` times over."""

    repeats: int
    pattern: tuple[LayerKind, ...]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's hyperparameters; hashable, so that a program can be keyed by it."""

    name: str
    architecture: str
    vocab_size: int
    width: int
    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    context_length: int
    tied_embeddings: bool
    attention_bias: bool  # of Q, K and V
    attention_output_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    layer_groups: tuple[LayerGroup, ...]


class _Fields:
    """Checked access to untyped metadata: None counts as absent, a bad value is an error that names field and file."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def fail(self, key: str, expected: str) -> ModelFileError:
        field = f"{self.source}: {self.prefix}{key}"
        if not self.has(key):
            return ModelFileError(f"{field} is missing; expected {expected}.")
        return ModelFileError(f"{field} must be {expected}, got {reprlib.repr(self.get(key))}.")

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.fail(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def mapping(self, key: str) -> "_Fields":
        value = self.get(key)
        if value is None:
            return _Fields({}, self.source)
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return _Fields(value, self.source)

    def without_layer_lists(self, *keys: str) -> "_Fields":
        """These fields, with a list of equal values, one for each layer, replaced by the value."""
        values = dict(self.values)
        for key in keys:
            value = self.get(key)
            if isinstance(value, list) and value:
                if any(item != value[0] for item in value):
                    raise UnsupportedModelError(
                        f"{self.source}: {self.prefix}{key} differs between layers, which is not supported."
                    )
                values[self.prefix + key] = value[0]
        return _Fields(values, self.source, self.prefix)

    def refuse_unless(self, key: str, *neutral: object) -> None:
        """Refuse an option that would change the answers, unless it is absent or has no effect."""
        if self.has(key) and self.get(key) not in neutral:
            known = " or ".join(str(value) for value in neutral) or "none"
            raise UnsupportedModelError(
                f"{self.source}: {self.prefix}{key} = {reprlib.repr(self.get(key))} is not supported; known: {known}."
            )


def from_gguf_metadata(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    *,
    name: str,
    source: str,
    rope_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """Read a GGUF file's hyperparameters.

    tensor_names are GGUF's own ("blk.0.attn_q.weight"): they tell tied embeddings and biases. rope_factors are the
    values of rope_freqs.weight, where the file has it. `source` names the file in errors.
    Raises ModelFileError and UnsupportedModelError.
    """
    general = _Fields(metadata, source)
    architecture = general.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise _unknown_architecture(architecture, GGUF_ARCHITECTURES, source)
    general.refuse_unless("split.count", 0, 1)
    fields = _Fields(metadata, source, f"{architecture}.").without_layer_lists(
        "attention.head_count", "attention.head_count_kv", "feed_forward_length"
    )
    width = fields.integer("embedding_length")
    query_heads = fields.integer("attention.head_count")
    head_dim = _head_dim(fields, "attention.key_length", width, query_heads)
    _refuse_gguf_options(fields, head_dim)
    tokens = general.get("tokenizer.ggml.tokens")
    window = fields.integer("attention.sliding_window", 0, low=0) or None
    layers = fields.integer("block_count", high=MAX_LAYERS)
    config = ModelConfig(
        name=name,
        architecture="llama",
        vocab_size=len(tokens) if isinstance(tokens, list) and tokens else fields.integer("vocab_size"),
        width=width,
        hidden=fields.integer("feed_forward_length"),
        layers=layers,
        query_heads=query_heads,
        kv_heads=fields.integer("attention.head_count_kv", query_heads),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(fields, head_dim, rope_factors),
        context_length=fields.integer("context_length"),
        tied_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        attention_output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        sliding_window=window,
        bos_id=_token_id(general, "tokenizer.ggml.bos_token_id"),
        eos_ids=_unique(_token_id(general, f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")),
        layer_groups=(LayerGroup(layers, (LayerKind(window),)),),
    )
    return _consistent(config, source)


def from_hf_config(
    config: Mapping[str, Any], *, name: str, source: str, generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read a Hugging Face config.json, of transformers 4 or 5; generation_config.json may add end-of-sequence ids.

    `source` names the file in errors. Raises ModelFileError and UnsupportedModelError.
    """
    fields = _Fields(config, source)
    model_type = _hf_model_type(fields)
    fields.refuse_unless("hidden_act", "silu")
    fields.refuse_unless("pretraining_tp", 1)
    fields.refuse_unless("quantization_config")
    mistral = model_type == "mistral"
    width = fields.integer("hidden_size")
    query_heads = fields.integer("num_attention_heads")
    head_dim = _head_dim(fields, "head_dim", width, query_heads)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    attention_bias = not mistral and fields.boolean("attention_bias", False)
    window = _hf_window(fields) if mistral else None
    generation = _Fields(generation_config or {}, source)
    result = ModelConfig(
        name=name,
        architecture="llama",
        vocab_size=fields.integer("vocab_size"),
        width=width,
        hidden=fields.integer("intermediate_size"),
        layers=layers,
        query_heads=query_heads,
        kv_heads=fields.integer("num_key_value_heads", 8 if mistral else query_heads),  # transformers' defaults
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_hf_rope(fields),
        context_length=fields.integer("max_position_embeddings"),
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=not mistral and fields.boolean("mlp_bias", False),
        sliding_window=window,
        bos_id=_token_id(fields, "bos_token_id"),
        eos_ids=_unique((*_token_ids(fields, "eos_token_id"), *_token_ids(generation, "eos_token_id"))),
        layer_groups=(LayerGroup(layers, (LayerKind(window),)),),
    )
    return _consistent(result, source)


def _unknown_architecture(architecture: str, known: Collection[str], source: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source}: architecture {reprlib.repr(architecture)} is not supported; known: {', '.join(known)}."
    )


def _head_dim(fields: _Fields, key: str, width: int, query_heads: int) -> int:
    if not fields.has(key) and width % query_heads:
        raise ModelFileError(
            f"{fields.source}: {key} is missing and the width {width} is no multiple of the {query_heads} query heads."
        )
    return fields.integer(key, width // query_heads)


def _token_id(fields: _Fields, key: str) -> int | None:
    return fields.integer(key, low=0) if fields.has(key) else None


def _token_ids(fields: _Fields, key: str) -> tuple[int | None, ...]:
    value = fields.get(key)
    if isinstance(value, list):
        return tuple(_Fields({key: item}, fields.source).integer(key, low=0) for item in value)
    return (_token_id(fields, key),)


def _unique(ids: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _consistent(config: ModelConfig, source: str) -> ModelConfig:
    """The config itself, or ModelFileError when its numbers contradict each other."""
    if config.query_heads % config.kv_heads:
        raise ModelFileError(
            f"{source}: {config.query_heads} query heads are no multiple of {config.kv_heads} key-value heads."
        )
    if config.head_dim % 2:
        raise ModelFileError(f"{source}: the head size {config.head_dim} is odd; rotary embedding needs halves.")
    ids = config.eos_ids if config.bos_id is None else (config.bos_id, *config.eos_ids)
    for token in ids:
        if token >= config.vocab_size:
            raise ModelFileError(
                f"{source}: special token id {token} is outside the vocabulary of {config.vocab_size}."
            )
    return config


def _refuse_gguf_options(fields: _Fields, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        fields.refuse_unless(key, head_dim)
    for key in ("expert_count", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"):
        fields.refuse_unless(key, 0)
    for key in ("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.attn_factor"):
        fields.refuse_unless(key, 0, 1)
    fields.refuse_unless("attention.causal", True)
    fields.refuse_unless("use_parallel_residual", False)
    fields.refuse_unless("rope.scaling.type", "none", "linear")


def _gguf_rope(fields: _Fields, head_dim: int, factors: tuple[float, ...] | None) -> RopeConfig:
    linear = 1.0
    if fields.text("rope.scaling.type", "linear") == "linear":  # a factor without a type is linear too
        linear = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    scaling = LinearScaling(linear) if linear != 1.0 else None
    if factors is not None:
        if len(factors) != head_dim // 2 or not all(0 < factor < math.inf for factor in factors):
            raise ModelFileError(
                f"{fields.source}: rope_freqs.weight must hold {head_dim // 2} positive numbers (half a head)."
            )
        scaling = FrequencyFactors(tuple(factor * linear for factor in factors))
    return RopeConfig(fields.number("rope.freq_base", 10_000.0), scaling)


def _hf_model_type(fields: _Fields) -> str:
    names = fields.get("architectures")
    if names is None:
        model_type = fields.text("model_type")
        if model_type not in HF_ARCHITECTURES.values():
            raise _unknown_architecture(model_type, HF_ARCHITECTURES.values(), fields.source)
        return model_type
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise fields.fail("architectures", "a list of names")
    if names[0] not in HF_ARCHITECTURES:
        raise _unknown_architecture(names[0], HF_ARCHITECTURES, fields.source)
    return HF_ARCHITECTURES[names[0]]


def _hf_window(fields: _Fields) -> int | None:
    if "sliding_window" not in fields.values:
        return 4096  # Mistral 7B's first release; later ones write null
    return fields.integer("sliding_window") if fields.has("sliding_window") else None


def _hf_rope(fields: _Fields) -> RopeConfig:
    # transformers 5 keeps all under rope_parameters; before, rope_theta stood beside rope_scaling.
    rope = fields.mapping("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    if any(isinstance(value, Mapping) for value in rope.values.values()):
        raise UnsupportedModelError(f"{fields.source}: rope_parameters differ between layers, which is not supported.")
    base = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    for partial in (rope, fields):
        partial.refuse_unless("partial_rotary_factor", 1)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(base)
    if kind == "linear":
        return RopeConfig(base, LinearScaling(rope.number("factor")))
    if kind == "llama3":
        return RopeConfig(base, _llama3_scaling(rope))
    raise UnsupportedModelError(
        f"{fields.source}: RoPE scaling {reprlib.repr(kind)} is not supported; known: default, linear, llama3."
    )


def _llama3_scaling(rope: _Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.fail("high_freq_factor", f"above low_freq_factor ({scaling.low_freq_factor:g})")
    return scaling
