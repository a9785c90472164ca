"""The suffix root: eligibility, which rows are whose, and what the base still does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import Context, Drafter, RowKind, Status, drafters, gates, testing
from strata_jax._types import DraftRow
from strata_jax.sampling import count_tokens, sampling_settings
from strata_jax.targets import TabularParams
from strata_jax.testing import _oracle as oracle

_ABSENT, _OFFERED, _NULL = (int(kind) for kind in RowKind)
_SIZE, _VOCAB_SIZE = 80, 8  # S, larger than every text here, and V
_MIN_MATCH, _MAX_MATCH = 2, 32
_NUM_BASE, _NUM_LOOKUP = 3, 2
_NUM_ROWS = _NUM_BASE + _NUM_LOOKUP
_RATES = (0.75, 0.88, 0.93, 0.96)
_ALL_ELIGIBLE = (1.0, 1.0, 1.0, 1.0)


def counting_base(num_draft_tokens=_NUM_BASE):
    """Row i is `params[i]`; the state counts the rows that were made."""

    def propose(params, state, context, offer):
        del context

        def row(carry, step):
            return carry + 1, DraftRow(params[step.row], jnp.any(params[step.row] > 0))

        return offer(row, state)

    return Drafter(
        init=lambda params, context, features: jnp.zeros((), jnp.int32),
        propose=propose,
        commit=lambda params, state, committed: state - committed.num_kept,
        num_draft_tokens=num_draft_tokens,
        vocab_size=_VOCAB_SIZE,
        max_length=_SIZE,
    )


def short_context():
    return Context(tokens=jnp.zeros(1, jnp.int32), length=jnp.int32(1))


_DRAFTER = drafters.suffix_root(
    counting_base(),
    min_match=_MIN_MATCH,
    max_match=_MAX_MATCH,
    num_lookup_tokens=_NUM_LOOKUP,
)


def build(row_fn, carry, gate, context, limit, uniforms, threshold):
    return drafters.build_proposal(
        row_fn,
        carry,
        num_draft_tokens=_NUM_ROWS,
        limit=limit,
        gate=gate,
        gate_settings={"threshold": threshold},
        gate_state=(),
        sampling=sampling_settings(_VOCAB_SIZE),
        counts=count_tokens(
            context.tokens, context.length, context.length, _VOCAB_SIZE
        ),
        context=context,
        draft_uniforms=uniforms,
        gate_uniforms=jnp.zeros(_NUM_ROWS),
        draft_rule="sample",
        max_candidates=None,
        dtype=jnp.float32,
    )


@functools.cache
def compiled(gate_name):
    gate = getattr(gates, gate_name)()

    @jax.jit
    def run(rows, rates, context, limit, uniforms, threshold):
        records = []

        def offer(row_fn, carry):
            proposal, record, carry = build(
                row_fn, carry, gate, context, limit, uniforms, threshold
            )
            records.append(record)
            return proposal, carry

        state = _DRAFTER.init(rows, context, None).replace(acceptance_rates=rates)
        proposal, state = _DRAFTER.propose(rows, state, context, offer)
        return proposal, records[0], state

    return run


def propose(
    text,
    rows,
    uniforms: Any = 0.0,
    *,
    rates=_ALL_ELIGIBLE,
    threshold=0.0,
    limit=_NUM_ROWS,
    gate="picked",
):
    """Returns (kinds, drawn tokens, measure, rows that the base made)."""
    # A decoy behind the text.
    tokens = np.random.default_rng(0).integers(0, _VOCAB_SIZE, _SIZE).astype(np.int32)
    tokens[: len(text)] = text
    uniforms = np.asarray(uniforms, np.float32)
    if uniforms.ndim < 2:
        # The block uniform does not count below 257 tokens.
        token = np.broadcast_to(uniforms, _NUM_ROWS)
        uniforms = np.stack([np.zeros(_NUM_ROWS), token], axis=1)
    proposal, record, state = compiled(gate)(
        jnp.asarray(rows, jnp.float32),
        jnp.asarray(rates, float),
        Context(tokens=jnp.asarray(tokens), length=jnp.asarray(len(text), jnp.int32)),
        jnp.asarray(limit, jnp.int32),
        jnp.asarray(uniforms, jnp.float32),
        jnp.asarray(threshold, float),
    )
    assert int(record.status) == Status.OK
    np.testing.assert_array_equal(state.acceptance_rates, np.asarray(rates, np.float32))
    return (
        proposal.kind.tolist(),
        record.tokens.tolist(),
        np.asarray(proposal.measure),
        int(state.base),
    )


def always(*tokens):
    """Rows of the base that are sure of these tokens."""
    return np.eye(_VOCAB_SIZE)[list(tokens)]


def between(first, second, rest, share=0.75):
    """Row 0 hesitates, and draws `second` from the uniform `share` on."""
    row = np.zeros(_VOCAB_SIZE)
    row[first], row[second] = share, 1 - share
    # Token order decides which uniforms draw what.
    assert first < second
    return np.stack([row, *always(*rest)])


# The suffix (1, 2) was followed by 5, 6, 7, 1, 2.
_TEXT = [0, 1, 2, 5, 6, 7, 1, 2]


def test_the_root_is_admitted_below_the_threshold_and_its_chain_follows():
    rows = between(3, 5, (3, 3))
    kind, drawn, measure, made = propose(_TEXT, rows, 0.8, threshold=0.5)
    assert kind == [_OFFERED] * 5
    assert drawn == [5, 6, 7, 1, 2]
    # Row 0 is drawn from q and judged by q; the others are point masses.
    np.testing.assert_array_equal(measure, [rows[0], *always(6, 7, 1, 2)])
    assert made == 1


def test_another_draw_leaves_the_chain_to_the_base():
    rows = between(3, 5, (3, 4))
    kind, drawn, measure, made = propose(_TEXT, rows, 0.7, threshold=0.5, limit=3)
    assert (kind, drawn) == ([_OFFERED] * 3 + [_ABSENT] * 2, [3, 3, 4, -1, -1])
    # The root's mass is part of the measure whatever was drawn.
    np.testing.assert_array_equal(measure[:3], rows)
    assert made == 3


def test_a_draw_that_neither_admits_is_null():
    rows = between(3, 5, (3, 4))
    rows[0, 4], rows[0, 5] = 0.125, 0.125
    kind, drawn, measure, made = propose(_TEXT, rows, 0.8, threshold=0.5)
    assert (kind, drawn) == ([_NULL] + [_ABSENT] * 4, [4, -1, -1, -1, -1])
    np.testing.assert_array_equal(np.flatnonzero(measure[0]), [3, 5])
    assert made == 1


def test_a_gate_that_does_not_attempt_the_row_admits_the_root_alone():
    rows = between(3, 5, (3, 4))
    alone = np.where(np.arange(_VOCAB_SIZE) == 5, rows[0], 0)
    options = {"gate": "top", "threshold": 0.9}
    kind, drawn, measure, _ = propose(_TEXT, rows, 0.8, **options)
    assert (kind, drawn) == ([_OFFERED] * 5, [5, 6, 7, 1, 2])
    np.testing.assert_array_equal(measure[0], alone)
    kind, drawn, measure, _ = propose(_TEXT, rows, 0.7, **options)
    assert (kind, drawn) == ([_NULL] + [_ABSENT] * 4, [3, -1, -1, -1, -1])
    np.testing.assert_array_equal(measure[0], alone)
    # Without a root the row is not attempted at all.
    kind, *_ = propose(_TEXT[:-1], rows, 0.8, **options)
    assert kind == [_ABSENT] * 5


def test_a_root_without_mass_is_never_drawn():
    _, drawn, measure, made = propose(_TEXT, always(3, 3, 4), 0.5, limit=3)
    assert drawn[:3] == [3, 3, 4]
    assert measure[0, 5] == 0
    assert made == 3


@pytest.mark.parametrize(
    ("text", "root"),
    [
        (_TEXT, 5),
        ([1, 2, 5, 6, 7, 0, 2], None),  # one token matches, two are asked for
        ([0, 1, 2], None),  # nothing matches
        ([5, 5, 5, 5], None),  # the root would be all of the continuation
        ([6, 5, 6, 5, 6, 5], 6),
    ],
)
def test_eligibility_is_decided_by_the_text(text, root):
    _, _, measure, _ = propose(text, between(5, 6, (5, 5)), threshold=1.0)
    assert np.flatnonzero(measure[0]).tolist() == ([] if root is None else [root])


def repeated(match):
    """A text whose last `match` tokens occur once more, followed by 5, 6, 4."""
    copy = np.random.default_rng(match).integers(0, 3, match).tolist()
    return [7, *copy, 5, 6, 4, *copy]


@pytest.mark.parametrize(
    ("match", "bucket"),
    [(2, 0), (5, 0), (6, 1), (11, 1), (12, 2), (23, 2), (24, 3), (34, 3)],
)
def test_eligibility_is_decided_by_the_rate_of_the_length(match, bucket):
    text = repeated(match)
    rows = between(3, 5, (3, 3))
    for eligible_bucket in range(4):
        rates = np.full(4, 0.84)
        rates[eligible_bucket] = 0.85
        _, _, measure, _ = propose(text, rows, threshold=1.0, rates=rates)
        assert (measure[0, 5] > 0) == (eligible_bucket == bucket)


def test_the_given_rates_ask_for_six_tokens():
    state = _DRAFTER.init(None, short_context(), None)
    np.testing.assert_array_equal(state.acceptance_rates, jnp.asarray(_RATES, float))
    rows = between(3, 5, (3, 3))
    for match in (5, 6):
        _, _, measure, _ = propose(repeated(match), rows, threshold=1.0, rates=_RATES)
        assert (measure[0, 5] > 0) == (match == 6)


def test_rows_behind_the_end_of_the_text_are_absent():
    # What followed (5, 6) is 5, 6; the place behind the text holds a decoy.
    text = [0, 5, 6, 5, 6]
    kind, drawn, _, made = propose(text, always(5, 0, 0))
    assert kind == [_OFFERED] * 2 + [_ABSENT] * 3
    assert drawn == [5, 6, -1, -1, -1]
    assert made == 1


def test_the_lookup_chain_goes_on_from_the_drafts():
    # (5, 6) are drafts of the base, which the text continues with 7, 1.
    text = [0, 5, 6, 7, 1, 4, 2]
    kind, drawn, measure, made = propose(text, always(3, 5, 6))
    assert kind == [_OFFERED] * 5
    assert drawn == [3, 5, 6, 7, 1]
    np.testing.assert_array_equal(measure[3:], always(7, 1))
    assert made == 3


def test_the_lookup_chain_matches_across_the_end_of_the_text():
    # Of 2 | 3, 3, 4 the last three were there already; two would point at 6 instead.
    text = [2, 3, 3, 4, 7, 1, 3, 4, 6, 0, 2]
    kind, drawn, _, _ = propose(text, always(3, 3, 4))
    assert (kind, drawn) == ([_OFFERED] * 5, [3, 3, 4, 7, 1])


def test_the_lookup_chain_continues_with_committed_text_only():
    # (4, 5) is followed by the draft 4 alone: a draft is no continuation.
    kind, drawn, _, _ = propose([0, 2, 1, 4], always(5, 4, 5))
    assert (kind, drawn) == ([_OFFERED] * 3 + [_ABSENT] * 2, [5, 4, 5, -1, -1])


def test_the_limit_cuts_and_changes_no_row_before_it():
    for text, rows in (
        (_TEXT, between(3, 5, (3, 3))),
        ([0, 5, 6, 7, 1, 4, 2], always(3, 5, 6)),
    ):
        kind, drawn, measure, made = propose(text, rows, 0.8)
        assert kind == [_OFFERED] * 5
        for limit in range(6):
            found = propose(text, rows, 0.8, limit=limit)
            cut = 5 - limit
            assert found[0] == kind[:limit] + [_ABSENT] * cut
            assert found[1] == drawn[:limit] + [-1] * cut
            np.testing.assert_array_equal(found[2][:limit], measure[:limit])
            assert not found[2][limit:].any()
            assert found[3] == min(made, limit)


def longest_match(text, length):
    """Returns the continuation, in text[:length], of the longest match of the text."""
    best, continuation = 0, []
    for end in range(1, length):
        match = 0
        limit = min(end, _MAX_MATCH)
        while match < limit and text[end - 1 - match] == text[-1 - match]:
            match += 1
        if match >= max(best, 1):
            best, continuation = match, text[end:length]
    return (best, continuation) if best >= _MIN_MATCH else (0, [])


def expected_rows(text, rows, uniforms, threshold, rates, limit):
    """Returns (kinds, drawn, rows of the base): the rule, one row after another."""
    match, suffix = longest_match(text, len(text))
    rate = rates[sum(match >= border for border in (6, 12, 24))]
    is_eligible = len(suffix) > 1 and rate >= 0.85
    kinds, drawn, made = [], [], 0
    for row in range(limit):
        if row and is_eligible and drawn[0] == suffix[0]:
            point = suffix[row : row + 1]
        elif row < _NUM_BASE:
            made += 1
            point = None
        else:
            point = longest_match([*text, *drawn], len(text))[1][:1]
        if point == [] or (point is None and not rows[row].any()):
            break
        probs = np.asarray(rows[row] if point is None else always(*point)[0])
        token = oracle.oracle_draw(probs.astype(np.float32), *uniforms[row])
        is_root = row == 0 and is_eligible and token == suffix[0]
        drawn.append(token)
        kinds.append(_OFFERED if is_root or probs[token] >= threshold else _NULL)
        if kinds[-1] == _NULL:
            break
    return kinds, drawn, made


def test_random_windows_against_the_rule():
    seen = set()
    for seed in range(400):
        rng = np.random.default_rng(seed)
        alphabet = int(rng.choice([2, 3, _VOCAB_SIZE]))
        length = int(rng.integers(1, _SIZE - _NUM_ROWS))
        text = rng.integers(0, alphabet, length).tolist()
        if seed % 2 and length > 20:
            text[-length // 3 :] = text[: length // 3 + (length % 3 > 0)]
        rows = np.zeros((_NUM_BASE, _VOCAB_SIZE))
        weights = rng.integers(1, 8, (_NUM_BASE, alphabet))
        # Sixteenths, so that the oracle and the program see the same running sums.
        for row, weight in zip(rows, weights, strict=True):
            counts = rng.multinomial(16, weight / weight.sum())
            row[:alphabet] = counts / 16
        if seed % 7 == 0:
            rows[int(rng.integers(_NUM_BASE))] = 0
        uniforms = (rng.integers(0, 2**24, (_NUM_ROWS, 2)) * 2.0**-24).astype("f4")
        threshold = float(rng.choice([0.0, 0.25, 0.5]))
        rates = rng.uniform(0.8, 1.0, 4).astype(np.float32)
        limit = int(rng.integers(_NUM_ROWS + 1))
        kinds, drawn, made = expected_rows(
            text, rows, uniforms, threshold, rates, limit
        )
        found = propose(
            text, rows, uniforms, rates=rates, threshold=threshold, limit=limit
        )
        missing = _NUM_ROWS - len(kinds)
        assert found[0] == kinds + [_ABSENT] * missing, seed
        assert found[1] == drawn + [-1] * missing, seed
        assert found[3] == made, seed
        follows = made < min(len(drawn), _NUM_BASE)
        seen.add((follows, len(kinds), kinds[-1:] == [_NULL]))
    # Windows of all lengths, with the suffix and with the base, with and without NULL.
    assert {(True, 2, False), (True, 5, False)} < seen
    assert {(False, 5, False), (False, 3, False), (False, 2, True)} < seen


def build_one_row(gate, also_admit):
    def row(carry, step):
        del step
        probs = jnp.full(_VOCAB_SIZE, 1 / _VOCAB_SIZE)
        return carry, DraftRow(probs, jnp.asarray(True), also_admit)

    limit, uniforms = jnp.int32(1), jnp.zeros((_NUM_ROWS, 2))
    threshold = jnp.asarray(0.0, float)
    return build(row, (), gate, short_context(), limit, uniforms, threshold)[:2]


def test_what_a_row_also_admits_hides_no_fault_of_the_gate():
    gate = gates.soft(lambda settings, context, probs: jnp.full_like(probs, 2.0))
    proposal, record = build_one_row(gate, jnp.full(_VOCAB_SIZE, True))
    assert proposal.kind.tolist() == [_ABSENT] * _NUM_ROWS
    assert int(record.status) == Status.INVALID_GATE


def test_what_a_row_also_admits_has_an_entry_for_each_token():
    with pytest.raises(ValueError, match="also_admit must have shape"):
        build_one_row(gates.always(), jnp.full(1, True))


def tabular_params(seed):
    random = np.random.default_rng(seed)
    table = random.dirichlet(np.full(4, 0.5), (4, 4))
    return TabularParams(jnp.log(jnp.asarray(table, float)))


@pytest.mark.parametrize(
    ("num_lookup_tokens", "gate"),
    [
        (2, gates.picked(0.4)),
        pytest.param(0, gates.picked(0.4), marks=pytest.mark.slow),
        pytest.param(2, None, marks=pytest.mark.slow),
        pytest.param(1, gates.top(0.6), marks=pytest.mark.slow),
    ],
)
def test_proposals_are_those_of_a_fresh_drafter(num_lookup_tokens, gate):
    target = strata.targets.tabular(4, max_length=64, order=2)
    drafter = drafters.suffix_root(
        drafters.model(target, num_draft_tokens=2),
        min_match=1,
        min_acceptance_rate=0.0,
        num_lookup_tokens=num_lookup_tokens,
    )
    params = strata.Params(target=tabular_params(0), drafter=tabular_params(1))
    context = [0, 1, 2, 3, 1, 2]
    testing.check_drafter(drafter, target, params, context, gate=gate)


def test_commit_goes_to_the_base():
    state = _DRAFTER.init(None, short_context(), None)
    committed = strata.Committed(
        context=short_context(), features=None, num_kept=jnp.int32(3)
    )
    after = _DRAFTER.commit(None, state, committed)
    assert int(after.base) == -3
    np.testing.assert_array_equal(after.acceptance_rates, state.acceptance_rates)


def test_the_drafter_takes_after_its_base():
    assert _DRAFTER.num_draft_tokens == _NUM_ROWS
    assert (_DRAFTER.vocab_size, _DRAFTER.max_length) == (_VOCAB_SIZE, _SIZE)
    assert drafters.suffix_root(counting_base()).num_draft_tokens == _NUM_BASE


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"min_match": 0}, "min_match must be at least 1"),
        ({"min_match": 5, "max_match": 4}, "max_match must be at least 5"),
        ({"max_match": 9.0}, "max_match must be an integer"),
        ({"acceptance_rates": (0.5, 0.5)}, "acceptance_rates must hold 4 rates"),
        ({"acceptance_rates": (0.5, 0.5, 1.5, 1)}, r"acceptance_rates\[2\] must be in"),
        ({"acceptance_rates": (0.5, float("nan"), 1, 1)}, r"acceptance_rates\[1\]"),
        ({"min_acceptance_rate": -0.1}, "min_acceptance_rate must be in"),
        ({"min_acceptance_rate": "high"}, "min_acceptance_rate must be a number"),
        ({"num_lookup_tokens": -1}, "num_lookup_tokens must be at least 0"),
        ({"num_lookup_tokens": 1.5}, "num_lookup_tokens must be an integer"),
        ({"base": drafters.none()}, "base drafts nothing"),
        ({"base": drafters.model}, "call the factory"),
        ({"base": None}, "base must be a strata_jax.Drafter, got None"),
    ],
)
def test_what_the_factory_refuses(changes, match):
    options = {"base": counting_base(), **changes}
    with pytest.raises(ValueError, match=match):
        drafters.suffix_root(options.pop("base"), **options)
