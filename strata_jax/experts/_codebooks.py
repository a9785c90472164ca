"""Codebooks of the trellis formats: a 16-bit state to a half-precision value.

The values are computed, not stored: a few integer operations scatter the states over an
approximate normal law. Each has a form in JAX and one in NumPy, with the same bits.

References:
  Tseng et al., `QTIP: Quantization with Trellises and Incoherence Processing
  <https://arxiv.org/abs/2406.11235>`_, 2024.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NUM_STATES = 1 << 16

# mul1 = (1024 + the sum of a product's four bytes) * _STEP + _SHIFT.
_STEP = float(np.uint16(0x1EEE).view(np.float16))
_SHIFT = float(np.uint16(0xC931).view(np.float16))
# mcg and 3inst add two halves of a word, of which some bits are kept, some flipped.
_KEPT = np.uint32(0x8FFF8FFF)
_FLIPPED = np.uint32(0x3B603B60)


class Codebook(NamedTuple):
    """A codebook."""

    name: str
    decode: Callable[[jax.Array], jax.Array]  # uint32 states -> float32
    reference: Callable[[np.ndarray], np.ndarray]  # the same in NumPy


@functools.cache
def all_values(codebook: Codebook) -> np.ndarray:
    """Values of all states, `[2**16]` float32."""
    return codebook.reference(np.arange(NUM_STATES, dtype=np.uint32))


@functools.cache
def standard_deviation(codebook: Codebook) -> float:
    """Standard deviation of the value of a uniform state."""
    return float(np.std(all_values(codebook).astype(np.float64)))


def _round_to_half(values: jax.Array) -> jax.Array:
    """Rounds float32 to the nearest half, ties to even, where that is a normal half.

    In integers, since XLA may drop a conversion to float16 and back.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    bits = bits + jnp.uint32(0xFFF) + (bits >> 13 & 1)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFE000), jnp.float32)


def _decode_mul1(states: jax.Array) -> jax.Array:
    word = states * jnp.uint32(0x83DCD12D)
    total = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24)
    # 11 bits times 11 bits, on the grid of the shift: exact, contracted or not.
    values = (total + 1024).astype(jnp.float32) * jnp.float32(_STEP)
    return _round_to_half(values + jnp.float32(_SHIFT))


def _reference_mul1(states: np.ndarray) -> np.ndarray:
    word = states * np.uint32(0x83DCD12D)
    total = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24)
    values = (1024 + total.astype(np.float64)) * _STEP + _SHIFT
    return values.astype(np.float16).astype(np.float32)


def _sum_of_halves(word: jax.Array) -> jax.Array:
    word = word & _KEPT ^ _FLIPPED
    return _round_to_half(_widen(word & 0xFFFF) + _widen(word >> 16))


def _widen(halves: jax.Array) -> jax.Array:
    """The float32 of a normal half that is given by its bits."""
    sign = (halves & 0x8000) << 16
    magnitude = ((halves & 0x7FFF) << 13) + jnp.uint32(112 << 23)
    return jax.lax.bitcast_convert_type(sign | magnitude, jnp.float32)


def _reference_sum_of_halves(word: np.ndarray) -> np.ndarray:
    halves = (word & _KEPT ^ _FLIPPED).astype("<u4").view("<f2").reshape(-1, 2)
    total = halves[:, 0].astype(np.float32) + halves[:, 1].astype(np.float32)
    return total.astype(np.float16).astype(np.float32).reshape(word.shape)


def _decode_mcg(states: jax.Array) -> jax.Array:
    return _sum_of_halves(states * jnp.uint32(0xCBAC1FED))


def _reference_mcg(states: np.ndarray) -> np.ndarray:
    return _reference_sum_of_halves(states * np.uint32(0xCBAC1FED))


def _decode_3inst(states: jax.Array) -> jax.Array:
    return _sum_of_halves(states * jnp.uint32(89226354) + jnp.uint32(64248484))


def _reference_3inst(states: np.ndarray) -> np.ndarray:
    word = states * np.uint32(89226354) + np.uint32(64248484)
    return _reference_sum_of_halves(word)


CODEBOOKS = (
    Codebook("mul1", _decode_mul1, _reference_mul1),
    Codebook("mcg", _decode_mcg, _reference_mcg),
    Codebook("3inst", _decode_3inst, _reference_3inst),
)
