"""A Llama forward in plain numpy and float64: one prompt, no cache, head by head."""

from collections.abc import Mapping

import numpy as np

from tpu_infer.models.config import FrequencyFactors, LinearScaling, Llama3Scaling, ModelConfig, RopeConfig

Array = np.ndarray


def logits(config: ModelConfig, tensors: Mapping[str, Array], token_ids: list[int]) -> Array:
    """float64 [T, V]: the logits after each token of the prompt."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    x = w["model.embed_tokens.weight"][token_ids]
    angles = np.outer(np.arange(len(token_ids)), frequencies(config.rope, config.head_dim))
    kinds = [kind for group in config.layer_groups for _ in range(group.repeats) for kind in group.pattern]
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        normed = norm(x, w[prefix + "input_layernorm.weight"], config.norm_eps)
        x = x + attention(config, w, prefix + "self_attn.", normed, angles, kind.window)
        normed = norm(x, w[prefix + "post_attention_layernorm.weight"], config.norm_eps)
        gate, up = (linear(w, f"{prefix}mlp.{part}_proj", normed) for part in ("gate", "up"))
        x = x + linear(w, prefix + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    return norm(x, w["model.norm.weight"], config.norm_eps) @ w[head].T


def greedy(config: ModelConfig, tensors: Mapping[str, Array], prompt: list[int], count: int, vocab: int) -> list[int]:
    """The likeliest token below `vocab`, `count` times."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(config, tensors, tokens)[-1, :vocab].argmax()))
    return tokens[len(prompt) :]


def norm(x: Array, scale: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def linear(w: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)


def rotate(x: Array, angle: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )


def attention(
    config: ModelConfig, w: Mapping[str, Array], prefix: str, x: Array, angles: Array, window: int | None
) -> Array:
    q, k, v = (linear(w, f"{prefix}{part}_proj", x).reshape(len(x), -1, config.head_dim) for part in "qkv")
    ahead = np.arange(len(x))[None, :] - np.arange(len(x))[:, None]  # key position - query position
    hidden = (ahead > 0) if window is None else (ahead > 0) | (ahead <= -window)
    heads = []
    for n in range(config.query_heads):
        kv = n * config.kv_heads // config.query_heads
        score = rotate(q[:, n], angles) @ rotate(k[:, kv], angles).T / np.sqrt(config.head_dim)
        weight = np.exp(np.where(hidden, -np.inf, score - score.max()))
        heads.append(weight / weight.sum(-1, keepdims=True) @ v[:, kv])
    return linear(w, prefix + "o_proj", np.concatenate(heads, axis=-1))


def frequencies(rope: RopeConfig, head_dim: int) -> Array:
    plain = [rope.base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    match rope.scaling:
        case None:
            return np.array(plain)
        case LinearScaling(factor):
            return np.array(plain) / factor
        case FrequencyFactors(factors):
            return np.array(plain) / np.array(factors)
        case Llama3Scaling() as scaling:
            return np.array([_llama3(frequency, scaling) for frequency in plain])


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    turns = scaling.original_max_position * frequency / (2 * np.pi)  # within the original context
    if turns > scaling.high_freq_factor:
        return frequency
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return frequency * share + frequency / scaling.factor * (1 - share)
