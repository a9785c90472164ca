"""Trellis-coded weights: K bits each, decoded from a window of 16.

A packed matrix is one word with the bits of its float32 scale, then its tiles of
16 x 16 weights in row-major order, row-major inside as well. A tile is a ring of 256 K
bits in little-endian order. The state of weight t is the window of 16 bits that ends
with bits [tK, tK + K), its own; the weight is the scale times the state's value in a
codebook.

References:
  Tseng et al., `QTIP: Quantization with Trellises and Incoherence Processing
  <https://arxiv.org/abs/2406.11235>`_, 2024.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.experts import _codebooks, _viterbi
from strata_jax.experts._codebooks import Codebook

TILE_SIZE = 16
_STATE_BITS = 16

# Standard deviation of the weights over that of the scaled codebook has a best value,
# which was measured on normal weights: the more bits, the more the tails matter.
_SPREAD = {2: 1.0, 3: 1.05, 4: 1.1}
# A smaller scale would make subnormal weights, which some programs flush to zero.
_LEAST_SCALE = 2.0**-100


def encode(weights: np.ndarray, num_bits: int, codebook: Codebook) -> np.ndarray:
    """`[O, I]` float32 -> packed words, uint32."""
    norm = np.sqrt(np.mean(np.square(weights, dtype=np.float64)))
    spread = _SPREAD[num_bits] / _codebooks.standard_deviation(codebook)
    scale = _round_scale(norm * spread)
    targets = _split_tiles(weights / (scale or np.float32(1)))
    states = _viterbi.closest_states(targets, _codebooks.all_values(codebook), num_bits)
    own = states >> np.uint32(_STATE_BITS - num_bits)
    bits = own[:, :, None] >> np.arange(num_bits, dtype=np.uint32) & 1
    packed = np.packbits(bits.reshape(-1).astype(np.uint8), bitorder="little")
    return np.concatenate([np.array([scale]).view(np.uint32), packed.view("<u4")])


def _round_scale(scale: float) -> np.float32:
    """Rounds to 13 bits: then its products with halves are exact in float32."""
    if scale < _LEAST_SCALE:
        return np.float32(0)
    mantissa, exponent = np.frexp(scale)
    return np.float32(np.ldexp(np.round(mantissa * 2**13), exponent - 13))


def _split_tiles(weights: np.ndarray) -> np.ndarray:
    """`[O, I]` -> `[tiles, 256]`."""
    num_outputs, num_inputs = weights.shape
    tiles = weights.reshape(
        num_outputs // TILE_SIZE, TILE_SIZE, num_inputs // TILE_SIZE, TILE_SIZE
    )
    return tiles.swapaxes(1, 2).reshape(-1, TILE_SIZE * TILE_SIZE)


def decode(
    words: jax.Array,
    num_outputs: int,
    num_inputs: int,
    num_bits: int,
    codebook: Codebook,
) -> jax.Array:
    """Packed words -> `[O, I]` float32."""
    scale = jax.lax.bitcast_convert_type(words[0], jnp.float32)
    grid = (num_outputs // TILE_SIZE, num_inputs // TILE_SIZE)
    # A row of a tile is K pieces of 16 bits; a window lies in a piece and the one
    # before it.
    pieces = jnp.stack([words[1:] & 0xFFFF, words[1:] >> 16], axis=-1)
    pieces = pieces.reshape(*grid, TILE_SIZE * num_bits)
    pairs = jnp.roll(pieces, 1, axis=-1) | pieces << 16
    pairs = pairs.reshape(*grid, TILE_SIZE, num_bits).swapaxes(1, 2)
    ends = np.arange(1, TILE_SIZE + 1) * num_bits
    states = []
    for piece in range(num_bits):
        inside = ends[(ends > 16 * piece) & (ends <= 16 * (piece + 1))] - 16 * piece
        pair = jnp.broadcast_to(
            pairs[..., piece, None], (*pairs.shape[:-1], len(inside))
        )
        shifts = jnp.broadcast_to(jnp.asarray(inside, jnp.uint32), pair.shape)
        states.append(pair >> shifts & 0xFFFF)
    values = codebook.decode(jnp.concatenate(states, axis=-1))
    return values.reshape(num_outputs, num_inputs) * scale


def reference(
    words: np.ndarray,
    num_outputs: int,
    num_inputs: int,
    num_bits: int,
    codebook: Codebook,
) -> np.ndarray:
    """As `decode`, in NumPy, one bit after another."""
    size = TILE_SIZE * TILE_SIZE
    stored = words[1:].astype("<u4").view(np.uint8)
    ring = np.unpackbits(stored, bitorder="little").reshape(-1, size * num_bits)
    states = np.zeros((len(ring), size), np.uint32)
    for bit in range(_STATE_BITS):
        places = np.arange(1, size + 1) * num_bits - _STATE_BITS + bit
        states |= ring[:, places % ring.shape[1]].astype(np.uint32) << np.uint32(bit)
    tiles = codebook.reference(states).reshape(
        num_outputs // TILE_SIZE, num_inputs // TILE_SIZE, TILE_SIZE, TILE_SIZE
    )
    values = tiles.swapaxes(1, 2).reshape(num_outputs, num_inputs)
    return values * words[0].view(np.float32)
