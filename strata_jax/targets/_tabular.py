"""Markov tables as a target: a law that is known, for enumeration."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax._types import TargetModel, TargetRows


@flax.struct.dataclass
class TabularParams:
    """A Markov chain of order n: one row of logits for each n tokens.

    `jnp.log` of a table of probabilities gives its logits; -inf is probability 0.
    """

    logits: jax.Array  # [V] * n + [V] float; n = 0 is independent tokens


def tabular(vocab_size: int, *, max_length: int, order: int = 1) -> TargetModel:
    """Adapts a Markov table.

    Args:
      vocab_size: V.
      max_length: S, the longest context in tokens.
      order: how many tokens the next one depends on; positions before the text count
        as token 0.

    Returns:
      The target, over `TabularParams`. It has no features.

    Raises:
      ValueError: if a number is out of range, or the table has another shape.

    Exactness: bit-exact: a row is read, not computed.
    """
    vocab_size = _checks.check_integer("vocab_size", vocab_size, 1)
    max_length = _checks.check_integer("max_length", max_length, 1)
    order = _checks.check_integer("order", order, 0)

    def init(params: TabularParams) -> jax.Array:
        _checks.check_shape("params.logits", params.logits, (vocab_size,) * (order + 1))
        # The text itself is the cache: like keys and values, addressed by position.
        return jnp.zeros(max_length, jnp.int32)

    def prefill(
        params: TabularParams,
        state: jax.Array,
        tokens: jax.Array,
        start: jax.Array,
        stop: jax.Array,
    ) -> tuple[jax.Array, None]:
        del params
        index = jnp.arange(max_length, dtype=jnp.int32)
        padded = jnp.zeros(max_length, jnp.int32).at[: tokens.shape[0]].set(tokens)
        return jnp.where((index >= start) & (index < stop), padded, state), None

    def score(
        params: TabularParams,
        state: jax.Array,
        tokens: jax.Array,
        position: jax.Array,
        num_rows: jax.Array,
    ) -> tuple[TargetRows, jax.Array]:
        row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        is_computed = row < num_rows
        place = jnp.where(is_computed, position + row, max_length)
        state = state.at[place].set(tokens, mode="drop")
        back = jnp.arange(1 - order, 1, dtype=jnp.int32)
        past = (position + row)[:, None] + back[None]
        history = jnp.where(past < 0, 0, state[jnp.clip(past, 0, max_length - 1)])
        logits = params.logits[tuple(history[:, back] for back in range(order))]
        if order == 0:
            logits = jnp.tile(logits[None], (tokens.shape[0], 1))
        logits = jnp.where(is_computed[:, None], logits, 0)
        return TargetRows(logits=logits, features=None), state

    def commit(state: jax.Array, position: jax.Array, num_kept: jax.Array) -> Any:
        del position, num_kept
        return state

    return TargetModel(
        init=init,
        prefill=prefill,
        score=score,
        commit=commit,
        vocab_size=vocab_size,
        max_length=max_length,
        is_bit_exact=True,
        name="tabular",
    )
