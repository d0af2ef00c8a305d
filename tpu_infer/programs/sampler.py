"""Choosing tokens on the device. A row's draw depends on its seed, choice and position only, never on its batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tpu_infer.step import SamplerFlags

Array = jax.Array

TOKEN_DRAW = 0  # kinds of draw, folded into the key: draws of different kinds at one position are independent

_BISECTIONS = 32  # one for each bit of a float32's ordered integer: the threshold found is exact


class SamplingRows(NamedTuple):
    """The sampling fields of a step's rows."""

    seed_R2: Array  # uint32: high and low word
    choice_R: Array
    position_R: Array  # of the token that is drawn
    temperature_R: Array  # 0: greedy
    top_k_R: Array  # 0: all
    top_p_R: Array
    min_p_R: Array


class Sampled(NamedTuple):
    """One token a row; the optional fields are there when the flags ask for log-probabilities."""

    token_R: Array  # int32
    finite_R: Array  # bool: all the row's logits were numbers
    logprob_R: Array | None = None
    top_id_RN: Array | None = None
    top_logprob_RN: Array | None = None


def sample(
    logits_RV: Array, rows: SamplingRows, mask_RW: Array | None, *, flags: SamplerFlags, vocab: int, top: int
) -> Sampled:
    """Draw one token a row from float32 logits.

    Ids from `vocab` on are padding and never drawn. `mask_RW` (uint32, bit v % 32 of word v // 32 allows id v) is
    there exactly when flags.masked. Log-probabilities are of the model's own distribution, before mask and
    temperature; `top` of the best are given.
    """
    logits_RV = logits_RV[:, :vocab]
    finite_R = jnp.isfinite(logits_RV).all(-1)
    allowed_RV = logits_RV
    if mask_RW is not None:
        allowed_RV = jnp.where(_unpack_mask(mask_RW, vocab), logits_RV, -jnp.inf)
    token_R = jnp.argmax(allowed_RV, axis=-1).astype(jnp.int32)
    if flags.random:
        drawn_R = _draw(allowed_RV, rows, filtered=flags.filtered)
        token_R = jnp.where(rows.temperature_R > 0, drawn_R, token_R)
    if not flags.logprobs:
        return Sampled(token_R, finite_R)
    normaliser_R = jax.nn.logsumexp(logits_RV, axis=-1)
    logprob_R = jnp.take_along_axis(logits_RV, token_R[:, None], axis=-1)[:, 0] - normaliser_R
    best_RN, top_id_RN = lax.top_k(logits_RV, min(top, vocab))
    return Sampled(token_R, finite_R, logprob_R, top_id_RN.astype(jnp.int32), best_RN - normaliser_R[:, None])


def _draw(logits_RV: Array, rows: SamplingRows, *, filtered: bool) -> Array:
    """Sample by Gumbel-max: argmax(logits / temperature + noise)."""
    temperature_R = jnp.where(rows.temperature_R > 0, rows.temperature_R, 1.0)
    # Relative to the row's best, so that a tiny temperature can't overflow.
    scaled_RV = (logits_RV - logits_RV.max(-1, keepdims=True)) / temperature_R[:, None]
    if filtered:
        scaled_RV = keep_top_p(keep_top_k(keep_min_p(scaled_RV, rows.min_p_R), rows.top_k_R), rows.top_p_R)
    noise_RV = jax.vmap(lambda key: jax.random.gumbel(key, (logits_RV.shape[1],)))(_keys(rows))
    return jnp.argmax(scaled_RV + noise_RV, axis=-1).astype(jnp.int32)


def _keys(rows: SamplingRows) -> Array:
    def key(seed_2: Array, choice: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        for word in (choice, position, TOKEN_DRAW):
            key = jax.random.fold_in(key, word)
        return key

    return jax.vmap(key)(rows.seed_R2, rows.choice_R, rows.position_R)


def keep_min_p(logits_RV: Array, min_p_R: Array) -> Array:
    """Keep tokens at least min_p times as likely as the likeliest (Nguyen et al., 2024); 0 keeps all."""
    floor_R = logits_RV.max(-1) + jnp.log(min_p_R)  # log(0) is -inf: nothing falls below it
    return jnp.where(logits_RV >= floor_R[:, None], logits_RV, -jnp.inf)


def keep_top_k(logits_RV: Array, top_k_R: Array) -> Array:
    """Keep the k likeliest (ties with the k-th are kept); 0 keeps all."""
    order_RV = _ordered(logits_RV)
    wanted_R = jnp.where(top_k_R > 0, jnp.minimum(top_k_R, logits_RV.shape[1]), logits_RV.shape[1])
    threshold_R = _largest(lambda t_R: jnp.sum(order_RV >= t_R[:, None], axis=-1) >= wanted_R, len(wanted_R))
    return jnp.where(order_RV >= threshold_R[:, None], logits_RV, -jnp.inf)


def keep_top_p(logits_RV: Array, top_p_R: Array) -> Array:
    """Keep the likeliest tokens whose mass reaches p (Holtzman et al., 2020), ties included; 1 keeps all."""
    order_RV = _ordered(logits_RV)
    probability_RV = jax.nn.softmax(logits_RV, axis=-1)

    def reaches(threshold_R: Array) -> Array:
        return jnp.sum(jnp.where(order_RV >= threshold_R[:, None], probability_RV, 0.0), axis=-1) >= top_p_R

    threshold_R = jnp.where(top_p_R < 1.0, _largest(reaches, len(top_p_R)), 0)
    return jnp.where(order_RV >= threshold_R[:, None], logits_RV, -jnp.inf)


def _ordered(x: Array) -> Array:
    """uint32 with the order of float32: sign bit flipped for positive numbers, all bits for negative ones."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds, rows: int) -> Array:
    """The largest uint32 for which `holds`, bit by bit, in each row."""

    def body(step: Array, found_R: Array) -> Array:
        candidate_R = found_R | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(holds(candidate_R), candidate_R, found_R)

    return lax.fori_loop(0, _BISECTIONS, body, jnp.zeros(rows, jnp.uint32))


def _unpack_mask(mask_RW: Array, vocab: int) -> Array:
    bits_RW32 = (mask_RW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits_RW32.reshape(mask_RW.shape[0], -1)[:, :vocab].astype(bool)
