"""Rules that are known to be biased, as controls for tests of exactness.

A test that never fails proves nothing. Each control repeats one fault that is found in
real engines by wrapping a part of this library, so that the rest of the machinery (the
draws, the verifier, the loop) stays as it is. A check of the law has to fail on every
one of them. Nothing else in the library imports this module.

p is the target row, q the draft row, mu the measure of a proposal, A the set of tokens
that a gate admits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax._types import (
    Context,
    Drafter,
    DraftRow,
    DraftStep,
    Draws,
    OfferFn,
    Proposal,
    RowKind,
    SpeculativeDecoder,
    Window,
)


def unaccounted_gate(drafter: Drafter, threshold: float) -> Drafter:
    r"""Drops a drawn token of probability below t, and forgets that it was drawn.

    The row of that token and those after it become ABSENT, hence ordinary draws from
    the target; the measure of the rows that stay is all of q. Use it with
    `gates.always()` and `verifiers.token()`.

    Args:
      drafter: what is wrapped.
      threshold: t in [0, 1], fixed when the drafter is built.

    Returns:
      The biased drafter.

    Raises:
      ValueError: if `threshold` is NaN or outside [0, 1].

    Exactness: biased by design. With N = q(not A), Z the sum of (q - p)+ and R its part
      outside A, one row emits :math:`(1 + N) p - 1_{A^c} \min(p, q) - R (p - q)_+ / Z`.
      p = (.5, .5), q = (.875, .125), t = .5 gives (.5625, .4375). Even with p = q =
      (.6, .3, .1), where every offer is accepted, t = .5 gives (.84, .12, .04).
    """
    threshold = _checks.check_number("threshold", threshold, 0.0, 1.0)

    def edit(proposal: Proposal) -> Proposal:
        return _drop_from(proposal, _first(_is_below(proposal, threshold)))

    return _edited(drafter, edit)


def mixed_repair(drafter: Drafter) -> Drafter:
    r"""Accounts for the gate in ratio and residual, but not in the NULL row.

    The measure is mu = q * g throughout, as it should be; a NULL row becomes ABSENT and
    so draws from p. Either repair is exact alone (mu everywhere, or mu renormalised
    with p for NULL); the mixture is not. Use it with `gates.picked()` and
    `verifiers.token()`.

    Args:
      drafter: what is wrapped.

    Returns:
      The biased drafter.

    Exactness: biased by design. With m the sum of mu and Z that of (p - mu)+, one row
      emits :math:`\min(p, \mu) + (1 - m) p + (Z - 1 + m) (p - \mu)_+ / Z`.
      p = (.2, .5, .3), q = (.6, .2, .2), A = {0} gives (.28, .45, .27).
    """

    def edit(proposal: Proposal) -> Proposal:
        return _drop_from(proposal, _first(proposal.kind == RowKind.NULL))

    return _edited(drafter, edit)


def ungated_residual(drafter: Drafter, threshold: float) -> Drafter:
    r"""Marks a dropped token as NULL, but leaves all of q as the measure.

    So the residual, on a rejection and on NULL alike, is (p - q)+ instead of (p - mu)+.
    Use it with `gates.always()` and `verifiers.token()`.

    Args:
      drafter: what is wrapped.
      threshold: t in [0, 1], fixed when the drafter is built.

    Returns:
      The biased drafter.

    Raises:
      ValueError: if `threshold` is NaN or outside [0, 1].

    Exactness: biased by design. With r = (p - q)+ normalised and mu = q on A, one row
      emits :math:`\min(p, \mu) + (1 - \sum \min(p, \mu)) r`. p = (.2, .5, .3),
      q = (.6, .2, .2), A = {0} gives (.2, .6, .2).
    """
    threshold = _checks.check_number("threshold", threshold, 0.0, 1.0)

    def edit(proposal: Proposal) -> Proposal:
        first = _first(_is_below(proposal, threshold))
        row = jnp.arange(proposal.kind.shape[0], dtype=jnp.int32)
        is_null = row == first
        kept = _drop_from(proposal, first)
        return Proposal(
            tokens=kept.tokens,
            measure=jnp.where(is_null[:, None], proposal.measure, kept.measure),
            kind=jnp.where(is_null, jnp.int32(RowKind.NULL), kept.kind),
        )

    return _edited(drafter, edit)


def argmax_with_soft_measure(drafter: Drafter) -> Drafter:
    r"""Drafts the largest token of q, but presents q as what it was drawn from.

    The combination that `speculative_decoder` refuses (`draft_rule="argmax"` with a
    ratio verifier), smuggled in through the drafter. Use it with `gates.always()` and
    `verifiers.token()`.

    Args:
      drafter: what is wrapped; it must know its vocabulary.

    Returns:
      The biased drafter.

    Raises:
      ValueError: if `drafter.vocab_size` is None.

    Exactness: biased by design. With D the argmax, a = min(1, p(D) / q(D)) and r the
      normalised (p - q)+, one row emits a at D and (1 - a) r elsewhere. p = (.5, .3,
      .2), q = (.6, .3, .1) gives (5/6, 0, 1/6).
    """
    vocab_size = drafter.vocab_size
    if vocab_size is None:
        raise ValueError(
            "drafter.vocab_size is None: wrap a drafter that knows its vocabulary"
        )

    def propose(
        params: Any, state: Any, context: Context, offer: OfferFn
    ) -> tuple[Proposal, Any]:
        def soft_offer(row_fn: Any, carry: Any) -> tuple[Proposal, Any]:
            def hard_row(carry: Any, step: DraftStep) -> tuple[Any, DraftRow]:
                carry, soft_rows = carry
                carry, row = row_fn(carry, step)
                largest = jnp.argmax(row.probs)
                token = jnp.arange(vocab_size, dtype=largest.dtype)
                hard = (token == largest).astype(row.probs.dtype)
                soft_rows = soft_rows.at[step.row].set(
                    row.probs.astype(soft_rows.dtype)
                )
                return (carry, soft_rows), DraftRow(hard, row.is_available)

            soft_rows = jnp.zeros((drafter.num_draft_tokens, vocab_size), float)
            proposal, (carry, soft_rows) = offer(hard_row, (carry, soft_rows))
            measure = jnp.where(
                (proposal.kind == RowKind.OFFERED)[:, None],
                soft_rows.astype(proposal.measure.dtype),
                proposal.measure,
            )
            return proposal.replace(measure=measure), carry  # type: ignore[attr-defined]

        return drafter.propose(params, state, context, soft_offer)

    return drafter._replace(propose=propose)


def hindsight_cut(drafter: Drafter, cut: Callable[[jax.Array], jax.Array]) -> Drafter:
    r"""Shortens a block by looking at all of its drawn tokens.

    Rows from the cut on become ABSENT; the measure of the others stays q. Use it with
    `gates.always()` and `verifiers.token()`.

    Args:
      drafter: what is wrapped.
      cut: (tokens `[K]` int32, -1 where nothing was offered) -> [] integer, how many
        rows stay.

    Returns:
      The biased drafter.

    Exactness: biased by design, unless {cut >= k} is independent of the k-th token,
      given the earlier ones. K = 2, rows p = (.7, .3), q = (.5, .5), two rows kept if
      the first token is 0 and none otherwise: (.85, .15). The exact form of that rule
      is a gate that admits {0} at row 0.

    References:
      The instance is that of DSpark, appendix A.
    """

    def edit(proposal: Proposal) -> Proposal:
        return _drop_from(proposal, cut(proposal.tokens).astype(jnp.int32))

    return _edited(drafter, edit)


def budget_cut_after_draw(drafter: Drafter, num_rows: int) -> Drafter:
    r"""Cuts a window to a budget after its rows were drawn, not before.

    OFFERED rows from `num_rows` on become ABSENT, while a NULL row stays NULL: whether
    a row survives then depends on its draw. Use it with `gates.picked()` and
    `verifiers.token()`.

    Args:
      drafter: what is wrapped.
      num_rows: how many offered rows the budget allows.

    Returns:
      The biased drafter.

    Raises:
      ValueError: if `num_rows` is no integer or negative.

    Exactness: biased by design. With m the sum of mu and r the normalised (p - mu)+, a
      row that is cut emits m p + (1 - m) r. p = (.5, .5), q = (.875, .125), t = .5,
      `num_rows` = 0 gives (.4375, .5625).
    """
    num_rows = _checks.check_integer("num_rows", num_rows, 0)

    def edit(proposal: Proposal) -> Proposal:
        is_offered = proposal.kind == RowKind.OFFERED
        row = jnp.arange(proposal.kind.shape[0], dtype=jnp.int32)
        return _drop(proposal, is_offered & (row >= num_rows))

    return _edited(drafter, edit)


def draw_dependent_suffix(drafter: Drafter, root: int) -> Drafter:
    r"""Lets another source take over when the first drawn token is its root.

    If the first token equals `root`, row 0 is presented as a point mass there, as a
    suffix match would be; otherwise its measure stays q. The choice of the source thus
    looks at the draw. Use it with `gates.always()` and `verifiers.token()`.

    Args:
      drafter: what is wrapped.
      root: the token id.

    Returns:
      The biased drafter.

    Raises:
      ValueError: if `root` is no integer or negative.

    Exactness: biased by design. p = q = (.5, .5), root = 0 gives (.25, .75), although
      the drafter is the target.
    """
    root = _checks.check_integer("root", root, 0)

    def edit(proposal: Proposal) -> Proposal:
        num_rows, vocab_size = proposal.measure.shape
        if num_rows == 0:
            return proposal
        token = jnp.arange(vocab_size, dtype=jnp.int32)
        point = (token == root).astype(proposal.measure.dtype)
        first = jnp.where(proposal.tokens[0] == root, point, proposal.measure[0])
        return dataclasses.replace(proposal, measure=proposal.measure.at[0].set(first))

    return _edited(drafter, edit)


def shared_draft_and_residual_key(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    r"""Draws the residual with the uniforms of the first draft row: one key for both.

    Every single draw is right; only their independence is lost. Injected draws and
    derived ones are treated alike.

    Args:
      decoder: what is wrapped: its verifier's draws must have a `residual`, as those
        of `verifiers.token()` do, and K must be positive.

    Returns:
      The biased decoder.

    Raises:
      ValueError: if the decoder drafts nothing, or when its step is traced, if the
        verifier draws no residual.

    Exactness: biased by design, as the residual is drawn from that part of the unit
      interval alone that drew the rejected token. p = (.2, .3, .5), q = (.8, .1, .1)
      gives (.2, .35, .45): of the uniforms below .8 that draft token 0, those below 1/3
      pick token 1 from the residual (1/3, 2/3) of tokens 1 and 2.
    """
    if decoder.num_draft_tokens == 0:
        raise ValueError("decoder drafts nothing: give it a drafter")

    def share(draws: Draws) -> Draws:
        if not hasattr(draws.verifier, "residual"):
            raise ValueError(
                "the decoder's verifier draws no residual: use verifiers.token()"
            )
        verifier_draws = draws.verifier.replace(residual=draws.draft[0])
        return dataclasses.replace(draws, verifier=verifier_draws)

    def step(params: Any, state: Any, draws: Draws | None = None) -> tuple[Any, Window]:
        if draws is None:
            # Of this call nothing but the draws is used, so none of it is compiled.
            draws = decoder.step(params, state)[1].draws
        return decoder.step(params, state, share(draws))

    def unguarded_step(params: Any, state: Any, draws: Draws) -> tuple[Any, Window]:
        return decoder.unguarded_step(params, state, share(draws))

    return decoder._replace(step=step, unguarded_step=unguarded_step)


def _edited(drafter: Drafter, edit: Callable[[Proposal], Proposal]) -> Drafter:
    """Returns the drafter with its proposals changed after their draw."""

    def propose(
        params: Any, state: Any, context: Context, offer: OfferFn
    ) -> tuple[Proposal, Any]:
        proposal, state = drafter.propose(params, state, context, offer)
        return edit(proposal), state

    return drafter._replace(propose=propose)


def _is_below(proposal: Proposal, threshold: float) -> jax.Array:
    """Returns `[K]` bool: the row is offered with a measure below the threshold."""
    is_offered = proposal.kind == RowKind.OFFERED
    token = jnp.where(is_offered, proposal.tokens, 0)
    measure = jnp.take_along_axis(proposal.measure, token[:, None], axis=1)[:, 0]
    return is_offered & (measure < threshold)


def _first(flags: jax.Array) -> jax.Array:
    """Returns the index of the first true flag of `[K]`, or K if there is none."""
    return jnp.sum(jnp.cumprod((~flags).astype(jnp.int32))).astype(jnp.int32)


def _drop_from(proposal: Proposal, first: jax.Array) -> Proposal:
    row = jnp.arange(proposal.kind.shape[0], dtype=jnp.int32)
    return _drop(proposal, row >= first)


def _drop(proposal: Proposal, is_dropped: jax.Array) -> Proposal:
    """Returns the proposal with some rows turned into ABSENT ones."""
    return Proposal(
        tokens=jnp.where(is_dropped, -1, proposal.tokens),
        measure=jnp.where(is_dropped[:, None], 0, proposal.measure),
        kind=jnp.where(is_dropped, jnp.int32(RowKind.ABSENT), proposal.kind),
    )
