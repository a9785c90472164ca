"""The suffix root emits the target's law, and two rules that are like it do not.

Enumerated through the real `step`, as in `law_test.py`. The prompt decides what the
suffix drafter finds; the tables decide how likely its root is. Token 1 ends most
prompts, so row 1 of a table makes row 0 of the first window.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from law_checks import (
    MAX_LENGTH,
    Bench,
    Case,
    assert_laws_are_targets,
    decoder_for,
    gate_settings,
    library_gates,
    one_of,
    tolerance,
    total_variation,
)
from moe_weights import quick_compilation

import strata_jax as strata
from strata_jax import RowKind, audit, drafters, gates
from strata_jax.audit import negative_controls

GATE_NAMES = ("always", "picked", "top", "entropy")

# With matches of two tokens at least. The root is eligible where it is not None.
PROMPTS = {
    "eligible": (0, 1, 2, 0, 1),  # what followed (0, 1): 2, 0, 1
    "eligible, token 0": (0, 1, 0, 1),  # what followed (0, 1): 0, 1
    "no match": (0, 2, 1),
    "too short": (1, 2, 0, 1),
    "the root ends the text": (1, 1, 1),
}
ROOTS = {"eligible": 2, "eligible, token 0": 0}

EVEN = (0.5, 0.5, 0.0)
FALLING = (0.6, 0.3, 0.1)

# (p, q) of the row that the root of the prompt "eligible", token 2, belongs to.
FIRST_ROWS = {
    "small q(root)": ((0.2, 0.5, 0.3), FALLING),
    "q(root) = 0": ((0.2, 0.3, 0.5), (0.7, 0.3, 0.0)),
    "p(root) = 0": ((0.4, 0.6, 0.0), FALLING),
    "q(root) = 1": ((0.2, 0.3, 0.5), (0.0, 0.0, 1.0)),
    "largest q(root)": ((0.5, 0.4, 0.1), (0.1, 0.2, 0.7)),
    "p = q": (FALLING, FALLING),
    "disjoint": ((0.0, 1.0, 0.0), (0.4, 0.0, 0.6)),
}


def suffix_root(base, num_lookup_tokens=0, **options):
    return drafters.suffix_root(
        base,
        num_lookup_tokens=num_lookup_tokens,
        **{"min_match": 2, "min_acceptance_rate": 0.0, **options},
    )


def gates_of(vocab_size, names=GATE_NAMES):
    every = library_gates(vocab_size)
    return {name: every[name] for name in names}


@functools.cache
def bench(
    vocab_size=3,
    num_base_tokens=2,
    num_lookup_tokens=0,
    verifier="token",
    draft_rule="sample",
    gate_names=GATE_NAMES,
):
    """The library's own rule, compiled once for all tests and gates."""
    return Bench(
        decoder_for(
            vocab_size,
            num_base_tokens,
            gate=one_of(gates_of(vocab_size, gate_names)),
            verifier=getattr(strata.verifiers, verifier)(),
            draft_rule=draft_rule,
            control=lambda base: suffix_root(base, num_lookup_tokens),
        )
    )


def settings_of(name, threshold, vocab_size=3, gate_names=GATE_NAMES):
    settings = gate_settings(name, threshold, vocab_size)
    return {**settings, "gate": float(gate_names.index(name))}


def random_table(rng, vocab_size, concentration=1.0):
    return rng.dirichlet(np.full(vocab_size, concentration), vocab_size)


def table(row):
    return np.tile(np.asarray(row, np.float64), (len(row), 1))


@functools.cache
def first_row_cases(thresholds=(0.5,), gate_names=GATE_NAMES):
    rng = np.random.default_rng(11)
    cases = []
    for gate in gate_names:
        for name, (p, q) in FIRST_ROWS.items():
            for threshold in thresholds:
                target, draft = random_table(rng, 3), random_table(rng, 3)
                target[1], draft[1] = p, q
                label = f"{gate}, {name}, t = {threshold}"
                cases.append(Case(label, target, draft, settings_of(gate, threshold)))
    return cases


# (L, verifier, draft rule): K is 2 + L. Exact match does not look at measures.
RULES = [
    pytest.param(0, "token", "sample", marks=pytest.mark.slow),
    (2, "token", "sample"),
    pytest.param(1, "exact_match", "argmax", marks=pytest.mark.slow),
    pytest.param(2, "exact_match", "sample", marks=pytest.mark.slow),
]
rules = pytest.mark.parametrize(("num_lookup", "verifier", "draft_rule"), RULES)


