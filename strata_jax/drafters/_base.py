"""What drafters around another one share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax._types import Drafter, DraftRow, DraftStep, RowFn


def check_base(base: Drafter, reason: str) -> None:
    """Raises ValueError unless `base` is a drafter that drafts; `reason` says why."""
    if not isinstance(base, Drafter):
        called = ": call the factory" if callable(base) else ""
        raise ValueError(f"base must be a strata_jax.Drafter, got {base!r}{called}")
    if base.num_draft_tokens == 0:
        raise ValueError(f"base drafts nothing{reason}: use drafters.suffix")


def run_row_if(
    is_needed: jax.Array, row_fn: RowFn, carry: Any, step: DraftStep
) -> tuple[Any, DraftRow]:
    """Returns the next carry and row, or the carry as it is and an empty row."""

    # A `cond` would copy the cache in the carry, whichever branch it takes.
    def run(index: jax.Array, loop: tuple[Any, DraftRow]) -> tuple[Any, DraftRow]:
        # What does not depend on the index may be moved out, and run in any case.
        own_row, previous, _ = lax.optimization_barrier(
            (step.row, step.previous_token, index)
        )
        return row_fn(loop[0], step._replace(row=own_row, previous_token=previous))

    _, row_shape = jax.eval_shape(lambda: row_fn(carry, step))
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), row_shape)
    return lax.fori_loop(0, is_needed.astype(jnp.int32), run, (carry, empty))
