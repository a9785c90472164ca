"""The parts of the long run: one text, many prompts, the law, the quality."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _forced_text import force_last_token
from _models import Model

import strata_jax as strata
from strata_jax import drafters, gates, targets, verifiers
from strata_jax.audit import negative_controls

NUM_DRAFT_TOKENS = 3
MODES = ("plain", "repaired", "original")
# Tokens that plain decoding follows in one compiled program.
_FOLLOWED = 64


class Systems:
    """Plain decoding, the repaired system and the original one, for one model."""

    def __init__(self, model: Model, max_length: int, threshold: float):
        """Builds the three decoders; nothing is compiled yet.

        Args:
          model: with a draft head.
          max_length: S; beyond the model's own limit it is raised.
          threshold: of the confidence gate.
        """
        limit = max(model.config.max_position, max_length)
        config = dataclasses.replace(model.config, max_position=limit)
        self.params = model.params
        self.vocab_size = config.vocab_size
        self._max_length, self._threshold = max_length, threshold
        exact = targets.singleton(config, max_length=max_length)
        shared = targets.batched(config, max_length=max_length)
        drafter = drafters.mtp(num_draft_tokens=NUM_DRAFT_TOKENS)
        dropping = negative_controls.unaccounted_gate(drafter, threshold)
        self.decoders = {
            "plain": strata.ancestral_decoder(exact),
            "repaired": strata.speculative_decoder(
                exact, drafter, gates.picked(threshold), verifiers.token()
            ),
            "original": strata.speculative_decoder(
                shared, dropping, gates.always(), verifiers.token(), bit_exact=False
            ),
        }
        # For q itself, whatever a gate makes of it.
        self._ungated = strata.speculative_decoder(
            exact, drafter, gates.always(), verifiers.token()
        )
        self._follow = jax.jit(self._follow_text)
        self._targets = {"plain": exact, "repaired": exact, "original": shared}
        self._tabulate = {mode: self._tabulator(mode) for mode in MODES}
        self._by_table = self._table_decoders()
        self._samplers = {
            mode: (_sampler(self.decoders[mode]), _sampler(self._by_table[mode]))
            for mode in MODES
        }

    def _follow_text(
        self, params: Any, state: Any, tokens: jax.Array, count: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Decodes `count` given tokens by the program for one token."""
        step = self.decoders["plain"].step

        def follow_one(index: jax.Array, carry: Any) -> Any:
            state, rows = carry
            state, window = step(params, state)
            state = force_last_token(state, tokens[index])
            return state, rows.at[index].set(window.target_probs[0])

        rows = jnp.zeros((len(tokens), self.vocab_size), jnp.float32)
        return jax.lax.fori_loop(0, count, follow_one, (state, rows))

    def follow(self, state: Any, tokens: np.ndarray) -> tuple[Any, np.ndarray]:
        """Returns the state behind a text and p of each of its tokens, `[n, V]`.

        Args:
          state: of the plain decoder, at the text's start.
          tokens: the text.
        """
        rows = []
        for start in range(0, len(tokens), _FOLLOWED):
            own = tokens[start : start + _FOLLOWED]
            piece = np.zeros(_FOLLOWED, np.int32)
            piece[: len(own)] = own
            state, found = self._follow(
                self.params, state, jnp.asarray(piece), jnp.int32(len(own))
            )
            rows.append(np.asarray(found)[: len(own)])
        return state, np.concatenate(rows)

    def next_row(self, context: list[int]) -> np.ndarray:
        """Returns p of the token behind a text by the program for one token."""
        state = self.start("plain", context, 0, 4)
        _, rows = self.follow(state, np.zeros(1, np.int32))
        return rows[0]

    def start(
        self, mode: str, context: list[int], seed: int, num_tokens: int, **more: Any
    ) -> Any:
        """Returns the state of a new request, temperature 1, no other setting."""
        return self.decoders[mode].init(
            self.params, context, seed=seed, max_new_tokens=num_tokens, **more
        )

    def sample_pairs(
        self, mode: str, prompt: list[int], seeds: np.ndarray, num_checked: int
    ) -> tuple[np.ndarray, int, float]:
        """Draws the first two tokens of requests that differ in their seed alone.

        Every request runs through the decoder's own step, window by window. The logits
        of two tokens depend on a few hundred contexts only: the model computes each of
        them once, and the requests look them up. Some run the model itself as well.

        Args:
          mode: one of `MODES`.
          prompt: token ids.
          seeds: `[n]` integers.
          num_checked: how many of them, the first ones, run the model too.

        Returns:
          `[n]` int64, first token times V plus the second; how many of those that were
          checked are the same; and the part of q that a gate drops, 0 without drafts.
        """
        by_model, by_table = self._samplers[mode]
        state = self.start(mode, prompt, 0, 2)
        tables = self._tabulate[mode](
            self.params, state.target_state, jnp.asarray(prompt, jnp.int32)[-1:], state
        )
        request = self._by_table[mode].init(tables, prompt, max_new_tokens=2)
        pairs = by_table(tables, request, jnp.asarray(seeds, jnp.uint32))
        checked = by_model(
            self.params, state, jnp.asarray(seeds[:num_checked], jnp.uint32)
        )
        same = (np.asarray(pairs[:num_checked]) == np.asarray(checked)).all(axis=1)
        first, second = np.asarray(pairs, np.int64).T
        q = np.asarray(tables.drafter, np.float64)
        dropped = float(q[tables.drafter < self._threshold].sum())
        return first * self.vocab_size + second, int(same.sum()), dropped

    def windows(self, mode: str, state: Any, num_windows: int) -> tuple[Any, Any]:
        """Runs windows and returns them on the host."""
        state, windows = strata.decode(
            self.decoders[mode], self.params, state, num_windows, trace=True
        )
        return state, jax.tree.map(np.asarray, windows)

    def _tabulator(self, mode: str) -> Any:
        """Returns a function that computes all rows of a prompt's next two tokens."""
        target, decoder = self._targets[mode], self.decoders[mode]
        num_rows = decoder.num_draft_tokens + 1
        vocabulary = jnp.arange(self.vocab_size, dtype=jnp.int32)

        @jax.jit
        def tabulate(
            params: Any, target_state: Any, last: jax.Array, state: Any
        ) -> strata.Params:
            position = state.context.length - 1

            def score(state: Any, first: Any, second: Any, place: Any, n: int) -> Any:
                tokens = jnp.zeros(num_rows, jnp.int32).at[0].set(first)
                if num_rows > 1:
                    tokens = tokens.at[1].set(second)
                n = min(n, num_rows)
                return target.score(params, state, tokens, place, jnp.int32(n))

            # Whatever is drafted behind the prompt's last token, at most one draft.
            def first_window(draft: jax.Array) -> jax.Array:
                rows, _ = score(target_state, last[0], draft, position, 2)
                return rows.logits[:2]

            _, after = score(target_state, last[0], 0, position, 1)
            after = target.commit(after, position, jnp.int32(1))

            def second_window(token: jax.Array) -> jax.Array:
                return score(after, token, 0, position + 1, 1)[0].logits[0]

            rows = jnp.zeros(self.vocab_size, jnp.float32)
            if num_rows > 1:
                _, window = self._ungated.step(params, state)
                rows = window.proposal.measure[0]
            return strata.Params(
                target=RowTables(
                    position=position,
                    first=jax.lax.map(first_window, vocabulary),
                    second=jax.lax.map(second_window, vocabulary),
                ),
                drafter=rows,
            )

        return tabulate

    def _table_decoders(self) -> dict[str, strata.SpeculativeDecoder]:
        """Returns the three decoders over tables; gate, draws and verifier as ever."""
        target = _table_target(self.vocab_size, self._max_length)
        drafter = _table_drafter(self.vocab_size)
        dropping = negative_controls.unaccounted_gate(drafter, self._threshold)
        token = verifiers.token()
        return {
            "plain": strata.ancestral_decoder(target),
            "repaired": strata.speculative_decoder(
                target, drafter, gates.picked(self._threshold), token
            ),
            "original": strata.speculative_decoder(
                target, dropping, gates.always(), token
            ),
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowTables:
    """Logits of a prompt's next two tokens, in every context that can occur."""

    position: jax.Array  # [] int32, of the prompt's last token
    first: jax.Array  # [V, 1 or 2, V], by the draft behind it
    second: jax.Array  # [V, V], by the first token


def _table_target(vocab_size: int, max_length: int) -> strata.TargetModel:
    def score(
        params: RowTables, state: Any, tokens: jax.Array, position: Any, num_rows: Any
    ) -> tuple[strata.TargetRows, Any]:
        del num_rows
        draft = tokens[1] if len(tokens) > 1 else 0
        window = params.first[draft]
        logits = jnp.zeros((len(tokens), vocab_size), jnp.float32)
        logits = logits.at[: len(window)].set(window)
        other = logits.at[0].set(params.second[tokens[0]])
        is_first = position == params.position
        return strata.TargetRows(jnp.where(is_first, logits, other), None), state

    return strata.TargetModel(
        init=lambda params: (),
        prefill=lambda params, state, tokens, start, stop: (state, None),
        score=score,
        commit=lambda state, position, num_kept: state,
        vocab_size=vocab_size,
        max_length=max_length,
        is_bit_exact=True,
        name="rows",
    )


def _table_drafter(vocab_size: int) -> strata.Drafter:
    def propose(params: Any, state: Any, context: Any, offer: Any) -> Any:
        def row(carry: Any, step: strata.DraftStep) -> Any:
            return carry, strata.DraftRow(params, jnp.asarray(True))

        proposal, _ = offer(row, ())
        return proposal, state

    return strata.Drafter(
        init=lambda params, context, features: (),
        propose=propose,
        commit=lambda params, state, committed: state,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        vocab_size=vocab_size,
        max_length=None,
    )


def _sampler(decoder: strata.SpeculativeDecoder) -> Any:
    """Returns a function: requests of many seeds, one after another, two tokens."""

    def is_running(request: Any) -> jax.Array:
        return request.finish_reason == strata.FinishReason.RUNNING

    @jax.jit
    def sample(params: Any, state: Any, seeds: jax.Array) -> jax.Array:
        def one(seed: jax.Array) -> jax.Array:
            key = jax.random.key(seed, impl="threefry2x32")
            request = dataclasses.replace(state, request_key=key)
            request = jax.lax.while_loop(
                is_running, lambda request: decoder.step(params, request)[0], request
            )
            place = state.context.length
            return jax.lax.dynamic_slice(request.context.tokens, (place,), (2,))

        return jax.lax.map(one, seeds)

    return sample


def emitted_rows(windows: strata.Window) -> np.ndarray:
    """Returns p of each position that a token was emitted at, `[n, V]`."""
    pairs = zip(windows.target_probs, windows.verdict.num_emitted, strict=True)
    return np.concatenate([probs[:count] for probs, count in pairs])


def reference_law(systems: Systems, prompt: list[int]) -> np.ndarray:
    """Returns the law of the next two tokens by plain decoding, `[V, V]` float64."""
    first = systems.next_row(prompt).astype(np.float64)
    second = [systems.next_row([*prompt, token]) for token in range(len(first))]
    law = first[:, None] * np.stack(second).astype(np.float64)
    return law / law.sum()
