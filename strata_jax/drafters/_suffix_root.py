"""A drafter whose chain may be taken over by the suffix drafter's continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax._types import (
    Committed,
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

# Lengths of match at which the second and later entries of `acceptance_rates` begin.
_BUCKETS = (6, 12, 24)


@flax.struct.dataclass
class SuffixRootState:
    """The base drafter's state, and statistics that stay as they are in a request."""

    base: Any  # the base drafter's own state
    acceptance_rates: jax.Array  # [4] float, by length of the match


@flax.struct.dataclass
class _Rows:
    """What the rows of one window pass on."""

    base: Any  # the base drafter's own carry
    tokens: jax.Array  # [S] int32, committed text with the drafts so far behind it
    start: jax.Array  # [] int32, where the suffix's continuation starts
    root: jax.Array  # [] int32, its first token, or -1 if it is not eligible


def suffix_root(
    base: Drafter,
    *,
    min_match: int = 3,
    max_match: int = 64,
    acceptance_rates: Sequence[float] = (0.75, 0.88, 0.93, 0.96),
    min_acceptance_rate: float = 0.85,
    num_lookup_tokens: int = 0,
) -> Drafter:
    """Lets the text's own continuation take over a chain that begins like it.

    The suffix root s is the first token of the continuation of the longest earlier
    match, as `suffix` finds it. It is eligible if the match has `min_match` tokens, if
    its continuation has a token after s, and if matches of its length are accepted
    often enough. Then row 0 admits s beside what the gate admits, and if s is what row
    0 draws, all later rows are the continuation's tokens, each a point mass, until the
    text ends; the base drafter does not run for them. Otherwise the base's chain goes
    on. Row 0 is drawn from the base's q in any case, and is judged by it: mu(s) = q(s).

    Args:
      base: the drafter whose chain may be taken over.
      min_match: least number of matching tokens.
      max_match: matches are compared up to so many tokens.
      acceptance_rates: for matches of less than 6, 12 and 24 tokens, and of 24 or more,
        how often a token of the continuation is accepted, in [0, 1]. They are kept in
        the drafter's state, fixed from the start of a request to its end.
      min_acceptance_rate: the rate in [0, 1] from which a match is eligible. With the
        rates given above, matches of 6 tokens or more are.
      num_lookup_tokens: rows that follow when all rows of the base were offered: each
        is the token after the longest match of committed text and drafts together, in
        committed text, a point mass. They ask for `min_match` tokens only.

    Returns:
      The drafter, with K = `base.num_draft_tokens` + `num_lookup_tokens`; the
      continuation may use all K rows.

    Raises:
      ValueError: if `base` drafts nothing, or a number is out of range.

    Exactness: law-exact; eligibility is decided by committed text and fixed numbers,
      before anything is drawn, and the source of a later row by earlier rows. To take
      the continuation because it begins with the token just drawn, and judge that token
      as a point mass, is biased: `audit.negative_controls.draw_dependent_suffix`.
    """
    check_base(base, ", so there is no row 0 to draw")
    min_match = _checks.check_integer("min_match", min_match, 1)
    max_match = _checks.check_integer("max_match", max_match, min_match)
    num_rates = len(_BUCKETS) + 1
    if len(acceptance_rates) != num_rates:
        raise ValueError(
            f"acceptance_rates must hold {num_rates} rates, for matches of less than "
            f"{_BUCKETS} tokens and of more, got {len(acceptance_rates)}"
        )
    rates = [
        _checks.check_number(f"acceptance_rates[{index}]", rate, 0.0, 1.0)
        for index, rate in enumerate(acceptance_rates)
    ]
    min_acceptance_rate = _checks.check_number(
        "min_acceptance_rate", min_acceptance_rate, 0.0, 1.0
    )
    num_lookup_tokens = _checks.check_integer("num_lookup_tokens", num_lookup_tokens, 0)

    def init(params: Any, context: Context, features: Any) -> SuffixRootState:
        return SuffixRootState(
            base=base.init(params, context, features),
            acceptance_rates=jnp.asarray(rates, float),
        )

    def propose(
        params: Any, state: SuffixRootState, context: Context, offer: OfferFn
    ) -> tuple[Proposal, SuffixRootState]:
        length = context.length

        def is_eligible(start: jax.Array, match: jax.Array) -> jax.Array:
            bucket = jnp.sum(match >= jnp.asarray(_BUCKETS, jnp.int32))
            is_often_accepted = state.acceptance_rates[bucket] >= min_acceptance_rate
            return (match >= min_match) & (start + 1 < length) & is_often_accepted

        def offer_rows(row_fn: RowFn, carry: Any) -> tuple[Proposal, Any]:
            def row(carry: _Rows, step: DraftStep) -> tuple[_Rows, DraftRow]:
                # In row 0 this writes the last committed token onto itself.
                behind = length - 1 + step.row
                tokens = carry.tokens.at[behind].set(step.previous_token)
                is_first = step.row == 0
                follows = ~is_first & (tokens[length] == carry.root)
                is_base = ~follows & (step.row < base.num_draft_tokens)
                is_lookup = ~follows & ~is_base

                start, match = longest_match(
                    tokens,
                    length + step.row,
                    context_length=length,
                    max_match=jnp.where(is_first | is_lookup, max_match, 0),
                )
                root = jnp.where(is_eligible(start, match), tokens[start], -1)
                root = jnp.where(is_first, root, carry.root)
                place = jnp.where(follows, carry.start + step.row, start)
                has_token = (follows | (match >= min_match)) & (place < length)

                base_carry, draft = run_row_if(is_base, row_fn, carry.base, step)
                vocabulary = jnp.arange(draft.probs.shape[0], dtype=jnp.int32)
                point = vocabulary == tokens[jnp.where(has_token, place, 0)]
                also_admit = is_first & (vocabulary == root)
                if draft.also_admit is not None:
                    also_admit = also_admit | draft.also_admit
                carry = _Rows(
                    base=base_carry,
                    tokens=tokens,
                    start=jnp.where(is_first, start, carry.start),
                    root=root,
                )
                return carry, DraftRow(
                    probs=jnp.where(
                        is_base, draft.probs, point.astype(draft.probs.dtype)
                    ),
                    is_available=jnp.where(is_base, draft.is_available, has_token),
                    also_admit=also_admit,
                )

            rows = _Rows(
                base=carry,
                tokens=context.tokens,
                start=jnp.zeros((), jnp.int32),
                root=jnp.full((), -1, jnp.int32),
            )
            proposal, rows = offer(row, rows)
            return proposal, rows.base

        proposal, base_state = base.propose(params, state.base, context, offer_rows)
        return proposal, SuffixRootState(base_state, state.acceptance_rates)

    def commit(
        params: Any, state: SuffixRootState, committed: Committed
    ) -> SuffixRootState:
        base_state = base.commit(params, state.base, committed)
        return SuffixRootState(base_state, state.acceptance_rates)

    return Drafter(
        init=init,
        propose=propose,
        commit=commit,
        num_draft_tokens=base.num_draft_tokens + num_lookup_tokens,
        vocab_size=base.vocab_size,
        max_length=base.max_length,
    )
