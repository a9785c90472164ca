"""The law of one row by hand: the rule here, and the unaccounted gate."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from strata_jax.testing._oracle._inputs import as_vector

_SUM_TOLERANCE = 1e-6


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
    admission = as_vector("g", g, target.shape[0])
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
    target = as_vector("p", p)
    draft = as_vector("q", q, target.shape[0])
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
