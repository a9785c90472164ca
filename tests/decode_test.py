"""The loop: where it stops, what it refuses, and that drafts change no token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import DecodingError, FinishReason, Params, RowKind, Status
from strata_jax.models import LlamaConfig, random_params
from strata_jax.targets import TabularParams

_ABSENT, _OFFERED, _NULL = (int(kind) for kind in RowKind)
_VOCAB, _SIZE, _DRAFTS = 8, 16, 4


def cycle_params(bad_row=None):
    """A target that counts: after t comes t + 1, for sure."""
    logits = np.full((_VOCAB, _VOCAB), -np.inf, np.float32)
    logits[np.arange(_VOCAB), (np.arange(_VOCAB) + 1) % _VOCAB] = 0.0
    if bad_row is not None:
        logits[bad_row] = np.nan
    return TabularParams(logits=jnp.asarray(logits))


@functools.cache
def counting(verifier="exact_match", wrong=()):
    """A decoder whose script counts as well, but for `wrong` positions."""
    script = np.eye(_VOCAB)[np.arange(_SIZE) % _VOCAB]
    for position in wrong:
        script[position] = np.roll(script[position], 3)
    decoder = strata.speculative_decoder(
        strata.targets.tabular(_VOCAB, max_length=_SIZE),
        strata.drafters.scripted(script, num_draft_tokens=_DRAFTS),
        verifier=getattr(strata.verifiers, verifier)(),
    )
    return decoder, jax.jit(decoder.step)


def prompt_of(length):
    return [token % _VOCAB for token in range(length)]


def count_on(start, length):
    return [token % _VOCAB for token in range(start, start + length)]


def run_to_end(decoder, step, params, prompt, **settings):
    """Returns the windows until the request has ended, and the last state."""
    state = decoder.init(params, prompt, **settings)
    windows = []
    while int(state.finish_reason) == FinishReason.RUNNING:
        state, window = step(params, state)
        windows.append(window)
        assert len(windows) <= _SIZE
    return windows, state


def host_leaves(state):
    state = state.replace(request_key=jax.random.key_data(state.request_key))
    return [np.array(leaf) for leaf in jax.tree.leaves(state)]


def check_no_op(step, params, state):
    """A further window changes no bit of the state and emits nothing."""
    before = host_leaves(state)
    after, window = step(params, state)
    for one, other in zip(before, host_leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(window.verdict.num_emitted) == 0
    assert int(window.verdict.num_accepted) == 0
    assert int(window.verdict.status) == 0
    assert window.verdict.tokens.tolist() == [-1] * (_DRAFTS + 1)
    assert window.proposal.kind.tolist() == [_ABSENT] * _DRAFTS


# Budget, context, EOS.


@pytest.mark.parametrize("verifier", ["exact_match", "token"])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 4, 5, 6, 9, 10, 11])
def test_the_budget_is_met_exactly(budget, verifier):
    decoder, step = counting(verifier)
    params = cycle_params()
    windows, state = run_to_end(
        decoder, step, params, prompt_of(4), max_new_tokens=budget
    )
    assert strata.output_tokens(state).tolist() == count_on(4, budget)
    assert int(state.finish_reason) == FinishReason.LENGTH
    left = budget
    for window in windows:
        offered = window.proposal.kind.tolist().count(_OFFERED)
        # Limited before the draw: all that is offered here is also emitted.
        assert offered == min(_DRAFTS, left - 1)
        assert window.proposal.kind.tolist() == (
            [_OFFERED] * offered + [_ABSENT] * (_DRAFTS - offered)
        )
        assert int(window.verdict.num_emitted) == offered + 1
        left -= offered + 1
    assert left == 0
    assert len(windows) == -(-budget // (_DRAFTS + 1))
    check_no_op(step, params, state)


@pytest.mark.parametrize("length", [1, 5, 10, 11, 12, 13, 14, 15, 16])
def test_the_context_is_filled_and_no_more(length):
    decoder, step = counting()
    params = cycle_params()
    windows, state = run_to_end(
        decoder, step, params, prompt_of(length), max_new_tokens=100
    )
    assert strata.output_tokens(state).tolist() == count_on(length, _SIZE - length)
    assert int(state.context.length) == _SIZE
    assert int(state.finish_reason) == FinishReason.LENGTH
    current = length
    for window in windows:
        wanted = max(min(_DRAFTS, _SIZE - current - 1), 0)
        assert window.proposal.kind.tolist().count(_OFFERED) == wanted
        assert window.proposal.kind.tolist().count(_NULL) == 0
        current += int(window.verdict.num_emitted)
    check_no_op(step, params, state)


@pytest.mark.parametrize("eos", [4, 5, 6, 7, 0, 1])
def test_eos_ends_the_stream_wherever_it_stands_in_the_window(eos):
    decoder, step = counting()
    params = cycle_params()
    windows, state = run_to_end(
        decoder, step, params, prompt_of(4), eos_ids=[eos], max_new_tokens=10
    )
    wanted = count_on(4, (eos - 4) % _VOCAB + 1)
    assert strata.output_tokens(state).tolist() == wanted
    assert int(state.finish_reason) == FinishReason.EOS
    last = windows[-1].verdict
    count = int(last.num_emitted)
    assert last.tokens.tolist()[count - 1] == eos
    assert last.tokens.tolist()[count:] == [-1] * (_DRAFTS + 1 - count)
    assert int(last.num_accepted) <= count
    check_no_op(step, params, state)


def test_eos_in_the_prompt_ends_nothing():
    decoder, step = counting()
    _, state = run_to_end(
        decoder, step, cycle_params(), [4], eos_ids=[4], max_new_tokens=3
    )
    # Rows of this script are wrong for the prompt; the target counts on.
    assert strata.output_tokens(state).tolist() == [5, 6, 7]


def test_eos_and_budget_on_the_same_token():
    decoder, step = counting()
    for eos, reason in ((6, FinishReason.EOS), (7, FinishReason.LENGTH)):
        _, state = run_to_end(
            decoder, step, cycle_params(), prompt_of(4), eos_ids=[eos], max_new_tokens=3
        )
        assert strata.output_tokens(state).tolist() == [4, 5, 6]
        assert int(state.finish_reason) == reason


def test_several_eos_ids_and_min_tokens():
    decoder, step = counting()
    params = TabularParams(logits=jnp.zeros((_VOCAB, _VOCAB)))
    for seed in range(10):
        _, state = run_to_end(
            decoder,
            step,
            params,
            [0],
            seed=seed,
            eos_ids=[1, 2, 3, 4],
            min_tokens=4,
            max_new_tokens=12,
        )
        tokens = strata.output_tokens(state).tolist()
        ends = [place for place, token in enumerate(tokens) if token in (1, 2, 3, 4)]
        # Banned for four tokens, in every row of a window; then it ends the text.
        assert all(place >= 4 for place in ends)
        assert ends in ([], [len(tokens) - 1])


def test_no_tokens_are_asked_for():
    decoder, step = counting()
    params = cycle_params()
    state = decoder.init(params, prompt_of(3), max_new_tokens=0)
    assert int(state.finish_reason) == FinishReason.LENGTH
    check_no_op(step, params, state)
    state, verdicts = strata.decode(decoder, params, state, 3)
    assert strata.output_tokens(state).tolist() == []
    assert verdicts.num_emitted.tolist() == [0, 0, 0]


def test_later_windows_of_a_scan_are_no_ops():
    decoder, step = counting()
    params = cycle_params()
    state = decoder.init(params, prompt_of(4), eos_ids=[6], max_new_tokens=10)
    one, _ = step(params, state)
    state = decoder.init(params, prompt_of(4), eos_ids=[6], max_new_tokens=10)
    many, verdicts = strata.decode(decoder, params, state, 5)
    for first, last in zip(host_leaves(one), host_leaves(many), strict=True):
        np.testing.assert_array_equal(first, last)
    assert verdicts.num_emitted.tolist() == [3, 0, 0, 0, 0]
    assert int(many.window) == 1


# Faults.


def test_nothing_is_emitted_from_a_bad_row_and_nothing_is_lost():
    decoder, step = counting()
    params = cycle_params(bad_row=6)
    windows, state = run_to_end(decoder, step, params, prompt_of(4), max_new_tokens=10)
    # Drafts 4, 5, 6, 7: the row after 6 is bad, in the middle of the window.
    assert strata.output_tokens(state).tolist() == [4, 5, 6]
    verdict = windows[-1].verdict
    assert verdict.tokens.tolist() == [4, 5, 6, -1, -1]
    assert int(verdict.num_emitted) == int(verdict.num_accepted) == 3
    assert int(verdict.status) == int(state.status) == Status.NON_FINITE_LOGITS
    assert int(state.finish_reason) == FinishReason.FAILED
    check_no_op(step, params, state)


@pytest.mark.parametrize("bad_row", [3, 4, 6, 7, 0])
def test_decode_raises_with_the_tokens_so_far(bad_row):
    decoder, _ = counting()
    params = cycle_params(bad_row=bad_row)
    wanted = count_on(4, (bad_row - 4) % _VOCAB + 1) if bad_row != 3 else []
    state = decoder.init(params, prompt_of(4), max_new_tokens=10)
    with pytest.raises(DecodingError, match="NON_FINITE_LOGITS") as raised:
        strata.decode(decoder, params, state, 5)
    assert raised.value.tokens.tolist() == wanted
    assert raised.value.status == Status.NON_FINITE_LOGITS
    state = decoder.init(params, prompt_of(4), max_new_tokens=10)
    state, _ = strata.decode(decoder, params, state, 5, throw=False)
    assert strata.output_tokens(state).tolist() == wanted
    assert int(state.status) == Status.NON_FINITE_LOGITS


def test_a_bad_row_behind_a_rejection_is_not_reached():
    # The draft at position 5 is wrong, the row after it is never used.
    decoder, step = counting(wrong=(5,))
    params = cycle_params(bad_row=0)
    state = decoder.init(params, prompt_of(4), max_new_tokens=10)
    state, window = step(params, state)
    # Token 0 = 5 + 3 mod 8 is what the script drafts there.
    assert window.proposal.tokens.tolist()[1] == 0
    assert np.isnan(params.logits[0]).all()
    assert window.verdict.tokens.tolist() == [4, 5, -1, -1, -1]
    assert int(state.status) == 0
    assert int(state.finish_reason) == FinishReason.RUNNING


def test_everything_banned_is_a_fault_too():
    decoder, step = counting()
    params = cycle_params()
    state = decoder.init(params, prompt_of(4), logit_bias={6: -np.inf})
    state, window = step(params, state)
    assert window.verdict.tokens.tolist() == [4, 5, -1, -1, -1]
    assert int(state.status) == Status.EMPTY_SUPPORT


def test_eos_before_a_bad_row_ends_the_request_well():
    decoder, step = counting()
    params = cycle_params(bad_row=5)
    _, state = run_to_end(decoder, step, params, prompt_of(4), eos_ids=[5])
    assert strata.output_tokens(state).tolist() == [4, 5]
    assert int(state.finish_reason) == FinishReason.EOS
    assert int(state.status) == 0


def test_a_running_request_without_room_is_a_fault():
    decoder, step = counting()
    params = cycle_params()
    state = decoder.init(params, prompt_of(4))
    full = state.context.replace(length=jnp.asarray(_SIZE, jnp.int32))
    state, window = step(params, state.replace(context=full))
    assert int(state.status) == Status.CACHE_FULL
    assert int(state.finish_reason) == FinishReason.FAILED
    assert int(window.verdict.num_emitted) == 0
    check_no_op(step, params, state)


def test_trace_changes_no_bit():
    decoder, _ = counting("token")
    params = TabularParams(
        logits=jnp.asarray(
            np.random.default_rng(0).normal(size=(_VOCAB, _VOCAB)), float
        )
    )
    for seed in range(3):
        states, outputs = [], []
        for trace in (False, True):
            state = decoder.init(params, [0], seed=seed)
            state, output = strata.decode(decoder, params, state, 6, trace=trace)
            states.append(host_leaves(state))
            outputs.append(output.verdict if trace else output)
        for pairs in (states, [jax.tree.leaves(output) for output in outputs]):
            for one, other in zip(*pairs, strict=True):
                np.testing.assert_array_equal(one, other)


def test_num_windows_is_checked():
    decoder, _ = counting()
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match="num_windows"):
            strata.decode(decoder, cycle_params(), None, wrong)


# Contract R1: in exact-match mode drafts change no token.

_TEXT_VOCAB, _TEXT_SIZE = 5, 28
_PROMPT = [1, 3, 1]
_SETTINGS = {
    "temperature": 0.9,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "min_p": 0.02,
    "max_new_tokens": 22,
}


def random_table(seed):
    logits = np.random.default_rng(seed).normal(size=(_TEXT_VOCAB, _TEXT_VOCAB)) * 1.5
    return TabularParams(logits=jnp.asarray(logits, jnp.float32))


def adaptive_gate():
    """A stop that looks at the windows before this one, through its own state."""

    def decide(settings, context, probs):
        return strata._types.GateDecision(
            attempt=context.state > -2.0,
            admit=jnp.ones_like(probs),
            go_on=probs >= 0,
        )

    def update(state, proposal, verdict):
        is_rejection = verdict.source == strata.Source.REJECTION
        return jnp.where(is_rejection, state - 1.0, 0.0)

    return strata.gates.gate(decide, init=lambda: jnp.zeros(()), update=update)


def make_parts(name):
    drafters, gates = strata.drafters, strata.gates
    tabular = functools.partial(strata.targets.tabular, _TEXT_VOCAB)
    script = np.random.default_rng(5).dirichlet(np.ones(_TEXT_VOCAB), _TEXT_SIZE)
    suffix = functools.partial(drafters.suffix, vocab_size=_TEXT_VOCAB, min_match=1)
    return {
        "none": (None, None, None),
        "suffix": (suffix(num_draft_tokens=1), None, None),
        "suffix_long": (suffix(num_draft_tokens=6), adaptive_gate(), None),
        "model": (
            drafters.model(tabular(max_length=_TEXT_SIZE), num_draft_tokens=3),
            gates.picked(0.4),
            None,
        ),
        "model_sampled": (
            drafters.model(tabular(max_length=_TEXT_SIZE), num_draft_tokens=4),
            gates.all_of(
                gates.include_then_stop(0.3),
                gates.soft(lambda settings, context, probs: jnp.sqrt(probs)),
            ),
            "sample",
        ),
        "scripted": (
            drafters.scripted(script, num_draft_tokens=2),
            gates.top(0.3),
            "sample",
        ),
    }[name]


@functools.cache
def r1_decoder(name, verifier="exact_match"):
    drafter, gate, rule = make_parts(name)
    return strata.speculative_decoder(
        strata.targets.tabular(_TEXT_VOCAB, max_length=_TEXT_SIZE),
        drafter,
        gate,
        getattr(strata.verifiers, verifier)(),
        draft_rule=rule,
    )


def generate(decoder, seed, context=None, **settings):
    params = Params(target=random_table(seed % 5), drafter=random_table(100 + seed % 3))
    state = decoder.init(
        params, context or _PROMPT, seed=seed, **{**_SETTINGS, **settings}
    )
    state, verdicts = strata.decode(decoder, params, state, 22)
    assert int(state.finish_reason) == FinishReason.LENGTH
    return strata.output_tokens(state).tolist(), verdicts


@functools.cache
def plain_tokens(seed):
    return tuple(generate(r1_decoder("none"), seed)[0])


@pytest.mark.parametrize(
    "name", ["suffix", "suffix_long", "model", "model_sampled", "scripted"]
)
def test_r1_tokens_are_the_same_for_every_drafter_gate_and_k(name):
    decoder = r1_decoder(name)
    num_windows = []
    for seed in range(20):
        tokens, verdicts = generate(decoder, seed)
        assert len(tokens) == 22
        assert tuple(tokens) == plain_tokens(seed), (name, seed)
        num_windows.append(int((verdicts.num_emitted > 0).sum()))
    # Drafts are accepted, else the test would compare plain decoding with itself.
    assert sum(num_windows) < 0.95 * 20 * 22


def test_r1_streams_of_two_requests_differ():
    assert len({plain_tokens(seed) for seed in range(20)}) == 20


@pytest.mark.parametrize("name", ["none", "suffix_long", "model", "scripted"])
def test_r1_resuming_continues_the_same_tokens(name):
    decoder = r1_decoder(name)
    rng = np.random.default_rng(0)
    for seed in range(20):
        tokens = plain_tokens(seed)
        place = int(rng.integers(1, 22))
        rest, _ = generate(
            decoder,
            seed,
            context=[*_PROMPT, *tokens[:place]],
            prompt_length=len(_PROMPT),
            window=int(rng.integers(0, 22)),
        )
        assert tuple(rest) == tokens, (name, seed, place)


def test_resuming_as_if_all_were_prompt_is_seen():
    # Without prompt_length the penalties count other tokens.
    decoder = r1_decoder("none")
    changed = 0
    for seed in range(20):
        tokens = plain_tokens(seed)
        rest, _ = generate(
            decoder, seed, context=[*_PROMPT, *tokens[:10]], max_new_tokens=12
        )
        changed += tuple(rest) != tokens[10:]
    assert changed > 0


def test_token_verification_depends_on_the_drafts():
    # The comparison of R1 can fail: another verifier fails it.
    tokens = [generate(r1_decoder("scripted", "token"), seed)[0] for seed in range(3)]
    assert any(tuple(found) != plain_tokens(seed) for seed, found in enumerate(tokens))


# What is refused, before anything is compiled.


def token_decoder(**parts):
    parts = {"gate": strata.gates.picked(), **parts}
    return strata.speculative_decoder(
        strata.targets.tabular(_VOCAB, max_length=_SIZE),
        strata.drafters.scripted(np.eye(_VOCAB), num_draft_tokens=2),
        verifier=strata.verifiers.token(),
        **parts,
    )


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"temperature": float("nan")}, "temperature.*nan"),
        ({"temperature": -1.0}, "temperature.*-1"),
        ({"temperature": float("inf")}, "temperature.*inf"),
        ({"top_p": float("nan")}, "top_p.*nan"),
        ({"top_p": -0.1}, "top_p.*-0.1"),
        ({"top_p": 1.5}, "top_p.*1.5"),
        ({"min_p": float("nan")}, "min_p.*nan"),
        ({"min_p": 1.1}, "min_p.*1.1"),
        ({"min_p": -0.1}, "min_p.*-0.1"),
        ({"top_k": -2}, "top_k.*-2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty.*0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty.*nan"),
        ({"max_new_tokens": -1}, "max_new_tokens.*-1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens.*2.5"),
        ({"seed": -1}, "seed.*-1"),
        ({"seed": 2**32}, "seed"),
        ({"seed": 0.5}, "seed.*0.5"),
        ({"threshold": float("nan")}, "threshold.*nan"),
        ({"threshold": -0.1}, "threshold.*-0.1"),
        ({"threshold": 1.1}, "threshold.*1.1"),
        ({"threshold": None}, "threshold has no default"),
        ({"prompt_length": 0}, "prompt_length.*0"),
        ({"prompt_length": 4}, "prompt_length.*4"),
        ({"window": -1}, "window.*-1"),
        ({"temprature": 1.0}, r"unknown settings \['temprature'\].*temperature"),
        ({"max_candidates": 4}, "unknown settings.*max_candidates"),
        ({"vocab_size": 4}, "unknown settings.*vocab_size"),
        ({"num_draft_tokens": 4}, "unknown settings.*num_draft_tokens"),
    ],
)
def test_bad_requests(bad, match):
    decoder = token_decoder()
    with pytest.raises(ValueError, match=match):
        decoder.init(cycle_params(), [0, 1, 2], **{"threshold": 0.5, **bad})


def test_a_threshold_that_is_missing():
    with pytest.raises(ValueError, match="threshold has no default: give it to init"):
        token_decoder().init(cycle_params(), [0])
    # A gate without settings takes none.
    with pytest.raises(ValueError, match=r"unknown settings \['threshold'\]"):
        token_decoder(gate=None).init(cycle_params(), [0], threshold=0.5)
    assert token_decoder().gate_settings == ("threshold",)


@pytest.mark.parametrize(
    ("context", "match"),
    [
        ([], "context is empty"),
        (np.zeros(0, np.int32), "context is empty"),
        (prompt_of(_SIZE + 1), r"context has 17 tokens, more than max_length=16"),
        ([0, 8, 1], r"context\[1\]=8 is no token id"),
        ([0, 1, -1], r"context\[2\]=-1 is no token id"),
        ([0.0, 1.0], "context must be .* token ids.*float"),
        (np.array([0.0]), "context must be .* token ids.*float"),
        ([[0, 1]], r"context must be one-dimensional|context must be a one-dim"),
        (3, "context must be a one-dimensional"),
        ([True, False], "context must be .* token ids.*bool"),
        ("abc", "context must be"),
    ],
)
def test_bad_contexts(context, match):
    with pytest.raises(ValueError, match=match):
        token_decoder().init(cycle_params(), context, threshold=0.5)


def tabular(vocab_size=_VOCAB, max_length=_SIZE):
    return strata.targets.tabular(vocab_size, max_length=max_length)


def test_parts_that_do_not_fit():
    drafters, verifiers = strata.drafters, strata.verifiers
    script = drafters.scripted(np.eye(_VOCAB), num_draft_tokens=_SIZE)
    with pytest.raises(ValueError, match=r"num_draft_tokens=16 does not fit.*16"):
        strata.speculative_decoder(tabular(), script)
    short = drafters.model(tabular(max_length=_SIZE - 1), num_draft_tokens=2)
    with pytest.raises(ValueError, match="max_length=15 is shorter"):
        strata.speculative_decoder(tabular(), short)
    for drafter in (
        drafters.model(tabular(_VOCAB + 1), num_draft_tokens=2),
        drafters.suffix(num_draft_tokens=2, vocab_size=_VOCAB + 1),
        drafters.scripted(np.eye(_VOCAB + 1), num_draft_tokens=2),
    ):
        with pytest.raises(ValueError, match="vocabulary has 9 tokens, the target's 8"):
            strata.speculative_decoder(tabular(), drafter)
    with pytest.raises(ValueError, match=r"argmax.*token.*exact_match"):
        strata.speculative_decoder(
            tabular(), verifier=verifiers.token(), draft_rule="argmax"
        )
    with pytest.raises(ValueError, match="draft_rule must be"):
        strata.speculative_decoder(tabular(), draft_rule="greedy")
    with pytest.raises(ValueError, match="max_candidates"):
        strata.speculative_decoder(tabular(), max_candidates=0)
    with pytest.raises(ValueError, match=r"'temperature'.*setting="):
        strata.speculative_decoder(
            tabular(), gate=strata.gates.picked(setting="temperature")
        )
    # These are the nearest that fit.
    fits = drafters.scripted(np.eye(_VOCAB), num_draft_tokens=_SIZE - 1)
    strata.speculative_decoder(tabular(), fits)
    strata.speculative_decoder(
        tabular(), verifier=verifiers.exact_match(), draft_rule="sample"
    )


@pytest.mark.parametrize("count", [-1, 0, 1.5])
def test_bad_numbers_of_drafts(count):
    for make in (
        lambda: strata.drafters.scripted(np.eye(3), num_draft_tokens=count),
        lambda: strata.drafters.suffix(num_draft_tokens=count, vocab_size=3),
        lambda: strata.drafters.model(tabular(), num_draft_tokens=count),
    ):
        with pytest.raises(ValueError, match="num_draft_tokens"):
            make()


def test_no_drafts_is_no_drafter():
    decoder = strata.ancestral_decoder(tabular())
    assert decoder.num_draft_tokens == 0
    assert (decoder.vocab_size, decoder.max_length) == (_VOCAB, _SIZE)


_CONFIG = LlamaConfig(
    vocab_size=11,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_position=32,
)


def test_the_batched_target_is_a_control_only():
    target = strata.targets.batched(_CONFIG, max_length=16)
    with pytest.raises(ValueError, match=r"targets.batched.*bit_exact=False"):
        strata.speculative_decoder(target)
    strata.speculative_decoder(target, bit_exact=False)
    strata.speculative_decoder(strata.targets.singleton(_CONFIG, max_length=16))


def test_a_gradient_through_the_singleton_path():
    target = strata.targets.singleton(_CONFIG, max_length=16)
    params = random_params(_CONFIG, jax.random.key(0))
    zero = jnp.zeros((), jnp.int32)

    def loss(params):
        rows, _ = target.score(
            params, target.init(params), jnp.zeros(1, jnp.int32), zero, zero + 1
        )
        return jnp.sum(rows.logits)

    def prefill_loss(params):
        tokens = jnp.zeros(4, jnp.int32)
        cache, _ = target.prefill(params, target.init(params), tokens, zero, zero + 4)
        return jnp.sum(cache.keys[0])

    for function in (loss, prefill_loss):
        with pytest.raises(ValueError, match=r"no gradient.*train with the batched"):
            jax.eval_shape(jax.grad(function), params)
    # The remedy that the message names does have one.
    gradient = jax.jit(
        jax.grad(
            lambda params: jnp.sum(
                strata.models.forward(_CONFIG, params, jnp.zeros(3, jnp.int32))
            )
        )
    )(params)
    assert np.isfinite(gradient.final_norm).all()


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("draft", (_DRAFTS + 1, 2), "draws.draft must have shape"),
        ("draft", (_DRAFTS,), "draws.draft must have shape"),
        ("gate", (_DRAFTS, 1), "draws.gate must have shape"),
        ("accept", (_DRAFTS - 1,), "draws.accept must have shape"),
        ("residual", (1,), "draws.residual must have shape"),
        ("pick", (_DRAFTS, 2), "draws.pick must have shape"),
    ],
)
def test_draws_of_a_wrong_shape(name, shape, match):
    decoder, _ = counting("token")
    params = cycle_params()
    state = decoder.init(params, [0])
    draws = jax.eval_shape(decoder.step, params, state)[1].draws
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    if name in ("draft", "gate"):
        draws = draws.replace(**{name: array})
    else:
        draws = draws.replace(verifier=draws.verifier.replace(**{name: array}))
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(decoder.step, params, state, draws)


def test_given_draws_replace_the_derived_ones():
    decoder, step = counting("token")
    params = TabularParams(logits=jnp.zeros((_VOCAB, _VOCAB)))
    states = [decoder.init(params, [0], seed=seed) for seed in (0, 1)]
    windows = [step(params, state)[1] for state in states]
    _, replayed = step(params, states[0], draws=windows[1].draws)
    for one, other in zip(
        jax.tree.leaves(windows[1]), jax.tree.leaves(replayed), strict=True
    ):
        np.testing.assert_array_equal(one, other)
