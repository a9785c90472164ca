"""The drafter that is trained with its target: a multi-token-prediction head."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._types import (
    Committed,
    Context,
    Drafter,
    DraftRow,
    DraftStep,
    OfferFn,
    Proposal,
)
from strata_jax.models import (
    MtpCache,
    TiledLlamaCache,
    TiledMtpParams,
    check_mtp_params,
    check_tiled_mtp_params,
    draft_logits,
    empty_mtp_cache,
    run_cell,
    run_cells,
    with_shared_tables,
)


@flax.struct.dataclass
class MtpDrafterState:
    """The head's cache, and what the last committed cell gave."""

    cache: MtpCache | TiledLlamaCache
    hidden: jax.Array  # [D], output of the last committed cell
    num_cells: jax.Array  # [] int32, committed cells; 0: nothing to draft from


def mtp(*, num_draft_tokens: int) -> Drafter:
    """Drafts with a model's multi-token-prediction head, chained.

    The head runs over the target's own hidden states of all committed positions; after
    a window it catches up over the rows that were kept and nothing else. The cells of a
    chain beyond the first draft run on the head's own states, and are overwritten.

    Args:
      num_draft_tokens: K.

    Returns:
      The drafter. Its params are a model's with `mtp`, or (as `Params.drafter`) an
      `MtpParams` that has its tables. It needs a target whose features are hidden
      states before the final norm, `[T, D]`. A text of one token has no draft.

    Raises:
      ValueError: if K is not positive; at the start of a request, if there is no draft
        head or the target has no such features.

    Exactness: law-exact with any weights; q is the request's sampling chain on the
      head's logits, with -inf outside its draft vocabulary.

    References:
      DeepSeek-AI, `DeepSeek-V3 Technical Report <https://arxiv.org/abs/2412.19437>`_,
      2024.
    """
    num_draft_tokens = _checks.check_integer("num_draft_tokens", num_draft_tokens, 1)

    def init(params: Any, context: Context, features: Any) -> MtpDrafterState:
        head = with_shared_tables(params)
        if isinstance(head, TiledMtpParams):
            check_tiled_mtp_params(head)
        else:
            check_mtp_params(head)
        width = head.config.hidden_size
        if getattr(features, "ndim", None) != 2 or features.shape[1] != width:
            raise ValueError(
                "drafters.mtp needs a target whose features are hidden states "
                f"[T, {width}], such as targets.singleton; this one's are "
                f"{getattr(features, 'shape', features)}"
            )
        state = MtpDrafterState(
            cache=empty_mtp_cache(head, context.tokens.shape[0]),
            hidden=jnp.zeros(width, features.dtype),
            num_cells=jnp.zeros((), jnp.int32),
        )
        return catch_up(head, state, context, features, context.length - 1)

    def catch_up(
        head: Any,
        state: MtpDrafterState,
        context: Context,
        features: jax.Array,
        stop: jax.Array,
    ) -> MtpDrafterState:
        """Runs the cells `state.num_cells` .. `stop - 1`, whose features these are."""
        first = state.num_cells
        places = first + 1 + jnp.arange(features.shape[0], dtype=jnp.int32)
        last = context.tokens.shape[0] - 1
        hidden, cache = run_cells(
            head,
            state.cache,
            features,
            context.tokens[jnp.minimum(places, last)],
            first,
            jnp.maximum(stop - first, 0),
            state.hidden,
        )
        return MtpDrafterState(cache=cache, hidden=hidden, num_cells=stop)

    def propose(
        params: Any, state: MtpDrafterState, context: Context, offer: OfferFn
    ) -> tuple[Proposal, MtpDrafterState]:
        head = with_shared_tables(params)

        def row(
            carry: tuple[Any, jax.Array], step: DraftStep
        ) -> tuple[tuple[Any, jax.Array], DraftRow]:
            # Row 0 has its cell already; later ones run one for the draft before.
            def cell(index: jax.Array, carry: tuple[Any, jax.Array]) -> Any:
                cache, hidden = carry
                place = state.num_cells - 1 + index
                hidden, cache, _ = run_cell(
                    head, cache, hidden, step.previous_token, place
                )
                return cache, hidden

            cache, hidden = carry
            if num_draft_tokens > 1:
                first = jnp.maximum(step.row, 1)
                cache, hidden = lax.fori_loop(first, step.row + 1, cell, carry)
            # A state that no row changes would be multiplied before it is known whether
            # there is a row at all.
            hidden, _ = lax.optimization_barrier((hidden, step.row))
            draft = step.to_row(draft_logits(head, hidden))
            is_available = draft.is_available & (state.num_cells > 0)
            return (cache, hidden), DraftRow(draft.probs, is_available)

        proposal, (cache, _) = offer(row, (state.cache, state.hidden))
        return proposal, dataclasses.replace(state, cache=cache)

    def commit(
        params: Any, state: MtpDrafterState, committed: Committed
    ) -> MtpDrafterState:
        # A kept row's hidden state pairs with the token after it, committed by now.
        return catch_up(
            with_shared_tables(params),
            state,
            committed.context,
            committed.features,
            state.num_cells + committed.num_kept,
        )

    return Drafter(
        init=init,
        propose=propose,
        commit=commit,
        num_draft_tokens=num_draft_tokens,
        vocab_size=None,
        max_length=None,
    )
