"""Matrix products with rounded factors, for training: twice as fast on many CPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def rounded_product(states: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns `states @ matrix`, with factors rounded to bfloat16 and float32 sums.

    The two products of its gradient are computed likewise; a cast of `matrix` alone
    would leave those in float32.

    Args:
      states: `[..., m]` float32.
      matrix: `[m, n]` float32.

    Returns:
      `[..., n]` float32.

    Exactness: neither law nor bits; for training only.
    """
    return _product(_rounded(states), _rounded(matrix))


def _rounded(values: jax.Array) -> jax.Array:
    return values.astype(jnp.bfloat16)


def _product(states: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.dot(states, matrix, preferred_element_type=jnp.float32)


def _forward(
    states: jax.Array, matrix: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    factors = _rounded(states), _rounded(matrix)
    return _product(*factors), factors


def _backward(
    factors: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    states, matrix = factors
    gradient = _rounded(gradient)
    rows = tuple(range(states.ndim - 1))
    of_matrix = lax.dot_general(
        states, gradient, ((rows, rows), ((), ())), preferred_element_type=jnp.float32
    )
    return _product(gradient, matrix.T), of_matrix


rounded_product.defvjp(_forward, _backward)
