"""Token verification: modified rejection sampling, one row at a time."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax._rng import Stream, position_uniforms, window_uniforms
from strata_jax._status import Status
from strata_jax._types import Proposal, Source, Verdict, Verifier
from strata_jax.measures import residual_weights
from strata_jax.sampling import draw_token
from strata_jax.verifiers import _final


@flax.struct.dataclass
class TokenDraws:
    """Uniforms of `token`, each in [0, 1)."""

    accept: jax.Array  # [K] float
    residual: jax.Array  # [2] float, for the row that rejects or is NULL
    pick: jax.Array  # [K + 1, 2] float, the target's own draw at each row


def token() -> Verifier:
    r"""Accepts each draft D with probability :math:`\min(1, p(D) / \mu(D))`.

    On a rejection and on a NULL row the token is drawn from the normalised
    :math:`(p - \mu)_+`; a row that was never attempted is an ordinary draw from p. This
    is the maximal coupling of p and mu on the alphabet V + NULL.

    Returns:
      The verifier; drafts are sampled from q.

    Exactness: law-exact under every gate; no epsilon and no division.

    References:
      Leviathan et al., `Fast Inference from Transformers via Speculative Decoding
      <https://arxiv.org/abs/2211.17192>`_, 2023. Chen et al., `Accelerating Large
      Language Model Decoding with Speculative Sampling
      <https://arxiv.org/abs/2302.01318>`_, 2023.
    """

    def draw(
        request_key: jax.Array,
        position: jax.Array,
        window: jax.Array,
        num_draft_tokens: int,
    ) -> TokenDraws:
        rows = position + jnp.arange(num_draft_tokens + 1, dtype=jnp.int32)
        accept = window_uniforms(
            request_key, Stream.ACCEPT, window, rows[:num_draft_tokens], 1
        )
        residual = window_uniforms(request_key, Stream.RESIDUAL, window, rows[:1], 2)
        return TokenDraws(
            accept=accept[:, 0],
            residual=residual[0],
            pick=position_uniforms(request_key, Stream.PICK, rows, 2),
        )

    def verify(
        draws: TokenDraws, target_probs: jax.Array, proposal: Proposal
    ) -> Verdict:
        num_draft_tokens = _final.check_rows(target_probs, proposal)
        _checks.check_shape("draws.accept", draws.accept, (num_draft_tokens,))
        _checks.check_shape("draws.residual", draws.residual, (2,))
        _checks.check_shape("draws.pick", draws.pick, (num_draft_tokens + 1, 2))
        dtype = target_probs.dtype

        is_offered, measure = _final.offered_measure(proposal)
        token = jnp.where(is_offered, proposal.tokens, 0)
        target = jnp.take_along_axis(target_probs[:-1], token[:, None], axis=1)[:, 0]
        uniforms = draws.accept.astype(dtype)
        is_accepted = is_offered & (measure > 0) & (uniforms * measure < target)
        num_accepted = _final.count_leading(is_accepted)

        row = target_probs[num_accepted]
        is_pick = _final.row_source(proposal, num_accepted) == Source.BONUS
        if num_draft_tokens:
            last = jnp.minimum(num_accepted, num_draft_tokens - 1)
            weights = residual_weights(row, proposal.measure[last])
            weights = jnp.where(is_pick, row, weights)
        else:
            weights = row
        final = draw_token(
            weights,
            jnp.where(is_pick, draws.pick[num_accepted], draws.residual),
        )
        has_zero = jnp.any(is_offered & (measure <= 0))
        status = jnp.where(has_zero, Status.ZERO_MEASURE_OFFERED.value, 0)
        return _final.assemble(proposal, num_accepted, final, status)

    return Verifier(
        draw=draw,
        verify=verify,
        draft_rule="sample",
        draft_rules=("sample",),
        name="token",
    )
