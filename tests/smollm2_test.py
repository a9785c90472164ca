"""The contracts on a real language model, SmolLM2-135M-Instruct."""

import hashlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_checks import gate_settings, library_gates, one_of

import strata_jax as strata
from strata_jax import (
    checkpoints,
    diagnostics,
    drafters,
    gates,
    targets,
    testing,
    verifiers,
)

MAX_LENGTH = 256
# All but one that states its admission for each of a few tokens.
GATES = {name: gate for name, gate in library_gates(4).items() if name != "soft_given"}
GOLDEN = pathlib.Path(__file__).parent / "testdata" / "smollm2_logits.npz"
TEXT = (
    "The Sun is the star at the centre of the Solar System. It is a nearly perfect "
    "ball of hot plasma, heated by nuclear fusion in its core; in 1610 it was drawn by "
    "the first telescopes, and by 1838 its heat had been measured. Light needs 8 "
    "minutes and 19 seconds to reach us."
)


@pytest.fixture(scope="module")
def model():
    path = checkpoints.find_smollm2()
    config, params = checkpoints.load_gguf(path)
    return config, params, checkpoints.load_gguf_tokenizer(path)


@pytest.fixture(scope="module", params=[16, pytest.param(64, marks=pytest.mark.slow)])
def singleton_rows(request, model):
    """Logits of the separately compiled one-token program, [n, V]."""
    config, params, tokenizer = model
    text = np.asarray(tokenizer.encode(TEXT)[: request.param], np.int32)
    assert len(text) == request.param
    target = targets.singleton(config, max_length=MAX_LENGTH)
    score = jax.jit(target.score, donate_argnums=1)
    state, rows = target.init(params), []
    for position in range(len(text)):
        token = text[position : position + 1]
        row, state = score(params, state, token, jnp.int32(position), jnp.int32(1))
        rows.append(np.asarray(row.logits[0]))
    return text, np.stack(rows)


def window_rows(target, params, text, width, max_width=8):
    """Logits of every row when the text passes in windows of one width."""
    score = jax.jit(target.score, donate_argnums=1)
    state, rows = target.init(params), []
    for position in range(0, len(text), width):
        piece = np.zeros(max_width, np.int32)
        part = text[position : position + width]
        piece[: len(part)] = part
        row, state = score(
            params, state, piece, jnp.int32(position), jnp.int32(len(part))
        )
        rows.append(np.asarray(row.logits[: len(part)]))
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def packed():
    config, params = checkpoints.load_smollm2()
    tokenizer = checkpoints.load_gguf_tokenizer(checkpoints.find_smollm2())
    text = np.asarray(tokenizer.encode(TEXT)[:24], np.int32)
    return targets.singleton(config, max_length=MAX_LENGTH), params, text


def test_windows_on_packed_weights_have_the_bits_of_one_token(packed):
    target, params, text = packed
    alone = window_rows(target, params, text, 1, max_width=1)
    for width in (2, 4):
        rows = window_rows(target, params, text, width, max_width=4)
        np.testing.assert_array_equal(rows, alone)
    print(f"\nrows of SmolLM2 equal to one token's: {2 * len(text)}")


def test_the_draft_head_is_the_one_on_its_card():
    path = checkpoints.smollm2_draft_head_path()
    content = path.read_bytes()
    card = path.with_suffix(".md").read_text("utf-8")
    assert len(content) <= 10_000_000
    assert hashlib.sha256(content).hexdigest() in card
    assert hashlib.sha256(checkpoints.find_smollm2().read_bytes()).hexdigest() in card
    (row,) = re.findall(r"\| all, temperature 1 \| (.*) \|", card)
    overlaps = [float(value) for value in row.split("|")]
    assert all(o >= least for o, least in zip(overlaps, (0.49, 0.43, 0.4), strict=True))


@pytest.mark.slow
def test_windows_drafted_by_the_head_are_those_of_plain_decoding(packed):
    target, params, text = packed
    decoder = strata.speculative_decoder(
        target,
        drafters.mtp(num_draft_tokens=3),
        gates.picked(0.2),
        verifiers.token(),
    )
    prompt = text[:12]
    state = decoder.init(params, prompt, seed=1, temperature=0.8)
    _, windows = strata.decode(decoder, params, state, 16, trace=True)
    parity = diagnostics.compare_with_singleton(target, params, prompt, windows)
    print(f"\nrows equal: {parity.num_equal} of {parity.num_rows}")
    assert parity.num_equal == parity.num_rows >= 16
    kinds = set(np.ravel(windows.proposal.kind).tolist())
    assert kinds == {kind.value for kind in strata.RowKind}
    assert diagnostics.summarize_acceptance(windows.verdict).num_accepted > 0


@pytest.mark.slow
def test_every_row_on_packed_weights_is_the_singletons(packed):
    target, params, text = packed
    counts = testing.check_target(target, params, text, poison=testing.poison_cache)
    print("\nrows bitwise equal to the one-token program:", counts)
    assert counts["widths"] == 8 * len(text)
    assert counts["rejections"] == 3 * len(text)


@pytest.mark.slow
def test_every_row_is_the_singletons(model, singleton_rows):
    config, params, _ = model
    text, _ = singleton_rows
    target = targets.singleton(config, max_length=MAX_LENGTH)
    counts = testing.check_target(target, params, text, poison=testing.poison_cache)
    print("\nrows bitwise equal to the one-token program:", counts)
    # Widths 1 .. 8; 1, 4 and 7 kept rows of 8; each over all positions.
    assert counts["widths"] == 8 * len(text)
    assert counts["rejections"] == 3 * len(text)


