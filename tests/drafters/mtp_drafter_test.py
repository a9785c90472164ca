"""The drafter of a multi-token-prediction head: proposals, law and default tokens.

What a cell joins, and with what, is in cases_test.py (bug-049); the head's arithmetic
in models/mtp_test.py.
"""

import collections
import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from moe_weights import moe_weights

import strata_jax as strata
from strata_jax import FinishReason, Params, RowKind, audit, models, testing
from strata_jax.audit import negative_controls
from strata_jax.drafters import mtp

# Wide enough for rounding to depend on the program.
CONFIG = models.MoeConfig(
    vocab_size=64,
    hidden_size=256,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=4,
    num_experts_per_token=2,
    expert_size=64,
)
SMALL = dataclasses.replace(
    CONFIG, vocab_size=8, hidden_size=32, head_dim=8, expert_size=8
)
MAX_LENGTH = 64
PROMPT = [1, 2, 3, 1, 2]
NUM_TOKENS = 12
TRACES = collections.Counter()


def counted(target):
    """A target that counts how often its functions are traced."""

    def count(name):
        def run(*arguments):
            TRACES[name] += 1
            return getattr(target, name)(*arguments)

        return run

    return target._replace(prefill=count("prefill"), score=count("score"))


TARGET = counted(strata.targets.singleton(CONFIG, max_length=MAX_LENGTH))


def decoder_of(num_draft_tokens, verifier):
    return strata.speculative_decoder(
        TARGET,
        mtp(num_draft_tokens=num_draft_tokens),
        strata.gates.picked(0.0),
        verifier,
    )


TOKEN = decoder_of(3, strata.verifiers.token())
STEP = jax.jit(TOKEN.step)
EXACT = {k: decoder_of(k, strata.verifiers.exact_match()) for k in (1, 3)}


@functools.cache
def params_of(config):
    return moe_weights(config)


def windows_of(context, num_windows=16, **settings):
    """Yields state and window, one after another, of a request with `TOKEN`."""
    state = TOKEN.init(params_of(CONFIG), context, **settings)
    for _ in range(num_windows):
        state, window = STEP(params_of(CONFIG), state)
        yield state, window
        if int(state.finish_reason):
            return


