"""The packet builder: which rows are made, drawn, offered, and with which measure."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import Context, RowKind, Status, gates
from strata_jax._types import DraftRow, GateDecision
from strata_jax.drafters import build_proposal
from strata_jax.sampling import count_tokens, sampling_settings
from strata_jax.testing import _oracle as oracle

_ABSENT, _OFFERED, _NULL = (int(kind) for kind in RowKind)
_PROMPT = (2, 0, 1)
# Built once, so that each is compiled once.
_ALWAYS, _PICKED, _TOP = gates.always(), gates.picked(), gates.top()
_STOPPING = gates.include_then_stop()
_ROOT = gates.soft(lambda settings, context, probs: jnp.sqrt(probs))
_HALF = gates.soft(lambda settings, context, probs: jnp.full_like(probs, 0.5))


def uniform_grid(rng, shape):
    return (rng.integers(0, 2**24, shape) * 2.0**-24).astype(np.float32)


@functools.cache
def program(decide, init, row_fn, draft_rule):
    """Compiles the builder once for a gate, a drafter and a rule."""
    gate = gates.gate(decide, init=init)

    @jax.jit
    def run(rows, available, draft, coins, limit, numbers, sampling):
        count, vocab_size = rows.shape

        def make_row(carry, step):
            return carry + 1, DraftRow(rows[step.row], available[step.row])

        prompt = jnp.asarray([*_PROMPT, 0, 0], jnp.int32)
        length = jnp.asarray(len(_PROMPT), jnp.int32)
        return build_proposal(
            row_fn or make_row,
            jnp.zeros((), jnp.int32),
            num_draft_tokens=count,
            limit=limit,
            gate=gate,
            gate_settings=numbers,
            gate_state=gate.init(),
            sampling=sampling,
            counts=count_tokens(prompt, length, length, vocab_size),
            context=Context(tokens=prompt, length=length),
            draft_uniforms=draft,
            gate_uniforms=coins,
            draft_rule=draft_rule,
            max_candidates=None,
            dtype=jnp.float32,
        )

    return run


def build(
    rows,
    gate=_ALWAYS,
    *,
    draft=0.0,
    coins=0.0,
    limit=None,
    available=True,
    draft_rule="sample",
    row_fn=None,
    sampling=None,
    **settings,
):
    """Builds a packet from `rows` `[K, V]`; the carry counts the rows that are made."""
    rows = jnp.asarray(rows, jnp.float32)
    count, vocab_size = rows.shape
    draft = np.asarray(draft, np.float32)
    if draft.ndim < 2:
        # Given by row: the block uniform does not count below 257 tokens.
        draft = np.stack([np.zeros(count), np.broadcast_to(draft, (count,))], axis=1)
    proposal, record, carry = program(gate.decide, gate.init, row_fn, draft_rule)(
        rows,
        jnp.asarray(np.broadcast_to(available, (count,))),
        jnp.asarray(draft, jnp.float32),
        jnp.asarray(np.broadcast_to(np.asarray(coins, np.float32), (count,))),
        jnp.asarray(count if limit is None else limit, jnp.int32),
        {name: jnp.asarray(value, float) for name, value in settings.items()},
        sampling or sampling_settings(vocab_size),
    )
    return (
        proposal.kind.tolist(),
        proposal.tokens.tolist(),
        np.asarray(proposal.measure),
        record.tokens.tolist(),
        Status(int(record.status)),
        int(carry),
    )


_ROWS = np.array(
    [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [0.25, 0.25, 0.5]], np.float32
)


def test_all_rows_are_offered_without_a_gate():
    kind, tokens, measure, drawn, status, made = build(_ROWS, draft=[0.5, 0.5, 0.5])
    assert kind == [_OFFERED] * 3
    assert tokens == drawn == [1, 1, 2]
    np.testing.assert_array_equal(measure, _ROWS)
    assert (status, made) == (Status.OK, 3)


def test_a_null_row_ends_the_packet():
    # Row 1 draws 2, which is not admitted; row 2 is never made.
    kind, tokens, measure, drawn, status, made = build(
        _ROWS, _PICKED, draft=[0.5, 0.9, 0.5], threshold=0.25
    )
    assert kind == [_OFFERED, _NULL, _ABSENT]
    # The token of the NULL row stays out of the proposal, its measure does not.
    assert tokens == [1, -1, -1]
    assert drawn == [1, 2, -1]
    wanted = [[0.5, 0.25, 0.25], [0, 0.75, 0], [0, 0, 0]]
    np.testing.assert_array_equal(measure, np.asarray(wanted, np.float32))
    assert (status, made) == (Status.OK, 2)


def test_an_empty_admitted_set_is_null_for_sure():
    nothing = gates.soft(lambda settings, context, probs: jnp.zeros_like(probs))
    kind, tokens, measure, drawn, status, made = build(_ROWS, nothing)
    assert (kind, tokens, drawn) == ([_NULL, _ABSENT, _ABSENT], [-1] * 3, [0, -1, -1])
    assert not measure.any()
    assert (status, made) == (Status.OK, 1)


def test_a_row_that_is_not_attempted_is_absent():
    kind, tokens, measure, drawn, status, made = build(
        _ROWS, _TOP, draft=0.5, threshold=0.6
    )
    assert kind == [_ABSENT] * 3
    assert tokens == drawn == [-1] * 3
    assert not measure.any()
    assert (status, made) == (Status.OK, 1)
    # Row 0 has .5 only; in another order rows 1 and 2 come first.
    kind, *_, made = build(_ROWS[[1, 2, 0]], _TOP, draft=0.5, threshold=0.6)
    assert (kind, made) == ([_OFFERED, _ABSENT, _ABSENT], 2)


def test_the_token_after_which_the_chain_stops_is_itself_offered():
    kind, tokens, measure, drawn, status, made = build(
        _ROWS, _STOPPING, draft=[0.0, 0.0, 0.0], threshold=0.25
    )
    # Row 1 draws token 0 of probability 1/8.
    assert kind == [_OFFERED, _OFFERED, _ABSENT]
    assert tokens == drawn == [0, 0, -1]
    np.testing.assert_array_equal(measure[:2], _ROWS[:2])
    assert not measure[2].any()
    assert (status, made) == (Status.OK, 2)


@pytest.mark.parametrize(
    ("coin", "kind"),
    [(0.0, _OFFERED), (0.4999, _OFFERED), (0.5, _NULL), (1 - 2**-24, _NULL)],
)
def test_the_coin_of_a_soft_gate(coin, kind):
    kinds, _, measure, *_ = build(_ROWS, _HALF, coins=[coin, 0, 0])
    assert kinds[0] == kind
    np.testing.assert_array_equal(measure[0], _ROWS[0] / 2)


def test_a_coin_of_zero_does_not_admit_a_token_of_admission_zero():
    kinds, *_ = build(_ROWS, _PICKED, draft=[0.9, 0, 0], threshold=0.5, coins=0)
    assert kinds[0] == _NULL


def test_coins_of_rows_are_their_own():
    assert build(_ROWS, _HALF, coins=[0.1, 0.9, 0.1])[0] == [_OFFERED, _NULL, _ABSENT]
    assert build(_ROWS, _HALF, coins=[0.1, 0.1, 0.9])[0] == [_OFFERED, _OFFERED, _NULL]


def random_gates():
    return [
        (_ALWAYS, {}, lambda q: np.ones_like(q)),
        (_PICKED, {"threshold": 0.2}, lambda q: q >= np.float32(0.2)),
        (_TOP, {"threshold": 0.4}, lambda q: np.ones_like(q)),
        (gates.entropy(), {"max_entropy": 1.4}, lambda q: np.ones_like(q)),
        (_STOPPING, {"threshold": 0.2}, lambda q: np.ones_like(q)),
        (_ROOT, {}, np.sqrt),
    ]


@pytest.mark.parametrize("index", range(6))
def test_every_packet_is_well_formed(index):
    gate, settings, admission = random_gates()[index]
    seen = set()
    for seed in range(25):
        rng = np.random.default_rng(seed)
        rows = rng.dirichlet(np.full(6, 0.4), 4).astype(np.float32)
        draft, coins = uniform_grid(rng, (4, 2)), uniform_grid(rng, 4)
        limit = int(rng.integers(0, 5))
        kind, tokens, measure, drawn, status, made = build(
            rows, gate, draft=draft, coins=coins, limit=limit, **settings
        )
        seen.add(tuple(kind))
        num_offered = kind.count(_OFFERED)
        num_null = kind.count(_NULL)
        assert num_null <= 1
        assert kind == (
            [_OFFERED] * num_offered
            + [_NULL] * num_null
            + [_ABSENT] * (4 - num_offered - num_null)
        )
        # Rows behind the one that ended the packet, or the limit, are not made.
        assert num_offered + num_null <= made <= min(limit, num_offered + num_null + 1)
        assert status == Status.OK
        for row in range(4):
            if kind[row] == _ABSENT:
                assert (tokens[row], drawn[row]) == (-1, -1)
                assert not measure[row].any()
                continue
            token = oracle.oracle_draw(rows[row], *draft[row])
            assert drawn[row] == token
            assert tokens[row] == (token if kind[row] == _OFFERED else -1)
            admit = np.asarray(admission(rows[row]), np.float32)
            wanted = rows[row] * admit
            np.testing.assert_allclose(measure[row], wanted, rtol=3e-7)
            assert np.all((measure[row] >= 0) & (measure[row] <= rows[row]))
            if index != 5:
                # The very q, bit for bit.
                np.testing.assert_array_equal(measure[row], wanted)
    assert len(seen) > 2


@pytest.mark.parametrize("index", range(6))
def test_a_limit_cuts_before_the_draw_and_changes_no_row_before_it(index):
    gate, settings, _ = random_gates()[index]
    rng = np.random.default_rng(index)
    rows = rng.dirichlet(np.full(6, 2.0), 4).astype(np.float32)
    draft, coins = uniform_grid(rng, (4, 2)), uniform_grid(rng, 4) / 4
    options = {"draft": draft, "coins": coins, **settings}
    kind, tokens, measure, drawn, _, made = build(rows, gate, **options)
    for limit in range(5):
        found = build(rows, gate, limit=limit, **options)
        assert found[0] == kind[:limit] + [_ABSENT] * (4 - limit)
        assert found[1] == tokens[:limit] + [-1] * (4 - limit)
        np.testing.assert_array_equal(found[2][:limit], measure[:limit])
        assert not found[2][limit:].any()
        assert found[3] == drawn[:limit] + [-1] * (4 - limit)
        assert found[5] == min(made, limit)


def test_no_rows_at_all():
    kind, tokens, measure, *_, made = build(np.zeros((0, 3)))
    assert (kind, tokens, measure.shape, made) == ([], [], (0, 3), 0)


@pytest.mark.parametrize(
    "bad",
    [
        [0.5, np.nan, 0.5],
        [0.5, 0.25, 0.15],
        [0.5, 0.5, 0.1],
        [1.25, -0.25, 0.0],
        [0.0, 0.0, 0.0],
        [np.inf, 0.0, 0.0],
        [-0.5, -0.25, -0.25],
        [0.5, 0.5, 2e-6],
    ],
)
@pytest.mark.parametrize("row", range(3))
def test_a_row_that_is_no_distribution(bad, row):
    rows = _ROWS.copy()
    rows[row] = bad
    kind, tokens, measure, drawn, status, made = build(rows, draft=0.5)
    assert kind == [_OFFERED] * row + [_ABSENT] * (3 - row)
    assert tokens == drawn == [1, 1, 2][:row] + [-1] * (3 - row)
    np.testing.assert_array_equal(measure[:row], _ROWS[:row])
    assert not measure[row:].any()
    assert (status, made) == (Status.UNNORMALIZED_DRAFT, row + 1)
    # A drafter that has nothing to say may leave anything in the row.
    available = np.arange(3) != row
    found = build(rows, draft=0.5, available=available)
    assert found[:2] == (kind, tokens)
    assert not found[2][row:].any()
    assert found[4] == Status.OK
    # A row that is not made is not judged.
    assert build(rows, draft=0.5, limit=row)[4] == Status.OK


def test_rounding_of_a_normalised_row_is_no_fault():
    for size in (19, 1000):
        rows = np.full((1, size), np.float32(1 / size))
        assert build(rows)[4] == Status.OK


_BAD = gates.soft(
    lambda settings, context, probs: jnp.where(
        (jnp.arange(3.0) == settings["place"]) & (context.row == 1),
        settings["value"],
        0.75,
    )
)


@pytest.mark.parametrize("value", [1.5, -0.1, np.nan, np.inf, 1 + 2**-20])
@pytest.mark.parametrize("place", [0.0, 2.0])
def test_an_admission_outside_its_range(value, place):
    kind, tokens, measure, _, status, made = build(
        _ROWS, _BAD, draft=0.5, value=value, place=place
    )
    assert kind == [_OFFERED, _ABSENT, _ABSENT]
    assert tokens == [1, -1, -1]
    assert not measure[1:].any()
    assert (status, made) == (Status.INVALID_GATE, 2)


def test_admissions_at_the_ends_of_the_range():
    ends = gates.soft(lambda settings, context, probs: jnp.asarray([0.0, 1.0, 1.0]))
    kind, _, measure, _, status, _ = build(_ROWS, ends, draft=0.5, coins=1 - 2**-24)
    assert kind == [_OFFERED] * 3
    assert not measure[:, 0].any()
    assert status == Status.OK


def test_argmax_drafts_are_draws_from_a_point_mass():
    kind, tokens, measure, *_ = build(_ROWS, draft=0.999, draft_rule="argmax")
    assert kind == [_OFFERED] * 3
    assert tokens == [0, 1, 2]
    np.testing.assert_array_equal(measure, np.eye(3, dtype=np.float32))
    # The gate still judges by q: .5 < .6.
    kind, tokens, measure, drawn, *_ = build(
        _ROWS, _PICKED, draft_rule="argmax", threshold=0.6
    )
    assert (kind[0], tokens[0], drawn[0]) == (_NULL, -1, 0)
    assert not measure.any()
    # Ties go to the lower id, whatever the uniform.
    ties = np.array([[0.25, 0.375, 0.375]])
    assert build(ties, draft=0.999, draft_rule="argmax")[1] == [1]


def test_a_row_knows_the_token_before_it_and_its_index():
    seen_rows = np.eye(4, dtype=np.float32)

    def after(carry, step):
        # The successor of the previous token; the index goes into the carry.
        row = jnp.asarray(seen_rows)[(step.previous_token + 1) % 4]
        return carry * 10 + step.row, DraftRow(row, jnp.asarray(True))

    kind, tokens, *_, carry = build(np.zeros((4, 4)), row_fn=after)
    assert kind == [_OFFERED] * 4
    # The prompt ends with 1.
    assert tokens == [2, 3, 0, 1]
    assert carry == 123


def test_the_chain_of_a_row_has_seen_the_rows_before_it():
    logits = jnp.asarray([2.0, 0.0, 1.0])

    def row(carry, step):
        return carry, step.to_row(logits)

    # Each occurrence in the output costs 1.5; the prompt does not count.
    sampling = sampling_settings(3, temperature=0.0, frequency_penalty=1.5)
    _, tokens, *_ = build(np.zeros((3, 3)), row_fn=row, sampling=sampling)
    # (2, 0, 1), (.5, 0, 1), (.5, 0, -.5).
    assert tokens == [0, 2, 0]


def test_a_gate_sees_earlier_rows_and_not_its_own_draw():
    def decide(settings, context, probs):
        # Admits iff the context holds what the packet has offered so far, and no more.
        count = jnp.sum(context.draft_tokens >= 0)
        joint = jnp.where(context.draft_tokens >= 0, context.draft_token_probs, 1.0)
        is_right = (count == context.row) & (
            jnp.prod(joint) == settings["joint"] ** context.row.astype(float)
        )
        return GateDecision(
            attempt=is_right & (context.committed.length == len(_PROMPT)),
            admit=jnp.ones_like(probs),
            go_on=probs >= 0,
        )

    gate = gates.gate(decide)
    halves = np.full((3, 2), 0.5)
    assert build(halves, gate, draft=[0, 0.9, 0.9], joint=0.5)[0] == [_OFFERED] * 3
    assert build(halves, gate, draft=[0, 0.9, 0.9], joint=0.6)[0] == [
        _OFFERED,
        _ABSENT,
        _ABSENT,
    ]


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"draws.draft must have shape \(3, 2\)"):
        build(_ROWS, draft=np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"the gate's admit must have shape \(3,\)"):
        build(_ROWS, gates.soft(lambda settings, context, probs: jnp.ones(4)))
    with pytest.raises(ValueError, match=r"the drafter's row must have shape \(3,\)"):
        build(
            _ROWS,
            row_fn=lambda carry, step: (
                carry,
                DraftRow(jnp.ones(2) / 2, jnp.asarray(True)),
            ),
        )
