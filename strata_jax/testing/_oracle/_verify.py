"""The verifiers in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from strata_jax.testing._oracle._draw import oracle_draw
from strata_jax.testing._oracle._inputs import as_rows, as_uniform, as_vector

ABSENT = 0  # the row was never attempted

OFFERED = 1  # the drawn token passed the gate


NULL = 2  # a token was drawn and the gate did not admit it


class OracleVerdict(NamedTuple):
    """What one window emits.

    Attributes:
      tokens: the emitted token ids, accepted drafts first, then one more.
      num_accepted: number of accepted draft rows.
      num_emitted: `num_accepted + 1`.
      source: where the last token comes from. `"bonus"`: a row that was never
        attempted, or the row after all drafts; `"rejection"`: an offered token was
        refused; `"null"`: a NULL row.
      zero_measure_offered: whether any offered token has no mass in the measure,
        whether or not the window reached its row.
    """

    tokens: list[int]
    num_accepted: int
    num_emitted: int
    source: str
    zero_measure_offered: bool


def oracle_verify_token(
    target_probs: ArrayLike,
    measure: ArrayLike,
    tokens: Sequence[int],
    kind: Sequence[int],
    accept_uniforms: ArrayLike,
    residual_uniforms: ArrayLike,
    pick_uniforms: ArrayLike,
    block_size: int = 256,
) -> OracleVerdict:
    """Verifies one window by the token rule for gated drafts.

    An offered D is accepted iff `(mu(D) > 0) and (u * mu(D) < p(D))`. The first row
    that is not accepted ends the window: after a rejection or at a NULL row the last
    token is drawn from the positive part of p - mu (from p if that is 0 throughout),
    at an ABSENT row and after all K rows from p.

    Args:
      target_probs: `[K+1, V]` float32 or float64, p of each row.
      measure: `[K, V]` of the same dtype, mu of each row, `0 <= mu <= q`, not
        renormalised. At a NULL row it is the mu the gate had admitted.
      tokens: `[K]` drafted ids; read only at offered rows.
      kind: `[K]` row kinds: 0 ABSENT, 1 OFFERED, 2 NULL.
      accept_uniforms: `[K]` in [0, 1).
      residual_uniforms: `[2]` in [0, 1), block and token uniform of the draw after a
        rejection or a NULL row.
      pick_uniforms: `[K+1, 2]` in [0, 1), the same for the draw from each row's p.
      block_size: as in `oracle_draw`.

    Returns:
      An `OracleVerdict`.

    Raises:
      ValueError: if a shape, dtype, kind, offered id or uniform is out of range, or
        if the row to draw from has no positive mass.

    Exactness: law-exact up to the rounding of the rows' dtype, whatever the gate;
      bit-exact to the singleton, as a row is compared and drawn by itself.

    References:
      Leviathan et al., `Fast Inference from Transformers via Speculative Decoding
      <https://arxiv.org/abs/2211.17192>`_, 2023, Alg. 1 (the case mu = q).
    """
    probs, drafts, kinds, picks = _window(target_probs, tokens, kind, pick_uniforms)
    num_rows = len(drafts)
    mu = _measure_rows(measure, probs, num_rows)
    accepts = as_vector("accept_uniforms", accept_uniforms, num_rows)
    residual_pair = as_vector("residual_uniforms", residual_uniforms, 2)

    emitted: list[int] = []
    source, final, pair = "bonus", probs[num_rows], picks[num_rows]
    for i in range(num_rows):
        if kinds[i] == ABSENT:
            source, final, pair = "bonus", probs[i], picks[i]
            break
        if kinds[i] == OFFERED:
            token = drafts[i]
            u = as_uniform("accept_uniforms", accepts[i], probs.dtype)
            if mu[i, token] > 0 and u * mu[i, token] < probs[i, token]:
                emitted.append(token)
                continue
        source = "rejection" if kinds[i] == OFFERED else "null"
        final = np.maximum(probs[i] - mu[i], probs.dtype.type(0))
        if not np.any(final > 0):
            final = probs[i]
        pair = residual_pair
        break
    num_accepted = len(emitted)
    emitted.append(_draw_positive(final, pair, block_size, num_accepted))
    return OracleVerdict(
        tokens=emitted,
        num_accepted=num_accepted,
        num_emitted=num_accepted + 1,
        source=source,
        zero_measure_offered=_offers_zero_measure(mu, drafts, kinds),
    )


def oracle_verify_exact_match(
    target_probs: ArrayLike,
    tokens: Sequence[int],
    kind: Sequence[int],
    pick_uniforms: ArrayLike,
    block_size: int = 256,
    measure: ArrayLike | None = None,
) -> OracleVerdict:
    """Verifies one window by comparing each draft with the target's own draw.

    Row i draws `y[i]` from its p with `pick_uniforms[i]`; it is accepted iff it is
    offered and its token is `y[i]`. The window emits `y[0] .. y[num_accepted]`.

    Args:
      target_probs: `[K+1, V]` float32 or float64, p of each row.
      tokens: `[K]` drafted ids; read only at offered rows.
      kind: `[K]` row kinds: 0 ABSENT, 1 OFFERED, 2 NULL.
      pick_uniforms: `[K+1, 2]` in [0, 1), block and token uniform of each row.
      block_size: as in `oracle_draw`.
      measure: `[K, V]` as in `oracle_verify_token` or None; decides nothing, and is
        read for `zero_measure_offered` alone.

    Returns:
      An `OracleVerdict`; without `measure`, `zero_measure_offered` is False.

    Raises:
      ValueError: if a shape, dtype, kind, offered id or uniform is out of range, or
        if a row to draw from has no positive mass.

    Exactness: law-exact under every gate, and bit-exact to the singleton: the emitted
      tokens depend on p and the pick uniforms alone.
    """
    probs, drafts, kinds, picks = _window(target_probs, tokens, kind, pick_uniforms)
    emitted: list[int] = []
    source = "bonus"
    for i in range(len(drafts) + 1):
        emitted.append(_draw_positive(probs[i], picks[i], block_size, i))
        if i == len(drafts) or kinds[i] == ABSENT:
            break
        if kinds[i] == NULL:
            source = "null"
            break
        if drafts[i] != emitted[i]:
            source = "rejection"
            break
    return OracleVerdict(
        tokens=emitted,
        num_accepted=len(emitted) - 1,
        num_emitted=len(emitted),
        source=source,
        zero_measure_offered=measure is not None
        and _offers_zero_measure(
            _measure_rows(measure, probs, len(drafts)), drafts, kinds
        ),
    )


def _measure_rows(measure: ArrayLike, probs: np.ndarray, num_rows: int) -> np.ndarray:
    mu = as_rows("measure", measure, ndim=2)
    if mu.shape != (num_rows, probs.shape[1]) or mu.dtype != probs.dtype:
        raise ValueError(
            f"measure must be [{num_rows}, {probs.shape[1]}] {probs.dtype}, got "
            f"{list(mu.shape)} {mu.dtype}"
        )
    return mu


def _offers_zero_measure(mu: np.ndarray, drafts: list[int], kinds: list[int]) -> bool:
    return any(
        row_kind == OFFERED and not mu[i, drafts[i]] > 0
        for i, row_kind in enumerate(kinds)
    )


def _window(
    target_probs: ArrayLike,
    tokens: Sequence[int],
    kind: Sequence[int],
    pick_uniforms: ArrayLike,
) -> tuple[np.ndarray, list[int], list[int], np.ndarray]:
    """Returns the checked p, tokens, kinds and pick uniforms of a window."""
    probs = as_rows("target_probs", target_probs, ndim=2)
    drafts = [int(token) for token in tokens]
    kinds = [int(row_kind) for row_kind in kind]
    picks = np.asarray(pick_uniforms, dtype=np.float64)
    num_rows = len(drafts)
    if len(kinds) != num_rows:
        raise ValueError(f"kind must have {num_rows} entries, got {len(kinds)}")
    if probs.shape[0] != num_rows + 1:
        raise ValueError(
            f"target_probs must have {num_rows + 1} rows, got {probs.shape[0]}"
        )
    if picks.shape != (num_rows + 1, 2):
        raise ValueError(
            f"pick_uniforms must be [{num_rows + 1}, 2], got {list(picks.shape)}"
        )
    for i in range(num_rows):
        if kinds[i] not in (ABSENT, OFFERED, NULL):
            raise ValueError(f"kind must be 0, 1 or 2, got {kinds[i]} at row {i}")
        if kinds[i] == OFFERED and not 0 <= drafts[i] < probs.shape[1]:
            raise ValueError(
                f"offered token must be in [0, {probs.shape[1]}), got {drafts[i]} "
                f"at row {i}"
            )
    return probs, drafts, kinds, picks


def _draw_positive(
    weights: np.ndarray, pair: np.ndarray, block_size: int, row: int
) -> int:
    token = oracle_draw(weights, pair[0], pair[1], block_size)
    if token < 0:
        raise ValueError(f"empty support: row {row} has no positive mass")
    return token
