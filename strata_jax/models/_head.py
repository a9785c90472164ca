"""The final norm and the output head in singleton arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax.models._attention import AttentionShape, rms_norm


def head_logits(
    config: AttentionShape, norm: jax.Array, table: jax.Array, state: jax.Array
) -> jax.Array:
    """Returns the logits `[V]` of one hidden state `[D]`.

    Exactness: a function of one token.
    """
    normed = rms_norm(state, norm, config.norm_epsilon)
    return (table @ normed).astype(state.dtype)


def head_rows(
    config: AttentionShape,
    norm: jax.Array,
    table: jax.Array,
    hidden: jax.Array,
    first_row: jax.Array,
    num_rows: jax.Array,
) -> jax.Array:
    """Returns logits `[T, V]` of the rows `first_row` .. `num_rows - 1`, else zero.

    Exactness: a row is a function of one token.
    """

    def row_logits(row: jax.Array, logits: jax.Array) -> jax.Array:
        return logits.at[row].set(head_logits(config, norm, table, hidden[row]))

    logits = jnp.zeros((hidden.shape[0], table.shape[0]), hidden.dtype)
    return lax.fori_loop(first_row, num_rows, row_logits, logits)
