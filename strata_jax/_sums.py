"""Sums whose order is written down, so that they can be repeated anywhere.

XLA is free to choose the order of a reduction, and chooses another one for another
shape or backend. Built from elementwise additions only, these sums have one value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_PIECES = 16  # of a row that are added in one pass; a power of two


def halving_sum(values: jax.Array) -> jax.Array:
    """Sums the last axis by adding its second half to its first, repeatedly.

    Args:
      values: `[..., n]` float; zeros behind it make n a power of two.

    Returns:
      `[...]`, in the dtype of `values`; the error grows with log2(n).

    Exactness: the order of additions is fixed, so the bits are a function of the row.
    """
    if not values.shape[-1]:
        return jnp.zeros(values.shape[:-1], values.dtype)
    width = 1 << (values.shape[-1] - 1).bit_length()
    while width > 1:
        # Several halvings in one pass over the row.
        count = min(_PIECES, width)
        width //= count
        pieces = _cut(values, width)
        while count > 1:
            count //= 2
            # What is missing are zeros, and changes no sum.
            rest = pieces[count:]
            pieces = [
                piece + rest[place] if place < len(rest) else piece
                for place, piece in enumerate(pieces[:count])
            ]
        values = pieces[0]
    return values[..., 0]


def _cut(values: jax.Array, width: int) -> list[jax.Array]:
    """Pieces of the last axis; only the last is padded, since that copies it."""
    size = values.shape[-1]
    pieces = [
        lax.slice_in_dim(values, start, min(start + width, size), axis=-1)
        for start in range(0, size, width)
    ]
    padding = [(0, 0, 0)] * (values.ndim - 1) + [(0, -size % width, 0)]
    return [*pieces[:-1], lax.pad(pieces[-1], _zero(values), padding)]


def doubling_sum(values: jax.Array) -> jax.Array:
    """Running sums: round k adds to each entry the one 2**k places before it.

    Args:
      values: `[n]` float.

    Returns:
      `[n]`; entry i is the sum of `values[: i + 1]`. With rounding the result need not
      be monotone.

    Exactness: the order of additions is fixed, so the bits are a function of the row.

    References:
      Hillis and Steele, `Data Parallel Algorithms
      <https://doi.org/10.1145/7902.7903>`_, 1986.
    """
    shift = 1
    while shift < values.shape[0]:
        values = values + lax.pad(values, _zero(values), [(shift, -shift, 0)])
        shift *= 2
    return values


def _zero(values: jax.Array) -> np.ndarray:
    return np.zeros((), values.dtype)
