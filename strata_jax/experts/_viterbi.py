"""Finds the closest tail-biting path of a trellis with 2**16 states.

A state is the window of 16 bits that ends with a weight's own K bits, which are its
uppermost. So a state's lower 16 - K bits are the upper ones of the state before, called
its stem here: all that a path's future knows of its past.

References:
  Viterbi, `Error Bounds for Convolutional Codes and an Asymptotically Optimum Decoding
  Algorithm <https://doi.org/10.1109/TIT.1967.1054010>`_, 1967.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

_STATE_BITS = 16
# Tiles side by side fill a vector register; their choices at 2 bits take 64 MiB.
_BATCH_SIZE = 16


def closest_states(
    targets: np.ndarray, values: np.ndarray, num_bits: int
) -> np.ndarray:
    """Encodes tiles with little squared error.

    Args:
      targets: `[tiles, T]` float32.
      values: `[2**16]` float32, the codebook.
      num_bits: K, bits per weight.

    Returns:
      `[tiles, T]` uint32 states of tail-biting paths: each state's lower 16 - K bits
      are the upper ones of the state before, the last being before the first.
    """
    num_tiles, length = targets.shape
    states = np.empty((num_tiles, length), np.uint32)
    for start in range(0, num_tiles, _BATCH_SIZE):
        batch = targets[start : start + _BATCH_SIZE]
        padding = ((0, _BATCH_SIZE - len(batch)), (0, 0))
        found = _closest_batch(np.pad(batch, padding).T, values, num_bits)
        states[start : start + len(batch)] = np.asarray(found).T[: len(batch)]
    return states


@functools.partial(jax.jit, static_argnames="num_bits")
def _closest_batch(targets: jax.Array, values: jax.Array, num_bits: int) -> jax.Array:
    """`[T, batch]` float32, `[2**16]` float32 -> `[T, batch]` states, int32."""
    length, batch_size = targets.shape
    num_stems = 1 << (_STATE_BITS - num_bits)

    # Where a path closes is found by a free one through the tile turned by half: what
    # it does at its middle has forgotten its ends.
    turned = jnp.roll(targets, length // 2, axis=0)
    free = jnp.zeros((num_stems, batch_size), jnp.float32)
    costs, choices = _forward(turned, values, free, num_bits)
    last = jnp.argmin(costs, axis=0).astype(jnp.int32)
    closing, _ = _backward(choices[length // 2 :], last, num_bits)

    stems = jax.lax.broadcasted_iota(jnp.int32, free.shape, 0)
    closed = jnp.where(stems == closing[None, :], free, jnp.float32(1e30))
    _, choices = _forward(targets, values, closed, num_bits)
    _, states = _backward(choices, closing, num_bits)
    return states


def _forward(
    targets: jax.Array, values: jax.Array, costs: jax.Array, num_bits: int
) -> tuple[jax.Array, jax.Array]:
    """Costs of the best paths to each stem.

    Args:
      targets: `[T, batch]` float32.
      values: `[2**16]` float32.
      costs: `[stems, batch]` float32, of the stems before the first target.
      num_bits: K.

    Returns:
      `[stems, batch]` float32, costs of the stems after the last target, and
      `[T, stems, batch]` uint8, the K bits that each stem's best state has below it.
    """
    num_branches = 1 << num_bits
    num_rests = 1 << (_STATE_BITS - 2 * num_bits)
    batch_size = targets.shape[1]
    # A state: its own bits, the rest, and the K bits that the next stem forgets.
    shape = (num_branches, num_rests, batch_size)
    table = values.reshape(num_branches, num_rests, num_branches)
    low_bits = num_branches - 1

    def step(costs: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        costs = costs.reshape(num_rests, num_branches, batch_size)
        target = jnp.broadcast_to(target, shape)
        best = jnp.full(shape, jnp.iinfo(jnp.int32).max, jnp.int32)
        for branch in range(num_branches):
            value = jnp.broadcast_to(table[:, :, branch, None], shape)
            before = jnp.broadcast_to(costs[None, :, branch], shape)
            error = value - target
            cost = before + error * error
            # Costs are not negative, so they order as integers do; the branch takes
            # their last bits, and one minimum finds both.
            bits = jax.lax.bitcast_convert_type(cost, jnp.int32)
            best = jnp.minimum(best, bits & ~low_bits | branch)
        best = best.reshape(num_branches * num_rests, batch_size)
        choices = (best & low_bits).astype(jnp.uint8)
        return jax.lax.bitcast_convert_type(best, jnp.float32), choices

    return jax.lax.scan(step, costs, targets)


def _backward(
    choices: jax.Array, stems: jax.Array, num_bits: int
) -> tuple[jax.Array, jax.Array]:
    """The paths that end in `stems`.

    Args:
      choices: `[T, stems, batch]` uint8, from `_forward`.
      stems: `[batch]` int32, after the last target.
      num_bits: K.

    Returns:
      `[batch]` int32, the stems before the first target, and `[T, batch]` int32, the
      states.
    """
    columns = jnp.arange(stems.shape[0], dtype=jnp.int32)
    num_stems = choices.shape[1]

    def step(stems: jax.Array, choice: jax.Array) -> tuple[jax.Array, jax.Array]:
        states = stems << num_bits | choice[stems, columns].astype(jnp.int32)
        return states & (num_stems - 1), states

    return jax.lax.scan(step, stems, choices, reverse=True)
