"""The decoding loop on a small llama: bits of the rows that tokens were drawn from."""

import jax
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import audit, drafters, gates, models, targets, verifiers

CONFIG = models.LlamaConfig(
    vocab_size=300,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
)
MAX_LENGTH = 192
PROMPT = [5, 17, 17, 250, 5, 17]
NUM_TOKENS = 40
# Penalties make a row depend on the drafts before it in the window.
SETTINGS = {
    "temperature": 0.7,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.1,
    "max_new_tokens": NUM_TOKENS,
}


@pytest.fixture(scope="module")
def params():
    return models.random_params(CONFIG, jax.random.key(3))


def make_drafter(name, num_draft_tokens, script=None):
    if name == "layer_skip":
        return drafters.layer_skip(
            CONFIG,
            layers=[0],
            num_draft_tokens=num_draft_tokens,
            max_length=MAX_LENGTH,
        )
    if name == "suffix":
        return drafters.suffix(
            num_draft_tokens=num_draft_tokens, vocab_size=300, min_match=1
        )
    return drafters.scripted(script, num_draft_tokens=num_draft_tokens)


def emitted_rows(windows):
    """p of every row that an emitted token was chosen from, [n, V]."""
    num_emitted = np.asarray(windows.verdict.num_emitted)
    probs = np.asarray(windows.target_probs)
    return np.concatenate([probs[i, :n] for i, n in enumerate(num_emitted)])


@pytest.fixture(scope="module")
def plain(params):
    decoder = strata.ancestral_decoder(targets.singleton(CONFIG, max_length=MAX_LENGTH))
    state = decoder.init(params, PROMPT, seed=7, **SETTINGS)
    state, windows = strata.decode(decoder, params, state, NUM_TOKENS, trace=True)
    return strata.output_tokens(state), emitted_rows(windows)


def half_right_script(tokens):
    """A script that drafts what plain decoding emits, and every fourth token wrong."""
    script = np.zeros((len(PROMPT) + len(tokens), 300), np.float32)
    for index, token in enumerate(tokens):
        wrong = (token + 1) % 300 if index % 4 == 3 else token
        script[len(PROMPT) + index, wrong] = 1
    return script


@pytest.mark.parametrize(
    ("name", "num_draft_tokens", "gate"),
    [
        pytest.param("layer_skip", 3, gates.picked(0.05), marks=pytest.mark.slow),
        pytest.param("suffix", 5, gates.always(), marks=pytest.mark.slow),
        pytest.param("scripted", 2, gates.always(), marks=pytest.mark.slow),
        ("scripted", 7, gates.always()),
    ],
)
def test_rows_in_windows_are_those_of_plain_decoding(
    params, plain, name, num_draft_tokens, gate
):
    tokens, rows = plain
    drafter = make_drafter(name, num_draft_tokens, half_right_script(tokens))
    target = targets.singleton(CONFIG, max_length=MAX_LENGTH)
    decoder = strata.speculative_decoder(target, drafter, gate)
    state = decoder.init(params, PROMPT, seed=7, **SETTINGS)
    state, windows = strata.decode(decoder, params, state, NUM_TOKENS, trace=True)
    np.testing.assert_array_equal(strata.output_tokens(state), tokens)
    np.testing.assert_array_equal(emitted_rows(windows), rows)
    if name == "scripted":
        num_accepted = np.asarray(windows.verdict.num_accepted)
        assert num_accepted.max() >= 2
        sources = np.asarray(windows.verdict.source)
        assert (sources == strata.Source.REJECTION).any()


def test_the_batched_control_gives_other_rows(params, plain):
    tokens, rows = plain
    drafter = make_drafter("scripted", 3, half_right_script(tokens))
    target = targets.batched(CONFIG, max_length=MAX_LENGTH)
    decoder = strata.speculative_decoder(target, drafter, bit_exact=False)
    state = decoder.init(params, PROMPT, seed=7, **SETTINGS)
    state, windows = strata.decode(decoder, params, state, NUM_TOKENS, trace=True)
    ours = emitted_rows(windows)
    shared = min(len(ours), len(rows))
    is_different = (ours[:shared] != rows[:shared]).any(axis=1)
    assert is_different.mean() > 0.5


@pytest.mark.slow
def test_requests_under_vmap_are_what_they_are_alone(params):
    target = targets.singleton(CONFIG, max_length=MAX_LENGTH)
    drafter = make_drafter("layer_skip", 2)
    decoder = strata.speculative_decoder(
        target, drafter, gates.picked(0.02), verifiers.token()
    )
    states = [
        decoder.init(params, PROMPT[: 3 + seed], seed=seed, **SETTINGS)
        for seed in range(3)
    ]
    step = jax.jit(decoder.step)
    together = jax.jit(jax.vmap(decoder.step, in_axes=(None, 0)))
    batch = audit.stack(states)
    for _ in range(6):
        batch, windows = together(params, batch)
        for slot in range(3):
            states[slot], alone = step(params, states[slot])
            np.testing.assert_array_equal(
                windows.verdict.tokens[slot], alone.verdict.tokens
            )
            np.testing.assert_array_equal(
                windows.target_probs[slot], alone.target_probs
            )
            np.testing.assert_array_equal(
                windows.proposal.measure[slot], alone.proposal.measure
            )
