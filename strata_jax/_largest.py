"""The place of a row's largest entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def first_largest(values: jax.Array, largest: jax.Array | None = None) -> jax.Array:
    """Returns where the largest entry stands, the first of equals.

    Two reductions of one operand each: on a CPU, XLA makes vectors of them, and not of
    `jnp.argmax`, which takes ten times as long.

    Args:
      values: `[n]` float; with a NaN among them the place means nothing.
      largest: [] float, the largest of them if it is known.

    Returns:
      [] int32, in 0 .. n - 1.

    Exactness: comparisons only.
    """
    size = values.shape[0]
    if largest is None:
        largest = jnp.max(values)
    places = jnp.arange(size, dtype=jnp.int32)
    return jnp.min(jnp.where(values == largest, places, size - 1))
