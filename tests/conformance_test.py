"""Every gate, drafter, verifier and target of the library through its own checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_weights import quick_compilation

import strata_jax as strata
from strata_jax import (
    GateDecision,
    drafters,
    gates,
    models,
    targets,
    testing,
    verifiers,
)
from strata_jax.targets import TabularParams

VOCAB_SIZE = 4
GATES = {
    "always": gates.always(),
    "picked": gates.picked(0.3),
    "top": gates.top(0.5),
    "entropy": gates.entropy(0.9),
    "include_then_stop": gates.include_then_stop(0.4),
    "soft": gates.soft(lambda settings, context, probs: 1 - probs),
    "all_of": gates.all_of(gates.picked(0.2), gates.top(0.4, setting="top_threshold")),
}


# Every gate is enumerated by law_test.py; here a few stand for the check itself.
DEFAULT_GATES = ("entropy", "all_of")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in DEFAULT_GATES else [pytest.mark.slow])
        for name in GATES
    ],
)
@quick_compilation()
def test_gates(name):
    testing.check_gate(GATES[name])


def gate_that_admits_too_much():
    def decide(settings, context, probs):
        del settings, context
        everything = jnp.ones_like(probs)
        return GateDecision(jnp.asarray(True), 1.5 * everything, everything > 0)

    return gates.gate(decide)


def gate_of_another_shape():
    def decide(settings, context, probs):
        del settings, context
        return GateDecision(jnp.asarray(True), jnp.ones(1), probs >= 0)

    return gates.gate(decide)


@pytest.mark.parametrize("make", [gate_that_admits_too_much, gate_of_another_shape])
def test_bad_gates_fail(make):
    with pytest.raises(testing.ConformanceError, match="G1"):
        testing.check_gate(make())


@pytest.mark.parametrize("verifier", [verifiers.token(), verifiers.exact_match()])
@quick_compilation()
def test_verifiers(verifier):
    testing.check_verifier(verifier)


@quick_compilation()
def test_a_verifier_that_accepts_everything_fails():
    token = verifiers.token()

    def verify(draws, target_probs, proposal):
        accept = jnp.zeros_like(draws.accept)
        return token.verify(draws.replace(accept=accept), target_probs, proposal)

    with pytest.raises(testing.ConformanceError, match="V1"):
        testing.check_verifier(token._replace(verify=verify))


def tabular(seed, order=1):
    random = np.random.default_rng(seed)
    shape = (VOCAB_SIZE,) * order
    table = random.dirichlet(np.ones(VOCAB_SIZE), shape)
    return TabularParams(jnp.log(jnp.asarray(table, float)))


def make_drafter(name):
    target = targets.tabular(VOCAB_SIZE, max_length=64, order=2)
    if name == "model":
        return drafters.model(target, num_draft_tokens=3)
    if name == "suffix":
        return drafters.suffix(num_draft_tokens=3, vocab_size=VOCAB_SIZE, min_match=1)
    if name == "scripted":
        script = np.random.default_rng(2).dirichlet(np.ones(VOCAB_SIZE), 40)
        return drafters.scripted(script, num_draft_tokens=3)
    return drafters.none()


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("none", None),
        ("model", None),
        ("model", "soft"),
        ("suffix", "picked"),
        ("scripted", "soft"),
    ],
)
def test_drafters(name, gate):
    target = targets.tabular(VOCAB_SIZE, max_length=64, order=2)
    params = strata.Params(target=tabular(0, 2), drafter=tabular(1, 2))
    testing.check_drafter(
        make_drafter(name),
        target,
        params,
        [0, 1, 2, 1, 2],
        gate=None if gate is None else GATES[gate],
    )


@pytest.mark.slow
def test_layer_skip_on_a_llama():
    config = models.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=256,
    )
    drafter = drafters.layer_skip(config, layers=[1], num_draft_tokens=3, max_length=64)
    target = targets.singleton(config, max_length=64)
    params = models.random_params(config, jax.random.key(0))
    testing.check_drafter(drafter, target, params, [1, 2, 3], temperature=2.0)


def test_a_drafter_that_keeps_rejected_rows_fails():
    target = targets.tabular(VOCAB_SIZE, max_length=64, order=2)
    drafter = drafters.model(target, num_draft_tokens=3)

    def commit(params, state, committed):
        # The cache is left as the drafts left it, rejected ones included.
        del params, committed
        return state

    params = strata.Params(target=tabular(0, 2), drafter=tabular(1, 2))
    with pytest.raises(testing.ConformanceError, match="T2"):
        testing.check_drafter(
            drafter._replace(commit=commit), target, params, [0, 1, 2, 1, 2]
        )


def test_a_drafter_that_hides_mass_fails():
    inner = make_drafter("model")

    def propose(params, state, context, offer):
        proposal, state = inner.propose(params, state, context, offer)
        return proposal.replace(measure=jnp.zeros_like(proposal.measure)), state

    target = targets.tabular(VOCAB_SIZE, max_length=64, order=2)
    params = strata.Params(target=tabular(0, 2), drafter=tabular(1, 2))
    with pytest.raises(testing.ConformanceError, match="P1"):
        testing.check_drafter(
            inner._replace(propose=propose), target, params, [0, 1, 2]
        )


def test_tabular_target():
    target = targets.tabular(VOCAB_SIZE, max_length=64, order=2)
    text = np.random.default_rng(3).integers(0, VOCAB_SIZE, 40)
    counts = testing.check_target(target, tabular(0, 2), text)
    assert counts["widths"] == 8 * 40
