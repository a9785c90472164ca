"""What does a window cost on this machine, and which exact policy is the fastest?

A window without drafts takes v0 seconds, each draft call c more, each offered row v1
more. `measure` finds these numbers by timing, `record` finds how sure the drafter is
and how often its drafts are accepted, and `predict` puts the two together for any gate,
threshold and number of drafts; `choose` looks for the best, plain decoding included.

  costs = diagnostics.cost.measure(target, drafter, params, prompt)
  records = diagnostics.cost.record(target, drafter, params, prompts, max_new_tokens=64)
  best = diagnostics.cost.choose(costs, records)[0]

Every policy is exact, so that none of these numbers can bias an output.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks, gates, verifiers
from strata_jax._decode import ancestral_decoder, decode, speculative_decoder
from strata_jax._types import (
    Drafter,
    FinishReason,
    Gate,
    GateContext,
    GateDecision,
    GateSetting,
    RowKind,
    SpeculativeDecoder,
    TargetModel,
    Verifier,
    Window,
)

GATES = ("always", "picked", "top", "entropy", "include_then_stop")
"""Gates that `predict` knows; "none" beside them is plain decoding."""
_NUM_THRESHOLDS = 24  # that `choose` tries for each gate and number of drafts
_WINDOWS_PER_CALL = 8


@dataclasses.dataclass(frozen=True)
class WindowCosts:
    """Seconds that the parts of a window take.

    Attributes:
      plain: a window of plain decoding, without a drafter.
      window: v0, a window of the drafter's decoder, without its rows.
      draft_call: c, for each row that is drafted, offered or not.
      offered: `[K + 1]`, for so many offered rows together; the first is 0.
      residual: the largest relative error of these numbers at what they were fitted to.
    """

    plain: float
    window: float
    draft_call: float
    offered: tuple[float, ...]
    residual: float

    @property
    def row(self) -> float:
        """v1, for each offered row, in the mean over K of them."""
        return self.offered[-1] / (len(self.offered) - 1)


@dataclasses.dataclass(frozen=True)
class DraftRecords:
    """Drafts that were all offered: how sure, and how likely to be accepted.

    Row k of a window stands behind its own earlier drafts, all taken as accepted.

    Attributes:
      is_drafted: `[n, K]` bool, whether the drafter had something to say.
      draft_prob: `[n, K]` float, q of the drawn token.
      top_prob: `[n, K]` float, the largest q.
      entropy: `[n, K]` float, of q, nats.
      acceptance: `[n, K]` float, the probability that the drawn token is accepted,
        behind accepted ones.
    """

    is_drafted: np.ndarray
    draft_prob: np.ndarray
    top_prob: np.ndarray
    entropy: np.ndarray
    acceptance: np.ndarray


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


def measure(
    target: TargetModel,
    drafter: Drafter,
    params: Any,
    prompt: Sequence[int] | np.ndarray,
    *,
    verifier: Verifier | None = None,
    rounds: int = 5,
    **settings: Any,
) -> WindowCosts:
    """Times windows of this target and drafter, with 0 to K drafts.

    A gate that counts rows, and looks at nothing else, makes every mixture of drafted
    and offered rows, each from the same state. The machine should be quiet.

    Args:
      target: the target.
      drafter: the drafter, with K > 0.
      params: the weights, as `decoder.init` takes them.
      prompt: token ids. Costs grow with the length of the text: take one as long as the
        texts in question are in the mean. Where the drafter has nothing to say behind
        it, costs of rows are interpolated.
      verifier: the rule; None is `verifiers.token()`.
      rounds: how often each mixture is timed; the median counts.
      **settings: of the request, such as temperature.

    Returns:
      The costs.

    Raises:
      ValueError: if the drafter drafts nothing, the prompt leaves no room for the
        windows, or the drafter offered no row behind this prompt.

    Exactness: read-only; the timed requests are exact ones.
    """
    num_drafts = _check_drafter(drafter)
    rounds = _checks.check_integer("rounds", rounds, 1)
    needed = _WINDOWS_PER_CALL * (num_drafts + 1)
    if len(prompt) + needed > target.max_length:
        raise ValueError(
            f"prompt has {len(prompt)} tokens: with max_length={target.max_length} "
            f"there is no room for {needed} more"
        )
    verifier = verifiers.token() if verifier is None else verifier
    plain = ancestral_decoder(target, bit_exact=target.is_bit_exact)
    decoder = speculative_decoder(
        target,
        drafter,
        _counting_gate(),
        verifier,
        draft_rule="sample",
        bit_exact=target.is_bit_exact,
    )
    # Offered rows, and whether the chain stops there or at one more row that fails.
    mixtures = [(offers, False) for offers in range(num_drafts)]
    mixtures += [(offers, True) for offers in range(1, num_drafts + 1)]
    starts = [
        decoder.init(params, prompt, offers=offers, stops=float(stops), **settings)
        for offers, stops in mixtures
    ]
    plain_start = plain.init(params, prompt, **settings)
    seconds = np.zeros((rounds + 1, len(mixtures)))
    plain_seconds = np.zeros(rounds + 1)
    features = np.zeros((len(mixtures), 2 + num_drafts))
    for number in range(rounds + 1):  # the first compiles
        plain_seconds[number], _ = _time_windows(plain, params, plain_start)
        for place in np.random.default_rng(number).permutation(len(mixtures)):
            found = _time_windows(
                decoder, params, starts[place], stops=mixtures[place][1]
            )
            seconds[number, place], features[place] = found
    of_plain = float(np.median(plain_seconds[1:])) / _WINDOWS_PER_CALL
    return _fit(of_plain, features, np.median(seconds[1:], axis=0))


def _counting_gate() -> Gate:
    """Offers the first `offers` rows of a window; `stops` 1 tries none after them."""

    def decide(
        settings: Mapping[str, jax.Array], context: GateContext, draft_probs: jax.Array
    ) -> GateDecision:
        row = context.row.astype(settings["offers"].dtype)
        ends = (row + 1 >= settings["offers"]) & (settings["stops"] > 0)
        return GateDecision(
            attempt=row < settings["offers"],
            admit=jnp.ones_like(draft_probs),
            go_on=jnp.full(draft_probs.shape, ~ends),
        )

    limits = GateSetting(None, 0.0, float("inf"))
    return gates.gate(decide, settings={"offers": limits, "stops": limits})


def _time_windows(
    decoder: SpeculativeDecoder, params: Any, start: Any, *, stops: bool = False
) -> tuple[float, np.ndarray]:
    """Seconds of one call, and what happened in it: windows, calls, offered rows."""
    # The state is given away.
    state = jax.block_until_ready(jax.tree.map(jnp.copy, start))
    began = time.perf_counter()
    _, verdicts = jax.block_until_ready(
        decode(decoder, params, state, _WINDOWS_PER_CALL, throw=False)
    )
    seconds = time.perf_counter() - began
    kind, emitted = np.asarray(verdicts.kind), np.asarray(verdicts.num_emitted)
    ran = emitted > 0
    num_offered = (kind == RowKind.OFFERED).sum(axis=1)[ran]
    # Another row was drafted, and failed: the gate or the drafter said no.
    num_calls = np.minimum(num_offered + 1, kind.shape[1])
    if stops:
        wanted = num_offered.max(initial=0)
        num_calls = np.where(num_offered == wanted, num_offered, num_calls)
    counts = [
        ran.sum(),
        num_calls.sum(),
        *((num_offered == row).sum() for row in range(1, kind.shape[1] + 1)),
    ]
    return seconds, np.asarray(counts, float)


def _fit(plain: float, features: np.ndarray, seconds: np.ndarray) -> WindowCosts:
    """Least squares over what happened in each call."""
    seen = np.flatnonzero(features.sum(axis=0))
    num_drafts = features.shape[1] - 2
    rows = [row for row in range(1, num_drafts + 1) if 1 + row in seen]
    if not rows:
        raise ValueError(
            "prompt: the drafter offered nothing behind it; give one that it can draft "
            "for, such as a repetitive text for a suffix drafter"
        )
    # Relative errors, so that short windows count as much as long ones.
    scaled = features[:, seen] / seconds[:, None]
    found = np.zeros(features.shape[1])
    found[seen] = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
    residual = float(np.abs(features @ found / seconds - 1).max())
    known = np.concatenate([[0.0], found[[1 + row for row in rows]]])
    offered = np.interp(np.arange(num_drafts + 1), [0, *rows], known)
    beyond = np.arange(num_drafts + 1) > rows[-1]
    offered[beyond] *= np.arange(num_drafts + 1)[beyond] / rows[-1]
    return WindowCosts(
        plain=plain,
        window=float(found[0]),
        draft_call=float(found[1]),
        offered=tuple(float(value) for value in offered),
        residual=residual,
    )


def record(
    target: TargetModel,
    drafter: Drafter,
    params: Any,
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    max_new_tokens: int,
    verifier: Verifier | None = None,
    **settings: Any,
) -> DraftRecords:
    """Decodes some requests with every draft offered, and keeps what drafts were worth.

    Args:
      target: the target.
      drafter: the drafter, with K > 0.
      params: the weights, as `decoder.init` takes them.
      prompts: token ids of each request; like those that are to be served.
      max_new_tokens: the token budget of each.
      verifier: `verifiers.token()`, which is the default, or `exact_match()`.
      **settings: of the requests, such as temperature and seed.

    Returns:
      The records of all windows.

    Raises:
      ValueError: if there is no prompt, the drafter drafts nothing, or the verifier has
        no closed form here.
      DecodingError: if a request fails.

    Exactness: read-only; drafts are sampled, and their acceptance is computed from the
      rows p and q, not counted.
    """
    num_drafts = _check_drafter(drafter)
    if not len(prompts):
        raise ValueError("prompts must hold at least one prompt")
    verifier = verifiers.token() if verifier is None else verifier
    if verifier.name not in ("token", "exact_match"):
        raise ValueError(
            f"verifier {verifier.name}: use verifiers.token() or exact_match()"
        )
    decoder = speculative_decoder(
        target,
        drafter,
        gates.always(),
        verifier,
        draft_rule="sample",
        bit_exact=target.is_bit_exact,
    )
    is_token = jnp.asarray(verifier.name == "token")
    pieces = []
    for prompt in prompts:
        state = decoder.init(params, prompt, max_new_tokens=max_new_tokens, **settings)
        while int(state.finish_reason) == FinishReason.RUNNING:
            # Rows of the whole vocabulary: a window at a time.
            state, windows = decode(decoder, params, state, 1, trace=True)
            pieces.append(jax.tree.map(np.asarray, _summarize(windows, is_token)))
    if not pieces:
        empty = np.zeros((0, num_drafts))
        return DraftRecords(empty > 0, empty, empty, empty, empty)
    leaves = [np.concatenate(leaf) for leaf in zip(*pieces, strict=True)]
    return DraftRecords(*leaves)


@jax.jit
def _summarize(windows: Window, is_token: jax.Array) -> tuple[jax.Array, ...]:
    measure = windows.proposal.measure
    drawn = jnp.maximum(windows.draft_tokens, 0)[..., None]
    drafted = windows.proposal.kind == RowKind.OFFERED
    q = jnp.take_along_axis(measure, drawn, axis=-1)[..., 0]
    p = jnp.take_along_axis(windows.target_probs[..., :-1, :], drawn, axis=-1)[..., 0]
    safe = jnp.where(measure > 0, measure, 1)
    entropy = -jnp.sum(safe * jnp.log(safe), axis=-1)
    ratio = jnp.minimum(1, p / jnp.where(q > 0, q, 1))
    return (
        drafted,
        q,
        jnp.max(measure, axis=-1),
        entropy,
        jnp.where(is_token, ratio, p),
    )


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
    quantiles = np.quantile(values, np.linspace(0, 1, _NUM_THRESHOLDS))
    return [float(value) for value in np.unique(quantiles)]


def _check_drafter(drafter: Drafter) -> int:
    if drafter.num_draft_tokens == 0:
        raise ValueError("drafter drafts nothing: there is no cost to weigh")
    return drafter.num_draft_tokens


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
    if not 1 <= policy.num_draft_tokens <= num_draft_tokens:
        raise ValueError(
            f"policy.num_draft_tokens must be in 1 .. {num_draft_tokens}, as measured "
            f"and recorded, got {policy.num_draft_tokens}"
        )
    has_threshold = policy.gate != "always"
    if (policy.threshold is not None) != has_threshold:
        needed = "a number" if has_threshold else "None"
        raise ValueError(
            f"policy.threshold must be {needed} for the gate {policy.gate}, got "
            f"{policy.threshold}"
        )
