"""One row of a stack of rows, read and written where its number is known at run time.

Indexing would check bounds and negative numbers: a dozen small steps for each row, in
programs that handle rows by the hundred. Numbers must be in range here: one beyond the
end reads, or overwrites, the last row.
"""

from __future__ import annotations

import jax
from jax import lax


def take_row(rows: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    """Returns row `index`, [] int32, along an axis.

    Exactness: nothing is computed.
    """
    return lax.dynamic_index_in_dim(
        rows, index, axis, keepdims=False, allow_negative_indices=False
    )


def put_row(
    rows: jax.Array, index: jax.Array, row: jax.Array, axis: int = 0
) -> jax.Array:
    """Returns the rows with `row`, of their dtype, at `index`, [] int32.

    Exactness: nothing is computed.
    """
    return lax.dynamic_update_index_in_dim(
        rows, row, index, axis, allow_negative_indices=False
    )
