"""From logits to emitted tokens: the parts of a window that no rule may vary."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax._types import Context, FinishReason, Verdict
from strata_jax.sampling import SamplingSettings, TokenCounts, chain_probs


def window_probs(
    sampling: SamplingSettings,
    logits: jax.Array,
    counts: TokenCounts,
    drafts: jax.Array,
    num_rows: jax.Array,
    *,
    max_candidates: int | None,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Runs the chain row by row: row t has seen the drafts before it."""
    num_tokens = logits.shape[0]
    places = jnp.arange(drafts.shape[0], dtype=jnp.int32)

    def row(index: jax.Array, carry: Any) -> Any:
        probs, status = carry
        row_probs, row_status = chain_probs(
            sampling,
            logits[index],
            counts,
            jnp.where(places < index, drafts, -1),
            max_candidates=max_candidates,
        )
        return probs.at[index].set(row_probs), status.at[index].set(row_status)

    carry = (jnp.zeros(logits.shape, dtype), jnp.zeros(num_tokens, jnp.int32))
    return lax.fori_loop(0, num_rows, row, carry)


def cut_verdict(
    verdict: Verdict,
    row_status: jax.Array,
    draft_status: jax.Array,
    eos_ids: jax.Array,
    is_running: jax.Array,
    num_rows: jax.Array,
) -> Verdict:
    """Ends the emission at a bad row, at EOS, and before it starts if finished.

    A bad row that the emission did not reach does not count: a target row behind a
    rejection or EOS, or the draft row after the last offered one (`draft_status`).
    """
    index = jnp.arange(verdict.tokens.shape[0], dtype=jnp.int32)
    is_bad = (row_status != 0) & (index < num_rows)
    # A bad row has no mass, so nothing is accepted at it; it emits nothing either.
    is_bad_end = is_bad[verdict.num_accepted]
    num_emitted = verdict.num_emitted - is_bad_end.astype(jnp.int32)
    is_emitted = index < num_emitted
    is_eos = _is_eos(verdict.tokens, eos_ids) & is_emitted
    num_emitted = jnp.where(
        jnp.any(is_eos), jnp.argmax(is_eos).astype(jnp.int32) + 1, num_emitted
    )
    num_emitted = jnp.where(is_running, num_emitted, 0)
    bad_target = jnp.where(is_bad_end, row_status[verdict.num_accepted], 0)
    bad_draft = jnp.where(verdict.num_accepted + 1 == num_rows, draft_status, 0)
    reached = jnp.where(jnp.any(is_eos), 0, bad_target | bad_draft)
    status = jnp.where(is_running, verdict.status | reached, 0)
    return dataclasses.replace(
        verdict,
        tokens=jnp.where(index < num_emitted, verdict.tokens, -1),
        num_accepted=jnp.minimum(verdict.num_accepted, num_emitted),
        num_emitted=num_emitted,
        status=status,
    )


def append_tokens(context: Context, verdict: Verdict) -> Context:
    """Commits the emitted tokens; nothing is written past the buffer."""
    index = jnp.arange(verdict.tokens.shape[0], dtype=jnp.int32)
    place = jnp.where(
        index < verdict.num_emitted, context.length + index, context.tokens.shape[0]
    )
    return Context(
        tokens=context.tokens.at[place].set(verdict.tokens, mode="drop"),
        length=context.length + verdict.num_emitted,
    )


def count_emitted(counts: TokenCounts, verdict: Verdict) -> TokenCounts:
    """Counts the emitted tokens as output."""
    vocab_size = counts.in_output.shape[0]
    tokens = jnp.where(verdict.tokens >= 0, verdict.tokens, vocab_size)
    return dataclasses.replace(
        counts,
        in_output=counts.in_output.at[tokens].add(1, mode="drop"),
        num_output=counts.num_output + verdict.num_emitted,
    )


def finish_reason(
    verdict: Verdict,
    context: Context,
    counts: TokenCounts,
    eos_ids: jax.Array,
    max_new_tokens: jax.Array,
    max_length: int,
) -> jax.Array:
    """Returns the `FinishReason` after a window, [] int32."""
    has_eos = jnp.any(_is_eos(verdict.tokens, eos_ids))
    is_over = (counts.num_output >= max_new_tokens) | (context.length >= max_length)
    return jnp.select(
        [verdict.status != 0, has_eos, is_over],
        [
            jnp.int32(FinishReason.FAILED),
            jnp.int32(FinishReason.EOS),
            jnp.int32(FinishReason.LENGTH),
        ],
        jnp.int32(FinishReason.RUNNING),
    )


def _is_eos(tokens: jax.Array, eos_ids: jax.Array) -> jax.Array:
    return jnp.any((tokens[:, None] == eos_ids[None]) & (tokens[:, None] >= 0), axis=1)
