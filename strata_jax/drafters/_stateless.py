"""Drafters without weights or memory: their proposals come from committed text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from strata_jax._types import (
    Context,
    Drafter,
    DraftRow,
    DraftStep,
    OfferFn,
    Proposal,
)


def stateless(
    make_rows: Callable[[Context], Callable[[DraftStep], DraftRow]],
    *,
    num_draft_tokens: int,
    vocab_size: int | None,
) -> Drafter:
    """Builds a drafter whose rows are a function of the committed text alone.

    Args:
      make_rows: (context) -> (step) -> row; the outer part runs once a window.
      num_draft_tokens: K.
      vocab_size: V, or None if any will do.

    Returns:
      The drafter.

    Exactness: law-exact; nothing it does can depend on a draw of the same window
      other than the earlier rows that `step` shows.
    """

    def propose(
        params: Any, state: Any, context: Context, offer: OfferFn
    ) -> tuple[Proposal, Any]:
        del params
        make_row = make_rows(context)

        def row(carry: Any, step: DraftStep) -> tuple[Any, DraftRow]:
            return carry, make_row(step)

        return offer(row, state)

    def init(params: Any, context: Context, features: Any) -> tuple[jax.Array, ...]:
        del params, context, features
        return ()

    return Drafter(
        init=init,
        propose=propose,
        commit=lambda params, state, committed: state,
        num_draft_tokens=num_draft_tokens,
        vocab_size=vocab_size,
        max_length=None,
    )