@rules
def test_law_of_a_token(num_lookup, verifier, draft_rule):
    own = bench(3, 2, num_lookup, verifier, draft_rule)
    for name, prompt in PROMPTS.items():
        # The lookup chain changes nothing of row 0.
        step = 1 if name == "eligible" and num_lookup == 0 else 6
        assert_laws_are_targets(own, first_row_cases()[::step], context=prompt)


@rules
def test_joint_law_of_three_tokens(num_lookup, verifier, draft_rule):
    # Which of the windows have a root depends on what the earlier ones emit.
    own = bench(3, 2, num_lookup, verifier, draft_rule)
    cases = first_row_cases(gate_names=("picked",))[::3]
    assert_laws_are_targets(own, cases, context=PROMPTS["eligible"], num_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("num_lookup", [0, 2])
def test_law_of_more_instances(num_lookup):
    own = bench(num_lookup_tokens=num_lookup)
    cases = first_row_cases((0.1, 0.25, 0.5, 0.8, 1.0))
    for prompt in PROMPTS.values():
        assert_laws_are_targets(own, cases, context=prompt)
        assert_laws_are_targets(own, cases[::9], context=prompt, num_tokens=3)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_law_up_to_the_budget_and_the_context_limit(num_tokens):
    own, prompt = bench(num_lookup_tokens=2), PROMPTS["eligible"]
    cases = first_row_cases()[7::6]
    assert_laws_are_targets(
        own, cases, context=prompt, num_tokens=num_tokens, max_new_tokens=num_tokens
    )
    context = (2,) * (MAX_LENGTH - num_tokens - len(prompt)) + prompt
    assert_laws_are_targets(own, cases, context=context, num_tokens=num_tokens)


def assert_masses(own, prompt, expected):
    """`expected`: (gate, threshold, q, each row OFFERED, accepted drafts); p falls."""
    cases = [
        Case("masses", table(FALLING), table(draft), settings_of(gate, threshold))
        for gate, threshold, draft, *_ in expected
    ]
    first = own.first_tokens(cases, PROMPTS[prompt])
    for index, (*_, offered, accepted) in enumerate(expected):
        assert_close(first.kind_mass[index][:, RowKind.OFFERED], offered)
        assert_close(first.num_accepted[index], accepted)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance())


def test_the_root_is_offered_and_its_suffix_followed():
    # Otherwise the laws would be right for want of suffixes.
    own = bench()
    expected = [
        # Row 0 admits 0 and the root 2; after the root comes the point mass of 0.
        ("picked", 0.5, FALLING, [0.7, 0.36 + 0.1], 0.7 + 0.36 + 0.1 * 0.6),
        # Of a row that the gate would not attempt only the root is admitted.
        ("top", 0.7, FALLING, [0.1, 0.1], 0.1 + 0.1 * 0.6),
        # A root without mass changes nothing.
        ("picked", 0.5, (0.7, 0.3, 0.0), [0.7, 0.49], 0.6 + 0.36),
    ]
    assert_masses(own, "eligible", expected)
    expected = [("picked", 0.5, FALLING, [0.6, 0.36], 0.6 + 0.36)]
    assert_masses(own, "no match", expected)


def test_the_lookup_chain_is_offered():
    own = bench(num_lookup_tokens=2)
    # Of the pairs in the prompt (0, 2, 1) only (0, 2) goes on; (2, 1) ends it.
    expected = [("always", 0, FALLING, [1, 1, 0.6 * 0.1, 0], 2 + 0.06 * 0.3)]
    assert_masses(own, "no match", expected)
    # In (1, 2, 0, 1) the pair (1, 2) goes on with 0, 1, and (2, 0) with 1.
    offered = [1, 1, 0.3 * 0.1 + 0.1 * 0.6, 0.3 * 0.1]
    accepted = 2 + 0.03 * (0.6 + 0.6 * 0.3) + 0.06 * 0.3
    expected = [("always", 0, FALLING, offered, accepted)]
    assert_masses(own, "too short", expected)


def judged_as_a_point_mass(base):
    """Takes the suffix if it begins with the draw, and forgets that it was drawn."""
    return negative_controls.draw_dependent_suffix(suffix_root(base), root=0)


def eligible_only_if_drawn(base):
    """Admits the root 2 if it is the draw, but not otherwise."""
    drafter = suffix_root(base)

    def propose(params, state, context, offer):
        proposal, state = drafter.propose(params, state, context, offer)
        without = proposal.measure.at[0, 2].set(0)
        measure = jnp.where(proposal.tokens[0] == 2, proposal.measure, without)
        return dataclasses.replace(proposal, measure=measure), state

    return drafter._replace(propose=propose)


