"""The law of one gated row, enumerated through the decoder's own step."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import strata_jax as strata
from strata_jax import audit, drafters, gates, targets, verifiers
from strata_jax.audit import negative_controls

# Tokens of a small alphabet; the last one stands for the text before the row.
WIDTH = 48
_TEXT = WIDTH - 1
_BATCH = 512


@functools.cache
def _enumerators(threshold: float) -> dict[str, tuple[Any, audit.WindowEnumerator]]:
    """Returns a decoder and its enumerator for each of the two rules."""
    target = targets.tabular(WIDTH, max_length=8, order=1)
    drafter = drafters.model(target, num_draft_tokens=1)
    decoders = {
        "repaired": strata.speculative_decoder(
            target, drafter, gates.picked(threshold), verifiers.token()
        ),
        "original": strata.speculative_decoder(
            target,
            negative_controls.unaccounted_gate(drafter, threshold),
            gates.always(),
            verifiers.token(),
        ),
    }
    logits = targets.TabularParams(jnp.zeros((WIDTH, WIDTH), jnp.float32))
    params = strata.Params(target=logits, drafter=logits)
    return {
        name: (
            decoder,
            audit.WindowEnumerator(
                decoder, params, decoder.init(params, [_TEXT]), batch_size=_BATCH
            ),
        )
        for name, decoder in decoders.items()
    }


def emitted_laws(
    rule: str, target_probs: np.ndarray, draft_probs: np.ndarray, threshold: float
) -> np.ndarray:
    """Enumerates what rows emit: over the draft's draw, the coin and the final draw.

    Each pair of rows is put on a small alphabet, the tokens of positive probability in
    the order of their ids, and goes through `step` with K = 1.

    Args:
      rule: "repaired" (`gates.picked`) or "original" (a drawn token below the threshold
        is dropped and forgotten), both with `verifiers.token`.
      target_probs: `[N, V]` float32, p.
      draft_probs: `[N, V]` float32, q; rows that sum to 1.
      threshold: of the gate.

    Returns:
      `[N, V]` float64, the law of the token that is emitted.

    Raises:
      ValueError: if a pair of rows has more tokens than the alphabet.
    """
    decoder, enumerator = _enumerators(threshold)[rule]
    laws = np.zeros(target_probs.shape, np.float64)
    if not len(target_probs):
        return laws
    state = None
    tables, alphabets = [], []
    for p, q in zip(target_probs, draft_probs, strict=True):
        alphabet = np.flatnonzero((p > 0) | (q > 0))
        if len(alphabet) > _TEXT:
            raise ValueError(
                f"a row has {len(alphabet)} tokens of positive probability, more than "
                f"{_TEXT}: set top_k"
            )
        params = strata.Params(target=_table(p[alphabet]), drafter=_table(q[alphabet]))
        if state is None:
            state = decoder.init(params, [_TEXT])
        tables.append(params)
        alphabets.append(alphabet)
    found = audit.sequence_laws(
        decoder,
        audit.stack(tables),
        audit.stack([state] * len(tables)),
        1,
        enumerator=enumerator,
    )
    for law, alphabet, row in zip(found, alphabets, laws, strict=True):
        for (token,), probability in law.items():
            row[alphabet[token]] = probability
    return laws


def _table(probs: np.ndarray) -> targets.TabularParams:
    """The row after the text; every other token leads to token 0 with certainty."""
    logits = np.full((WIDTH, WIDTH), -np.inf, np.float32)
    logits[:, 0] = 0
    logits[_TEXT] = -np.inf
    with np.errstate(divide="ignore"):
        logits[_TEXT, : len(probs)] = np.log(probs)
    return targets.TabularParams(jnp.asarray(logits))
