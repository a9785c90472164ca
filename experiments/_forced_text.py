"""Decoding a text that is given: what plain decoding would have computed for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

import strata_jax as strata


def force_last_token(state: strata.DecoderState, token: Any) -> strata.DecoderState:
    """Replaces the token that was just emitted.

    It is not yet in the cache, so the state is that of a request which emitted this
    token. Counts for penalties stay those of the token that was drawn.
    """
    context: Any = state.context
    tokens: jax.Array = context.tokens.at[context.length - 1].set(token)
    return dataclasses.replace(
        state, context=dataclasses.replace(context, tokens=tokens)
    )
