"""Reading a proposal, and assembling a verdict: what the verifiers share."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax._types import Proposal, RowKind, Source, Verdict


def check_rows(target_probs: jax.Array, proposal: Proposal) -> int:
    """Checks the shapes of a window statically and returns K."""
    _checks.check_shape("proposal.tokens", proposal.tokens, (None,))
    num_draft_tokens = proposal.tokens.shape[0]
    _checks.check_floating("target_probs", target_probs)
    _checks.check_shape("target_probs", target_probs, (num_draft_tokens + 1, None))
    vocab_size = target_probs.shape[1]
    _checks.check_shape(
        "proposal.measure", proposal.measure, (num_draft_tokens, vocab_size)
    )
    _checks.check_shape("proposal.kind", proposal.kind, (num_draft_tokens,))
    _checks.check_integer_dtype("proposal.tokens", proposal.tokens)
    _checks.check_integer_dtype("proposal.kind", proposal.kind)
    if proposal.measure.dtype != target_probs.dtype:
        raise ValueError(
            f"proposal.measure ({proposal.measure.dtype}) and target_probs "
            f"({target_probs.dtype}) must have one dtype"
        )
    return num_draft_tokens


def offered_measure(proposal: Proposal) -> tuple[jax.Array, jax.Array]:
    """Returns (is the row OFFERED, mu of its token), each `[K]`."""
    is_offered = proposal.kind == RowKind.OFFERED
    token = jnp.where(is_offered, proposal.tokens, 0)
    measure = jnp.take_along_axis(proposal.measure, token[:, None], axis=1)[:, 0]
    return is_offered, jnp.where(is_offered, measure, 0)


def count_leading(flags: jax.Array) -> jax.Array:
    """Returns how many entries of `[K]` bool are true before the first false one."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32))).astype(jnp.int32)


def row_source(proposal: Proposal, num_accepted: jax.Array) -> jax.Array:
    """Returns the `Source` of a window that stops at row `num_accepted`."""
    kind = jnp.append(proposal.kind, RowKind.ABSENT.value)[num_accepted]
    return jnp.select(
        [kind == RowKind.OFFERED, kind == RowKind.NULL],
        [jnp.int32(Source.REJECTION), jnp.int32(Source.NULL)],
        jnp.int32(Source.BONUS),
    )


def assemble(
    proposal: Proposal,
    num_accepted: jax.Array,
    final_token: jax.Array,
    status: jax.Array,
) -> Verdict:
    """Returns the verdict: the accepted drafts, then the final token."""
    index = jnp.arange(proposal.tokens.shape[0] + 1, dtype=jnp.int32)
    drafts = jnp.append(proposal.tokens, jnp.int32(-1))
    tokens = jnp.where(
        index < num_accepted, drafts, jnp.where(index == num_accepted, final_token, -1)
    )
    return Verdict(
        tokens=tokens.astype(jnp.int32),
        num_accepted=num_accepted,
        num_emitted=num_accepted + 1,
        source=row_source(proposal, num_accepted),
        status=status.astype(jnp.int32),
        kind=proposal.kind,
    )
