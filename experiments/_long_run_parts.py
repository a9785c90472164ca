"""The parts of the long run: one text, many prompts, the law, the quality."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        self._follow = jax.jit(self._follow_text)
        self._sample = {mode: self._sampler(mode) for mode in MODES}

    def _follow_text(
        self, params: Any, state: Any, tokens: jax.Array, count: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Decodes `count` given tokens by the program for one token."""
        step = self.decoders["plain"].step

        def follow_one(index: jax.Array, carry: Any) -> Any:
            state, rows = carry
            state, window = step(params, state)
            context = state.context
            # The last token is not yet in the cache: whatever was drawn, it is this.
            place = context.length - 1
            context = dataclasses.replace(
                context, tokens=context.tokens.at[place].set(tokens[index])
            )
            state = dataclasses.replace(state, context=context)
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
        self, mode: str, prompt: list[int], seeds: np.ndarray
    ) -> np.ndarray:
        """Draws the first two tokens of requests that differ in their seed alone.

        Every request runs through the decoder's own step, window by window.

        Args:
          mode: one of `MODES`.
          prompt: token ids.
          seeds: `[n]` integers.

        Returns:
          `[n]` int64, first token times V plus the second.
        """
        state = self.start(mode, prompt, 0, 2)
        pairs = self._sample[mode](self.params, state, jnp.asarray(seeds, jnp.uint32))
        first, second = np.asarray(pairs, np.int64).T
        return first * self.vocab_size + second

    def _sampler(self, mode: str) -> Any:
        step = self.decoders[mode].step

        def is_running(request: Any) -> jax.Array:
            return request.finish_reason == strata.FinishReason.RUNNING

        @jax.jit
        def sample(params: Any, state: Any, seeds: jax.Array) -> jax.Array:
            def one(seed: jax.Array) -> jax.Array:
                key = jax.random.key(seed, impl="threefry2x32")
                request = dataclasses.replace(state, request_key=key)
                request = jax.lax.while_loop(
                    is_running, lambda request: step(params, request)[0], request
                )
                place = state.context.length
                return jax.lax.dynamic_slice(request.context.tokens, (place,), (2,))

            return jax.lax.map(one, seeds)

        return sample

    def windows(self, mode: str, state: Any, num_windows: int) -> tuple[Any, Any]:
        """Runs windows and returns them on the host."""
        state, windows = strata.decode(
            self.decoders[mode], self.params, state, num_windows, trace=True
        )
        return state, jax.tree.map(np.asarray, windows)


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
