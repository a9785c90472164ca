"""The negative control: a window's rows share their products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._types import TargetModel, TargetRows
from strata_jax.models import (
    LlamaCache,
    LlamaConfig,
    LlamaParams,
    batched_rows,
    check_params,
    empty_cache,
)


def batched(
    config: LlamaConfig, *, max_length: int, max_window: int = 8
) -> TargetModel:
    """Adapts a llama model in the usual batched arithmetic, as a negative control.

    Args:
      config: the model's shape.
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

    def init(params: LlamaParams) -> LlamaCache:
        check_params(config, params)
        # A window writes all its rows, computed or not; they must not be shifted.
        size = max_length + max_window
        return empty_cache(config, size, params.embedding.dtype)

    def score(
        params: LlamaParams,
        cache: LlamaCache,
        tokens: jax.Array,
        position: jax.Array,
        num_rows: jax.Array,
    ) -> tuple[TargetRows, LlamaCache]:
        del num_rows
        if tokens.shape[0] > max_window:
            raise ValueError(
                f"tokens holds {tokens.shape[0]} rows: build the target with "
                f"max_window={tokens.shape[0]} or more"
            )
        logits, hidden, cache = batched_rows(config, params, cache, tokens, position)
        return TargetRows(logits=logits, features=hidden), cache

    def prefill(
        params: LlamaParams,
        cache: LlamaCache,
        tokens: jax.Array,
        start: jax.Array,
        stop: jax.Array,
    ) -> LlamaCache:
        padded = jnp.pad(tokens, (0, max_window))

        def chunk(index: jax.Array, cache: LlamaCache) -> LlamaCache:
            position = start + index * max_window
            piece = lax.dynamic_slice(padded, (position,), (max_window,))
            _, _, cache = batched_rows(config, params, cache, piece, position)
            return cache

        num_chunks = (stop - start + max_window - 1) // max_window
        return lax.fori_loop(0, num_chunks, chunk, cache)

    def commit(cache: LlamaCache, position: jax.Array, num_kept: jax.Array) -> Any:
        del position, num_kept
        return cache

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
