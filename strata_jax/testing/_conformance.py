"""Conformance checks: the contracts as functions that users call on their own parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import audit, gates, verifiers
from strata_jax._decode import speculative_decoder
from strata_jax._request import take_gate_numbers
from strata_jax._types import (
    Context,
    Drafter,
    Gate,
    GateContext,
    GateDecision,
    GateSetting,
    Params,
    Proposal,
    RowKind,
    SpeculativeDecoder,
    TargetModel,
    Verifier,
    Window,
)
from strata_jax.drafters import model
from strata_jax.targets import TabularParams, tabular
from strata_jax.testing._broken import ConformanceError, as_int, require, same_bits

_LAW_TOLERANCE = {np.dtype(np.float32): 1e-6, np.dtype(np.float64): 1e-12}


def check_law(
    decoder: SpeculativeDecoder,
    params: Any,
    context: Sequence[int],
    table: np.ndarray,
    *,
    num_tokens: int = 2,
    **settings: Any,
) -> audit.LawDifference:
    """Checks by enumeration that a decoder emits the law of a Markov table (V1).

    Args:
      decoder: a decoder over a `targets.tabular` target, small enough to enumerate.
      params: its params.
      context: the prompt, token ids.
      table: `[V] * n + [V]` float, the target's probabilities.
      num_tokens: length of the sequences that are compared.
      **settings: for `decoder.init`.

    Returns:
      The difference found, below the tolerance: 1e-6 in float32, 1e-12 in float64.

    Raises:
      ConformanceError: if the law is another.

    Exactness: exact enumeration through the decoder's own `step`.
    """
    state = decoder.init(params, context, **settings)
    law = audit.sequence_law(decoder, params, state, num_tokens)
    reference = audit.markov_law(table, context, num_tokens)
    difference = audit.compare_laws(law, reference)
    _check_difference(difference)
    return difference


def check_gate(gate: Gate, *, seed: int = 0, **settings: float) -> None:
    """Checks a gate: the form of its decisions, and the law under it (G1, V1).

    Args:
      gate: the gate.
      seed: of the random rows.
      **settings: the gate's settings, where they have no default.

    Raises:
      ConformanceError: naming the contract that is broken.

    Exactness: decisions are tested on random rows; the law by exact enumeration with
      three tokens, two drafts and `verifiers.token`.
    """
    random = np.random.default_rng(seed)
    numbers = take_gate_numbers(gate, dict(settings))
    for vocab_size in (3, 300):
        rows = jnp.asarray(random.dirichlet(np.full(vocab_size, 0.3), 8), float)
        decide = jax.jit(gate.decide)
        for row in rows:
            context = _gate_context(gate, vocab_size)
            decision = decide(numbers, context, row)
            again = decide(numbers, context, row)
            require(decision.attempt.shape == (), "G1: attempt must be a scalar bool")
            require(decision.attempt.dtype == bool, "G1: attempt must be a bool")
            for name in ("admit", "go_on"):
                require(
                    getattr(decision, name).shape == (vocab_size,),
                    f"G1: {name} must have one entry for each of {vocab_size} tokens",
                )
            require(decision.go_on.dtype == bool, "G1: go_on must be bool")
            admit = np.asarray(decision.admit, np.float64)
            require(
                bool(np.all((admit >= 0) & (admit <= 1))),
                "G1: admit must lie in [0, 1]",
            )
            require(
                same_bits(decision, again),
                "G1: two calls on one row gave two decisions",
            )
    target, params, table = _tables(seed)
    decoder = speculative_decoder(
        target, model(target, num_draft_tokens=2), gate, verifiers.token()
    )
    check_law(decoder, params, [0], table, num_tokens=2, **settings)


def check_verifier(verifier: Verifier, *, seed: int = 0) -> None:
    """Checks a verifier: the law with every kind of row (V1), and its verdicts.

    Args:
      verifier: the verifier.
      seed: of the random tables.

    Raises:
      ConformanceError: naming the contract that is broken.

    Exactness: exact enumeration with three tokens, K of 0 and 2, under a gate that is
      made to give OFFERED, NULL and ABSENT rows, soft ones too.
    """
    target, params, table = _tables(seed)
    everything = {"g0": 1.0, "g1": 1.0, "g2": 1.0, "attempt": 1.0, "halt": 0.0}
    kinds = {
        "all rows offered": {},
        "a set admitted": {"g0": 0.0},
        "nothing admitted": {"g0": 0.0, "g1": 0.0, "g2": 0.0},
        "soft admission": {"g0": 0.25, "g1": 0.5, "g2": 0.9},
        "nothing attempted": {"attempt": 0.0},
        "one row, then stop": {"halt": 1.0},
    }
    reference = audit.markov_law(table, [0], 2)
    drafter = model(target, num_draft_tokens=2)
    for draft_rule in verifier.draft_rules:
        decoder = speculative_decoder(
            target, drafter, _stated_gate(), verifier, draft_rule=draft_rule
        )
        states = [
            decoder.init(params, [0], **{**everything, **numbers})
            for numbers in kinds.values()
        ]
        laws = audit.sequence_laws(
            decoder, audit.stack([params] * len(states)), audit.stack(states), 2
        )
        for name, law in zip(kinds, laws, strict=True):
            try:
                _check_difference(audit.compare_laws(law, reference))
            except ConformanceError as error:
                raise ConformanceError(f"with {name}: {error}") from error
    decoder = speculative_decoder(target, verifier=verifier)
    check_law(decoder, params, [0], table, num_tokens=2)


def check_drafter(
    drafter: Drafter,
    target: TargetModel,
    params: Any,
    context: Sequence[int],
    *,
    gate: Gate | None = None,
    num_windows: int = 8,
    seed: int = 0,
    poison: Callable[[Any, jax.Array], Any] | None = None,
    **settings: Any,
) -> list[int]:
    """Checks a drafter's proposals over some windows (P1, P2, R1, T2).

    Kinds read OFFERED*, NULL?, ABSENT*; a measure is a sub-probability that gives every
    offered token mass; the budget is respected; proposals do not depend on the
    verifier's draws; and after accepted and rejected drafts they are bitwise those of a
    drafter that starts afresh on the committed text.

    Args:
      drafter: the drafter.
      target: a target it drafts for.
      params: the params of both.
      context: a prompt, token ids.
      gate: a gate to try it with; None admits all.
      num_windows: how many windows to run.
      seed: of the request.
      poison: (drafter state, position) -> state with NaN in all slots that no
        committed token has filled, jittable; if given, every window starts from a
        poisoned state. `position` is how many tokens stand before the last committed
        one. `poison_cache` does it for `drafters.model` over a llama or
        mixture-of-experts model, and for `drafters.mtp`.
      **settings: for `decoder.init`.

    Returns:
      How many drafts each window accepted: the check has seen only those endings.

    Raises:
      ConformanceError: naming the contract that is broken.

    Exactness: a test on one run; the law of small drafters is tested by `check_law`.
    """
    decoder = speculative_decoder(
        target, drafter, gate, verifiers.token(), bit_exact=target.is_bit_exact
    )
    # The draws by themselves, so that one program runs all the windows.
    draw = jax.jit(lambda params, state: decoder.step(params, state)[1].draws)
    step = jax.jit(decoder.step)
    spoil = jax.jit(poison or (lambda state, position: state))
    budget = num_windows * (drafter.num_draft_tokens + 1)
    settings = {"seed": seed, "max_new_tokens": budget, **settings}
    state = decoder.init(params, context, **settings)
    num_accepted = []
    for index in range(num_windows):
        if int(state.finish_reason):
            break
        length = int(state.context.length)
        spoiled = spoil(state.drafter_state, as_int(length - 1))
        before = state.replace(drafter_state=spoiled)
        draws = draw(params, before)
        state, window = step(params, before, draws)
        num_accepted.append(int(window.verdict.num_accepted))
        _check_proposal(window)
        room = budget - int(before.counts.num_output) - 1
        num_attempted = int((window.proposal.kind != RowKind.ABSENT).sum())
        require(
            num_attempted <= max(room, 0),
            f"P2: {num_attempted} rows attempted with room for {room}",
        )

        other = jax.tree.map(lambda leaf: 1 - 2**-24 - leaf, draws.verifier)
        _, twin = step(params, before, draws.replace(verifier=other))
        require(
            same_bits(window.proposal, twin.proposal),
            "R1: the proposal depends on the verifier's draws",
        )
        fresh = decoder.init(
            params,
            np.asarray(before.context.tokens)[:length],
            prompt_length=len(context),
            window=int(before.window),
            **settings,
        )
        fresh = fresh.replace(gate_state=before.gate_state)
        _, expected = step(params, fresh, draw(params, fresh))
        require(
            same_bits(window.proposal, expected.proposal),
            f"T2: in window {index} the proposal is not that of a fresh drafter on the "
            "committed text: its cache was not rolled back or not brought up to date, "
            "or slots are read that no committed token has filled",
        )
    return num_accepted


def _check_proposal(window: Window) -> None:
    proposal: Proposal = window.proposal
    kind = np.asarray(proposal.kind)
    order = {RowKind.OFFERED: 0, RowKind.NULL: 1, RowKind.ABSENT: 2}
    places = [order[RowKind(value)] for value in kind]
    require(
        places == sorted(places) and places.count(1) <= 1,
        f"P1: kinds must read OFFERED*, NULL?, ABSENT*, got {kind.tolist()}",
    )
    measure = np.asarray(proposal.measure, np.float64)
    tokens = np.asarray(proposal.tokens)
    require(bool((measure >= 0).all()), "P1: a measure is negative")
    require(bool((measure.sum(axis=1) <= 1 + 1e-5).all()), "P1: a measure exceeds 1")
    for row, value in enumerate(kind):
        if value == RowKind.OFFERED:
            token = int(tokens[row])
            require(0 <= token < measure.shape[1], f"P1: row {row} offers no token id")
            require(
                measure[row, token] > 0,
                f"P1: row {row} offers token {token}, which its measure excludes",
            )
        else:
            require(
                int(tokens[row]) == -1, f"P1: row {row} shows a token it does not offer"
            )
        if value == RowKind.ABSENT:
            require(not measure[row].any(), f"P1: the ABSENT row {row} has a measure")


def _check_difference(difference: audit.LawDifference) -> None:
    dtype = np.dtype(jnp.zeros((), float).dtype)
    require(
        difference.total_variation <= _LAW_TOLERANCE[dtype],
        "V1: the emitted law is not the target's: total variation "
        f"{difference.total_variation:.3g}, worst at {difference.worst_tokens}",
    )


def _stated_gate() -> Gate:
    """A gate for three tokens that does what its settings say."""

    def decide(
        settings: Mapping[str, jax.Array], context: GateContext, draft_probs: jax.Array
    ) -> GateDecision:
        del context
        admit = jnp.stack([settings["g0"], settings["g1"], settings["g2"]])
        return GateDecision(
            attempt=settings["attempt"] > 0.5,
            admit=admit.astype(draft_probs.dtype),
            go_on=jnp.full(3, True) & (settings["halt"] < 0.5),
        )

    names = ("g0", "g1", "g2", "attempt", "halt")
    return gates.gate(
        decide, settings={name: GateSetting(None, 0.0, 1.0) for name in names}
    )


def _tables(seed: int) -> tuple[TargetModel, Params, np.ndarray]:
    random = np.random.default_rng(seed)
    table, draft = random.dirichlet(np.ones(3), (2, 3))
    target = tabular(3, max_length=8)
    params = Params(
        target=TabularParams(jnp.log(jnp.asarray(table, float))),
        drafter=TabularParams(jnp.log(jnp.asarray(draft, float))),
    )
    return target, params, table


def _gate_context(gate: Gate, vocab_size: int) -> GateContext:
    tokens = jnp.arange(8, dtype=jnp.int32) % vocab_size
    return GateContext(
        committed=Context(tokens=tokens, length=as_int(5)),
        row=as_int(0),
        draft_tokens=jnp.full(3, -1, jnp.int32),
        draft_token_probs=jnp.zeros(3, float),
        state=gate.init(),
    )
