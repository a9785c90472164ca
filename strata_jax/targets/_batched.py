"""The negative control: a window's rows share their products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._types import TargetModel, TargetRows
from strata_jax.targets._family import Config, find_family


def batched(config: Config, *, max_length: int, max_window: int = 8) -> TargetModel:
    """Adapts a model in the usual batched arithmetic, as a negative control.

    Args:
      config: the model's shape, `models.LlamaConfig` or `models.MoeConfig`.
      max_length: S, the longest context in tokens; at most `config.max_position`.
      max_window: the largest T that `score` will be given.

    Returns:
      The target; a decoder takes it only with `bit_exact=False`.

    Raises:
      ValueError: if a number is out of range.

    Exactness: not bit-exact: a row's last bits depend on how many rows share its
      window, so the law is that of a slightly different target.
    """
    max_length = _checks.check_integer("max_length", max_length, 1, config.max_position)
    max_window = _checks.check_integer("max_window", max_window, 1)

    family = find_family(
        config, expert_mode="batched", num_cached_experts=0, max_window=max_window
    )

    def init(params: Any) -> Any:
        # A window writes all its rows, computed or not; they must not be shifted.
        return family.init(params, max_length + max_window)

    def score(
        params: Any,
        state: Any,
        tokens: jax.Array,
        position: jax.Array,
        num_rows: jax.Array,
    ) -> tuple[TargetRows, Any]:
        del num_rows
        if tokens.shape[0] > max_window:
            raise ValueError(
                f"tokens holds {tokens.shape[0]} rows: build the target with "
                f"max_window={tokens.shape[0]} or more"
            )
        logits, hidden, state = family.batched_rows(params, state, tokens, position)
        rows = TargetRows(logits=logits, features=hidden, status=family.status(state))
        return rows, state

    def prefill(
        params: Any,
        state: Any,
        tokens: jax.Array,
        start: jax.Array,
        stop: jax.Array,
    ) -> tuple[Any, jax.Array]:
        num_tokens = tokens.shape[0]
        padded = jnp.pad(tokens, (0, max_window))

        def chunk(
            index: jax.Array, carry: tuple[Any, jax.Array]
        ) -> tuple[Any, jax.Array]:
            state, features = carry
            position = start + index * max_window
            piece = lax.dynamic_slice(padded, (position,), (max_window,))
            _, hidden, state = family.batched_rows(params, state, piece, position)
            row = position + jnp.arange(max_window, dtype=jnp.int32)
            place = jnp.where(row < stop, row, num_tokens)
            return state, features.at[place].set(hidden, mode="drop")

        hidden_shape = jax.eval_shape(
            family.batched_rows, params, state, padded[:1], start
        )[1]
        features = jnp.zeros((num_tokens, hidden_shape.shape[1]), hidden_shape.dtype)
        num_chunks = (stop - start + max_window - 1) // max_window
        return lax.fori_loop(0, num_chunks, chunk, (state, features))

    def commit(state: Any, position: jax.Array, num_kept: jax.Array) -> Any:
        del position, num_kept
        return state

    return TargetModel(
        init=init,
        prefill=prefill,
        score=score,
        commit=commit,
        vocab_size=config.vocab_size,
        max_length=max_length,
        is_bit_exact=False,
        name="batched",
        max_window=max_window,
    )
