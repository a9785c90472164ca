"""What a policy would do: costs and drafts put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from strata_jax import _checks
from strata_jax.diagnostics.cost._drafts import DraftRecords
from strata_jax.diagnostics.cost._windows import WindowCosts

GATES = ("always", "picked", "top", "entropy", "include_then_stop")
"""Gates that `predict` knows; "none" beside them is plain decoding."""
_NUM_THRESHOLDS = 24  # that `choose` tries for each gate and number of drafts


@dataclasses.dataclass(frozen=True)
class Policy:
    """An exact way to decode.

    Attributes:
      gate: one of `GATES`, or "none" for plain decoding.
      threshold: the gate's number; None for "none" and "always".
      num_draft_tokens: K; 0 for "none".
    """

    gate: str
    threshold: float | None
    num_draft_tokens: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a policy is expected to do, in the mean over windows.

    Attributes:
      policy: the policy.
      tokens_per_window: emitted tokens.
      calls_per_window: drafted rows, the one that ends a chain included.
      offered_per_window: offered rows.
      seconds_per_window: their cost.
    """

    policy: Policy
    tokens_per_window: float
    calls_per_window: float
    offered_per_window: float
    seconds_per_window: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput."""
        return self.tokens_per_window / self.seconds_per_window


def predict(costs: WindowCosts, records: DraftRecords, policy: Policy) -> Prediction:
    """Predicts what a policy does, from measured costs and recorded drafts.

    Args:
      costs: of the machine.
      records: of texts like those in question.
      policy: the policy.

    Returns:
      The prediction: means over the recorded windows, with the gate's rule applied to
      each of their drafts.

    Raises:
      ValueError: if the policy is not a known one, or has more drafts than costs and
        records.

    Exactness: read-only.
    """
    _check_policy(policy, min(len(costs.offered) - 1, records.is_drafted.shape[1]))
    if policy.gate == "none":
        return Prediction(policy, 1.0, 0.0, 0.0, costs.plain)
    if not len(records.is_drafted):
        raise ValueError("records are empty: record some requests first")
    drafted, offered = _apply(records, policy)
    survival = np.cumprod(records.acceptance[:, : policy.num_draft_tokens], axis=1)
    accepted = np.where(offered, survival, 0).sum(axis=1).mean()
    calls, rows = drafted.sum(axis=1), offered.sum(axis=1)
    seconds = (
        costs.window
        + costs.draft_call * calls.mean()
        + np.asarray(costs.offered)[rows].mean()
    )
    return Prediction(
        policy=policy,
        tokens_per_window=float(1 + accepted),
        calls_per_window=float(calls.mean()),
        offered_per_window=float(rows.mean()),
        seconds_per_window=float(seconds),
    )


def choose(
    costs: WindowCosts,
    records: DraftRecords,
    *,
    gate_names: Sequence[str] = GATES,
) -> list[Prediction]:
    """Predicts many policies: each gate and number of drafts with its best threshold.

    Args:
      costs: of the machine.
      records: of texts like those in question.
      gate_names: which of `GATES` to try.

    Returns:
      Predictions, the fastest first. Plain decoding is always among them, so that the
      first is never predicted to be slower.

    Raises:
      ValueError: if a name is unknown, or there are no records.

    Exactness: read-only; all policies are exact.
    """
    unknown = sorted(set(gate_names) - set(GATES))
    if unknown:
        raise ValueError(f"gate_names must be of {list(GATES)}, got {unknown}")
    num_drafts = min(len(costs.offered) - 1, records.is_drafted.shape[1])
    best = [predict(costs, records, Policy("none", None, 0))]
    for name in gate_names:
        for count in range(1, num_drafts + 1):
            found = [
                predict(costs, records, Policy(name, threshold, count))
                for threshold in _thresholds(records, name)
            ]
            best.append(max(found, key=lambda found: found.tokens_per_second))
    return sorted(best, key=lambda found: -found.tokens_per_second)


def _apply(records: DraftRecords, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """Which rows `[n, K]` are drafted under a policy, and which of them offered."""
    rows = slice(policy.num_draft_tokens)
    drafted = records.is_drafted[:, rows]
    everything = np.ones_like(drafted)
    attempts = admits = goes_on = everything
    if policy.gate == "top":
        attempts = records.top_prob[:, rows] >= policy.threshold
    elif policy.gate == "entropy":
        attempts = records.entropy[:, rows] <= policy.threshold
    elif policy.gate == "picked":
        admits = records.draft_prob[:, rows] >= policy.threshold
    elif policy.gate == "include_then_stop":
        goes_on = records.draft_prob[:, rows] >= policy.threshold
    offers = drafted & attempts & admits
    # A row is reached if all before it were offered and let the chain go on.
    before = np.cumprod(offers & goes_on, axis=1, dtype=int).astype(bool)
    reached = np.concatenate([everything[:, :1], before[:, :-1]], axis=1)
    return reached, reached & offers


def _thresholds(records: DraftRecords, name: str) -> list[float | None]:
    """Candidates: quantiles of what the gate looks at."""
    of_gate = {
        "picked": records.draft_prob,
        "include_then_stop": records.draft_prob,
        "top": records.top_prob,
        "entropy": records.entropy,
    }
    if name not in of_gate:
        return [None]
    values = of_gate[name][records.is_drafted]
    if not len(values):
        return [1.0]
    steps = np.linspace(0, 1, _NUM_THRESHOLDS)
    quantiles = np.quantile(values, steps, method="nearest")
    return [float(value) for value in np.unique(quantiles)]


def _check_policy(policy: Policy, num_draft_tokens: int) -> None:
    if policy.gate not in ("none", *GATES):
        raise ValueError(
            f"policy.gate must be one of {['none', *GATES]}, got {policy.gate!r}"
        )
    if policy.gate == "none":
        if policy.num_draft_tokens:
            raise ValueError(
                "policy.num_draft_tokens must be 0 for plain decoding, got "
                f"{policy.num_draft_tokens}"
            )
        return
    # As many as were measured and recorded.
    _checks.check_integer(
        "policy.num_draft_tokens", policy.num_draft_tokens, 1, num_draft_tokens
    )
    has_threshold = policy.gate != "always"
    if (policy.threshold is not None) != has_threshold:
        needed = "a number" if has_threshold else "None"
        raise ValueError(
            f"policy.threshold must be {needed} for the gate {policy.gate}, got "
            f"{policy.threshold}"
        )
    if policy.threshold is not None:
        most = float("inf") if policy.gate == "entropy" else 1.0
        _checks.check_number("policy.threshold", policy.threshold, 0.0, most)
