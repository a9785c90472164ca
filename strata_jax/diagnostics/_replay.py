"""Deciding a trace again, in NumPy, from what it recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from strata_jax._rng import Stream
from strata_jax._types import Source
from strata_jax.diagnostics._trace import DRAWS, Trace
from strata_jax.testing import (
    OracleVerdict,
    oracle_position_uniforms,
    oracle_verify_exact_match,
    oracle_verify_token,
    oracle_window_uniforms,
)


@dataclasses.dataclass(frozen=True)
class TraceDifference:
    """The first place where a trace is not what its own inputs give.

    Attributes:
      window: number of the window in the trace.
      row: row in that window.
      stream: name of the stream whose draw, or whose decision, differs.
      recorded: what the trace says.
      recomputed: what follows from p, mu, draws and counters.
    """

    window: int
    row: int
    stream: str
    recorded: Any
    recomputed: Any

    def __str__(self) -> str:
        """Says where and what in one line."""
        return (
            f"window {self.window}, row {self.row}, stream {self.stream}: recorded "
            f"{self.recorded}, recomputed {self.recomputed}"
        )


@dataclasses.dataclass(frozen=True)
class Replay:
    """The outcome of a replay.

    Attributes:
      num_windows: windows that were decided again.
      num_rows: emitted tokens among them.
      num_decisions: acceptances and final draws that were reached.
      num_draws: uniforms that were made again from their counters.
      difference: the first difference, where the replay stopped; None if all agrees.
    """

    num_windows: int
    num_rows: int
    num_decisions: int
    num_draws: int
    difference: TraceDifference | None


def replay(trace: Trace) -> Replay:
    """Decides every window of a trace again, in NumPy.

    The uniforms are made from the request's key and their counters (stream, window,
    position); acceptances and final tokens follow from p, mu and these uniforms alone,
    by the verifiers of the NumPy oracle. No model and no part of `step` runs.

    Args:
      trace: as `record_trace` or `load_trace` give it.

    Returns:
      The counts, and the first difference. In a window that failed only the uniforms
      are compared.

    Raises:
      ValueError: if the trace's verifier is unknown, or a row is no row of numbers.

    Exactness: decides as the library does, bit for bit; the draw of a draft token from
      q is not repeated, since a trace holds mu.
    """
    if trace.verifier not in DRAWS:
        raise ValueError(
            f"trace.verifier is {trace.verifier!r}: only windows of {sorted(DRAWS)} "
            "can be decided again"
        )
    windows = trace.windows
    position = len(trace.context)
    eos_ids = trace.settings["sampling.eos_ids"]
    num_rows = num_decisions = num_draws = 0
    for index in range(len(windows.verdict.status)):
        found, difference = _compare_draws(trace, index, position)
        num_draws += found
        if difference is None and not windows.verdict.status[index]:
            expected = _decide(trace, index)
            difference = _compare_verdict(trace, index, expected, eos_ids)
            # Exact match decides by its draw, the token rule by a coin before it.
            is_extra = trace.verifier == "token" and expected.source == "rejection"
            num_decisions += expected.num_accepted + 1 + is_extra
        if difference is not None:
            return Replay(index, num_rows, num_decisions, num_draws, difference)
        emitted = int(windows.verdict.num_emitted[index])
        position += emitted
        num_rows += emitted
    return Replay(
        num_windows=len(windows.verdict.status),
        num_rows=num_rows,
        num_decisions=num_decisions,
        num_draws=num_draws,
        difference=None,
    )


def _compare_draws(
    trace: Trace, index: int, position: int
) -> tuple[int, TraceDifference | None]:
    """Makes a window's uniforms again; returns how many, and the first difference."""
    draws = trace.windows.draws
    window = trace.window + index
    num_draft_tokens = draws.gate.shape[1]
    count = 0
    for row in range(num_draft_tokens + 1):
        streams: list[tuple[Stream, Any]] = []
        if row < num_draft_tokens:
            streams += [(Stream.DRAFT, draws.draft), (Stream.GATE, draws.gate)]
        if trace.verifier == "token":
            if row < num_draft_tokens:
                streams.append((Stream.ACCEPT, draws.verifier.accept))
            if row == 0:
                residual = draws.verifier.residual
                streams.append((Stream.RESIDUAL, residual[:, None]))
        streams.append((Stream.PICK, draws.verifier.pick))
        for stream, values in streams:
            recorded = np.atleast_1d(values[index, row])
            counters = (position + row, len(recorded))
            if stream == Stream.PICK:
                expected = oracle_position_uniforms(trace.key_data, stream, *counters)
            else:
                expected = oracle_window_uniforms(
                    trace.key_data, stream, window, *counters
                )
            count += len(recorded)
            if not np.array_equal(recorded, expected):
                difference = TraceDifference(
                    window=index,
                    row=row,
                    stream=stream.name,
                    recorded=recorded.tolist(),
                    recomputed=expected.tolist(),
                )
                return count, difference
    return count, None


def _decide(trace: Trace, index: int) -> OracleVerdict:
    windows = trace.windows
    target_probs = windows.target_probs[index]
    proposal, draws = windows.proposal, windows.draws.verifier
    tokens, kinds = proposal.tokens[index].tolist(), proposal.kind[index].tolist()
    if trace.verifier == "token":
        return oracle_verify_token(
            target_probs,
            proposal.measure[index],
            tokens,
            kinds,
            draws.accept[index],
            draws.residual[index],
            draws.pick[index],
        )
    return oracle_verify_exact_match(target_probs, tokens, kinds, draws.pick[index])


def _compare_verdict(
    trace: Trace, index: int, expected: OracleVerdict, eos_ids: np.ndarray
) -> TraceDifference | None:
    verdict = trace.windows.verdict
    tokens = list(expected.tokens)
    ends = [place for place, token in enumerate(tokens) if token in eos_ids]
    if ends:
        tokens = tokens[: ends[0] + 1]
    num_accepted = min(expected.num_accepted, len(tokens))
    recorded = verdict.tokens[index]
    found = recorded[: verdict.num_emitted[index]].tolist()

    def difference(row: int, stream: Stream, old: Any, new: Any) -> TraceDifference:
        return TraceDifference(index, row, stream.name, old, new)

    decision = Stream.ACCEPT if trace.verifier == "token" else Stream.PICK
    accepted = int(verdict.num_accepted[index])
    if accepted != num_accepted:
        row = min(accepted, num_accepted)
        text = ("rejected", "accepted")
        return difference(row, decision, text[accepted > row], text[num_accepted > row])
    source = Source(int(verdict.source[index])).name.lower()
    if source != expected.source:
        return difference(num_accepted, decision, source, expected.source)
    final = Stream.PICK
    if trace.verifier == "token" and expected.source != "bonus":
        final = Stream.RESIDUAL
    for row in range(max(len(found), len(tokens))):
        old = found[row] if row < len(found) else None
        new = tokens[row] if row < len(tokens) else None
        if old != new:
            stream = Stream.DRAFT if row < num_accepted else final
            return difference(row, stream, old, new)
    return None
