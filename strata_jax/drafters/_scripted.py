"""A scripted drafter: rows fixed in advance, by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from strata_jax import _checks
from strata_jax._types import Context, Drafter, DraftRow, DraftStep
from strata_jax.drafters._packet import sum_tolerance
from strata_jax.drafters._stateless import stateless


def scripted(probs: Any, *, num_draft_tokens: int) -> Drafter:
    """Drafts from rows given in advance: row i of the script drafts position i.

    Useful to replay a known continuation (one-hot rows), and in tests.

    Args:
      probs: `[P, V]` float, q for the tokens at positions 0 .. P - 1 (the prompt's are
        never used). A row of zeros, and every position from P on, has no draft.
      num_draft_tokens: K.

    Returns:
      The drafter.

    Raises:
      ValueError: if a row is neither zero nor a distribution, or K is not positive.

    Exactness: law-exact; the script is fixed before anything is drawn.
    """
    rows = np.asarray(probs)
    _checks.check_shape("probs", rows, (None, None))
    num_draft_tokens = _checks.check_integer("num_draft_tokens", num_draft_tokens, 1)
    # As strict as the packet builder, which sees the rows in the target's dtype.
    tolerance = sum_tolerance(jnp.result_type(float)) / 2
    totals = rows.sum(axis=1, dtype=np.float64)
    is_row = (totals == 0) | (np.abs(totals - 1) < tolerance)
    if not (np.isfinite(rows).all() and (rows >= 0).all() and is_row.all()):
        bad = int(np.argmin(is_row & (rows >= 0).all(1) & np.isfinite(rows).all(1)))
        raise ValueError(
            f"probs[{bad}] is no distribution: every row must be non-negative and sum "
            "to 1, or be all zero for no draft"
        )
    num_positions, vocab_size = rows.shape

    def make_rows(context: Context) -> Callable[[DraftStep], DraftRow]:
        script = jnp.asarray(rows, float)

        def make_row(step: DraftStep) -> DraftRow:
            position = context.length + step.row
            is_known = position < num_positions
            probs = script[jnp.where(is_known, position, 0)]
            return DraftRow(probs, is_known & jnp.any(probs > 0))

        return make_row

    return stateless(
        make_rows, num_draft_tokens=num_draft_tokens, vocab_size=vocab_size
    )
