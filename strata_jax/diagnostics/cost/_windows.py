"""What windows cost: timed, and taken apart by least squares."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks, gates, verifiers
from strata_jax._decode import (
    ancestral_decoder,
    decode,
    output_tokens,
    speculative_decoder,
)
from strata_jax._status import raise_if_failed
from strata_jax._types import (
    Drafter,
    Gate,
    GateContext,
    GateDecision,
    GateSetting,
    RowKind,
    SpeculativeDecoder,
    TargetModel,
    Verifier,
)
from strata_jax.diagnostics.cost._drafts import check_drafter

_WINDOWS_PER_CALL = 8


@dataclasses.dataclass(frozen=True)
class WindowCosts:
    """Seconds that the parts of a window take.

    Attributes:
      plain: a window of plain decoding, without a drafter.
      window: v0, a window of the drafter's decoder, without its rows.
      draft_call: c, for each row that is drafted, offered or not.
      offered: `[K + 1]`, for so many offered rows together; the first is 0, and none
        is less than the one before.
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
      DecodingError: if a request fails.

    Exactness: read-only; the timed requests are exact ones.
    """
    num_drafts = check_drafter(drafter)
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
            offers, stops = mixtures[place]
            found = _time_windows(
                decoder, params, starts[place], last=offers if stops else None
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
    decoder: SpeculativeDecoder, params: Any, start: Any, *, last: int | None = None
) -> tuple[float, np.ndarray]:
    """Seconds of one call, and what happened in it: windows, calls, offered rows.

    A window that offered `last` rows drafted no other.
    """
    # The state is given away.
    state = jax.block_until_ready(jax.tree.map(jnp.copy, start))
    began = time.perf_counter()
    state, verdicts = jax.block_until_ready(
        decode(decoder, params, state, _WINDOWS_PER_CALL, throw=False)
    )
    seconds = time.perf_counter() - began
    # Here, since looking at the status takes time too.
    raise_if_failed(int(state.status), output_tokens(state))
    kind, emitted = np.asarray(verdicts.kind), np.asarray(verdicts.num_emitted)
    ran = emitted > 0
    num_offered = (kind == RowKind.OFFERED).sum(axis=1)[ran]
    # Another row was drafted, and failed: the gate or the drafter said no.
    num_calls = np.minimum(num_offered + 1, kind.shape[1])
    if last is not None:
        num_calls = np.where(num_offered == last, num_offered, num_calls)
    counts = [
        ran.sum(),
        num_calls.sum(),
        *((num_offered == row).sum() for row in range(1, kind.shape[1] + 1)),
    ]
    return seconds, np.asarray(counts, float)


def _fit(plain: float, features: np.ndarray, seconds: np.ndarray) -> WindowCosts:
    """Least squares over what happened in each call, no part of it below zero.

    Noise would else make drafts cheaper than none, or two rows cheaper than one.
    """
    # Where it is used: importing it takes half a second.
    import scipy.optimize

    seen = np.flatnonzero(features.sum(axis=0))
    num_drafts = features.shape[1] - 2
    rows = [row for row in range(1, num_drafts + 1) if 1 + row in seen]
    if not rows:
        raise ValueError(
            "prompt: the drafter offered nothing behind it; give one that it can draft "
            "for, such as a repetitive text for a suffix drafter"
        )
    # What each row adds to those before it, rather than what so many rows cost.
    steps = features.copy()
    steps[:, 2:] = np.cumsum(features[:, :1:-1], axis=1)[:, ::-1]
    # Relative errors, so that short windows count as much as long ones.
    scaled = steps / seconds[:, None]
    found, _ = scipy.optimize.nnls(scaled, np.ones(len(seconds)))
    residual = float(np.abs(steps @ found / seconds - 1).max())
    found[2:] = np.cumsum(found[2:])
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
