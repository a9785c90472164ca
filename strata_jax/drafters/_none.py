"""No drafts: plain decoding, one token a window."""

from __future__ import annotations

from strata_jax._types import Context, Drafter, DraftRow, DraftStep
from strata_jax.drafters._stateless import stateless


def none() -> Drafter:
    """Drafts nothing, so that every window is one ordinary draw from the target.

    Returns:
      The drafter, with K = 0.

    Exactness: plain decoding by the same program as every other decoder.
    """

    def make_rows(context: Context):
        del context

        def make_row(step: DraftStep) -> DraftRow:
            raise AssertionError("a window without draft rows asks for none")

        return make_row

    return stateless(make_rows, num_draft_tokens=0, vocab_size=None)
