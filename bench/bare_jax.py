"""A bare JAX loop of the same model with a contiguous cache, no server: what XLA can give, and the service's yardstick.

Plain, but in the forms that are fast on XLA:CPU: matrices [out, in] with Q, K, V and gate, up fused; unrolled layers;
the cache donated, one array per layer. A product of one row leaves XLA's fast path in bfloat16, so it is padded to two.
Shapes: B rows, T tokens, D width, N query heads, K KV heads, G = N / K, H head size, S cache length, V vocabulary.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.checkpoint import Checkpoint, LlamaShape, read_checkpoint
from bench.child import ChildArgs, Generate, serve

Params = dict[str, Any]
Cache = list[tuple[jax.Array, jax.Array]]  # of each layer, K and V [B, K, S, H]


def make_params(checkpoint: Checkpoint, dtype: jnp.dtype) -> Params:
    tensors = checkpoint.tensors

    def fused(layer: int, *names: str) -> jax.Array:
        return jnp.asarray(np.concatenate([tensors[f"model.layers.{layer}.{name}.weight"] for name in names]), dtype)

    layers = [
        {
            "norm1": fused(i, "input_layernorm"),
            "qkv": fused(i, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": fused(i, "self_attn.o_proj"),
            "norm2": fused(i, "post_attention_layernorm"),
            "gate_up": fused(i, "mlp.gate_proj", "mlp.up_proj"),
            "down": fused(i, "mlp.down_proj"),
        }
        for i in range(checkpoint.shape.num_hidden_layers)
    ]
    top = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    return {"layers": layers} | {key: jnp.asarray(tensors[name], dtype) for key, name in top.items()}


def make_cache(shape: LlamaShape, rows: int, length: int, dtype: jnp.dtype) -> Cache:
    dims = (rows, shape.num_key_value_heads, length, shape.head_dim)
    return [(jnp.zeros(dims, dtype), jnp.zeros(dims, dtype)) for _ in range(shape.num_hidden_layers)]


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] by weight [out, in]."""
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if rows == 1 and x.dtype == jnp.bfloat16:
        flat = jnp.concatenate([flat, flat])
    out = jax.lax.dot_general(flat, weight, (((1,), (1,)), ((), ())))
    return out[:rows].reshape(*x.shape[:-1], -1)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def rope(x_BTNH: jax.Array, positions_T: jax.Array, theta: float) -> jax.Array:
    half = x_BTNH.shape[-1] // 2
    angles = positions_T[:, None, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTNH.dtype)


def attention(q_BTNH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, start: jax.Array) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    K, S = k_BKSH.shape[1:3]
    seen_TS = jnp.arange(S) <= start + jnp.arange(T)[:, None]
    q = q_BTNH.reshape(B, T, K, N // K, H)
    if B == T == 1:  # XLA:CPU fuses multiply-and-sum, which beats a dot for one row and loses to it for many
        q, k, v = (x.astype(jnp.float32) for x in (q[:, 0, :, :, None], k_BKSH[:, :, None], v_BKSH[:, :, None]))
        scores = jnp.sum(q * k, -1) * H**-0.5
        weights = jax.nn.softmax(jnp.where(seen_TS, scores, -jnp.inf), -1)
        out = jnp.sum(weights[..., None] * v, -2)
    else:
        scores = jnp.einsum("BTKGH,BKSH->BKGTS", q, k_BKSH, preferred_element_type=jnp.float32) * H**-0.5
        weights = jax.nn.softmax(jnp.where(seen_TS, scores, -jnp.inf), -1).astype(v_BKSH.dtype)
        out = jnp.einsum("BKGTS,BKSH->BTKGH", weights, v_BKSH)
    return out.reshape(B, T, N * H).astype(q_BTNH.dtype)


def layer(
    shape: LlamaShape, w: Params, x_BTD: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    B, T, _ = x_BTD.shape
    N, K, H = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    positions = start + jnp.arange(T)
    qkv = project(rms_norm(x_BTD, w["norm1"], shape.rms_norm_eps), w["qkv"]).reshape(B, T, N + 2 * K, H)
    q, k, v = jnp.split(qkv, [N, N + K], 2)
    q, k = rope(q, positions, shape.rope_theta), rope(k, positions, shape.rope_theta)
    k_BKSH = jax.lax.dynamic_update_slice(k_BKSH, k.swapaxes(1, 2), (0, 0, start, 0))
    v_BKSH = jax.lax.dynamic_update_slice(v_BKSH, v.swapaxes(1, 2), (0, 0, start, 0))
    x_BTD = x_BTD + project(attention(q, k_BKSH, v_BKSH, start), w["out"])
    gate, up = jnp.split(project(rms_norm(x_BTD, w["norm2"], shape.rms_norm_eps), w["gate_up"]), 2, -1)
    return x_BTD + project(jax.nn.silu(gate) * up, w["down"]), k_BKSH, v_BKSH


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(
    shape: LlamaShape, params: Params, cache: Cache, ids_BT: jax.Array, start: jax.Array
) -> tuple[jax.Array, Cache, jax.Array]:
    """Run ids at positions from `start`; gives the next ids [B, 1], the cache, and the position after."""
    x = params["embed"][ids_BT]
    written: Cache = []
    for w, (k, v) in zip(params["layers"], cache, strict=True):
        x, k, v = layer(shape, w, x, k, v, start)
        written.append((k, v))
    last_BD = rms_norm(x[:, -1], params["norm"], shape.rms_norm_eps)
    logits_BV = project(last_BD, params["embed"])
    return jnp.argmax(logits_BV, -1, keepdims=True).astype(jnp.int32), written, start + ids_BT.shape[1]


def load(args: ChildArgs) -> Generate:
    dtype = jnp.dtype(args.dtype)
    checkpoint = read_checkpoint(Path(args.model))
    shape, params = checkpoint.shape, make_params(checkpoint, dtype)

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        cache = make_cache(shape, len(prompts), args.max_model_len, dtype)
        ids, start = jnp.asarray(prompts, jnp.int32), jnp.int32(0)
        out = []
        for _ in range(new):
            ids, cache, start = step(shape, params, cache, ids, start)
            out.append(ids)
        return np.concatenate([np.asarray(x) for x in out], 1).tolist()

    return generate


if __name__ == "__main__":
    serve(load)
