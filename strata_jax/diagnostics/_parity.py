"""Bitwise comparison of a run's target rows with plain one-token decoding."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax._types import RowKind, TargetModel, Window


@dataclasses.dataclass(frozen=True)
class RowParity:
    """How many logit rows of a run equal those of plain decoding.

    Attributes:
      num_rows: rows that an emitted token was chosen from.
      num_equal: those of them whose logits are equal bit for bit.
      largest_difference: largest absolute difference of a logit.
    """

    num_rows: int
    num_equal: int
    largest_difference: float


def compare_with_singleton(
    target: TargetModel, params: Any, prompt_tokens: np.ndarray, windows: Window
) -> RowParity:
    """Scores a run's windows again, and its tokens one by one, and compares the rows.

    Every window is scored as it was, with its drafts, accepted or not. Plain decoding
    is a separately compiled program for one token.

    Args:
      target: the target.
      params: its weights.
      prompt_tokens: `[m]` int, the prompt.
      windows: the run's windows, as `decode(trace=True)` returns them, in order and
        joined along the leading axis; `target_probs` and measures are not read.

    Returns:
      The comparison, over all rows that an emitted token was chosen from.

    Exactness: compares bits; for a bit-exact target all rows are equal.
    """
    verdicts = windows.verdict
    tokens = np.asarray(verdicts.tokens)
    text = np.concatenate([prompt_tokens, tokens[tokens >= 0]]).astype(np.int32)
    score = jax.jit(target.score, donate_argnums=1)
    prefill = jax.jit(target.prefill)
    commit = jax.jit(target.commit)
    first = len(prompt_tokens) - 1

    def start() -> Any:
        padded = np.zeros(target.max_length, np.int32)
        padded[: len(prompt_tokens)] = prompt_tokens
        state = target.init(params)
        return prefill(params, state, padded, _int(0), _int(first))[0]

    state = start()
    expected = []
    for position in range(first, len(text) - 1):
        token = text[position : position + 1]
        rows, state = score(params, state, token, _int(position), _int(1))
        state = commit(state, _int(position), _int(1))
        expected.append(np.asarray(rows.logits[0]))

    state, position = start(), first
    num_equal, largest = 0, 0.0
    kinds = np.asarray(windows.proposal.kind)
    drafts = np.asarray(windows.proposal.tokens)
    for window, num_emitted in enumerate(np.asarray(verdicts.num_emitted)):
        if not num_emitted:
            continue
        is_offered = kinds[window] == RowKind.OFFERED
        piece = np.append(text[position], np.where(is_offered, drafts[window], 0))
        num_rows = int(is_offered.sum()) + 1
        rows, state = score(
            params, state, piece.astype(np.int32), _int(position), _int(num_rows)
        )
        state = commit(state, _int(position), _int(num_emitted))
        logits = np.asarray(rows.logits)
        for row in range(num_emitted):
            wanted = expected[position + row - first]
            if np.array_equal(logits[row], wanted, equal_nan=True):
                num_equal += 1
            else:
                gap = np.abs(logits[row] - wanted)
                largest = max(largest, float(gap[np.isfinite(gap)].max(initial=0)))
        position += int(num_emitted)
    return RowParity(
        num_rows=len(expected), num_equal=num_equal, largest_difference=largest
    )


def _int(value: int) -> jax.Array:
    return jnp.asarray(value, jnp.int32)
