"""Hadamard-folded inputs: weights that are stored turned, and inputs turned to match.

H, block-diagonal with Sylvester matrices over sqrt(128), is symmetric and its own
inverse. So with D = diag(signs), W x = (W D H) (H D x). The left product has fewer
outliers than W and is what is quantised; the input is transformed once per token and
layer, for all experts with the same signs.

References:
  Chee et al., `QuIP: 2-Bit Quantization of Large Language Models With Guarantees
  <https://arxiv.org/abs/2307.13304>`_, 2023.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks

_BLOCK_SIZE = 128
_NUM_ROUNDS = 7
_SCALE = _BLOCK_SIZE**-0.5


def hadamard(values: jax.Array) -> jax.Array:
    """Multiplies blocks of 128 by the natural-order Sylvester matrix over sqrt(128).

    Args:
      values: `[..., I]` float32, I a multiple of 128.

    Returns:
      `[..., I]` float32.

    Raises:
      ValueError: at trace time, if the last axis or the dtype does not fit.

    Exactness: bit-exact to the singleton: seven rounds of additions in a fixed order,
      then one multiplication.

    Example:
      >>> import jax.numpy as jnp
      >>> hadamard(jnp.zeros(128).at[1].set(8.0))[:4].round(3).tolist()
      [0.7070000171661377, -0.7070000171661377, 0.7070000171661377, -0.7070000171661377]
    """
    _check_transformed("values", jnp.shape(values), jnp.result_type(values))
    # The loop keeps the multiplication, and the producer's, out of other kernels, where
    # they could be contracted with an addition. In the rounds before the last it is
    # by one.
    scales = np.ones(_NUM_ROUNDS, np.float32)
    scales[-1] = _SCALE

    def round_of(blocks: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        return _add_and_subtract(blocks, jnp) * scale, None

    blocks = values.reshape(-1, _BLOCK_SIZE)
    blocks, _ = jax.lax.scan(round_of, blocks, jnp.asarray(scales))
    return blocks.reshape(values.shape)


def hadamard_reference(values: np.ndarray) -> np.ndarray:
    """Does what `hadamard` does, in NumPy.

    Args:
      values: `[..., I]` float32, I a multiple of 128.

    Returns:
      `[..., I]` float32.

    Raises:
      ValueError: if the last axis or the dtype does not fit.

    Exactness: the bits of `hadamard`.
    """
    _check_transformed("values", np.shape(values), np.result_type(values))
    return _transform_on_host(values) * np.float32(_SCALE)


def fold_hadamard(weights: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Turns weights so that they fit inputs that went through `hadamard`.

    The result W' satisfies W x = W' H(signs * x).

    Args:
      weights: `[O, I]` float32, W, I a multiple of 128.
      signs: `[I]` float32 of +1 and -1, from `hadamard_signs`.

    Returns:
      `[O, I]` float32, W'.

    Raises:
      ValueError: if the shapes, the dtype or the signs do not fit.

    Exactness: computed in float64 and rounded once, so the product is that of `weights`
      up to rounding.
    """
    weights = np.asarray(weights)
    signs = np.asarray(signs)
    _checks.check_shape("weights", weights, (None, None))
    _check_transformed("weights", weights.shape, weights.dtype)
    _checks.check_shape("signs", signs, weights.shape[1:])
    if not np.all(np.abs(signs) == 1):
        raise ValueError("signs must be +1 or -1; make them with hadamard_signs")
    turned = _transform_on_host(weights.astype(np.float64) * signs.astype(np.float64))
    return (turned * _SCALE).astype(np.float32)


def hadamard_signs(num_inputs: int, seed: int) -> np.ndarray:
    """Draws the signs of the input channels.

    Channel i is -1 where the i-th output of SplitMix64 after `seed` is odd.

    Args:
      num_inputs: I, a multiple of 128.
      seed: in [0, 2**64).

    Returns:
      `[I]` float32 of +1 and -1.

    Raises:
      ValueError: if an argument is out of range.

    Exactness: integer arithmetic; a function of the seed and the channel.

    References:
      Steele et al., `Fast Splittable Pseudorandom Number Generators
      <https://doi.org/10.1145/2660193.2660195>`_, 2014.
    """
    num_inputs = _checks.check_integer("num_inputs", num_inputs, 1)
    _check_transformed("num_inputs", (num_inputs,), jnp.dtype(jnp.float32))
    seed = _checks.check_integer("seed", seed, 0, 2**64 - 1)
    odd = split_mix(seed, np.arange(num_inputs, dtype=np.uint64)) & np.uint64(1)
    return np.where(odd, np.float32(-1), np.float32(1))


def split_mix(seed: int, indices: np.ndarray) -> np.ndarray:
    """Outputs number `indices` (from 0, uint64) of SplitMix64 after `seed`."""
    mixed = np.uint64(seed) + (indices + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return mixed ^ mixed >> np.uint64(31)


def _check_transformed(name: str, shape: tuple[int, ...], dtype: Any) -> None:
    if not shape or shape[-1] == 0 or shape[-1] % _BLOCK_SIZE:
        size = shape[-1] if shape else 1
        raise ValueError(
            f"{name} must have a multiple of {_BLOCK_SIZE} input channels, got {size}"
        )
    if dtype != np.float32:
        raise ValueError(f"{name} must be float32, got {dtype}")


def _add_and_subtract(blocks: Any, xp: Any) -> Any:
    """One round of butterflies over `[blocks, 128]`; `xp` is the module of the array.

    Sums go before differences: seven such shuffles put every channel back in its place.
    """
    first, second = blocks[:, 0::2], blocks[:, 1::2]
    return xp.concatenate([first + second, first - second], axis=1)


def _transform_on_host(values: np.ndarray) -> np.ndarray:
    """The transform without its scale."""
    blocks = values.reshape(-1, _BLOCK_SIZE)
    for _ in range(_NUM_ROUNDS):
        blocks = _add_and_subtract(blocks, np)
    return blocks.reshape(values.shape)
