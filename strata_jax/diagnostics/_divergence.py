"""Distances between laws, and the chi-square test of a sample against a law."""

from __future__ import annotations

import dataclasses

import numpy as np


def total_variation(probs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    r"""Returns the total variation distance, :math:`\frac12 \sum |p - r|`.

    Args:
      probs: `[..., N]` float, a law.
      reference: `[..., N]` float, another.

    Returns:
      `[...]` float64.

    Raises:
      ValueError: if the shapes differ.

    Exactness: computed in float64.
    """
    probs, reference = _pair(probs, reference)
    return np.abs(probs - reference).sum(axis=-1) / 2


def kl_divergence(probs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    r"""Returns the Kullback-Leibler divergence, :math:`\sum p \ln (p / r)`, in nats.

    Args:
      probs: `[..., N]` float, a law.
      reference: `[..., N]` float, another; infinite where it lacks mass.

    Returns:
      `[...]` float64.

    Raises:
      ValueError: if the shapes differ.

    Exactness: computed in float64.
    """
    probs, reference = _pair(probs, reference)
    import scipy.stats  # here, since it takes half a second

    return np.asarray(scipy.stats.entropy(probs, reference, axis=-1))


@dataclasses.dataclass(frozen=True)
class ChiSquare:
    """Result of a chi-square test.

    Attributes:
      statistic: the sum of (observed - expected)^2 / expected.
      degrees_of_freedom: pooled cells minus one.
      p_value: the probability of at least this statistic under the law.
    """

    statistic: float
    degrees_of_freedom: int
    p_value: float


def chi_square(
    counts: np.ndarray, probs: np.ndarray, *, min_expected: float = 5.0
) -> ChiSquare:
    """Tests a sample of counts against a law.

    Args:
      counts: `[N]` int, how often each cell was seen.
      probs: `[N]` float, the law.
      min_expected: cells are pooled, the rarest first, until each expects so many.

    Returns:
      The test. A count in a cell of probability 0 gives an infinite statistic.

    Raises:
      ValueError: if shapes differ, nothing was counted, or the law does not sum to 1.

    Exactness: asymptotic in the sample size; hence `min_expected`.
    """
    probs, counts = _pair(probs, counts)
    total = counts.sum()
    if counts.ndim != 1 or total <= 0:
        raise ValueError("counts must be one-dimensional and hold at least one draw")
    if abs(probs.sum() - 1) > 1e-5:
        raise ValueError(f"probs must sum to 1, got {probs.sum():.6g}")
    if counts[probs <= 0].any():
        return ChiSquare(float("inf"), max(int((probs > 0).sum()), 1), 0.0)
    order = np.argsort(probs[probs > 0], kind="stable")
    expected = (probs[probs > 0] * total / probs.sum())[order]
    observed = counts[probs > 0][order]
    num_rare = int(np.searchsorted(expected, min_expected))
    while num_rare < len(expected) and 0 < expected[:num_rare].sum() < min_expected:
        num_rare += 1
    if num_rare > 1:
        expected = np.append(expected[num_rare:], expected[:num_rare].sum())
        observed = np.append(observed[num_rare:], observed[:num_rare].sum())
    degrees = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    import scipy.stats

    p_value = float(scipy.stats.chi2.sf(statistic, degrees)) if degrees else 1.0
    return ChiSquare(statistic, degrees, p_value)


def _pair(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first = np.asarray(first, np.float64)
    second = np.asarray(second, np.float64)
    if first.shape != second.shape:
        raise ValueError(
            f"the two laws must have one shape, got {first.shape} and {second.shape}"
        )
    return first, second