def same_bits(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_proposals_are_those_of_a_fresh_drafter():
    testing.check_drafter(
        mtp(num_draft_tokens=3),
        TARGET,
        params_of(CONFIG),
        PROMPT,
        gate=strata.gates.picked(0.0),
        num_windows=10,
        poison=testing.poison_cache,
        seed=3,
    )
    # The same request again: its windows ended in every way.
    budget = 10 * 4
    windows = [
        window for _, window in windows_of(PROMPT, 10, seed=3, max_new_tokens=budget)
    ]
    accepted = {int(window.verdict.num_accepted) for window in windows}
    assert {0, 1, 2} <= accepted
    assert all((window.proposal.kind == RowKind.OFFERED).all() for window in windows)


def check_small(drafter):
    target = strata.targets.singleton(SMALL, max_length=MAX_LENGTH)
    testing.check_drafter(
        drafter, target, params_of(SMALL), PROMPT, poison=testing.poison_cache
    )


def test_a_drafter_that_pairs_a_stale_state_fails():
    drafter = mtp(num_draft_tokens=2)

    def commit(params, state, committed):
        # The row after the last one that was kept.
        features = jnp.roll(committed.features, -1, axis=0)
        return drafter.commit(params, state, committed.replace(features=features))

    with pytest.raises(testing.ConformanceError, match="T2"):
        check_small(drafter._replace(commit=commit))


def test_a_drafter_that_reads_dead_cells_fails():
    drafter = mtp(num_draft_tokens=2)

    def propose(params, state, context, offer):
        dead = jnp.sum(state.cache.keys[:, context.length])
        spoiled = dataclasses.replace(state, hidden=state.hidden + 0 * dead)
        return drafter.propose(params, spoiled, context, offer)

    with pytest.raises(testing.ConformanceError, match="T2"):
        check_small(drafter._replace(propose=propose))


def test_catching_up_reads_kept_rows_alone():
    drafter, params = mtp(num_draft_tokens=3), params_of(CONFIG)
    random = np.random.default_rng(0)
    features = random.normal(size=(9, 256)).astype(np.float32)
    text = random.integers(0, 64, MAX_LENGTH).astype(np.int32)

    def context(length):
        return strata.Context(tokens=jnp.asarray(text), length=jnp.int32(length))

    def fresh(length):
        padded = np.full((MAX_LENGTH, 256), np.nan, np.float32)
        padded[: length - 1] = features[: length - 1]
        return jax.jit(drafter.init)(params, context(length), padded)

    commit = jax.jit(drafter.commit)
    for num_kept in (0, 1, 2, 4):
        rows = np.full((4, 256), np.nan, np.float32)
        rows[:num_kept] = features[4 : 4 + num_kept]
        state = testing.poison_cache(fresh(5), jnp.int32(4))
        after = commit(
            params,
            state,
            strata.Committed(
                context=context(5 + num_kept),
                features=rows,
                num_kept=jnp.int32(num_kept),
            ),
        )
        wanted = fresh(5 + num_kept)
        assert int(after.num_cells) == int(wanted.num_cells) == 4 + num_kept
        np.testing.assert_array_equal(after.hidden, wanted.hidden)
        for found, right in zip(
            jax.tree.leaves(after.cache), jax.tree.leaves(wanted.cache), strict=True
        ):
            np.testing.assert_array_equal(
                found[:, : 4 + num_kept], right[:, : 4 + num_kept]
            )
            assert np.isnan(found[:, 4 + num_kept :]).all()


def test_poison_fills_what_a_drafter_has_not_committed():
    cache = models.empty_mtp_cache(params_of(SMALL).mtp, 16)
    own, model = (
        testing.poison_cache(state, jnp.int32(5))
        for state in (
            strata.drafters.MtpDrafterState(cache, jnp.zeros(32), jnp.int32(5)),
            # It may be a token behind the text.
            strata.drafters.ModelDrafterState(cache, jnp.int32(4)),
        )
    )
    for rows in (own.cache.keys, own.cache.values):
        assert np.isnan(rows[:, 5:]).all() and not rows[:, :5].any()
    for rows in (model.target_state.keys, model.target_state.values):
        assert np.isnan(rows[:, 4:]).all() and not rows[:, :4].any()
    assert not own.hidden.any() and int(own.num_cells) == 5


def test_a_text_of_one_token_has_no_draft_and_the_next_has():
    windows = [window for _, window in windows_of([5], 2, seed=1)]
    first, second = windows
    assert first.proposal.kind.tolist() == [RowKind.ABSENT] * 3
    assert int(first.verdict.num_emitted) == 1
    assert second.proposal.kind.tolist() == [RowKind.OFFERED] * 3


def test_eos_inside_a_window_and_a_request_that_is_over():
    num_inside = 0
    for seed in range(12):
        *_, (state, window) = windows_of(PROMPT, seed=seed, eos_ids=range(8))
        if state.finish_reason != FinishReason.EOS:
            continue
        # The last emitted token was an accepted draft, and there were more drafts.
        num_emitted = int(window.verdict.num_emitted)
        if int(window.verdict.num_accepted) < num_emitted or num_emitted == 3:
            continue
        num_inside += 1
        length = int(state.context.length)
        assert int(state.drafter_state.num_cells) == length - 1
        assert np.isfinite(state.drafter_state.hidden).all()
        again, window = STEP(params_of(CONFIG), state)
        assert int(window.verdict.num_emitted) == 0
        assert window.proposal.kind.tolist() == [RowKind.ABSENT] * 3
        kept = [dataclasses.replace(each, request_key=None) for each in (state, again)]
        assert same_bits(*kept)
    assert num_inside >= 1


# The default mode: the tokens depend on the request alone.


def tokens_of(decoder, seed):
    params = params_of(CONFIG)
    settings = {"seed": seed, "max_new_tokens": NUM_TOKENS}
    if decoder.num_draft_tokens:
        # `init` does not know K, nor the verifier: one program for all.
        state = TOKEN.init(params, PROMPT, **settings)
    else:
        state = decoder.init(params, PROMPT, **settings)
    state, verdicts = strata.decode(decoder, params, state, NUM_TOKENS)
    return strata.output_tokens(state).tolist(), np.asarray(verdicts.num_accepted)


def test_default_tokens_do_not_depend_on_the_drafter():
    plain = strata.ancestral_decoder(TARGET)
    num_accepted, num_other = [], 0
    for seed in range(6):
        wanted, _ = tokens_of(plain, seed)
        assert len(wanted) == NUM_TOKENS
        for decoder in EXACT.values():
            tokens, accepted = tokens_of(decoder, seed)
            assert tokens == wanted
            num_accepted.append(accepted.sum())
        *_, (state, _) = windows_of(PROMPT, seed=seed, max_new_tokens=NUM_TOKENS)
        num_other += strata.output_tokens(state).tolist() != wanted
    assert sum(num_accepted) > 0
    # Another verifier's tokens do: the comparison can see it.
    assert num_other >= 3


def test_a_second_request_compiles_nothing():
    decoder, params = EXACT[3], params_of(CONFIG)

    def run(context, **settings):
        state = TOKEN.init(params, context, **settings)
        return strata.decode(decoder, params, state, NUM_TOKENS, throw=False)

    run(PROMPT)
    before = TRACES.copy()
    assert before["score"] and before["prefill"]
    run([7], temperature=0.0, seed=9, threshold=0.5)
    run(PROMPT * 4, top_k=3, eos_ids=[4], max_new_tokens=5, logit_bias={3: 1.0})
    assert TRACES == before
    strata.decode(decoder, params, TOKEN.init(params, PROMPT), 2)
    assert TRACES["score"] > before["score"]


@pytest.mark.parametrize("name", ["step", "decode"])
def test_lowers_for_every_platform(name):
    functions = {
        "step": TOKEN.step,
        "decode": lambda params, state: strata.decode(
            EXACT[3], params, state, 4, throw=False
        ),
    }
    params = params_of(CONFIG)
    state = jax.eval_shape(lambda: TOKEN.init(params, PROMPT))
    platforms = ("cpu", "cuda", "rocm", "tpu")
    export = jax.export.export(jax.jit(functions[name]), platforms=platforms)
    assert export(params, state).platforms == platforms


# The law, with a draft vocabulary that lacks a token.

TINY = dataclasses.replace(
    SMALL,
    vocab_size=4,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    num_experts=3,
)
THRESHOLD = 0.3


def law_of(drafter, gate, params, num_tokens):
    target = strata.targets.singleton(TINY, max_length=16)
    decoder = strata.speculative_decoder(
        target, drafter, gate, strata.verifiers.token()
    )
    state = decoder.init(params, [1, 2, 0])
    enumerator = audit.WindowEnumerator(decoder, params, state, batch_size=64)
    (law,) = audit.sequence_laws(
        decoder,
        audit.stack([params]),
        audit.stack([state]),
        num_tokens,
        enumerator=enumerator,
    )
    return law


def plain_law(params, num_tokens):
    """Products of the rows that plain decoding draws from."""
    decoder = strata.ancestral_decoder(strata.targets.singleton(TINY, max_length=16))
    step = jax.jit(decoder.step)
    law = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for tokens, probability in law.items():
            state = decoder.init(params, [1, 2, 0, *tokens])
            _, window = step(params, state)
            for token, mass in enumerate(np.asarray(window.target_probs[0], float)):
                longer[(*tokens, token)] = probability * mass
        law = longer
    return law


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_tokens"),
    [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_the_law_is_the_targets(num_draft_tokens, num_tokens):
    params = moe_weights(TINY, 6)
    params = models.with_draft_vocabulary(params, [2, 0, 3])
    reference = plain_law(params, num_tokens)
    drafter = mtp(num_draft_tokens=num_draft_tokens)
    law = law_of(drafter, strata.gates.picked(THRESHOLD), params, num_tokens)
    assert audit.compare_laws(law, reference).worst <= 1e-5
    # Forgetting what the gate dropped is seen.
    biased = negative_controls.unaccounted_gate(drafter, THRESHOLD)
    law = law_of(biased, strata.gates.always(), params, num_tokens)
    assert audit.compare_laws(law, reference).worst > 1e-2


# What is refused.


def init_with(target, params):
    decoder = strata.speculative_decoder(target, mtp(num_draft_tokens=1))
    return decoder.init(params, [1, 2])


@pytest.mark.parametrize("num_draft_tokens", [0, -1, 2.5, True])
def test_bad_numbers_of_drafts_are_refused(num_draft_tokens):
    with pytest.raises(ValueError, match="num_draft_tokens"):
        mtp(num_draft_tokens=num_draft_tokens)


def test_params_without_a_head_are_refused():
    target = strata.targets.singleton(SMALL, max_length=16)
    params = params_of(SMALL)
    bare = dataclasses.replace(params, mtp=None)
    with pytest.raises(ValueError, match="params has no draft head"):
        init_with(target, bare)
    with pytest.raises(ValueError, match="needs its embedding and head"):
        init_with(target, Params(target=bare, drafter=params.mtp))
    short = params.mtp.replace(projection=params.mtp.projection[:-1])
    alone = models.with_shared_tables(params).replace(projection=short.projection)
    with pytest.raises(ValueError, match=r"mtp\.projection must have shape"):
        init_with(target, Params(target=bare, drafter=alone))


def test_targets_without_hidden_states_are_refused():
    params = models.with_shared_tables(params_of(SMALL))
    tabular = strata.targets.tabular(8, max_length=16)
    table = strata.targets.TabularParams(jnp.zeros((8, 8)))
    with pytest.raises(ValueError, match=r"hidden states \[T, 32\]"):
        init_with(tabular, Params(target=table, drafter=params))
    # Of another width.
    wide = dataclasses.replace(SMALL, hidden_size=16)
    target = strata.targets.singleton(wide, max_length=16)
    bare = dataclasses.replace(params_of(wide), mtp=None)
    with pytest.raises(ValueError, match=r"hidden states \[T, 32\].*\(16, 16\)"):
        init_with(target, Params(target=bare, drafter=params))


def test_a_head_of_another_vocabulary_is_refused():
    config = dataclasses.replace(SMALL, vocab_size=9)
    params = Params(
        target=params_of(SMALL), drafter=models.with_shared_tables(params_of(config))
    )
    target = strata.targets.singleton(SMALL, max_length=16)
    decoder = strata.speculative_decoder(target, mtp(num_draft_tokens=1))
    state = decoder.init(params, [1, 2])
    with pytest.raises(ValueError, match=r"logits must have shape \(8,\), got \(9,\)"):
        decoder.step(params, state)


def test_a_head_given_by_itself_drafts_as_the_shared_one():
    params = params_of(CONFIG)
    both = Params(
        target=dataclasses.replace(params, mtp=None),
        drafter=models.with_shared_tables(params),
    )
    windows = [
        jax.jit(TOKEN.step)(each, TOKEN.init(each, PROMPT, seed=2))[1]
        for each in (params, both)
    ]
    assert same_bits(*windows)
