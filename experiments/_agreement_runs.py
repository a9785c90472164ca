"""Six runs of one prompt, and how far each of their positions is from the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _forced_text import force_last_token
from _models import Model, own_drafter
from _row_laws import emitted_laws

import strata_jax as strata
from strata_jax import diagnostics, gates, targets, verifiers
from strata_jax.audit import negative_controls

NUM_DRAFT_TOKENS = 3
# The sampling settings of the engine whose study this repeats.
SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
RUNS = (
    "original, no drafts",
    "original, gated",
    "original, default",
    "repaired, no drafts",
    "repaired, gated",
    "repaired, default",
)


class Study:
    """The decoders of one model; compiled once for all its requests."""

    def __init__(self, model: Model, max_length: int, threshold: float):
        """Builds the six decoders.

        Args:
          model: the model, with weights of any format.
          max_length: S.
          threshold: of the confidence gate.
        """
        self._params, self._threshold = model.params, threshold
        exact = targets.singleton(model.config, max_length=max_length)
        shared = targets.batched(model.config, max_length=max_length)
        drafter = own_drafter(model, NUM_DRAFT_TOKENS, max_length)
        drafter = _recording(drafter, model.config.vocab_size)
        dropping = negative_controls.unaccounted_gate(drafter, threshold)
        # Without drafts there is no gate and no window: both systems then run the
        # program for one token.
        self._decoders = {
            "original, no drafts": strata.ancestral_decoder(exact),
            "original, gated": strata.speculative_decoder(
                shared, dropping, gates.always(), verifiers.token(), bit_exact=False
            ),
            "original, default": strata.speculative_decoder(
                shared, drafter, bit_exact=False
            ),
            "repaired, no drafts": strata.ancestral_decoder(exact),
            "repaired, gated": strata.speculative_decoder(
                exact, drafter, gates.picked(threshold), verifiers.token()
            ),
            "repaired, default": strata.speculative_decoder(exact, drafter),
        }
        # The shared arithmetic on one row, which neither system runs.
        self._references = {
            "original": self._decoders["original, no drafts"],
            "repaired": self._decoders["repaired, no drafts"],
            "batched": strata.ancestral_decoder(shared, bit_exact=False),
        }
        self._steps = {
            decoder: jax.jit(decoder.step)
            for decoder in [*self._decoders.values(), *self._references.values()]
        }
        self._texts: dict[bytes, dict[str, np.ndarray]] = {}

    def run(
        self, name: str, prompt: list[int], num_tokens: int, seed: int
    ) -> dict[str, Any]:
        """Decodes one request and compares each position with the target.

        Args:
          name: one of `RUNS`.
          prompt: token ids.
          num_tokens: positions to emit.
          seed: of the request.

        Returns:
          Counts, replayed decisions, and a list of positions.
        """
        state, trace, found = self._decode(name, prompt, num_tokens, seed)
        tokens = strata.output_tokens(state)
        replayed = diagnostics.replay(trace)
        windows = trace.windows
        references = self._rows_of(prompt, tokens)
        exact = references["repaired"]
        places = [
            (window, row)
            for window, emitted in enumerate(windows.verdict.num_emitted)
            for row in range(emitted)
        ]
        rows = np.stack([windows.target_probs[place] for place in places])
        drafts = np.zeros_like(rows)
        if name.endswith("gated"):
            for position, (window, row) in enumerate(places):
                if row < NUM_DRAFT_TOKENS:
                    drafts[position] = found[window][row]
        is_drafted = np.asarray(drafts.any(axis=1))
        laws = {"own": rows.astype(np.float64), "gate": exact.astype(np.float64)}
        rule = name.split(",")[0]
        for kind, source in (("own", rows), ("gate", exact)):
            if kind == "gate" and np.array_equal(rows[is_drafted], exact[is_drafted]):
                laws["gate"][is_drafted] = laws["own"][is_drafted]
                continue
            laws[kind][is_drafted] = emitted_laws(
                rule, source[is_drafted], drafts[is_drafted], self._threshold
            )
        is_detailed = name.endswith("gated") or num_tokens <= 12
        return {
            "num_positions": len(tokens),
            "tokens": tokens.tolist(),
            "num_equal": {
                other: int(_equal(rows, reference).sum())
                for other, reference in references.items()
            },
            "replay": {
                "num_decisions": replayed.num_decisions,
                "num_draws": replayed.num_draws,
                "difference": replayed.difference and str(replayed.difference),
            },
            "num_drafted": int(is_drafted.sum()),
            "largest": _largest(rows, exact, laws),
            "positions": [
                _position(place, index, rows, exact, laws, is_drafted, is_detailed)
                for index, place in enumerate(places)
            ],
        }

    def _decode(
        self, name: str, prompt: list[int], num_tokens: int, seed: int
    ) -> tuple[Any, diagnostics.Trace, list[np.ndarray]]:
        """Returns the last state, the trace, and q of each window's rows."""
        decoder = self._decoders[name]
        step = self._steps[decoder]
        state = decoder.init(
            self._params, prompt, seed=seed, max_new_tokens=num_tokens, **SAMPLING
        )
        trace = diagnostics.begin_trace(decoder, state)
        windows, drafts = [], []
        while int(state.finish_reason) == strata.FinishReason.RUNNING:
            state, window = step(self._params, state)
            windows.append(jax.tree.map(np.asarray, window))
            if isinstance(state.drafter_state, _Recorded):
                drafts.append(np.asarray(state.drafter_state.rows))
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *windows)
        return state, diagnostics.extend_trace(trace, stacked), drafts

    def _rows_of(self, prompt: list[int], tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the references' rows along a text, one token at a time."""
        key = np.asarray([*prompt, -1, *tokens.tolist()], np.int32).tobytes()
        if key not in self._texts:
            self._texts[key] = {
                name: self._follow(decoder, prompt, tokens)
                for name, decoder in self._references.items()
            }
        return self._texts[key]

    def _follow(
        self, decoder: strata.SpeculativeDecoder, prompt: list[int], tokens: np.ndarray
    ) -> np.ndarray:
        """Decodes a given text, one token a window, and returns its rows."""
        step = self._steps[decoder]
        state = decoder.init(
            self._params, prompt, max_new_tokens=len(tokens), **SAMPLING
        )
        rows = []
        for token in tokens:
            state, window = step(self._params, state)
            rows.append(np.asarray(window.target_probs[0]))
            state = force_last_token(state, int(token))
        return np.stack(rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A drafter's own state, and the rows q of its last window."""

    own: Any
    rows: jax.Array  # [K, V] float32, zero where no row was made


def _recording(drafter: strata.Drafter, vocab_size: int) -> strata.Drafter:
    """Returns the drafter; its state keeps the rows that the drafts are drawn from."""
    empty = (drafter.num_draft_tokens, vocab_size)

    def init(params: Any, context: strata.Context, features: Any) -> _Recorded:
        own = drafter.init(params, context, features)
        return _Recorded(own, jnp.zeros(empty, jnp.float32))

    def propose(params: Any, state: _Recorded, context: Any, offer: Any) -> Any:
        rows = jnp.zeros(empty, jnp.float32)

        def recording_offer(row_fn: Any, carry: Any) -> Any:
            nonlocal rows

            def row(carry: Any, step: strata.DraftStep) -> Any:
                own, rows = carry
                own, draft = row_fn(own, step)
                kept = jnp.where(draft.is_available, draft.probs, 0)
                return (own, rows.at[step.row].set(kept)), draft

            proposal, (carry, rows) = offer(row, (carry, rows))
            return proposal, carry

        proposal, own = drafter.propose(params, state.own, context, recording_offer)
        return proposal, _Recorded(own, rows)

    def commit(params: Any, state: _Recorded, committed: Any) -> _Recorded:
        return _Recorded(drafter.commit(params, state.own, committed), state.rows)

    return drafter._replace(init=init, propose=propose, commit=commit)


def _equal(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    return (rows == others).all(axis=1)


def _largest(
    rows: np.ndarray, exact: np.ndarray, laws: Mapping[str, np.ndarray]
) -> dict[str, float]:
    distances = {
        "arithmetic": diagnostics.total_variation(rows, exact),
        "gate": diagnostics.total_variation(laws["gate"], exact),
        "emitted": diagnostics.total_variation(laws["own"], exact),
    }
    return {
        f"{name}_{statistic}": float(getattr(distance, statistic)())
        for name, distance in distances.items()
        for statistic in ("mean", "max")
    }


def _position(
    place: tuple[int, int],
    index: int,
    rows: np.ndarray,
    exact: np.ndarray,
    laws: Mapping[str, np.ndarray],
    is_drafted: np.ndarray,
    is_detailed: bool,
) -> dict[str, Any]:
    row, reference = rows[index], exact[index]
    is_equal = bool(np.array_equal(row, reference))
    found: dict[str, Any] = {
        "window": int(place[0]),
        "row": int(place[1]),
        "is_equal": is_equal,
        "tv_arithmetic": float(diagnostics.total_variation(row, reference)),
    }
    if is_drafted[index]:
        for name, law in (("tv_gate", laws["gate"]), ("tv_emitted", laws["own"])):
            found[name] = float(diagnostics.total_variation(law[index], reference))
    if is_detailed:
        found["p"] = _distribution(reference)
        if not is_equal:
            found["p_in_window"] = _distribution(row)
        if is_drafted[index]:
            found["emitted"] = _distribution(laws["own"][index].astype(np.float32))
    return found


def _distribution(row: np.ndarray) -> str:
    """Writes a distribution on one line: token:probability, in float32."""
    return " ".join(f"{token}:{row[token]}" for token in np.flatnonzero(row))