@pytest.mark.parametrize(
    ("control", "gate", "name", "prompt", "target", "law"),
    [
        # 0 (.5) is accepted with .5 / 1, else (p - onehot)+ = (0, .5); 1 is accepted.
        (
            judged_as_a_point_mass,
            gates.always(),
            "always",
            "eligible, token 0",
            EVEN,
            (0.25, 0.75, 0.0),
        ),
        # 0 (.6) and the root 2 (.1) are accepted; 1 (.3) is NULL, with the measure
        # (.6, 0, 0) of a row without a root, and goes to (p - mu)+ = (0, .3, .1).
        (
            eligible_only_if_drawn,
            gates.picked(0.5),
            "picked",
            "eligible",
            FALLING,
            (0.6, 0.225, 0.175),
        ),
    ],
    ids=["judged as a point mass", "eligible only if drawn"],
)
def test_controls_are_biased_as_worked_by_hand(
    control, gate, name, prompt, target, law
):
    # The drafter is the target itself.
    case = Case(control.__name__, table(target), table(target))
    context = PROMPTS[prompt]
    biased = Bench(decoder_for(3, 2, gate=gate, control=control))
    with quick_compilation():
        found = biased.first_tokens([case], context).laws[0]
    distance = total_variation(found, target)
    print(f"\n{control.__name__}: total variation {distance:.6f}, law {found}")
    assert_close(found, law)
    assert distance > 0.07
    # The same check: fails on the control, passes on the library's rule.
    with pytest.raises(AssertionError, match="1 of 1 laws are not the target's"):
        assert_laws_are_targets(biased, [case], context=context)
    own = case._replace(settings=settings_of(name, 0.5))
    assert_laws_are_targets(bench(), [own], context=context)


EVERY_GATE = tuple(library_gates(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab_size", "num_base", "num_lookup", "verifier", "draft_rule"),
    [
        (2, 1, 0, "token", "sample"),
        (2, 3, 2, "token", "sample"),
        (3, 1, 2, "token", "sample"),
        (3, 3, 1, "token", "sample"),
        (4, 2, 1, "token", "sample"),
        (2, 2, 2, "exact_match", "argmax"),
        (3, 2, 1, "exact_match", "sample"),
    ],
)
def test_every_gate(vocab_size, num_base, num_lookup, verifier, draft_rule):
    own = bench(vocab_size, num_base, num_lookup, verifier, draft_rule, EVERY_GATE)
    rng = np.random.default_rng([12, vocab_size, num_base, num_lookup])
    cases = []
    for gate in EVERY_GATE:
        for threshold in (0.0, 0.3, 0.6, 1.0):
            target = random_table(rng, vocab_size, 0.7)
            draft = random_table(rng, vocab_size)
            settings = settings_of(gate, threshold, vocab_size, EVERY_GATE)
            cases.append(Case(f"{gate}, t = {threshold}", target, draft, settings))
    for length in (3, 5, 7):
        context = rng.integers(vocab_size, size=length)
        assert_laws_are_targets(own, cases, context=context.tolist())
        assert_laws_are_targets(own, cases[1::7], context=context, num_tokens=3)


@pytest.mark.slow
def test_a_suffix_root_around_another():
    # The inner one asks for a match of one token, the outer one for two.
    own = Bench(
        decoder_for(
            3,
            2,
            gate=gates.picked(0.5),
            control=lambda base: suffix_root(suffix_root(base, 1, min_match=1), 1),
        )
    )
    rng = np.random.default_rng(13)
    cases = [
        Case(f"nested, {i}", random_table(rng, 3), random_table(rng, 3))
        for i in range(20)
    ]
    for prompt in PROMPTS.values():
        assert_laws_are_targets(own, cases, context=prompt)
        assert_laws_are_targets(own, cases[:4], context=prompt, num_tokens=3)


@pytest.mark.slow
def test_the_conformance_check_takes_it():
    target = strata.targets.tabular(3, max_length=MAX_LENGTH)
    rng = np.random.default_rng(14)
    tables = random_table(rng, 3), random_table(rng, 3)
    params = strata.Params(
        *(strata.targets.TabularParams(jnp.log(jnp.asarray(t, float))) for t in tables)
    )
    decoder = strata.speculative_decoder(
        target,
        suffix_root(drafters.model(target, num_draft_tokens=2), 1),
        gates.picked(0.3),
        strata.verifiers.token(),
    )
    difference = strata.testing.check_law(
        decoder, params, PROMPTS["eligible"], tables[0], num_tokens=3
    )
    assert isinstance(difference, audit.LawDifference)
