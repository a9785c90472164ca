"""The loop: one window after another, and its state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from strata_jax import _checks
from strata_jax._combination import check_combination, check_parts
from strata_jax._emission import (
    append_tokens,
    count_emitted,
    cut_verdict,
    finish_reason,
    window_probs,
)
from strata_jax._precision import at_least_float32
from strata_jax._request import (
    DecoderState,
    Request,
    check_request,
)
from strata_jax._rng import Stream, window_uniforms
from strata_jax._status import Status, raise_if_failed
from strata_jax._types import (
    Committed,
    Context,
    Drafter,
    Draws,
    FinishReason,
    Gate,
    Params,
    RowKind,
    SpeculativeDecoder,
    TargetModel,
    Verdict,
    Verifier,
    Window,
)
from strata_jax.drafters import build_proposal
from strata_jax.drafters import none as no_drafter
from strata_jax.gates import always
from strata_jax.sampling import count_tokens
from strata_jax.targets import guard
from strata_jax.verifiers import exact_match


def speculative_decoder(
    target: TargetModel,
    drafter: Drafter | None = None,
    gate: Gate | None = None,
    verifier: Verifier | None = None,
    *,
    draft_rule: str | None = None,
    max_candidates: int | None = None,
    bit_exact: bool = True,
) -> SpeculativeDecoder:
    """Composes a target, a drafter, a gate and a verifier into a decoding loop.

    Args:
      target: what is sampled from, exactly.
      drafter: proposes; None drafts nothing.
      gate: admits drafts; None admits all.
      verifier: decides; None is `verifiers.exact_match()`.
      draft_rule: "sample" or "argmax", how drafts are picked from q; None is the
        verifier's own.
      max_candidates: static limit on the survivors of the sampling chain; requests
        must then ask for a `top_k` within it.
      bit_exact: whether the target must be bitwise the singleton's.

    Returns:
      The decoder. `init(params, context, *, seed, max_new_tokens, ...)` takes the
      prompt as token ids, the arguments of `sampling.sampling_settings` and the gate's
      settings by name; `step(params, state, draws=None)` runs one window.

    Raises:
      ValueError: if the parts do not fit, naming the alternative.

    Exactness: law-exact, and bit-exact to the singleton if the target is.
    """
    drafter = no_drafter() if drafter is None else drafter
    gate = always() if gate is None else gate
    verifier = exact_match() if verifier is None else verifier
    check_parts(target, drafter, gate, verifier)
    rule = verifier.draft_rule if draft_rule is None else draft_rule
    check_combination(target, drafter, gate, verifier, rule, bit_exact)
    if max_candidates is not None:
        max_candidates = _checks.check_integer("max_candidates", max_candidates, 1)

    num_draft_tokens = drafter.num_draft_tokens
    vocab_size = target.vocab_size
    max_length = target.max_length

    @jax.jit
    def start(params: Any, request: Request) -> DecoderState:
        target_params, drafter_params = _split_params(params)
        context = Context(tokens=request.tokens, length=request.length)
        zero = jnp.zeros((), jnp.int32)
        counts = count_tokens(
            request.tokens, request.prompt_length, request.length, vocab_size
        )
        # A resumed text may have ended; an EOS that belongs to the prompt ends nothing.
        last = context.tokens[context.length - 1]
        has_ended = (counts.num_output > 0) & jnp.any(
            request.settings.sampling.eos_ids == last
        )
        is_over = (request.settings.max_new_tokens <= counts.num_output) | (
            context.length >= max_length
        )
        reason = jnp.where(
            has_ended,
            FinishReason.EOS.value,
            jnp.where(is_over, FinishReason.LENGTH.value, FinishReason.RUNNING.value),
        )
        target_state, features = target.prefill(
            target_params,
            target.init(target_params),
            context.tokens,
            zero,
            context.length - 1,
        )
        return DecoderState(
            request_key=request.key,
            window=request.window,
            context=context,
            counts=counts,
            finish_reason=reason.astype(jnp.int32),
            status=zero,
            settings=request.settings,
            target_state=target_state,
            drafter_state=drafter.init(drafter_params, context, features),
            gate_state=gate.init(),
        )

    def init(
        params: Any,
        context: Sequence[int] | np.ndarray | jax.Array,
        *,
        seed: int = 0,
        max_new_tokens: int | None = None,
        prompt_length: int | None = None,
        window: int = 0,
        **settings: Any,
    ) -> DecoderState:
        """Checks a request on the host and reads its prompt."""
        request = check_request(
            context,
            vocab_size=vocab_size,
            max_length=max_length,
            max_candidates=max_candidates,
            gate=gate,
            seed=seed,
            max_new_tokens=max_new_tokens,
            prompt_length=prompt_length,
            window=window,
            settings=settings,
        )
        return start(params, request)

    def derive_draws(state: DecoderState) -> Draws:
        position = state.context.length
        rows = position + jnp.arange(num_draft_tokens, dtype=jnp.int32)
        key, window = state.request_key, state.window
        coins = window_uniforms(key, Stream.GATE, window, rows, 1)
        return Draws(
            draft=window_uniforms(key, Stream.DRAFT, window, rows, 2),
            gate=coins[:, 0],
            verifier=verifier.draw(key, position, window, num_draft_tokens),
        )

    def unguarded_step(
        params: Any, state: DecoderState, draws: Draws
    ) -> tuple[DecoderState, Window]:
        target_params, drafter_params = _split_params(params)
        context, counts, settings = state.context, state.counts, state.settings
        is_running = state.finish_reason == FinishReason.RUNNING
        is_full = is_running & (context.length >= max_length)
        is_running = is_running & ~is_full

        # Decided before anything is drawn (contract P2): the last row of a window
        # always emits one token that no draft stands for.
        budget = settings.max_new_tokens - counts.num_output
        room = jnp.minimum(budget - 1, max_length - context.length - 1)
        limit = jnp.where(is_running, jnp.clip(room, 0, num_draft_tokens), 0)

        logits_dtype = jax.eval_shape(
            target.score,
            target_params,
            state.target_state,
            jnp.zeros(num_draft_tokens + 1, jnp.int32),
            context.length,
            context.length,
        )[0].logits.dtype
        dtype = at_least_float32(logits_dtype)
        records = []

        def offer(row_fn: Any, carry: Any) -> tuple[Any, Any]:
            proposal, record, carry = build_proposal(
                row_fn,
                carry,
                num_draft_tokens=num_draft_tokens,
                limit=limit,
                gate=gate,
                gate_settings=settings.gate,
                gate_state=state.gate_state,
                sampling=settings.sampling,
                counts=counts,
                context=context,
                draft_uniforms=draws.draft,
                gate_uniforms=draws.gate,
                draft_rule=rule,
                max_candidates=max_candidates,
                dtype=dtype,
            )
            records.append(record)
            return proposal, carry

        proposal, drafter_state = drafter.propose(
            drafter_params, state.drafter_state, context, offer
        )

        if len(records) != 1:
            raise ValueError(
                f"drafter.propose called offer {len(records)} times: it must call it "
                "once, and return the proposal that it gets"
            )
        record = records[0]
        is_offered = proposal.kind == RowKind.OFFERED
        drafts = jnp.where(is_offered, proposal.tokens, 0)
        num_offered = jnp.sum(is_offered).astype(jnp.int32)
        num_rows = jnp.where(is_running, num_offered + 1, 0)
        last = context.tokens[context.length - 1]
        window_tokens = jnp.concatenate([last[None], drafts])
        position = context.length - 1
        rows, target_state = target.score(
            target_params, state.target_state, window_tokens, position, num_rows
        )
        target_probs, row_status = window_probs(
            settings.sampling,
            rows.logits,
            counts,
            drafts,
            num_rows,
            max_candidates=max_candidates,
            dtype=dtype,
        )
        if rows.status is not None:
            # Nothing of a faulty window may be emitted: its rows get no mass.
            target_probs = jnp.where(rows.status == 0, target_probs, 0)
            row_status = row_status | rows.status
        verdict = verifier.verify(draws.verifier, target_probs, proposal)
        eos_ids = settings.sampling.eos_ids
        verdict = cut_verdict(
            verdict, row_status, record.status, eos_ids, is_running, num_rows
        )
        status = verdict.status | jnp.where(is_full, Status.CACHE_FULL.value, 0)
        verdict = dataclasses.replace(verdict, status=status)

        context = append_tokens(context, verdict)
        counts = count_emitted(counts, verdict)
        num_kept = verdict.num_emitted
        committed = Committed(
            context=context, features=rows.features, num_kept=num_kept
        )
        reason = finish_reason(
            verdict, context, counts, eos_ids, settings.max_new_tokens, max_length
        )
        stays = (state.finish_reason != FinishReason.RUNNING) & ~is_full
        new_state = DecoderState(
            request_key=state.request_key,
            window=state.window + is_running.astype(jnp.int32),
            context=context,
            counts=counts,
            finish_reason=jnp.where(stays, state.finish_reason, reason),
            status=state.status | status,
            settings=settings,
            target_state=target.commit(target_state, position, num_kept),
            drafter_state=drafter.commit(drafter_params, drafter_state, committed),
            gate_state=jax.tree.map(
                lambda new, old: jnp.where(is_running, new, old),
                gate.update(state.gate_state, proposal, verdict),
                state.gate_state,
            ),
        )
        return new_state, Window(
            proposal=proposal,
            draft_tokens=record.tokens,
            draws=draws,
            verdict=verdict,
            target_probs=target_probs,
        )

    guarded_step = guard(unguarded_step)

    def step(
        params: Any, state: DecoderState, draws: Draws | None = None
    ) -> tuple[DecoderState, Window]:
        """Runs one window; a finished request is returned as it is."""
        draws = derive_draws(state) if draws is None else draws
        # The draws are all that a window needs of the key.
        keyless = dataclasses.replace(state, request_key=None)
        after, window = guarded_step(params, keyless, draws)
        return dataclasses.replace(after, request_key=state.request_key), window

    return SpeculativeDecoder(
        init=init,
        step=step,
        unguarded_step=unguarded_step,
        num_draft_tokens=num_draft_tokens,
        vocab_size=vocab_size,
        max_length=max_length,
        gate_settings=tuple(gate.settings),
        verifier_name=verifier.name,
    )


def ancestral_decoder(target: TargetModel, **options: Any) -> SpeculativeDecoder:
    """Builds plain decoding, one token a window: what every other decoder must equal.

    Args:
      target: what is sampled from.
      **options: `max_candidates` and `bit_exact`, as in `speculative_decoder`.

    Returns:
      The decoder, with K = 0.

    Exactness: the law of the target by definition; its program is the singleton.
    """
    return speculative_decoder(target, **options)


@overload
def decode(
    decoder: SpeculativeDecoder,
    params: Any,
    state: DecoderState,
    num_windows: int,
    *,
    trace: Literal[False] = False,
    throw: bool = True,
) -> tuple[DecoderState, Verdict]: ...


@overload
def decode(
    decoder: SpeculativeDecoder,
    params: Any,
    state: DecoderState,
    num_windows: int,
    *,
    trace: Literal[True],
    throw: bool = True,
) -> tuple[DecoderState, Window]: ...


def decode(
    decoder: SpeculativeDecoder,
    params: Any,
    state: DecoderState,
    num_windows: int,
    *,
    trace: bool = False,
    throw: bool = True,
) -> tuple[DecoderState, Verdict | Window]:
    """Runs windows in one program, a `lax.scan` over `step`.

    Args:
      decoder: the decoder.
      params: the weights, as for `decoder.init`.
      state: where to go on; its buffers are reused, so it must not be read again.
      num_windows: how many windows, static. Those after the end cost next to nothing.
      trace: whether to return whole windows (about 4 (2K + 1) V bytes each).
      throw: whether to raise on the host if the request failed. Inside `jit` this
        cannot be done: give False and look at `state.status`.

    Returns:
      The state after the windows, and their verdicts (or windows), stacked.

    Raises:
      ValueError: if `num_windows` is not positive.
      DecodingError: if `throw` and a status bit is set; it holds the tokens emitted.

    Exactness: that of the decoder; the same bits with and without `trace`.
    """
    num_windows = _checks.check_integer("num_windows", num_windows, 1)
    state, windows = _scan(decoder, num_windows, trace, params, state)
    if throw and not isinstance(state.status, jax.core.Tracer):
        failed = int(state.status)
        if failed:
            raise_if_failed(failed, output_tokens(state))
    return state, windows


def output_tokens(state: DecoderState) -> np.ndarray:
    """Returns the tokens that a request has emitted so far, on the host.

    Args:
      state: the request's state.

    Returns:
      `[n]` int32, without the prompt.

    Exactness: not concerned.
    """
    length = int(state.context.length)
    num_output = int(state.counts.num_output)
    return np.asarray(state.context.tokens)[length - num_output : length]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4,))
def _scan(
    decoder: SpeculativeDecoder,
    num_windows: int,
    trace: bool,
    params: Any,
    state: DecoderState,
) -> tuple[DecoderState, Verdict | Window]:
    def body(state: DecoderState, _: None) -> tuple[DecoderState, Verdict | Window]:
        state, window = decoder.step(params, state)
        return state, window if trace else window.verdict

    return lax.scan(body, state, None, length=num_windows)


def _split_params(params: Any) -> tuple[Any, Any]:
    if isinstance(params, Params):
        return params.target, params.drafter
    return params, params
