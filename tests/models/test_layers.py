"""Norm and rotary embedding, each against its formula; the products are tested in the whole decoder."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tpu_infer.models.config import FrequencyFactors, LinearScaling, Llama3Scaling, RopeConfig
from tpu_infer.models.layers import RMSNorm, rope_frequencies, rotate

from . import reference

RANDOM = np.random.default_rng(0)

SCALINGS = {
    "none": None,
    "linear": LinearScaling(4.0),
    "factors": FrequencyFactors(tuple(float(i) for i in range(1, 33))),
    "llama3": Llama3Scaling(8.0, 1.0, 4.0, 8192),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_frequencies(name: str):
    rope = RopeConfig(500_000.0, SCALINGS[name])
    wanted = reference.frequencies(rope, 64)
    np.testing.assert_allclose(rope_frequencies(rope, 64), wanted, rtol=2e-6)
    assert name == "none" or not np.allclose(wanted, reference.frequencies(RopeConfig(500_000.0), 64))


def test_llama3_scaling_touches_all_three_kinds_of_waves():
    plain = rope_frequencies(RopeConfig(500_000.0), 64)
    ratio = plain / rope_frequencies(RopeConfig(500_000.0, SCALINGS["llama3"]), 64)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8)
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    frequencies = reference.frequencies(RopeConfig(10_000.0), 16)
    q, k = RANDOM.standard_normal((2, 16)).astype(np.float32)

    def product(at_q: int, at_k: int) -> float:
        angle = np.outer([at_q, at_k], frequencies)
        both = rotate(jnp.asarray(np.stack([q, k])[:, None, None]), jnp.cos(angle), jnp.sin(angle))
        np.testing.assert_allclose(np.linalg.norm(both, axis=-1).ravel(), np.linalg.norm([q, k], axis=-1), rtol=1e-5)
        return float((both[0] * both[1]).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)


def test_rotation_is_over_halves():
    x = np.zeros((1, 1, 1, 4), np.float32)
    x[..., 0] = 1.0
    turned = rotate(jnp.asarray(x), jnp.zeros((1, 2)), jnp.ones((1, 2)))
    np.testing.assert_array_equal(np.asarray(turned).ravel(), [0, 0, 1, 0])


def _norm(scale: np.ndarray, dtype: str) -> RMSNorm:
    layer = RMSNorm(len(scale), 1e-5, dtype)
    layer.scale = nnx.Param(jnp.asarray(scale, dtype))
    return layer


def test_norm():
    x, scale = RANDOM.standard_normal((3, 32)).astype(np.float32), RANDOM.standard_normal(32).astype(np.float32)
    wanted = reference.norm(x.astype(np.float64), scale, 1e-5)
    np.testing.assert_allclose(_norm(scale, "float32")(jnp.asarray(x)), wanted, rtol=1e-5, atol=1e-6)


def test_norm_of_zeros_is_zero_and_of_large_bfloat16_is_not_lost():
    layer = _norm(np.ones(32), "bfloat16")
    np.testing.assert_array_equal(np.asarray(layer(jnp.zeros((1, 32), jnp.bfloat16)), np.float32), 0.0)
    # Squared and summed in bfloat16, these would be off by several percent.
    large = jnp.full((1, 32), 3e4, jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(layer(large), np.float32), 1.0, rtol=2**-8)
