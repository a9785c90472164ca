"""The suffix drafter first: whose a window is, and that the law stays the target's."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from law_checks import (
    Bench,
    Case,
    assert_laws_are_targets,
    decoder_for,
    gate_settings,
    library_gates,
    one_of,
    total_variation,
)
from moe_weights import quick_compilation

import strata_jax as strata
from strata_jax import Context, Drafter, drafters, gates
from strata_jax._types import DraftRow, DraftStep
from strata_jax.audit import negative_controls

_GATE_NAMES = ("always", "picked", "top", "entropy")
_PROMPTS = {
    "continuation": (0, 1, 2, 0, 1),  # what followed (0, 1): 2, 0, 1
    "short continuation": (1, 1, 1),  # what followed (1, 1): 1
    "base": (0, 2, 1),
}
_EVEN = (0.5, 0.5, 0.0)


def suffix_first(base):
    return drafters.suffix_first(base, num_draft_tokens=3, min_match=2)


@functools.cache
def bench():
    """The library's own rule, compiled once for all gates; the base drafts two."""
    every = library_gates(3)
    gate = one_of({name: every[name] for name in _GATE_NAMES})
    return Bench(decoder_for(3, 2, gate=gate, control=suffix_first))


def settings_of(name, threshold):
    place = float(_GATE_NAMES.index(name))
    return {**gate_settings(name, threshold, 3), "gate": place}


@pytest.mark.parametrize("prompt", _PROMPTS.values(), ids=_PROMPTS.keys())
def test_the_law_is_the_targets(prompt):
    rng = np.random.default_rng(21)
    cases = [
        Case(
            f"{gate}, t = {threshold}",
            rng.dirichlet(np.full(3, 0.7), 3),
            rng.dirichlet(np.ones(3), 3),
            settings_of(gate, threshold),
        )
        for gate in _GATE_NAMES
        for threshold in (0.2, 0.5)
    ]
    with quick_compilation():
        assert_laws_are_targets(bench(), cases, context=prompt)
        assert_laws_are_targets(bench(), cases[2:4], context=prompt, num_tokens=3)


def test_to_let_a_draft_decide_is_biased_as_worked_by_hand():
    # Where the text does not match itself, but the draw is what would have followed:
    # 0 (.5) is accepted with .5 / 1, else (p - onehot)+ = (0, .5); 1 is accepted.
    def control(base):
        return negative_controls.draw_dependent_suffix(suffix_first(base), root=0)

    even = np.tile(np.asarray(_EVEN), (3, 1))
    case = Case("decided by a draft", even, even)
    prompt = _PROMPTS["base"]
    biased = Bench(decoder_for(3, 2, gate=gates.always(), control=control))
    with quick_compilation():
        found = biased.first_tokens([case], prompt).laws[0]
        np.testing.assert_allclose(found, (0.25, 0.75, 0), atol=1e-6)
        assert total_variation(found, _EVEN) > 0.2
        with pytest.raises(AssertionError, match="1 of 1 laws are not the target's"):
            assert_laws_are_targets(biased, [case], context=prompt)
        own = case._replace(settings=settings_of("always", 0.0))
        assert_laws_are_targets(bench(), [own], context=prompt)


def test_the_law_by_exact_match_and_with_argmax():
    rng = np.random.default_rng(22)
    cases = [
        Case(str(i), rng.dirichlet(np.ones(3), 3), rng.dirichlet(np.ones(3), 3))
        for i in range(4)
    ]
    decoder = decoder_for(
        3,
        2,
        gate=gates.always(),
        verifier=strata.verifiers.exact_match(),
        draft_rule="argmax",
        control=suffix_first,
    )
    with quick_compilation():
        for prompt in _PROMPTS.values():
            assert_laws_are_targets(Bench(decoder), cases, context=prompt)


@pytest.mark.parametrize("context", [[0, 1, 2, 3, 1, 2], [3, 0, 2, 1, 3, 2]])
def test_proposals_are_those_of_a_fresh_drafter(context):
    target = strata.targets.tabular(4, max_length=64, order=2)
    drafter = drafters.suffix_first(
        drafters.model(target, num_draft_tokens=2), num_draft_tokens=4, min_match=2
    )
    rng = np.random.default_rng(23)
    params = strata.Params(
        *(
            strata.targets.TabularParams(
                jnp.log(jnp.asarray(rng.dirichlet(np.ones(4), (4, 4)), float))
            )
            for _ in range(2)
        )
    )
    gate = gates.picked(0.2)
    strata.testing.check_drafter(drafter, target, params, context, gate=gate)


