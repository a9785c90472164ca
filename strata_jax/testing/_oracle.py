"""NumPy oracle: the sampling chain, the draws and the verifiers, one row at a time.

It follows the written rules, not the JAX code, and uses loops where they are
clearer. It serves as the reference for the library's own parts and for a user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

ABSENT = 0  # the row was never attempted
OFFERED = 1  # the drawn token passed the gate
NULL = 2  # a token was drawn and the gate did not admit it

_SUM_TOLERANCE = 1e-6


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


# ---------------------------------------------------------------------------
# Sampling chain.
# ---------------------------------------------------------------------------


def oracle_chain(
    logits: ArrayLike,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: ArrayLike | None = None,
    prompt_counts: ArrayLike | None = None,
    output_counts: ArrayLike | None = None,
    banned_ids: Sequence[int] = (),
) -> np.ndarray:
    """Computes the distribution a request samples one row from, in float64.

    The order is: logit bias, bans, penalties, `top_k`, `top_p`, `min_p`,
    temperature. Each filter measures the renormalised survivors of the one before
    it, untempered; ties go to the lower id.

    Args:
      logits: `[V]` real, raw logits; `-inf` removes a token.
      temperature: softmax temperature, >= 0; 0 gives a one-hot at the lowest id
        among the largest survivors.
      top_k: exactly `min(top_k, number of finite logits)` tokens survive; 0, -1 and
        any value >= V turn the filter off.
      top_p: in [0, 1]; a token survives iff the sorted mass before it is < `top_p`,
        and at least one does; 1 turns the filter off.
      min_p: in [0, 1]; a token survives iff its probability is >= `min_p` times the
        largest; 0 turns the filter off.
      repetition_penalty: > 0; applied once to each distinct id of prompt and output:
        a positive logit is divided by it, any other multiplied; 1 turns it off.
      presence_penalty: subtracted from each id that occurs in the output.
      frequency_penalty: subtracted once for each occurrence in the output.
      logit_bias: `[V]` real or None, added first; `-inf` bans.
      prompt_counts: `[V]` integer or None, occurrences of each id in the prompt.
      output_counts: `[V]` integer or None, occurrences of each id in the output so
        far, including the window's rows before this one.
      banned_ids: ids removed from the row.

    Returns:
      `[V]` float64 probabilities, exactly 0 for removed tokens.

    Raises:
      ValueError: if a logit is NaN or +inf before or after the bias, if every token
        is removed, or if a shape, id or parameter is out of range.

    Exactness: law-exact reference in float64; not bit-exact to a float32 chain,
      whose kept set may differ within rounding of a cut (`oracle_chain_cuts`).

    Example:
      >>> off = dict(repetition_penalty=1, presence_penalty=0, frequency_penalty=0)
      >>> oracle_chain([0, 1, 1], temperature=0, top_k=0, top_p=1, min_p=0, **off)
      array([0., 1., 0.])
    """
    scores = _penalised_logits(
        logits,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        prompt_counts=prompt_counts,
        output_counts=output_counts,
        banned_ids=banned_ids,
    )
    kept = _filter_cuts(scores, temperature, top_k, top_p, min_p)["kept"]
    probs = np.zeros(scores.shape, np.float64)
    if temperature == 0:
        probs[kept[0]] = 1.0
        return probs
    with np.errstate(over="ignore"):
        weights = np.exp((scores[kept] - scores[kept[0]]) / np.float64(temperature))
    probs[kept] = weights / weights.sum()
    return probs


def oracle_chain_cuts(
    logits: ArrayLike,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: ArrayLike | None = None,
    prompt_counts: ArrayLike | None = None,
    output_counts: ArrayLike | None = None,
    banned_ids: Sequence[int] = (),
) -> dict[str, Any]:
    """Computes how far the chain's decisions are from their cuts.

    Below, F, K1, K2, K3 are the numbers of finite logits and of the survivors of
    `top_k`, `top_p`, `min_p`. A distance that no decision depends on is `inf`. A gap
    of exactly 0 (a tie, decided by the id in any precision) is reported, but left
    out of `smallest_distance`. A float32 chain may keep other tokens only where
    `smallest_distance` is of the order of its rounding.

    Args:
      logits: as in `oracle_chain`.
      temperature: as in `oracle_chain`.
      top_k: as in `oracle_chain`.
      top_p: as in `oracle_chain`.
      min_p: as in `oracle_chain`.
      repetition_penalty: as in `oracle_chain`.
      presence_penalty: as in `oracle_chain`.
      frequency_penalty: as in `oracle_chain`.
      logit_bias: as in `oracle_chain`.
      prompt_counts: as in `oracle_chain`.
      output_counts: as in `oracle_chain`.
      banned_ids: as in `oracle_chain`.

    Returns:
      A dict with
        `logits`: `[V]` float64, after bias, bans and penalties;
        `order`: `[F]` int64, ids by falling logit, ties by rising id;
        `cum_before`: `[K1]` float64, mass before each token of `order[:K1]`;
        `ratio`: `[K2]` float64, probability over the largest, for `order[:K2]`;
        `kept`: `[K3]` int64, `order[:K3]`;
        `num_finite`, `num_top_k`, `num_top_p`, `num_min_p`: F, K1, K2, K3;
        `top_k_gap`: logit gap between the last kept and the first dropped token;
        `top_p_gap`: the same at the border of `top_p`;
        `top_p_distance`: smallest `|cum_before - top_p|` (the first token, which is
        always kept, left out);
        `min_p_distance`: smallest `|ratio - min_p|` (likewise);
        `argmax_gap`: logit gap between the two largest (`inf` if one is kept); not
        part of `smallest_distance`;
        `smallest_distance`: the smallest of the two distances and the two gaps.

    Raises:
      ValueError: as `oracle_chain`.

    Exactness: diagnostics in float64; draws nothing, so neither law-exact nor
      bit-exact to the singleton.
    """
    scores = _penalised_logits(
        logits,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        prompt_counts=prompt_counts,
        output_counts=output_counts,
        banned_ids=banned_ids,
    )
    return _filter_cuts(scores, temperature, top_k, top_p, min_p)


def _vector(name: str, value: ArrayLike, size: int | None = None) -> np.ndarray:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim != 1 or (size is not None and array.shape[0] != size):
        want = "[V]" if size is None else f"[{size}]"
        raise ValueError(f"{name} must have shape {want}, got {list(array.shape)}")
    return array


def _counts(name: str, value: ArrayLike | None, size: int) -> np.ndarray:
    counts = np.zeros(size) if value is None else _vector(name, value, size)
    if not np.all((counts >= 0) & (counts == np.floor(counts))):
        raise ValueError(f"{name} must hold non-negative whole numbers")
    return counts


def _check_logits(stage: str, scores: np.ndarray) -> None:
    bad = np.flatnonzero(np.isnan(scores) | (scores == np.inf))
    if bad.size:
        raise ValueError(f"{stage}: NaN or +inf at id {bad[0]}: {scores[bad[0]]}")


def _penalised_logits(
    logits: ArrayLike,
    *,
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: ArrayLike | None,
    prompt_counts: ArrayLike | None,
    output_counts: ArrayLike | None,
    banned_ids: Sequence[int],
) -> np.ndarray:
    """Returns `[V]` float64 logits after bias, bans and penalties."""
    scores = _vector("logits", logits).copy()
    size = scores.shape[0]
    _check_logits("logits", scores)
    if not 0 < repetition_penalty < np.inf:
        raise ValueError(
            f"repetition_penalty must be positive, got {repetition_penalty!r}"
        )
    for name, value in (
        ("presence_penalty", presence_penalty),
        ("frequency_penalty", frequency_penalty),
    ):
        if not np.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value!r}")
    if logit_bias is not None:
        bias = _vector("logit_bias", logit_bias, size)
        _check_logits("logit_bias", bias)
        scores = scores + bias
        _check_logits("logits + logit_bias", scores)
    for token in banned_ids:
        if not 0 <= token < size:
            raise ValueError(f"banned_ids must be in [0, {size}), got {token}")
        scores[token] = -np.inf
    in_prompt = _counts("prompt_counts", prompt_counts, size)
    in_output = _counts("output_counts", output_counts, size)
    for token in range(size):
        if in_prompt[token] > 0 or in_output[token] > 0:
            if scores[token] > 0:
                scores[token] = scores[token] / repetition_penalty
            else:
                scores[token] = scores[token] * repetition_penalty
        if in_output[token] > 0:
            scores[token] -= frequency_penalty * in_output[token]
            scores[token] -= presence_penalty
    _check_logits("penalised logits", scores)
    return scores


def _filter_cuts(
    scores: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[str, Any]:
    """Applies the three filters to `[V]` float64 logits; see `oracle_chain_cuts`."""
    if not 0 <= temperature < np.inf:
        raise ValueError(f"temperature must be >= 0 and finite, got {temperature!r}")
    if int(top_k) != top_k or top_k < -1:
        raise ValueError(f"top_k must be a whole number >= -1, got {top_k!r}")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value!r}")

    order = np.argsort(-scores, kind="stable")
    num_finite = int(np.isfinite(scores).sum())
    if num_finite == 0:
        raise ValueError("empty support: every token is removed")
    order = order[:num_finite]
    ranked = scores[order]  # [F], falling

    num_top_k = num_finite
    if 0 < top_k < scores.shape[0]:
        num_top_k = min(int(top_k), num_finite)
    top_k_gap = np.inf
    if num_top_k < num_finite:
        top_k_gap = float(ranked[num_top_k - 1] - ranked[num_top_k])

    relative = np.exp(ranked[:num_top_k] - ranked[0])  # [K1], the first is 1
    running = np.cumsum(relative)
    cum_before = np.concatenate([[0.0], running[:-1] / running[-1]])
    num_top_p = num_top_k
    top_p_gap = top_p_distance = np.inf
    if top_p < 1:
        num_top_p = max(1, int((cum_before < top_p).sum()))
        if num_top_k > 1:
            top_p_distance = float(np.abs(cum_before[1:] - top_p).min())
        if num_top_p < num_top_k:
            top_p_gap = float(ranked[num_top_p - 1] - ranked[num_top_p])

    ratio = relative[:num_top_p]
    num_min_p = num_top_p
    min_p_distance = np.inf
    if min_p > 0:
        num_min_p = int((ratio >= min_p).sum())
        if num_top_p > 1:
            min_p_distance = float(np.abs(ratio[1:] - min_p).min())

    gaps = [gap for gap in (top_k_gap, top_p_gap) if gap > 0]
    return {
        "logits": scores,
        "order": order,
        "cum_before": cum_before,
        "ratio": ratio,
        "kept": order[:num_min_p],
        "num_finite": num_finite,
        "num_top_k": num_top_k,
        "num_top_p": num_top_p,
        "num_min_p": num_min_p,
        "top_k_gap": top_k_gap,
        "top_p_gap": top_p_gap,
        "top_p_distance": top_p_distance,
        "min_p_distance": min_p_distance,
        "argmax_gap": float(ranked[0] - ranked[1]) if num_min_p > 1 else np.inf,
        "smallest_distance": min([top_p_distance, min_p_distance, *gaps]),
    }


# ---------------------------------------------------------------------------
# Sums and draws.
# ---------------------------------------------------------------------------


def doubling_sum(values: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    """Computes running sums by doubling, with a fixed tree of additions.

    For s = 1, 2, 4, ... < n every entry i >= s becomes `c[i] + c[i-s]`, all from the
    array of the round before.

    Args:
      values: `[n]` real.
      dtype: floating dtype of every addition and of the result.

    Returns:
      `[n]` of `dtype`; entry i approximates `sum(values[:i+1])`. Rounding may leave
      it not monotone.

    Raises:
      ValueError: if `values` is not one-dimensional.

    Exactness: bit-exact to the singleton: entry i depends on `values[:i+1]` alone, in
      a fixed order.

    References:
      Hillis and Steele, `Data Parallel Algorithms
      <https://doi.org/10.1145/7902.7903>`_, 1986.
    """
    sums = np.array(values, dtype=dtype)
    if sums.ndim != 1:
        raise ValueError(f"values must have shape [n], got {list(sums.shape)}")
    step = 1
    while step < sums.shape[0]:
        before = sums.copy()
        sums[step:] = before[step:] + before[:-step]
        step *= 2
    return sums


def halving_sum(values: ArrayLike) -> np.ndarray:
    """Computes sums over the last axis by halving, with a fixed tree of additions.

    The axis is padded with zeros to a power of two, then its second half is added to
    its first until one entry is left.

    Args:
      values: `[..., n]` real.

    Returns:
      `[...]` of the dtype of `values`; 0 for n = 0.

    Raises:
      ValueError: if `values` has no axis.

    Exactness: bit-exact to the singleton: a row's sum does not depend on the leading
      axes.
    """
    rows = np.asarray(values)
    if rows.ndim == 0:
        raise ValueError("values must have at least one axis")
    size = rows.shape[-1]
    width = 1
    while width < size:
        width *= 2
    padded = np.zeros((*rows.shape[:-1], width), rows.dtype)
    padded[..., :size] = rows
    while width > 1:
        width //= 2
        padded = padded[..., :width] + padded[..., width:]
    return padded[..., 0]


def oracle_draw(
    weights: ArrayLike, u_block: float, u_token: float, block_size: int = 256
) -> int:
    """Draws a token by a two-level inverse CDF: a block, then a token inside it.

    The weights are padded with zeros to a multiple of `block_size`. Block sums come
    from `halving_sum`, running sums from `doubling_sum`; an entry without mass takes
    the running maximum of those before it, so it is never the first to exceed the
    threshold. Each level returns the smallest j with `c[j] > u * c[-1]`. With
    V <= `block_size` there is one block of V entries and `u_block` is not used.

    Args:
      weights: `[V]` float32 or float64, >= 0, need not sum to 1. Their dtype is the
        dtype of all arithmetic.
      u_block: uniform in [0, 1), converted to that dtype.
      u_token: uniform in [0, 1), converted to that dtype.
      block_size: entries in a block, >= 1.

    Returns:
      The drawn id, which has a positive weight; -1 if no weight is positive.

    Raises:
      ValueError: if the weights are negative, not finite or of another shape or
        dtype, if a uniform is outside [0, 1) after conversion, or if
        `block_size` < 1.

    Exactness: law-exact up to the rounding of the sums; bit-exact to the singleton.
      Subnormal weights count as positive here, while a backend may flush them to 0.
    """
    row = _rows("weights", weights, ndim=1)
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    block_uniform = _uniform("u_block", u_block, row.dtype)
    token_uniform = _uniform("u_token", u_token, row.dtype)
    if not np.any(row > 0):
        return -1
    if row.shape[0] <= block_size:
        return _smallest_above(row, token_uniform)
    num_blocks = -(-row.shape[0] // block_size)
    blocks = np.zeros(num_blocks * block_size, row.dtype)
    blocks[: row.shape[0]] = row
    blocks = blocks.reshape(num_blocks, block_size)
    block = _smallest_above(halving_sum(blocks), block_uniform)
    return block * block_size + _smallest_above(blocks[block], token_uniform)


def _rows(name: str, value: ArrayLike, ndim: int) -> np.ndarray:
    rows = np.asarray(value)
    if rows.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got {list(rows.shape)}")
    if rows.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(f"{name} must be float32 or float64, got {rows.dtype}")
    if not np.all(np.isfinite(rows) & (rows >= 0)):
        raise ValueError(f"{name} must be finite and non-negative")
    return rows


def _uniform(name: str, value: float, dtype: np.dtype) -> np.floating:
    uniform = dtype.type(value)
    if not 0 <= uniform < 1:
        raise ValueError(f"{name} must be in [0, 1) as {dtype}, got {value!r}")
    return uniform


def _smallest_above(masses: np.ndarray, uniform: np.floating) -> int:
    """Returns the smallest i of positive mass with cdf[i] > uniform * cdf[-1]."""
    sums = doubling_sum(masses, masses.dtype)
    sums = np.maximum.accumulate(np.where(masses == 0, masses.dtype.type(0), sums))
    above = np.flatnonzero(sums > uniform * sums[-1])
    if above.size:
        return int(above[0])
    # Only a subnormal total can round `uniform * total` up to the total.
    return int(np.flatnonzero(masses > 0)[-1])


# ---------------------------------------------------------------------------
# Verifiers.
# ---------------------------------------------------------------------------


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
    accepts = _vector("accept_uniforms", accept_uniforms, num_rows)
    residual_pair = _vector("residual_uniforms", residual_uniforms, 2)

    emitted: list[int] = []
    source, final, pair = "bonus", probs[num_rows], picks[num_rows]
    for i in range(num_rows):
        if kinds[i] == ABSENT:
            source, final, pair = "bonus", probs[i], picks[i]
            break
        if kinds[i] == OFFERED:
            token = drafts[i]
            u = _uniform("accept_uniforms", accepts[i], probs.dtype)
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
    mu = _rows("measure", measure, ndim=2)
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
    probs = _rows("target_probs", target_probs, ndim=2)
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


# ---------------------------------------------------------------------------
# Laws of one row.
# ---------------------------------------------------------------------------


def oracle_row_law(p: ArrayLike, q: ArrayLike, g: ArrayLike) -> np.ndarray:
    """Computes what one gated row emits under the mu rule.

    With mu = q g: `min(p, mu) + (1 - sum(min(p, mu))) * r`, r the normalised positive
    part of p - mu (p where that is 0 throughout).

    Args:
      p: `[V]` target probabilities, sum 1.
      q: `[V]` draft probabilities, sum at most 1 (what is missing is NULL).
      g: `[V]` in [0, 1], the gate's admission of each token.

    Returns:
      `[V]` float64 law of the emitted token, equal to p up to rounding.

    Raises:
      ValueError: if the shapes differ or a row is not a (sub-)probability.

    Exactness: law-exact (it is the formula itself), in float64.
    """
    target, draft = _law_rows(p, q)
    admission = _vector("g", g, target.shape[0])
    if not np.all((admission >= 0) & (admission <= 1)):
        raise ValueError("g must be in [0, 1]")
    mu = draft * admission
    accepted = np.minimum(target, mu)
    return accepted + (1 - accepted.sum()) * _normalised_residual(target, mu)


def oracle_unaccounted_row_law(
    p: ArrayLike, q: ArrayLike, admitted_mask: ArrayLike
) -> np.ndarray:
    """Computes what one gated row emits if the gate is left out of the account.

    This is the biased rule, kept as a negative control: ratio and residual use q, and
    a token that fails the gate is replaced by a plain draw from p.

    Args:
      p: `[V]` target probabilities, sum 1.
      q: `[V]` draft probabilities, sum 1.
      admitted_mask: `[V]` bool, the admitted set A.

    Returns:
      `[V]` float64 law of the emitted token. Its total variation from p is
      N TV(p, law given D outside A), with N the draft mass outside A.

    Raises:
      ValueError: if the shapes differ or a row is not a probability.

    Exactness: neither law-exact nor bit-exact to the singleton; biased by
      construction unless N is 0 or 1.
    """
    target, draft = _law_rows(p, q)
    if abs(draft.sum() - 1) > _SUM_TOLERANCE:
        raise ValueError(f"q must sum to 1, got {draft.sum()}")
    admitted = np.asarray(admitted_mask)
    if admitted.shape != target.shape or admitted.dtype != np.bool_:
        raise ValueError(f"admitted_mask must be [{target.shape[0]}] bool")
    accepted = np.where(admitted, np.minimum(target, draft), 0.0)
    refused = np.where(admitted, np.maximum(draft - target, 0.0), 0.0).sum()
    failed = draft[~admitted].sum()
    return accepted + refused * _normalised_residual(target, draft) + failed * target


def _law_rows(p: ArrayLike, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    target = _vector("p", p)
    draft = _vector("q", q, target.shape[0])
    for name, row in (("p", target), ("q", draft)):
        if not np.all(np.isfinite(row) & (row >= 0)):
            raise ValueError(f"{name} must be finite and non-negative")
    if abs(target.sum() - 1) > _SUM_TOLERANCE:
        raise ValueError(f"p must sum to 1, got {target.sum()}")
    if draft.sum() > 1 + _SUM_TOLERANCE:
        raise ValueError(f"q must sum to at most 1, got {draft.sum()}")
    return target, draft


def _normalised_residual(target: np.ndarray, mu: np.ndarray) -> np.ndarray:
    positive = np.maximum(target - mu, 0.0)
    total = positive.sum()
    return positive / total if total > 0 else target


# ---------------------------------------------------------------------------
# Suffix drafts.
# ---------------------------------------------------------------------------


def oracle_suffix(
    context: Sequence[int], *, max_match: int, min_match: int, num_draft_tokens: int
) -> list[int]:
    """Finds the continuation of the longest earlier copy of the context's suffix.

    Lengths are tried from `max_match` down to `min_match`; among copies of one length
    the latest wins. The suffix does not match itself, but a copy may overlap it. The
    continuation may run into the suffix and stops at the end of the context.

    Args:
      context: token ids so far.
      max_match: longest suffix tried, in tokens.
      min_match: shortest suffix tried, >= 1.
      num_draft_tokens: most tokens returned, >= 0.

    Returns:
      Up to `num_draft_tokens` ids; empty if nothing matches (no attempt, not NULL).

    Raises:
      ValueError: if `1 <= min_match <= max_match` or `num_draft_tokens >= 0` fails.

    Exactness: bit-exact to the singleton; a function of the committed context alone,
      so a draft from it may be verified with mu = one-hot (law-exact).

    Example:
      >>> oracle_suffix([1, 2, 5, 1, 2, 6, 1, 2], max_match=2, min_match=2,
      ...               num_draft_tokens=3)
      [6, 1, 2]
    """
    if not 1 <= min_match <= max_match:
        raise ValueError(
            f"need 1 <= min_match <= max_match, got {min_match} and {max_match}"
        )
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be >= 0, got {num_draft_tokens}")
    ids = [int(token) for token in context]
    for length in range(min(max_match, len(ids) - 1), min_match - 1, -1):
        suffix = ids[-length:]
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start : start + length] == suffix:
                return ids[start + length : start + length + num_draft_tokens]
    return []
