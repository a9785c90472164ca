"""Exact match: the target draws its own token and keeps a draft that equals it."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._rng import Stream, position_uniforms
from strata_jax._status import Status
from strata_jax._types import Proposal, Verdict, Verifier
from strata_jax.sampling import draw_token
from strata_jax.verifiers import _final


@flax.struct.dataclass
class ExactMatchDraws:
    """Uniforms of `exact_match`, each in [0, 1)."""

    pick: jax.Array  # [K + 1, 2] float, the target's own draw at each row


def exact_match() -> Verifier:
    """Emits the target's own draws; a draft that equals one saves a pass.

    The draw at a position depends on (request, position) alone, so the tokens are the
    same for every drafter, gate, K, batch slot and resume point.

    Returns:
      The verifier; drafts are the drafter's argmax, or sampled if the decoder asks.

    Exactness: law-exact under every gate and every drafter; the emitted tokens are
      those of plain decoding, one by one.
    """

    def draw(
        request_key: jax.Array,
        position: jax.Array,
        window: jax.Array,
        num_draft_tokens: int,
    ) -> ExactMatchDraws:
        del window
        rows = position + jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)
        return ExactMatchDraws(
            pick=position_uniforms(request_key, Stream.PICK, rows, 2)
        )

    def verify(
        draws: ExactMatchDraws, target_probs: jax.Array, proposal: Proposal
    ) -> Verdict:
        num_draft_tokens = _final.check_rows(target_probs, proposal)
        _checks.check_shape("draws.pick", draws.pick, (num_draft_tokens + 1, 2))
        is_offered, measure = _final.offered_measure(proposal)
        num_offered = _final.count_leading(is_offered)

        def pick(row: jax.Array, picks: jax.Array) -> jax.Array:
            return picks.at[row].set(draw_token(target_probs[row], draws.pick[row]))

        picks = jnp.full(num_draft_tokens + 1, -1, jnp.int32)
        picks = lax.fori_loop(0, num_offered + 1, pick, picks)
        is_match = is_offered & (proposal.tokens == picks[:-1])
        num_accepted = _final.count_leading(is_match)
        has_zero = jnp.any(is_offered & (measure <= 0))
        status = jnp.where(has_zero, Status.ZERO_MEASURE_OFFERED.value, 0)
        return _final.assemble(proposal, num_accepted, picks[num_accepted], status)

    return Verifier(
        draw=draw,
        verify=verify,
        draft_rule="argmax",
        draft_rules=("argmax", "sample"),
        name="exact_match",
    )