def counting_base():
    """Is sure of token 7, twice; the state counts the rows that were made."""

    def propose(params, state, context, offer):
        del params, context

        def row(carry, step):
            del step
            return carry + 1, DraftRow(jnp.eye(8)[7], jnp.asarray(True))

        return offer(row, state)

    return Drafter(
        init=lambda params, context, features: jnp.int32(0),
        propose=propose,
        commit=lambda params, state, committed: state,
        num_draft_tokens=2,
        vocab_size=8,
        max_length=None,
    )


@pytest.mark.parametrize(
    ("text", "expected", "num_made"),
    [
        ([0, 1, 2, 5, 6, 4, 1, 2], [5, 6, 4, 1], 0),
        ([0, 5, 6, 5, 6], [5, 6, None, None], 0),  # the text ends
        ([0, 1, 2, 5, 6, 4, 3, 2], [7, 7, None, None], 2),  # one token matches
        ([3], [7, 7, None, None], 2),
    ],
)
def test_rows_are_the_continuations_or_the_bases(text, expected, num_made):
    drafter = drafters.suffix_first(counting_base(), num_draft_tokens=4, min_match=2)
    assert drafter.num_draft_tokens == 4
    # A decoy behind the text.
    tokens = np.full(12, 5, np.int32)
    tokens[: len(text)] = text
    context = Context(tokens=jnp.asarray(tokens), length=jnp.int32(len(text)))
    rows = []

    def offer(row_fn, carry):
        for place in range(4):
            step = DraftStep(jnp.int32(place), jnp.int32(0), lambda logits: logits)
            carry, row = row_fn(carry, step)
            rows.append(row)
        return None, carry

    _, made = drafter.propose(None, jnp.int32(0), context, offer)
    assert int(made) == num_made
    for row, token in zip(rows, expected, strict=True):
        assert bool(row.is_available) == (token is not None)
        if token is not None:
            np.testing.assert_array_equal(row.probs, np.eye(8)[token])


def test_the_models_head_drafts_between_continuations():
    target, params = strata.load_bundled(max_length=128)
    drafter = drafters.suffix_first(
        drafters.mtp(num_draft_tokens=1), num_draft_tokens=4
    )
    decoders = [
        strata.ancestral_decoder(target),
        strata.speculative_decoder(
            target, drafter, gates.always(), strata.verifiers.token()
        ),
    ]
    prompt = list(b"To be, or not to be; to be, or not to be; what ")
    states = []
    for decoder in decoders:
        state = decoder.init(params, prompt, max_new_tokens=48, temperature=0.0)
        state, verdicts = strata.decode(decoder, params, state, 48)
        states.append(state)
    plain, found = (strata.output_tokens(state) for state in states)
    np.testing.assert_array_equal(found, plain)
    # Windows of both: text that matches itself nowhere can be drafted by the head only.
    num_emitted = np.asarray(verdicts.num_emitted)
    offered = np.asarray(verdicts.kind == strata.RowKind.OFFERED).sum(axis=1)
    text = [*prompt, *found.tolist()]
    ends = len(prompt) + np.cumsum(num_emitted) - num_emitted
    is_new = np.array(
        [
            not any(text[e - 3 : e] == text[i - 3 : i] for i in range(3, e))
            for e in ends.tolist()
        ]
    )
    ran = num_emitted > 0
    assert (offered[ran & is_new] == 1).any()
    assert (offered[ran & is_new] <= 1).all()
    assert (offered[ran & ~is_new] > 1).any()


def test_bad_arguments_are_refused():
    base = counting_base()
    with pytest.raises(ValueError, match="base must be a strata_jax"):
        drafters.suffix_first(drafters.mtp, num_draft_tokens=1)
    with pytest.raises(ValueError, match="base drafts nothing: use"):
        drafters.suffix_first(drafters.none(), num_draft_tokens=1)
    with pytest.raises(ValueError, match="num_draft_tokens must be at least 2, got 1"):
        drafters.suffix_first(base, num_draft_tokens=1)
    with pytest.raises(ValueError, match="max_match must be at least 3"):
        drafters.suffix_first(base, num_draft_tokens=2, max_match=2)
