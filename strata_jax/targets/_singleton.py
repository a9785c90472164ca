"""The default target: every token computed as if it were alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._types import TargetModel, TargetRows
from strata_jax.targets._family import Config, find_family
from strata_jax.targets._guard import guard


def singleton(
    config: Config,
    *,
    max_length: int,
    prefill_chunk: int = 32,
    expert_mode: str = "singleton",
    num_cached_experts: int = 0,
) -> TargetModel:
    """Adapts a llama or mixture-of-experts model in singleton arithmetic.

    Args:
      config: the model's shape, `models.LlamaConfig` or `models.MoeConfig`.
      max_length: S, the longest context in tokens; at most `config.max_position`.
      prefill_chunk: how many prompt tokens share a pass over the weights; changes the
        speed and no bit.
      expert_mode: "singleton" decodes an expert for each of its tokens, "shared" once
        for all of a window's; changes the speed and no bit.
      num_cached_experts: R, how many experts of each layer to keep on the device, of
        those on the host or on disk; changes the speed and no bit.

    Returns:
      The target; features are the hidden states before the final norm, `[T, D]`.

    Raises:
      ValueError: if a number is out of range, or with `expert_mode="batched"`.

    Exactness: bit-exact to the T = 1 program for every width, rejection pattern,
      prefill chunk, place of the experts and, under `vmap`, batch.
    """
    max_length = _checks.check_integer("max_length", max_length, 1, config.max_position)
    prefill_chunk = _checks.check_integer("prefill_chunk", prefill_chunk, 1)
    if expert_mode == "batched":
        raise ValueError(
            "expert_mode='batched' is not bitwise the singleton's: use "
            "targets.batched with bit_exact=False for a control"
        )
    family = find_family(
        config,
        expert_mode=expert_mode,
        num_cached_experts=num_cached_experts,
        max_window=prefill_chunk,
    )

    def init(params: Any) -> Any:
        return family.init(params, max_length)

    @guard
    def score(
        params: Any,
        state: Any,
        tokens: jax.Array,
        position: jax.Array,
        num_rows: jax.Array,
    ) -> tuple[TargetRows, Any]:
        state = family.begin(params, state)
        first = jnp.zeros((), jnp.int32)
        logits, hidden, state = family.score_rows(
            params, state, tokens, position, num_rows, first
        )
        rows = TargetRows(logits=logits, features=hidden, status=family.status(state))
        return rows, state

    @guard
    def prefill(
        params: Any,
        state: Any,
        tokens: jax.Array,
        start: jax.Array,
        stop: jax.Array,
    ) -> tuple[Any, jax.Array]:
        num_tokens = tokens.shape[0]
        padded = jnp.pad(tokens, (0, prefill_chunk))

        def chunk(
            index: jax.Array, carry: tuple[Any, jax.Array]
        ) -> tuple[Any, jax.Array]:
            state, features = carry
            position = start + index * prefill_chunk
            num_rows = jnp.minimum(stop - position, prefill_chunk)
            piece = lax.dynamic_slice(padded, (position,), (prefill_chunk,))
            state = family.begin(params, state)
            _, hidden, state = family.score_rows(
                params, state, piece, position, num_rows, num_rows
            )
            row = jnp.arange(prefill_chunk, dtype=jnp.int32)
            place = jnp.where(row < num_rows, position + row, num_tokens)
            features = features.at[place].set(hidden, mode="drop")
            return family.commit(state, num_rows), features

        hidden_shape = jax.eval_shape(
            family.score_rows,
            params,
            state,
            padded[:prefill_chunk],
            start,
            start,
            start,
        )[1]
        features = jnp.zeros((num_tokens, hidden_shape.shape[1]), hidden_shape.dtype)
        num_chunks = (stop - start + prefill_chunk - 1) // prefill_chunk
        return lax.fori_loop(0, num_chunks, chunk, (state, features))

    def commit(state: Any, position: jax.Array, num_kept: jax.Array) -> Any:
        # Rows past the position are dead: attention stops before them, and the next
        # window overwrites them.
        del position
        return family.commit(state, num_kept)

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
