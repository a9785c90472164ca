"""The sampling chain in NumPy, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from strata_jax.testing._oracle._inputs import as_vector


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


def _counts(name: str, value: ArrayLike | None, size: int) -> np.ndarray:
    counts = np.zeros(size) if value is None else as_vector(name, value, size)
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
    scores = as_vector("logits", logits).copy()
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
        bias = as_vector("logit_bias", logit_bias, size)
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
