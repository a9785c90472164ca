"""Acceptance statistics of decoded windows."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from strata_jax import measures
from strata_jax._types import RowKind, Verdict, Window


@dataclasses.dataclass(frozen=True)
class AcceptanceSummary:
    """Counts and rates over the windows of one or more requests.

    Attributes:
      num_windows: windows that emitted anything, one target pass each.
      num_tokens: emitted tokens.
      num_offered: rows whose draft was offered to the verifier.
      num_accepted: drafts among the emitted tokens.
      num_null: rows whose draft was drawn and not admitted.
      num_absent: rows that were never attempted.
      acceptance_rate: accepted per offered row, 0 if none was offered.
      tokens_per_window: block efficiency, emitted tokens per target pass.
      num_windows_with_offer: windows that offered at least one row.
      tokens_per_window_with_offer: the same ratio over those windows.
      offered_by_row: `[K]` int, offered rows by their place in the window.
      accepted_by_row: `[K]` int, accepted drafts by their place in the window.
    """

    num_windows: int
    num_tokens: int
    num_offered: int
    num_accepted: int
    num_null: int
    num_absent: int
    acceptance_rate: float
    tokens_per_window: float
    num_windows_with_offer: int
    tokens_per_window_with_offer: float
    offered_by_row: np.ndarray
    accepted_by_row: np.ndarray


def summarize_acceptance(verdicts: Verdict) -> AcceptanceSummary:
    """Summarizes stacked verdicts, as `decode` returns them.

    Args:
      verdicts: any leading axes; windows that emitted nothing do not count.

    Returns:
      The summary. Rows after a rejection count as offered, since they were proposed
      and computed.

    Exactness: counts of what happened.
    """
    num_emitted = np.ravel(verdicts.num_emitted)
    ran = num_emitted > 0
    kind = np.asarray(verdicts.kind)
    kind = kind.reshape(len(ran), kind.shape[-1])[ran]
    num_emitted = num_emitted[ran]
    num_accepted = np.ravel(verdicts.num_accepted)[ran]
    is_offered = kind == RowKind.OFFERED
    has_offer = is_offered.any(axis=1)
    rows = np.arange(kind.shape[1])
    is_accepted = rows[None] < num_accepted[:, None]
    num_offered = int(is_offered.sum())
    return AcceptanceSummary(
        num_windows=int(ran.sum()),
        num_tokens=int(num_emitted.sum()),
        num_offered=num_offered,
        num_accepted=int(num_accepted.sum()),
        num_null=int((kind == RowKind.NULL).sum()),
        num_absent=int((kind == RowKind.ABSENT).sum()),
        acceptance_rate=_ratio(num_accepted.sum(), num_offered),
        tokens_per_window=_ratio(num_emitted.sum(), ran.sum()),
        num_windows_with_offer=int(has_offer.sum()),
        tokens_per_window_with_offer=_ratio(
            num_emitted[has_offer].sum(), has_offer.sum()
        ),
        offered_by_row=is_offered.sum(axis=0),
        accepted_by_row=is_accepted.sum(axis=0),
    )


@dataclasses.dataclass(frozen=True)
class RowMasses:
    """Masses of the attempted rows of traced windows.

    Attributes:
      is_attempted: `[..., K]` bool; the masses of other rows are 0.
      overlap: `[..., K]` float, sum min(p, mu): the probability that the row is
        accepted, given that it is reached.
      null_mass: `[..., K]` float, 1 - sum mu.
    """

    is_attempted: np.ndarray
    overlap: np.ndarray
    null_mass: np.ndarray


def row_masses(windows: Window) -> RowMasses:
    """Computes the masses of the rows of windows, as `decode(trace=True)` returns them.

    Args:
      windows: any leading axes.

    Returns:
      The masses. A row behind the first rejection is judged against the target row
      that its own drafts led to.

    Exactness: read-only; sums of fixed order.
    """
    kind = np.asarray(windows.proposal.kind)
    is_attempted = kind != RowKind.ABSENT
    # The row after the last offered one has a target row too.
    target_probs = jax.numpy.asarray(windows.target_probs)[..., :-1, :]
    measure = jax.numpy.asarray(windows.proposal.measure)
    overlap = np.asarray(measures.overlap(target_probs, measure))
    null_mass = np.asarray(measures.null_mass(measure))
    return RowMasses(
        is_attempted=is_attempted,
        overlap=np.where(is_attempted, overlap, 0),
        null_mass=np.where(is_attempted, null_mass, 0),
    )


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator) / float(denominator) if denominator else 0.0
