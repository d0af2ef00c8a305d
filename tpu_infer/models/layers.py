"""Parts that decoder layers are made of. A weight declares its shape, dtype and logical axes once; sharding,
initial values and loading follow from that."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from tpu_infer.mesh import Axes
from tpu_infer.models.config import FrequencyFactors, LinearScaling, Llama3Scaling, RopeConfig

Array = jax.Array


def weight(shape: Sequence[int], axes: Axes, dtype: str, stack: int | None = None) -> nnx.Param:
    """A declared, not yet loaded, parameter; `stack` layers of it in one array when given."""
    if stack is not None:
        shape, axes = (stack, *shape), ("layers", *axes)
    return nnx.Param(jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)), axes=axes)


def precision(dtype: jnp.dtype) -> lax.Precision:
    """float32 means float32: a TPU's default would round the operands to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def project(x_TI: Array, w_OI: Array) -> Array:
    """x_TI times a weight's transpose, in x's dtype. Any axes of the weight before its last are outputs: [T, *outputs].

    Weights stand outputs first, as in checkpoints: XLA:CPU multiplies eight rows and more a fifth faster by them.
    """
    outputs, inputs = w_OI.shape[:-1], w_OI.shape[-1]
    # One output axis: over several, XLA:CPU would copy the weight in every step.
    product = jnp.einsum("ti,oi->to", x_TI, w_OI.reshape(-1, inputs), precision=precision(x_TI.dtype))
    return product.reshape(x_TI.shape[0], *outputs)


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), in float32."""

    def __init__(self, width: int, eps: float, dtype: str, stack: int | None = None) -> None:
        self.scale = weight((width,), (None,), dtype, stack)
        self.eps = eps

    def __call__(self, x_TD: Array) -> Array:
        x32_TD = x_TD.astype(jnp.float32)
        inverse_T1 = lax.rsqrt(jnp.mean(jnp.square(x32_TD), axis=-1, keepdims=True) + self.eps)
        return (x32_TD * inverse_T1).astype(x_TD.dtype) * self.scale[...]


class GatedMLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, width: int, hidden: int, bias: bool, dtype: str, stack: int | None = None) -> None:
        self.gate_up = weight((2, hidden, width), (None, "hidden", None), dtype, stack)
        self.down = weight((width, hidden), (None, "hidden"), dtype, stack)
        self.gate_up_bias = weight((2, hidden), (None, "hidden"), dtype, stack) if bias else None
        self.down_bias = weight((width,), (None,), dtype, stack) if bias else None

    def __call__(self, x_TD: Array) -> Array:
        both_T2F = project(x_TD, self.gate_up[...])
        if self.gate_up_bias is not None:
            both_T2F += self.gate_up_bias[...]
        hidden_TF = jax.nn.silu(both_T2F[:, 0]) * both_T2F[:, 1]
        out_TD = project(hidden_TF, self.down[...])
        return out_TD if self.down_bias is None else out_TD + self.down_bias[...]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position of each rotated pair, float32 [H / 2]."""
    frequency = 1.0 / rope.base ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    match rope.scaling:
        case None:
            pass
        case LinearScaling(factor):
            frequency = frequency / factor
        case FrequencyFactors(factors):
            frequency = frequency / np.asarray(factors, np.float32)
        case Llama3Scaling() as scaling:
            frequency = _llama3(frequency, scaling)
    return frequency.astype(np.float32)


def _llama3(frequency: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Llama 3.1: waves longer than the original context are slowed, short ones kept, the rest interpolated."""
    wavelength = 2 * math.pi / frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelength - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def rotate(x_TKGH: Array, cos_TH: Array, sin_TH: Array) -> Array:
    """Rotary embedding (Su et al., 2021) over halves of a head, in float32; cos and sin are [T, H / 2]."""
    x32 = x_TKGH.astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    cos, sin = cos_TH[:, None, None], sin_TH[:, None, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_TKGH.dtype)
