"""A request's windows, kept on the host."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from strata_jax import _checks
from strata_jax._decode import decode
from strata_jax._request import DecoderState
from strata_jax._types import (
    Draws,
    FinishReason,
    Proposal,
    SpeculativeDecoder,
    Verdict,
    Window,
)
from strata_jax.verifiers import ExactMatchDraws, TokenDraws

# The verifiers whose windows `replay` can decide again, and what they draw.
DRAWS = {"token": TokenDraws, "exact_match": ExactMatchDraws}


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a request did, window by window: enough to decide all of it again.

    Attributes:
      verifier: "token" or "exact_match".
      key_data: `[2]` uint32, `jax.random.key_data` of the request's key.
      window: windows before the first one here.
      context: `[n]` int32, the committed text before the first window.
      num_output: how many of its last tokens are output of an earlier part of the run.
      settings: the request's numbers by name, such as "sampling.temperature".
      versions: of the packages that made it.
      files: SHA-256 of the model's files by name, as the caller gave them.
      windows: NumPy arrays, leading axis W; windows that did nothing are left out.
    """

    verifier: str
    key_data: np.ndarray
    window: int
    context: np.ndarray
    num_output: int
    settings: Mapping[str, np.ndarray]
    versions: Mapping[str, str]
    files: Mapping[str, str]
    windows: Window


def begin_trace(
    decoder: SpeculativeDecoder,
    state: DecoderState,
    *,
    files: Mapping[str, str] | None = None,
) -> Trace:
    """Returns a trace without windows, of a request as it stands.

    Args:
      decoder: the decoder.
      state: the request's state; only read.
      files: SHA-256 of the model's files by name, to be kept in the trace.

    Returns:
      The trace; `extend_trace` adds windows to it.

    Raises:
      ValueError: if the decoder's verifier is not one that `replay` knows.

    Exactness: read-only.
    """
    if decoder.verifier_name not in DRAWS:
        raise ValueError(
            f"decoder verifies by {decoder.verifier_name!r}: traces are kept of "
            f"{sorted(DRAWS)}; use decode(..., trace=True) and keep its windows"
        )
    num_draft_tokens, vocab_size = decoder.num_draft_tokens, decoder.vocab_size
    length = int(state.context.length)
    versions = {
        "strata_jax": importlib.metadata.version("strata-jax"),
        **{name: importlib.metadata.version(name) for name in ("jax", "numpy")},
    }
    none: Any = np.zeros(0, np.int32)
    uniforms: Any = np.zeros((0, num_draft_tokens), np.float32)
    rows: Any = np.zeros((0, num_draft_tokens), np.int32)
    probs: Any = np.zeros((0, num_draft_tokens + 1, vocab_size), np.float32)
    pick: Any = np.zeros((0, num_draft_tokens + 1, 2), np.float32)
    residual: Any = np.zeros((0, 2), np.float32)
    if decoder.verifier_name == "token":
        draws: Any = TokenDraws(accept=uniforms, residual=residual, pick=pick)
    else:
        draws = ExactMatchDraws(pick=pick)
    windows = Window(
        proposal=Proposal(tokens=rows, measure=probs[:, 1:], kind=rows),
        draft_tokens=rows,
        draws=Draws(
            draft=pick[:, 1:],
            gate=uniforms,
            verifier=draws,
        ),
        verdict=Verdict(
            tokens=np.zeros((0, num_draft_tokens + 1), np.int32),  # type: ignore[arg-type]
            num_accepted=none,
            num_emitted=none,
            source=none,
            status=none,
            kind=rows,
        ),
        target_probs=probs,
    )
    return Trace(
        verifier=decoder.verifier_name,
        key_data=np.asarray(jax.random.key_data(state.request_key)),
        window=int(state.window),
        context=np.array(state.context.tokens[:length]),
        num_output=int(state.counts.num_output),
        settings=_named_settings(state.settings),
        versions=versions,
        files=dict(files or {}),
        windows=windows,
    )


def extend_trace(trace: Trace, windows: Window) -> Trace:
    """Returns the trace with more windows at its end.

    Args:
      trace: of the same request, up to these windows.
      windows: as `decode(trace=True)` returns them, leading axis windows; those that
        did nothing, after the request's end, are left out.

    Returns:
      The longer trace, on the host.

    Raises:
      ValueError: if the windows are of another decoder.

    Exactness: bits are kept.
    """
    windows = jax.tree.map(np.asarray, windows)
    _check_alike(trace, windows)
    verdict = windows.verdict
    ran = (verdict.num_emitted > 0) | (verdict.status != 0)
    windows = jax.tree.map(lambda leaf: leaf[ran], windows)
    if len(trace.windows.verdict.status):
        windows = jax.tree.map(
            lambda *leaves: np.concatenate(leaves), trace.windows, windows
        )
    return dataclasses.replace(trace, windows=windows)


def _check_alike(trace: Trace, windows: Window) -> None:
    """Raises ValueError if windows cannot be of the trace's decoder."""
    if not isinstance(windows.draws.verifier, DRAWS[trace.verifier]):
        raise ValueError(
            f"windows are not of the verifier {trace.verifier!r}, the trace's: begin a "
            "trace with their own decoder"
        )
    shape = trace.windows.target_probs.shape[1:]
    if windows.target_probs.ndim != 3 or windows.target_probs.shape[1:] != shape:
        raise ValueError(
            f"windows must have target_probs of shape [windows, {shape[0]}, "
            f"{shape[1]}], as the trace's decoder, got "
            f"{list(windows.target_probs.shape)}"
        )


def record_trace(
    decoder: SpeculativeDecoder,
    params: Any,
    state: DecoderState,
    num_windows: int,
    *,
    files: Mapping[str, str] | None = None,
    windows_per_call: int = 16,
) -> tuple[DecoderState, Trace]:
    """Runs windows and keeps all of them on the host.

    Args:
      decoder: the decoder.
      params: the weights.
      state: where to go on; its buffers are reused, so it must not be read again.
      num_windows: most windows to run; a request that ends earlier stops there.
      files: SHA-256 of the model's files by name, to be kept in the trace.
      windows_per_call: windows in one compiled program; p and mu of so many are held
        on the device, about 4 (2 K + 1) V bytes each.

    Returns:
      The state after the windows, and the trace. A request that fails ends the trace;
      look at `state.status`.

    Raises:
      ValueError: if a number is wrong, or the decoder's verifier is not one that
        `replay` knows.

    Exactness: read-only; the same tokens and bits as `decode` without a trace.
    """
    num_windows = _checks.check_integer("num_windows", num_windows, 1)
    windows_per_call = _checks.check_integer("windows_per_call", windows_per_call, 1)
    trace = begin_trace(decoder, state, files=files)
    pieces = []
    while num_windows and int(state.finish_reason) == FinishReason.RUNNING:
        size = min(num_windows, windows_per_call)
        state, windows = decode(decoder, params, state, size, trace=True, throw=False)
        pieces.append(jax.tree.map(np.asarray, windows))
        num_windows -= size
    if pieces:
        windows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
        trace = extend_trace(trace, windows)
    return state, trace


def _named_settings(settings: Any) -> dict[str, np.ndarray]:
    named = {"max_new_tokens": np.asarray(settings.max_new_tokens)}
    for field in dataclasses.fields(settings.sampling):
        value = getattr(settings.sampling, field.name)
        named[f"sampling.{field.name}"] = np.asarray(value)
    for name, value in settings.gate.items():
        named[f"gate.{name}"] = np.asarray(value)
    return named
