"""Draws of a token from a row of weights by a two-level inverse CDF."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._sums import doubling_sum, halving_sum

BLOCK_SIZE = 256


def draw_token(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Draws a token with probability proportional to its weight.

    The row is cut into blocks of `BLOCK_SIZE`; the first uniform picks a block, the
    second a token inside it, each as the smallest index whose running sum exceeds the
    uniform times the last running sum. With V <= BLOCK_SIZE there is one block and the
    first uniform does not count. Scaling by the row's own total loses no tail to
    float32 sums that end below 1, and two levels reach masses that a single running sum
    over V would absorb.

    Args:
      weights: `[V]` float, not negative, of any total.
      uniforms: `[2]` float in [0, 1), (u_block, u_token), of no more precision than
        24 bits if `weights` is float32.

    Returns:
      [] int32, a token of positive weight, or -1 if there is none.

    Raises:
      ValueError: at trace time, if a shape or dtype is wrong.

    Exactness: law-exact up to the rounding of the running sums, whose order is fixed;
      the bits are a function of the row alone.

    Example:
      >>> import jax.numpy as jnp
      >>> int(draw_token(jnp.array([0.25, 0.0, 0.75]), jnp.array([0.0, 0.25])))
      2
    """
    _checks.check_shape("weights", weights, (None,))
    _checks.check_floating("weights", weights)
    _checks.check_shape("uniforms", uniforms, (2,))
    return _draw(weights, uniforms)


# A program of its own for the tracer: drafts and residuals then share it.
@jax.jit
def _draw(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    uniforms = uniforms.astype(weights.dtype)
    size = weights.shape[0]
    if size <= BLOCK_SIZE:
        return _smallest_exceeding(weights, doubling_sum(weights), uniforms[1])
    # The last block apart, for padding the row would be a slow copy of it.
    num_whole = size // BLOCK_SIZE
    blocks = weights[: num_whole * BLOCK_SIZE].reshape(-1, BLOCK_SIZE)
    rest = jnp.pad(weights[num_whole * BLOCK_SIZE :], (0, -size % BLOCK_SIZE))
    sums = halving_sum(blocks)
    if rest.size:
        sums = jnp.append(sums, halving_sum(rest))
    block = _smallest_exceeding(sums, doubling_sum(sums), uniforms[0])
    inside = lax.dynamic_index_in_dim(
        blocks, jnp.clip(block, 0, num_whole - 1), keepdims=False
    )
    if rest.size:
        inside = jnp.where(block == num_whole, rest, inside)
    token = _smallest_exceeding(inside, doubling_sum(inside), uniforms[1])
    return jnp.where(block < 0, block, block * BLOCK_SIZE + token)


def _smallest_exceeding(
    weights: jax.Array, running: jax.Array, uniform: jax.Array
) -> jax.Array:
    # Running sums that are rounded in a tree need not grow, and could grow at an entry
    # of weight 0; a running maximum over the others restores both.
    running = lax.cummax(jnp.where(weights > 0, running, jnp.zeros_like(running)))
    exceeds = running > uniform * running[-1]
    index = jnp.where(jnp.any(exceeds), jnp.argmax(exceeds), -1)
    return index.astype(jnp.int32)
