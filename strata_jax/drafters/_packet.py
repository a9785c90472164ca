"""The packet builder: the one place where a Proposal is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._largest import first_largest
from strata_jax._status import Status
from strata_jax._sums import halving_sum
from strata_jax._types import (
    Context,
    DraftRow,
    DraftStep,
    Gate,
    GateContext,
    Proposal,
    RowFn,
    RowKind,
)
from strata_jax.measures import retain
from strata_jax.sampling import (
    SamplingSettings,
    TokenCounts,
    chain_probs,
    draw_token,
)


@flax.struct.dataclass
class _Packet:
    """A proposal in the making."""

    drawn: jax.Array  # [K] int32, drawn so far, then -1
    token_probs: jax.Array  # [K] float, q of those tokens
    measure: jax.Array  # [K, V] float
    kind: jax.Array  # [K] int32
    row: jax.Array  # [] int32, the next row
    goes_on: jax.Array  # [] bool
    status: jax.Array  # [] int32


class DraftRecord(NamedTuple):
    """What happened while a proposal was built; not for verifiers."""

    tokens: jax.Array
    """[K] int32, as drawn, NULL rows too; -1 where ABSENT."""
    status: jax.Array
    """[] int32, Status bits of the row after the last offered one."""


def build_proposal(
    row_fn: RowFn,
    carry: Any,
    *,
    num_draft_tokens: int,
    limit: jax.Array,
    gate: Gate,
    gate_settings: Mapping[str, jax.Array],
    gate_state: Any,
    sampling: SamplingSettings,
    counts: TokenCounts,
    context: Context,
    draft_uniforms: jax.Array,
    gate_uniforms: jax.Array,
    draft_rule: str,
    max_candidates: int | None,
    dtype: Any,
) -> tuple[Proposal, DraftRecord, Any]:
    """Draws the drafts of a window row by row, and gates each row before its draw.

    A row is made only if all rows before it were offered, so a gated window costs no
    draft call beyond the row that ended it. The number of rows is limited here, before
    anything is drawn; a row cut after its draw would bias the output (contract P2).

    Args:
      row_fn: makes the rows.
      carry: its first carry.
      num_draft_tokens: K, static.
      limit: [] int32, rows that the budget and the context leave room for.
      gate: the gate.
      gate_settings: its traced numbers.
      gate_state: its own state.
      sampling: the request's chain, for rows that come as logits.
      counts: the committed text, for the penalties.
      context: the committed text.
      draft_uniforms: `[K, 2]`, one pair per row.
      gate_uniforms: `[K]`, the gate's coins.
      draft_rule: "sample" draws from q; "argmax" takes its largest token, which is a
        draw from the one-hot row there.
      max_candidates: the chain's static limit.
      dtype: of the measure.

    Returns:
      The proposal, a record of what was drawn, and the last carry.

    Exactness: q is the array that the draw was taken from, and measure = q * admit of
      that array (contract P1); the gate's coin makes the admission.
    """
    vocab_size = sampling.logit_bias.shape[0]
    _checks.check_shape("draws.draft", draft_uniforms, (num_draft_tokens, 2))
    _checks.check_shape("draws.gate", gate_uniforms, (num_draft_tokens,))
    packet = _Packet(
        drawn=jnp.full(num_draft_tokens, -1, jnp.int32),
        token_probs=jnp.zeros(num_draft_tokens, dtype),
        measure=jnp.zeros((num_draft_tokens, vocab_size), dtype),
        kind=jnp.full(num_draft_tokens, RowKind.ABSENT.value, jnp.int32),
        row=jnp.zeros((), jnp.int32),
        goes_on=jnp.asarray(True),
        status=jnp.zeros((), jnp.int32),
    )
    if num_draft_tokens == 0:
        return *_finish(packet), carry

    def has_next(loop: tuple[_Packet, Any]) -> jax.Array:
        packet, _ = loop
        return packet.goes_on & (packet.row < limit)

    def next_row(loop: tuple[_Packet, Any]) -> tuple[_Packet, Any]:
        packet, carry = loop
        row = packet.row
        last = context.tokens[context.length - 1]
        previous = jnp.where(row == 0, last, packet.drawn[row - 1])

        def to_row(logits: jax.Array) -> DraftRow:
            probs, status = chain_probs(
                sampling, logits, counts, packet.drawn, max_candidates=max_candidates
            )
            # With all of it banned there is nothing to draft, which is no fault.
            # Rows of NaN stay, and are seen to be no distribution.
            return DraftRow(probs, status != Status.EMPTY_SUPPORT.value)

        carry, draft = row_fn(
            carry, DraftStep(row=row, previous_token=previous, to_row=to_row)
        )
        _checks.check_shape("the drafter's row", draft.probs, (vocab_size,))
        probs = draft.probs.astype(dtype)
        is_valid = _is_distribution(probs)
        decision = gate.decide(
            gate_settings,
            GateContext(
                committed=context,
                row=row,
                draft_tokens=packet.drawn,
                draft_token_probs=packet.token_probs,
                state=gate_state,
            ),
            probs,
        )
        admit = decision.admit.astype(dtype)
        _checks.check_shape("the gate's admit", admit, (vocab_size,))
        _checks.check_shape("the gate's go_on", decision.go_on, (vocab_size,))
        is_gate_valid = jnp.all((admit >= 0) & (admit <= 1))
        attempt, go_on = decision.attempt, decision.go_on
        if draft.also_admit is not None:
            also_admit = draft.also_admit
            _checks.check_shape("the drafter's also_admit", also_admit, (vocab_size,))
            # Of a row that it does not attempt, the gate itself admits nothing.
            admit = jnp.where(also_admit, 1, jnp.where(attempt, admit, 0))
            attempt = attempt | jnp.any(also_admit)
            go_on = go_on | also_admit
        is_attempted = draft.is_available & is_valid & is_gate_valid & attempt

        if draft_rule == "argmax":
            places = jnp.arange(vocab_size, dtype=jnp.int32)
            drawn_from = (places == first_largest(probs)).astype(dtype)
        else:
            drawn_from = probs
        token = draw_token(drawn_from, draft_uniforms[row])
        is_offered = is_attempted & (gate_uniforms[row].astype(dtype) < admit[token])
        kind = jnp.where(
            is_attempted,
            jnp.where(is_offered, RowKind.OFFERED.value, RowKind.NULL.value),
            RowKind.ABSENT.value,
        )
        measure = jnp.where(is_attempted, retain(drawn_from, admit), 0)
        status = jnp.where(
            draft.is_available & ~is_valid, Status.UNNORMALIZED_DRAFT.value, 0
        ) | jnp.where(
            draft.is_available & is_valid & ~is_gate_valid, Status.INVALID_GATE.value, 0
        )
        packet = _Packet(
            drawn=packet.drawn.at[row].set(jnp.where(is_attempted, token, -1)),
            token_probs=packet.token_probs.at[row].set(
                jnp.where(is_offered, probs[token], 0)
            ),
            measure=packet.measure.at[row].set(measure),
            kind=packet.kind.at[row].set(kind.astype(jnp.int32)),
            row=row + 1,
            goes_on=is_offered & go_on[token],
            status=packet.status | status.astype(jnp.int32),
        )
        return packet, carry

    packet, carry = lax.while_loop(has_next, next_row, (packet, carry))
    return *_finish(packet), carry


def _finish(packet: _Packet) -> tuple[Proposal, DraftRecord]:
    # The token of a NULL row stays out of the proposal: no verifier may look at it.
    is_offered = packet.kind == RowKind.OFFERED
    proposal = Proposal(
        tokens=jnp.where(is_offered, packet.drawn, -1),
        measure=packet.measure,
        kind=packet.kind,
    )
    return proposal, DraftRecord(tokens=packet.drawn, status=packet.status)


def _is_distribution(probs: jax.Array) -> jax.Array:
    # Draws scale by the row's own total, the measure does not: they agree only if the
    # total is 1.
    # A mass below zero, or NaN, makes the sum NaN: one pass over the row sees all.
    total = halving_sum(jnp.where(probs >= 0, probs, jnp.nan))
    return jnp.abs(total - 1) <= sum_tolerance(probs.dtype)


def sum_tolerance(dtype: jax.typing.DTypeLike) -> float:
    """Returns by how much the sum of a normalised row of a dtype may miss 1.

    In float32 1e-6, which bounds the bias that such a row can cause.
    """
    return 8 * float(jnp.finfo(dtype).eps)
