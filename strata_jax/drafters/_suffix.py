"""The suffix drafter: what followed the last time the text ended like this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._types import Context, Drafter, DraftRow, DraftStep
from strata_jax.drafters._stateless import stateless


def suffix(
    *, num_draft_tokens: int, vocab_size: int, min_match: int = 3, max_match: int = 64
) -> Drafter:
    """Drafts the continuation of the longest earlier match of the text's own suffix.

    Looks in the committed text only. The longest match wins, among equals the latest;
    a suffix never matches itself, but its continuation may run into it and stops at
    the end of the text. Each row is a point mass, a one-hot q.

    Args:
      num_draft_tokens: K.
      vocab_size: V.
      min_match: least number of matching tokens.
      max_match: matches are compared up to so many tokens.

    Returns:
      The drafter.

    Raises:
      ValueError: if a number is out of range.

    Exactness: law-exact; decided by committed text, before anything is drawn.

    References:
      Saxena, `Prompt Lookup Decoding
      <https://github.com/apoorvumang/prompt-lookup-decoding>`_, 2023.
    """
    num_draft_tokens = _checks.check_integer("num_draft_tokens", num_draft_tokens, 1)
    vocab_size = _checks.check_integer("vocab_size", vocab_size, 1)
    min_match = _checks.check_integer("min_match", min_match, 1)
    max_match = _checks.check_integer("max_match", max_match, min_match)

    def make_rows(context: Context) -> Callable[[DraftStep], DraftRow]:
        start, match = longest_match(
            context.tokens,
            context.length,
            context_length=context.length,
            max_match=max_match,
        )

        def make_row(step: DraftStep) -> DraftRow:
            position = start + step.row
            is_available = (match >= min_match) & (position < context.length)
            token = context.tokens[jnp.where(is_available, position, 0)]
            return DraftRow(
                (jnp.arange(vocab_size, dtype=token.dtype) == token).astype(float),
                is_available,
            )

        return make_row

    return stateless(
        make_rows, num_draft_tokens=num_draft_tokens, vocab_size=vocab_size
    )


def longest_match(
    tokens: jax.Array,
    text_length: jax.Array,
    *,
    context_length: jax.Array,
    max_match: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Finds the longest match of a text's suffix that committed text goes on from.

    Args:
      tokens: `[S]` int32, committed text and perhaps drafts behind it.
      text_length: [] int32, length of the text whose suffix is matched.
      context_length: [] int32, how much of it is committed: the continuation's first
        token lies there.
      max_match: [] int, how many tokens are compared; with 0 nothing is done.

    Returns:
      (where the continuation starts, number of matching tokens), [] int32 each.

    Exactness: integers only.
    """
    size = tokens.shape[0]
    # ends[e] is about the text tokens[: e]; text_length would be the suffix itself.
    ends = jnp.arange(size, dtype=jnp.int32)

    def compare(back: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
        matches, lengths = carry
        token = tokens[jnp.maximum(text_length - 1 - back, 0)]
        index = ends - 1 - back
        is_equal = (index >= 0) & (tokens[jnp.maximum(index, 0)] == token)
        matches = matches & is_equal
        return matches, lengths + matches.astype(jnp.int32)

    is_end = (ends >= 1) & (ends < context_length)
    lengths = jnp.zeros(size, jnp.int32)
    limit = jnp.minimum(max_match, text_length)
    _, lengths = lax.fori_loop(0, limit, compare, (is_end, lengths))
    # The largest length, and among equals the latest end.
    end = size - 1 - jnp.argmax(lengths[::-1]).astype(jnp.int32)
    return end, lengths[end]
