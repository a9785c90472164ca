"""Sums in the written order, and draws from a row, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from strata_jax.testing._oracle._inputs import as_rows, as_uniform


def doubling_sum(values: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    """Computes running sums by doubling, with a fixed tree of additions.

    For s = 1, 2, 4, ... < n every entry i >= s becomes `c[i] + c[i-s]`, all from the
    array of the round before.

    Args:
      values: `[n]` real.
      dtype: floating dtype of every addition and of the result.

    Returns:
      `[n]` of `dtype`; entry i approximates `sum(values[:i+1])`. Rounding may leave
      it not monotone.

    Raises:
      ValueError: if `values` is not one-dimensional.

    Exactness: bit-exact to the singleton: entry i depends on `values[:i+1]` alone, in
      a fixed order.

    References:
      Hillis and Steele, `Data Parallel Algorithms
      <https://doi.org/10.1145/7902.7903>`_, 1986.
    """
    sums = np.array(values, dtype=dtype)
    if sums.ndim != 1:
        raise ValueError(f"values must have shape [n], got {list(sums.shape)}")
    step = 1
    while step < sums.shape[0]:
        before = sums.copy()
        sums[step:] = before[step:] + before[:-step]
        step *= 2
    return sums


def halving_sum(values: ArrayLike) -> np.ndarray:
    """Computes sums over the last axis by halving, with a fixed tree of additions.

    The axis is padded with zeros to a power of two, then its second half is added to
    its first until one entry is left.

    Args:
      values: `[..., n]` real.

    Returns:
      `[...]` of the dtype of `values`; 0 for n = 0.

    Raises:
      ValueError: if `values` has no axis.

    Exactness: bit-exact to the singleton: a row's sum does not depend on the leading
      axes.
    """
    rows = np.asarray(values)
    if rows.ndim == 0:
        raise ValueError("values must have at least one axis")
    size = rows.shape[-1]
    width = 1
    while width < size:
        width *= 2
    padded = np.zeros((*rows.shape[:-1], width), rows.dtype)
    padded[..., :size] = rows
    while width > 1:
        width //= 2
        padded = padded[..., :width] + padded[..., width:]
    return padded[..., 0]


def oracle_draw(
    weights: ArrayLike, u_block: float, u_token: float, block_size: int = 256
) -> int:
    """Draws a token by a two-level inverse CDF: a block, then a token inside it.

    The weights are padded with zeros to a multiple of `block_size`. Block sums come
    from `halving_sum`, running sums from `doubling_sum`; an entry without mass takes
    the running maximum of those before it, so it is never the first to exceed the
    threshold. Each level returns the smallest j with `c[j] > u * c[-1]`. With
    V <= `block_size` there is one block of V entries and `u_block` is not used.

    Args:
      weights: `[V]` float32 or float64, >= 0, need not sum to 1. Their dtype is the
        dtype of all arithmetic.
      u_block: uniform in [0, 1), converted to that dtype.
      u_token: uniform in [0, 1), converted to that dtype.
      block_size: entries in a block, >= 1.

    Returns:
      The drawn id, which has a positive weight; -1 if no weight is positive.

    Raises:
      ValueError: if the weights are negative, not finite or of another shape or
        dtype, if a uniform is outside [0, 1) after conversion, or if
        `block_size` < 1.

    Exactness: law-exact up to the rounding of the sums; bit-exact to the singleton.
      Subnormal weights count as positive here, while a backend may flush them to 0.
    """
    row = as_rows("weights", weights, ndim=1)
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    block_uniform = as_uniform("u_block", u_block, row.dtype)
    token_uniform = as_uniform("u_token", u_token, row.dtype)
    if not np.any(row > 0):
        return -1
    if row.shape[0] <= block_size:
        return _smallest_above(row, token_uniform)
    num_blocks = -(-row.shape[0] // block_size)
    blocks = np.zeros(num_blocks * block_size, row.dtype)
    blocks[: row.shape[0]] = row
    blocks = blocks.reshape(num_blocks, block_size)
    block = _smallest_above(halving_sum(blocks), block_uniform)
    return block * block_size + _smallest_above(blocks[block], token_uniform)


def _smallest_above(masses: np.ndarray, uniform: np.floating) -> int:
    """Returns the smallest i of positive mass with cdf[i] > uniform * cdf[-1]."""
    sums = doubling_sum(masses, masses.dtype)
    sums = np.maximum.accumulate(np.where(masses == 0, masses.dtype.type(0), sums))
    above = np.flatnonzero(sums > uniform * sums[-1])
    if above.size:
        return int(above[0])
    # Only a subnormal total can round `uniform * total` up to the total.
    return int(np.flatnonzero(masses > 0)[-1])
