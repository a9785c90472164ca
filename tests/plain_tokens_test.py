"""The default mode's contract in full: tokens depend on the request alone.

Every drafter, K and gate, 20 seeds, resumed at several points, on Markov tables and on
a small llama: the tokens are those of plain decoding. The gates share one program,
which asks the gate that a traced setting names.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_checks import GATE_NAMES, gate_settings, library_gates, one_of

import strata_jax as strata
from strata_jax import audit, drafters, gates, models, targets, verifiers
from strata_jax.targets import TabularParams

NUM_SEEDS = 20
NUM_TOKENS = 12
PROMPT = [1, 2, 0, 1, 2]
MAX_LENGTH = 32
VOCAB_SIZE = {"tabular": 4, "llama": 64}
CONFIG = models.LlamaConfig(
    vocab_size=64,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
)


@functools.cache
def target_and_params(kind):
    if kind == "llama":
        params = models.random_params(CONFIG, jax.random.key(5))
        return targets.singleton(CONFIG, max_length=MAX_LENGTH), params
    random = np.random.default_rng(6)
    table, draft = random.dirichlet(np.ones(4), (2, 4, 4))
    params = strata.Params(
        target=TabularParams(jnp.log(jnp.asarray(table, float))),
        drafter=TabularParams(jnp.log(jnp.asarray(draft, float))),
    )
    return targets.tabular(4, max_length=MAX_LENGTH, order=2), params


def make_drafter(kind, name, num_draft_tokens):
    vocab_size = VOCAB_SIZE[kind]
    if name == "suffix":
        return drafters.suffix(
            num_draft_tokens=num_draft_tokens, vocab_size=vocab_size, min_match=1
        )
    if name == "scripted":
        rows = np.random.default_rng(7).dirichlet(np.ones(vocab_size), MAX_LENGTH)
        return drafters.scripted(rows, num_draft_tokens=num_draft_tokens)
    if kind == "llama":
        return drafters.layer_skip(
            CONFIG,
            layers=[0],
            num_draft_tokens=num_draft_tokens,
            max_length=MAX_LENGTH,
        )
    target, _ = target_and_params(kind)
    return drafters.model(target, num_draft_tokens=num_draft_tokens)


def run(decoder, params, requests):
    """Runs requests together, each as if alone, and returns their tokens."""
    states = audit.stack([decoder.init(params, **request) for request in requests])

    @jax.jit
    def run_all(params, states):
        def window(states, _):
            step = jax.vmap(decoder.step, in_axes=(None, 0))
            states, windows = step(params, states)
            return states, windows.proposal.kind

        return jax.lax.scan(window, states, None, length=NUM_TOKENS)

    states, kinds = run_all(params, states)
    assert (np.asarray(states.finish_reason) == strata.FinishReason.LENGTH).all()
    stop = len(PROMPT) + NUM_TOKENS
    return np.asarray(states.context.tokens)[:, len(PROMPT) : stop], np.asarray(kinds)


@functools.cache
def plain_tokens(kind):
    target, params = target_and_params(kind)
    requests = [
        {"context": PROMPT, "seed": seed, "max_new_tokens": NUM_TOKENS}
        for seed in range(NUM_SEEDS)
    ]
    tokens, _ = run(strata.ancestral_decoder(target), params, requests)
    assert len({row.tobytes() for row in tokens}) == NUM_SEEDS
    return tokens


def requests_of(kind):
    """Every gate with every seed; the place of resumption goes through all places."""
    vocab_size, tokens = VOCAB_SIZE[kind], plain_tokens(kind)
    threshold = {"tabular": 0.3, "llama": 0.02}[kind]
    for number, gate in enumerate(GATE_NAMES):
        for seed in range(NUM_SEEDS):
            resume = (number + seed) % NUM_TOKENS
            yield {
                "context": [*PROMPT, *tokens[seed, :resume]],
                "prompt_length": len(PROMPT),
                "seed": seed,
                "max_new_tokens": NUM_TOKENS,
                "window": seed % 3,
                **gate_settings(gate, threshold, vocab_size),
            }


# One program each; the others are long tests. On a model with layers, the runs of
# bundled_test.py compare tokens with plain decoding too.
SHORT = {("tabular", "suffix", 3), ("tabular", "scripted", 3)}
CASES = [
    pytest.param(
        *(kind, name, k),
        marks=[] if (kind, name, k) in SHORT else [pytest.mark.slow],
    )
    for kind in ("tabular", "llama")
    for name in ("model", "suffix", "scripted")
    for k in (1, 2, 3)
]


@pytest.mark.parametrize(("kind", "name", "num_draft_tokens"), CASES)
def test_tokens_are_those_of_plain_decoding(kind, name, num_draft_tokens):
    target, params = target_and_params(kind)
    decoder = strata.speculative_decoder(
        target,
        make_drafter(kind, name, num_draft_tokens),
        one_of(library_gates(VOCAB_SIZE[kind])),
        draft_rule="sample" if name == "model" else "argmax",
    )
    requests = list(requests_of(kind))
    tokens, kinds = run(decoder, params, requests)
    expected = np.tile(plain_tokens(kind), (len(GATE_NAMES), 1))
    np.testing.assert_array_equal(tokens, expected)
    seen = set(np.unique(kinds))
    assert strata.RowKind.OFFERED in seen
    assert strata.RowKind.ABSENT in seen


def test_the_token_verifier_fails_the_same_comparison():
    target, params = target_and_params("tabular")
    decoder = strata.speculative_decoder(
        target,
        make_drafter("tabular", "model", 3),
        gates.always(),
        verifiers.token(),
    )
    requests = [
        {"context": PROMPT, "seed": seed, "max_new_tokens": NUM_TOKENS}
        for seed in range(NUM_SEEDS)
    ]
    tokens, _ = run(decoder, params, requests)
    assert (tokens != plain_tokens("tabular")).any(axis=1).mean() > 0.5
