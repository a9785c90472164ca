"""The default target: every token computed as if it were alone."""

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
    check_params,
    empty_cache,
    score_rows,
)
from strata_jax.targets._guard import guard


def singleton(
    config: LlamaConfig, *, max_length: int, prefill_chunk: int = 32
) -> TargetModel:
    """Adapts a llama model in singleton arithmetic.

    Args:
      config: the model's shape.
      max_length: S, the longest context in tokens; at most `config.max_position`.
      prefill_chunk: how many prompt tokens share a pass over the weights; changes the
        speed and no bit.

    Returns:
      The target; features are the hidden states before the final norm, `[T, D]`.

    Raises:
      ValueError: if a number is out of range.

    Exactness: bit-exact to the T = 1 program for every width, rejection pattern,
      prefill chunk and, under `vmap`, batch.
    """
    max_length = _checks.check_integer("max_length", max_length, 1, config.max_position)
    prefill_chunk = _checks.check_integer("prefill_chunk", prefill_chunk, 1)

    def init(params: LlamaParams) -> LlamaCache:
        check_params(config, params)
        return empty_cache(config, max_length, params.embedding.dtype)

    @guard
    def score(
        params: LlamaParams,
        cache: LlamaCache,
        tokens: jax.Array,
        position: jax.Array,
        num_rows: jax.Array,
    ) -> tuple[TargetRows, LlamaCache]:
        first = jnp.zeros((), jnp.int32)
        logits, hidden, cache = score_rows(
            config, params, cache, tokens, position, num_rows, first
        )
        return TargetRows(logits=logits, features=hidden), cache

    @guard
    def prefill(
        params: LlamaParams,
        cache: LlamaCache,
        tokens: jax.Array,
        start: jax.Array,
        stop: jax.Array,
    ) -> LlamaCache:
        padded = jnp.pad(tokens, (0, prefill_chunk))

        def chunk(index: jax.Array, cache: LlamaCache) -> LlamaCache:
            position = start + index * prefill_chunk
            num_rows = jnp.minimum(stop - position, prefill_chunk)
            piece = lax.dynamic_slice(padded, (position,), (prefill_chunk,))
            _, _, cache = score_rows(
                config, params, cache, piece, position, num_rows, num_rows
            )
            return cache

        num_chunks = (stop - start + prefill_chunk - 1) // prefill_chunk
        return lax.fori_loop(0, num_chunks, chunk, cache)

    def commit(cache: LlamaCache, position: jax.Array, num_kept: jax.Array) -> Any:
        # Rows past the position are dead: attention stops before them, and the next
        # window overwrites them.
        del position, num_kept
        return cache

    return TargetModel(
        init=init,
        prefill=prefill,
        score=score,
        commit=commit,
        vocab_size=config.vocab_size,
        max_length=max_length,
        is_bit_exact=True,
        name="singleton",
    )
