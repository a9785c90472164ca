"""What drafts are worth: how sure the drafter is, and how often they are accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import gates, verifiers
from strata_jax._decode import decode, speculative_decoder
from strata_jax._types import (
    Drafter,
    FinishReason,
    RowKind,
    TargetModel,
    Verifier,
    Window,
)


@dataclasses.dataclass(frozen=True)
class DraftRecords:
    """Drafts that were all offered: how sure, and how likely to be accepted.

    Row k of a window stands behind its own earlier drafts, all taken as accepted.

    Attributes:
      is_drafted: `[n, K]` bool, whether the drafter had something to say.
      draft_prob: `[n, K]` float, q of the drawn token.
      top_prob: `[n, K]` float, the largest q.
      entropy: `[n, K]` float, of q, nats.
      acceptance: `[n, K]` float, the probability that the drawn token is accepted,
        behind accepted ones.
    """

    is_drafted: np.ndarray
    draft_prob: np.ndarray
    top_prob: np.ndarray
    entropy: np.ndarray
    acceptance: np.ndarray


def record(
    target: TargetModel,
    drafter: Drafter,
    params: Any,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    max_new_tokens: int,
    verifier: Verifier | None = None,
    **settings: Any,
) -> DraftRecords:
    """Decodes some requests with every draft offered, and keeps what drafts were worth.

    Args:
      target: the target.
      drafter: the drafter, with K > 0.
      params: the weights, as `decoder.init` takes them.
      prompts: token ids of each request; like those that are to be served.
      max_new_tokens: the token budget of each.
      verifier: `verifiers.token()`, which is the default, or `exact_match()`.
      **settings: of the requests, such as temperature and seed.

    Returns:
      The records of all windows.

    Raises:
      ValueError: if there is no prompt, the drafter drafts nothing, or the verifier has
        no closed form here.
      DecodingError: if a request fails.

    Exactness: read-only; drafts are sampled, and their acceptance is computed from the
      rows p and q, not counted.
    """
    num_drafts = check_drafter(drafter)
    if not len(prompts):
        raise ValueError("prompts must hold at least one prompt")
    verifier = verifiers.token() if verifier is None else verifier
    if verifier.name not in ("token", "exact_match"):
        raise ValueError(
            f"verifier {verifier.name}: use verifiers.token() or exact_match()"
        )
    decoder = speculative_decoder(
        target,
        drafter,
        gates.always(),
        verifier,
        draft_rule="sample",
        bit_exact=target.is_bit_exact,
    )
    is_token = jnp.asarray(verifier.name == "token")
    pieces = []
    for prompt in prompts:
        state = decoder.init(params, prompt, max_new_tokens=max_new_tokens, **settings)
        while int(state.finish_reason) == FinishReason.RUNNING:
            # Rows of the whole vocabulary: a window at a time.
            state, windows = decode(decoder, params, state, 1, trace=True)
            pieces.append(jax.tree.map(np.asarray, _summarize(windows, is_token)))
    if not pieces:
        empty = np.zeros((0, num_drafts))
        return DraftRecords(empty > 0, empty, empty, empty, empty)
    leaves = [np.concatenate(leaf) for leaf in zip(*pieces, strict=True)]
    return DraftRecords(*leaves)


@jax.jit
def _summarize(windows: Window, is_token: jax.Array) -> tuple[jax.Array, ...]:
    measure = windows.proposal.measure
    drawn = jnp.maximum(windows.draft_tokens, 0)[..., None]
    drafted = windows.proposal.kind == RowKind.OFFERED
    q = jnp.take_along_axis(measure, drawn, axis=-1)[..., 0]
    p = jnp.take_along_axis(windows.target_probs[..., :-1, :], drawn, axis=-1)[..., 0]
    safe = jnp.where(measure > 0, measure, 1)
    entropy = -jnp.sum(safe * jnp.log(safe), axis=-1)
    ratio = jnp.minimum(1, p / jnp.where(q > 0, q, 1))
    return (
        drafted,
        q,
        jnp.max(measure, axis=-1),
        entropy,
        jnp.where(is_token, ratio, p),
    )


def check_drafter(drafter: Drafter) -> int:
    """Returns K, or raises ValueError if there are no drafts to look at."""
    if drafter.num_draft_tokens == 0:
        raise ValueError(
            "drafter drafts nothing, so there is nothing to weigh: give one with K > 0"
        )
    return drafter.num_draft_tokens
