"""The text's own continuation where it has one, and another drafter elsewhere."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from strata_jax import _checks
from strata_jax._types import (
    Context,
    Drafter,
    DraftRow,
    DraftStep,
    OfferFn,
    Proposal,
    RowFn,
)
from strata_jax.drafters._base import check_base, run_row_if
from strata_jax.drafters._suffix import longest_match


def suffix_first(
    base: Drafter, *, num_draft_tokens: int, min_match: int = 3, max_match: int = 64
) -> Drafter:
    """Drafts as `suffix` does where the text matches itself, and else as `base` does.

    A continuation costs nothing to draft and may be long; the base's drafts cost time
    and are few. In a window of the continuation the base does not run at all.

    Args:
      base: the drafter of windows without a match.
      num_draft_tokens: K, at least the base's; a continuation may use all K rows, the
        base as many as it drafts.
      min_match: least number of matching tokens.
      max_match: matches are compared up to so many tokens.

    Returns:
      The drafter; its state is the base's.

    Raises:
      ValueError: if `base` drafts nothing, or a number is out of range.

    Exactness: law-exact; committed text alone decides whose a window is, before
      anything is drawn. To decide it by a draft is biased:
      `audit.negative_controls.draw_dependent_suffix`.
    """
    check_base(base, "")
    num_draft_tokens = _checks.check_integer(
        "num_draft_tokens", num_draft_tokens, base.num_draft_tokens
    )
    min_match = _checks.check_integer("min_match", min_match, 1)
    max_match = _checks.check_integer("max_match", max_match, min_match)

    def propose(
        params: Any, state: Any, context: Context, offer: OfferFn
    ) -> tuple[Proposal, Any]:
        start, match = longest_match(
            context.tokens,
            context.length,
            context_length=context.length,
            max_match=max_match,
        )
        follows = match >= min_match

        def offer_rows(row_fn: RowFn, carry: Any) -> tuple[Proposal, Any]:
            def row(carry: Any, step: DraftStep) -> tuple[Any, DraftRow]:
                is_base = ~follows & (step.row < base.num_draft_tokens)
                carry, draft = run_row_if(is_base, row_fn, carry, step)
                place = start + step.row
                has_token = follows & (place < context.length)
                token = context.tokens[jnp.where(has_token, place, 0)]
                vocabulary = jnp.arange(draft.probs.shape[0], dtype=jnp.int32)
                point = (vocabulary == token).astype(draft.probs.dtype)
                return carry, DraftRow(
                    probs=jnp.where(is_base, draft.probs, point),
                    is_available=jnp.where(is_base, draft.is_available, has_token),
                    also_admit=draft.also_admit,
                )

            return offer(row, carry)

        return base.propose(params, state, context, offer_rows)

    return base._replace(propose=propose, num_draft_tokens=num_draft_tokens)