@pytest.mark.slow
def test_batched_control_differs_on_most_rows(model, singleton_rows):
    config, params, _ = model
    text, expected = singleton_rows
    control = window_rows(
        targets.batched(config, max_length=MAX_LENGTH), params, text, 8
    )
    num_control = int((control != expected).any(axis=1).sum())
    print(
        "\nrows of the batched control that differ from the one-token program: "
        f"{num_control} of {len(text)}"
    )
    assert num_control > len(text) / 2
    np.testing.assert_allclose(control, expected, atol=1e-2)
    with pytest.raises(testing.ConformanceError, match="T1"):
        testing.check_target(
            targets.batched(config, max_length=MAX_LENGTH), params, text[:16]
        )


@pytest.mark.parametrize(
    "weights", ["packed", pytest.param("float32", marks=pytest.mark.slow)]
)
def test_first_logits_agree_with_transformers(model, weights):
    config, params, tokenizer = model
    if weights == "packed":
        _, params = checkpoints.load_gguf_tiled(checkpoints.find_smollm2())
    golden = np.load(GOLDEN)
    prompt = golden["prompt_ids"].astype(np.int32)
    assert tokenizer.encode("The capital of France is") == prompt.tolist()
    target = targets.singleton(config, max_length=MAX_LENGTH)
    last = len(prompt) - 1
    state, _ = jax.jit(target.prefill)(
        params, target.init(params), prompt, jnp.int32(0), jnp.int32(last)
    )
    rows, _ = jax.jit(target.score)(
        params, state, prompt[last:], jnp.int32(last), jnp.int32(1)
    )
    difference = np.abs(np.asarray(rows.logits[0]) - golden["logits"]).max()
    print(f"\nlargest difference from transformers: {difference:.2e}")
    assert difference < 1e-3


@pytest.mark.slow
def test_greedy_continuation(model):
    config, params, tokenizer = model
    target = targets.singleton(config, max_length=MAX_LENGTH)
    generation = strata.generate(
        strata.speculative_decoder(
            target, drafters.suffix(num_draft_tokens=3, vocab_size=config.vocab_size)
        ),
        params,
        tokenizer,
        "The capital of France is",
        max_new_tokens=8,
        temperature=0.0,
    )
    assert generation.text.startswith(" Paris.")
    golden = np.load(GOLDEN)["greedy_ids"]
    np.testing.assert_array_equal(generation.tokens, golden)


# A covering set: every drafter, several K, both draft rules; with each of them every
# gate, in turn with one of the seeds and at one place of resumption.
CONFIGURATIONS = {
    "suffix, K=1": ("suffix", 1, "argmax"),
    "layer_skip, K=3": ("layer_skip", 3, "sample"),
    "scripted, K=7": ("scripted", 7, "argmax"),
}
NUM_TOKENS = 16
SEEDS = (0, 1, 2)


def make_drafter(config, name, num_draft_tokens):
    vocab_size = config.vocab_size
    if name == "suffix":
        return drafters.suffix(
            num_draft_tokens=num_draft_tokens, vocab_size=vocab_size, min_match=1
        )
    if name == "layer_skip":
        return drafters.layer_skip(
            config,
            layers=[0, 1, 2, 11, 28, 29],
            num_draft_tokens=num_draft_tokens,
            max_length=MAX_LENGTH,
        )
    # Every row of the script is a point mass on one token.
    script = np.zeros((64, vocab_size), np.float32)
    script[:, 260] = 1
    return drafters.scripted(script, num_draft_tokens=num_draft_tokens)


@pytest.fixture(scope="module")
def plain_tokens(model):
    config, params, tokenizer = model
    decoder = strata.ancestral_decoder(targets.singleton(config, max_length=MAX_LENGTH))
    prompt = tokenizer.encode("One, two, three, one, two, three, one,")
    tokens = {}
    for seed in SEEDS:
        state = decoder.init(
            params, prompt, seed=seed, temperature=0.9, max_new_tokens=NUM_TOKENS
        )
        state, _ = strata.decode(decoder, params, state, NUM_TOKENS)
        tokens[seed] = strata.output_tokens(state)
    assert len({tuple(t) for t in tokens.values()}) == len(SEEDS)
    return prompt, tokens


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_exact_match_emits_the_tokens_of_plain_decoding(
    model, plain_tokens, configuration
):
    config, params, _ = model
    prompt, tokens = plain_tokens
    name, num_draft_tokens, draft_rule = CONFIGURATIONS[configuration]
    decoder = strata.speculative_decoder(
        targets.singleton(config, max_length=MAX_LENGTH),
        make_drafter(config, name, num_draft_tokens),
        one_of(GATES),
        draft_rule=draft_rule,
    )
    kinds = set()
    for number, gate in enumerate(GATES):
        seed = SEEDS[number % len(SEEDS)]
        resume = 3 * number % NUM_TOKENS
        state = decoder.init(
            params,
            [*prompt, *tokens[seed][:resume]],
            prompt_length=len(prompt),
            seed=seed,
            temperature=0.9,
            max_new_tokens=NUM_TOKENS,
            **{**gate_settings(gate, 0.2, config.vocab_size), "gate": number},
        )
        state, verdicts = strata.decode(decoder, params, state, NUM_TOKENS)
        np.testing.assert_array_equal(strata.output_tokens(state), tokens[seed])
        kinds |= set(np.unique(verdicts.kind))
    assert {strata.RowKind.OFFERED, strata.RowKind.ABSENT} <= kinds
