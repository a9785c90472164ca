"""The drafter of a multi-token-prediction head: proposals, law and default tokens.

What a cell joins, and with what, is in cases_test.py (bug-049); the head's arithmetic
in models/mtp_test.py.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_weights import moe_weights, quick_compilation

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
LIKELY = (3, 4, 5, 6)
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


def decoder_of(num_draft_tokens, verifier=None):
    drafter = mtp(num_draft_tokens=num_draft_tokens) if num_draft_tokens else None
    return strata.speculative_decoder(
        TARGET, drafter, strata.gates.picked(0.0), verifier
    )


DECODER = decoder_of(3)


@functools.cache
def params_of(config):
    return moe_weights(config)


def start(decoder, context, **settings):
    """A request in which a few tokens are likely, so that drafts are accepted."""
    settings = {"logit_bias": dict.fromkeys(LIKELY, 4.0), **settings}
    # It knows neither K nor the verifier: one program makes all states.
    state = DECODER.init(params_of(CONFIG), context, **settings)
    if not decoder.num_draft_tokens:
        state = dataclasses.replace(state, drafter_state=())
    return state


def run(decoder, state, num_windows=NUM_TOKENS):
    return strata.decode(decoder, params_of(CONFIG), state, num_windows, trace=True)


def same_bits(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_proposals_are_those_of_a_fresh_drafter():
    num_accepted = testing.check_drafter(
        mtp(num_draft_tokens=3),
        TARGET,
        params_of(CONFIG),
        PROMPT,
        gate=strata.gates.picked(0.0),
        num_windows=10,
        poison=testing.poison_cache,
        seed=3,
    )
    assert set(num_accepted) == {0, 1, 2, 3}


def check_small(drafter):
    target = strata.targets.singleton(SMALL, max_length=MAX_LENGTH)
    testing.check_drafter(
        drafter, target, params_of(SMALL), PROMPT, poison=testing.poison_cache
    )


@pytest.mark.slow
def test_a_drafter_that_pairs_a_stale_state_fails():
    drafter = mtp(num_draft_tokens=2)

    def commit(params, state, committed):
        # The row after the last one that was kept.
        features = jnp.roll(committed.features, -1, axis=0)
        return drafter.commit(params, state, committed.replace(features=features))

    with pytest.raises(testing.ConformanceError, match="T2"):
        check_small(drafter._replace(commit=commit))


@pytest.mark.slow
def test_a_drafter_that_reads_dead_cells_fails():
    drafter = mtp(num_draft_tokens=2)

    def propose(params, state, context, offer):
        dead = jnp.sum(state.cache.keys[:, context.length])
        spoiled = dataclasses.replace(state, hidden=state.hidden + 0 * dead)
        return drafter.propose(params, spoiled, context, offer)

    with pytest.raises(testing.ConformanceError, match="T2"):
        check_small(drafter._replace(propose=propose))


@pytest.mark.slow
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
    _, windows = run(DECODER, start(DECODER, [5], seed=1))
    kind = np.asarray(windows.proposal.kind)
    assert kind[0].tolist() == [RowKind.ABSENT] * 3
    assert int(windows.verdict.num_emitted[0]) == 1
    assert kind[1].tolist() == [RowKind.OFFERED] * 3


def test_eos_inside_a_window_and_a_request_that_is_over():
    num_inside, settings = 0, {"logit_bias": {5: 5.0}, "eos_ids": [5]}
    for seed in range(8):
        state, windows = run(DECODER, start(DECODER, PROMPT, seed=seed, **settings))
        if state.finish_reason != FinishReason.EOS:
            continue
        last = int(np.flatnonzero(windows.verdict.num_emitted)[-1])
        num_accepted = windows.verdict.num_accepted[last]
        if num_accepted < windows.verdict.num_emitted[last]:
            continue
        # The last token was an accepted draft; there were more.
        num_inside += 1
        assert (windows.proposal.kind[last] == RowKind.OFFERED).all()
        assert int(state.drafter_state.num_cells) == int(state.context.length) - 1
        assert np.isfinite(state.drafter_state.hidden).all()
        before = jax.tree.map(np.asarray, dataclasses.replace(state, request_key=None))
        state, windows = run(DECODER, state)
        assert not windows.verdict.num_emitted.any()
        assert (windows.proposal.kind == RowKind.ABSENT).all()
        assert same_bits(before, dataclasses.replace(state, request_key=None))
    assert num_inside >= 3


def tokens_of(decoder, seed):
    state = start(decoder, PROMPT, seed=seed, max_new_tokens=NUM_TOKENS)
    state, windows = run(decoder, state)
    return strata.output_tokens(state).tolist(), windows.verdict.num_accepted


@functools.cache
def plain_tokens():
    decoder = decoder_of(0)
    return [tokens_of(decoder, seed)[0] for seed in range(8)]


@pytest.mark.parametrize(
    "num_draft_tokens", [3, pytest.param(1, marks=pytest.mark.slow)]
)
def test_default_tokens_do_not_depend_on_the_drafter(num_draft_tokens):
    decoder = DECODER if num_draft_tokens == 3 else decoder_of(num_draft_tokens)
    num_accepted = 0
    for seed, wanted in enumerate(plain_tokens()):
        assert len(wanted) == NUM_TOKENS
        tokens, accepted = tokens_of(decoder, seed)
        assert tokens == wanted
        num_accepted += int(accepted.sum())
    assert num_accepted >= 10, num_accepted


@pytest.mark.slow
def test_the_token_verifier_fails_the_same_comparison():
    decoder = decoder_of(3, strata.verifiers.token())
    is_same = [
        tokens_of(decoder, seed)[0] == wanted
        for seed, wanted in enumerate(plain_tokens())
    ]
    assert not any(is_same)


def test_a_second_request_compiles_nothing():
    run(DECODER, start(DECODER, PROMPT))
    before = TRACES.copy()
    assert before["score"] and before["prefill"]
    run(DECODER, start(DECODER, [7], temperature=0.0, seed=9, threshold=0.5))
    changes = {"top_k": 3, "eos_ids": [4], "max_new_tokens": 5, "logit_bias": {3: 1.0}}
    run(DECODER, start(DECODER, PROMPT * 4, **changes))
    assert TRACES == before
    # Another number of windows is another program.
    state = start(DECODER, PROMPT)
    jax.eval_shape(lambda state: run(DECODER, state, 2), state)
    assert TRACES["score"] > before["score"]


# The law, with a draft vocabulary that lacks a token.

TINY = dataclasses.replace(
    SMALL,
    vocab_size=4,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    num_experts=3,
)
TEXT = [1, 2, 0]
THRESHOLD = 0.2


def with_control(drafter):
    """The drafter; or, where the flag in its params is set, a biased form of it."""

    def init(params, context, features):
        return drafter.init(params[0], context, features)

    def propose(params, state, context, offer):
        head, is_biased = params
        honest, state = drafter.propose(head, state, context, offer)
        done = drafter._replace(propose=lambda *_: (honest, state))
        biased = negative_controls.unaccounted_gate(done, THRESHOLD)
        biased, _ = biased.propose(head, state, context, offer)
        proposal = jax.tree.map(
            lambda one, other: jnp.where(is_biased, one, other), biased, honest
        )
        return proposal, state

    def commit(params, state, committed):
        return drafter.commit(params[0], state, committed)

    return drafter._replace(init=init, propose=propose, commit=commit)


def laws_of(num_draft_tokens, params, num_tokens):
    """The law with a gate, and that of the same gate unaccounted for."""
    decoder = strata.speculative_decoder(
        strata.targets.singleton(TINY, max_length=16),
        with_control(mtp(num_draft_tokens=num_draft_tokens)),
        strata.gates.picked(),
        strata.verifiers.token(),
    )
    both = [
        Params(target=params, drafter=(params, jnp.asarray(flag)))
        for flag in (False, True)
    ]
    states = [
        decoder.init(each, TEXT, threshold=threshold)
        for each, threshold in zip(both, (THRESHOLD, 0.0), strict=True)
    ]
    enumerator = audit.WindowEnumerator(decoder, both[0], states[0], batch_size=64)
    return audit.sequence_laws(
        decoder,
        audit.stack(both),
        audit.stack(states),
        num_tokens,
        enumerator=enumerator,
    )


def plain_law(params, num_tokens):
    """Products of the rows of the target, one token at a time."""
    target = strata.targets.singleton(TINY, max_length=16)
    score = jax.jit(target.score)
    law = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for tokens, probability in law.items():
            state = target.init(params)
            for position, token in enumerate([*TEXT, *tokens]):
                rows, state = score(
                    params,
                    state,
                    jnp.full(1, token, jnp.int32),
                    jnp.int32(position),
                    jnp.int32(1),
                )
            weights = np.exp(np.asarray(rows.logits[0], np.float64))
            for token, mass in enumerate(weights / weights.sum()):
                longer[(*tokens, token)] = probability * mass
        law = longer
    return law


@pytest.mark.slow
@pytest.mark.parametrize(("num_draft_tokens", "num_tokens"), [(1, 1), (2, 2)])
def test_the_law_is_the_targets(num_draft_tokens, num_tokens):
    params = moe_weights(TINY, 9)
    params = models.with_draft_vocabulary(params, [2, 0, 3])
    reference = plain_law(params, num_tokens)
    with quick_compilation():
        law, biased = laws_of(num_draft_tokens, params, num_tokens)
    assert audit.compare_laws(law, reference).worst <= 1e-5
    # Forgetting what the gate dropped is seen.
    assert audit.compare_laws(biased, reference).worst > 1e-2


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
    state = jax.eval_shape(lambda: decoder.init(params, [1, 2]))
    with pytest.raises(ValueError, match=r"logits must have shape \(8,\), got \(9,\)"):
        jax.eval_shape(decoder.step, params, state)


@pytest.mark.slow
def test_a_head_given_by_itself_starts_as_the_shared_one():
    shared = params_of(SMALL)
    alone = Params(
        target=dataclasses.replace(shared, mtp=None),
        drafter=models.with_shared_tables(shared),
    )
    target = strata.targets.singleton(SMALL, max_length=16)
    states = [init_with(target, params) for params in (shared, alone)]
    assert same_bits(*(state.drafter_state for state in states))
    assert states[0].drafter_state.hidden.any()
