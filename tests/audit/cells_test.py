"""The enumerator itself: complete cells, true borders, laws worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_checks import (
    Case,
    decoder_for,
    gate_settings,
    library_bench,
    one_instance,
    tolerance,
)
from moe_weights import quick_compilation

import strata_jax as strata
from strata_jax import audit, drafters, gates, targets, verifiers
from strata_jax.targets import TabularParams

CONFIGURATIONS = [
    (2, 1, "token"),
    (2, 3, "token"),
    (3, 2, "token"),
    (2, 3, "exact_match, argmax"),
    (2, 2, "exact_match, sample"),
]


def cases_of(vocab_size):
    rng = np.random.default_rng([11, vocab_size])
    return [
        Case(
            gate,
            rng.dirichlet(np.ones(vocab_size), vocab_size),
            rng.dirichlet(np.ones(vocab_size), vocab_size),
            gate_settings(gate, 0.3, vocab_size),
        )
        for gate in ("always", "picked", "soft_ratio", "picked_and_stop")
    ]


def row_case(p, q, settings):
    return Case("row", np.tile(p, (len(p), 1)), np.tile(q, (len(q), 1)), settings)


@pytest.mark.parametrize(("vocab_size", "num_draft_tokens", "verifier"), CONFIGURATIONS)
def test_cells_partition_the_uniforms(vocab_size, num_draft_tokens, verifier):
    cases = cases_of(vocab_size)
    bench = library_bench(vocab_size, num_draft_tokens, verifier)
    cells = bench.cells(cases)
    volumes = np.bincount(cells.state_index, weights=cells.volume)
    np.testing.assert_allclose(volumes, np.ones(len(cases)), rtol=0, atol=1e-13)
    assert (cells.volume > 0).all()
    assert (cells.uniforms >= 0).all()
    assert (cells.uniforms < 1).all()
    # No two cells of a state start at the same place.
    places = np.column_stack([cells.state_index, cells.uniforms])
    assert len(np.unique(places, axis=0)) == len(places)


@pytest.mark.parametrize(("vocab_size", "num_draft_tokens", "verifier"), CONFIGURATIONS)
def test_every_border_flips_the_decision(vocab_size, num_draft_tokens, verifier):
    cases = cases_of(vocab_size)
    bench = library_bench(vocab_size, num_draft_tokens, verifier)
    borders = bench.cells(cases).borders
    assert borders.dtype == np.int64
    owner, axis, at = borders[:, 0], borders[:, 1], borders[:, 2:]
    entry = np.arange(len(borders))
    assert (at[entry, axis] > 0).all()
    params, states = bench.instances(cases)
    own_states = jax.tree.map(lambda leaf: leaf[owner], states)

    def outcomes(grid):
        return bench.enumerator.evaluate(params, own_states, owner, grid)[0]

    def moved(by):
        grid = at.copy()
        grid[entry, axis] += by
        return grid

    on = outcomes(at)
    differs_below = (outcomes(moved(-1)) != on).any(axis=1)
    assert differs_below.all(), borders[~differs_below]
    known = {tuple(row) for row in borders}
    above = moved(1)
    is_inside = at[entry, axis] + 1 < 1 << bench.enumerator.grid_bits
    above[~is_inside] = at[~is_inside]
    changed = (outcomes(above) != on).any(axis=1)
    for i in np.flatnonzero(changed):
        assert (owner[i], axis[i], *above[i]) in known, borders[i]
    # The coins of a soft gate and each kind of the verifier's draws have borders.
    axes = set(axis)
    has_coin = owner == [case.label for case in cases].index("soft_ratio")
    assert 2 in set(axis[has_coin])
    assert max(axes) >= 3 * num_draft_tokens


def test_cells_of_a_window_worked_by_hand():
    # p = (.5, .5), q = (.875, .125), t = .5. On a grid of multiples of 2**-b, token 0
    # is drawn below .875, and accepted below 4/7, so up to ceil(2**b * 4 / 7) - 1.
    bench = library_bench(2, 1, "token")
    case = row_case((0.5, 0.5), (0.875, 0.125), gate_settings("picked", 0.5, 2))
    cells = bench.cells([case])
    offered, null = int(strata.RowKind.OFFERED), int(strata.RowKind.NULL)
    found = {
        (int(kind[0]), int(count), int(tokens[0])): volume
        for kind, count, tokens, volume in zip(
            cells.kind, cells.num_accepted, cells.tokens, cells.volume, strict=True
        )
        if int(count) == 0
    }
    expected = {(offered, 0, 1): 0.375, (null, 0, 1): 0.125}
    assert found.keys() == expected.keys()
    for key, volume in expected.items():
        assert abs(found[key] - volume) <= tolerance(), key
    # The accepted draft is followed by a draw from the next row, (.5, .5).
    accepted = cells.num_accepted == 1
    assert sorted(map(tuple, cells.tokens[accepted].tolist())) == [(0, 0), (0, 1)]
    np.testing.assert_allclose(
        cells.volume[accepted], [0.25, 0.25], rtol=0, atol=tolerance()
    )


@quick_compilation()
def test_laws_of_requests_alone_and_together():
    cases = [
        row_case((0.3, 0.7), (0.875, 0.125), {"threshold": 0.5}),
        row_case((0.75, 0.25), (0.375, 0.625), {"threshold": 0.25}),
    ]
    decoder = decoder_for(2, 1, gate=gates.picked())
    pairs = [one_instance(decoder, case) for case in cases]
    params, states = (audit.stack(trees) for trees in zip(*pairs, strict=True))
    first, second = audit.sequence_laws(decoder, params, states, 2)
    assert_law(first, {(0, 0): 0.3**2, (0, 1): 0.21, (1, 0): 0.21, (1, 1): 0.7**2})
    assert_law(second, {(0, 0): 0.5625, (0, 1): 0.1875, (1, 0): 0.1875, (1, 1): 0.0625})
    assert audit.sequence_law(decoder, *pairs[0], 2) == first


def test_markov_law_by_hand():
    table = np.array([[0.25, 0.75], [1.0, 0.0]])
    assert audit.markov_law(table, [1, 0], 2) == {
        (0, 0): 0.25 * 0.25,
        (0, 1): 0.25 * 0.75,
        (1, 0): 0.75,
    }
    assert audit.markov_law(table, [1], 1) == {(0,): 1.0}
    # Order 0 needs no context; order 2 takes token 0 for what is before the text.
    assert audit.markov_law(np.array([0.5, 0.5]), [], 1) == {(0,): 0.5, (1,): 0.5}
    second = np.zeros((2, 2, 2))
    second[0, 1] = 0.125, 0.875
    second[1, 0] = 1.0, 0.0
    second[1, 1] = 0.0, 1.0
    assert audit.markov_law(second, [1], 2) == {(0, 0): 0.125, (1, 1): 0.875}


def test_compare_laws():
    difference = audit.compare_laws(
        {(0,): 0.5, (1,): 0.25, (2, 0): 0.25}, {(0,): 0.25, (1,): 0.25, (3,): 0.5}
    )
    # |.25| + 0 + |.25| + |.5|, halved.
    assert difference.total_variation == 0.5
    assert difference.worst == 0.5
    assert difference.worst_tokens == (3,)
    same = audit.compare_laws({(0,): 1.0}, {(0,): 1.0})
    assert same.total_variation == same.worst == 0.0


def assert_law(law, expected):
    assert law.keys() == expected.keys()
    for sequence, probability in expected.items():
        assert abs(law[sequence] - probability) <= tolerance(), sequence
    assert abs(sum(law.values()) - 1) <= 1e-12


def test_eos_and_budget_end_sequences_early():
    # Token 1 ends the text: it comes with .75 at each place.
    bench = library_bench(2, 2, "token")
    case = row_case((0.25, 0.75), (0.5, 0.5), gate_settings("picked", 0.5, 2))
    ended = {(1,): 0.75, (0, 1): 0.25 * 0.75}
    (law,) = bench.sequence_laws([case], 3, eos_ids=[1])
    assert_law(law, {**ended, (0, 0, 1): 0.25**2 * 0.75, (0, 0, 0): 0.25**3})
    (law,) = bench.sequence_laws([case], 3, eos_ids=[1], max_new_tokens=2)
    assert_law(law, {**ended, (0, 0): 0.0625})
    (law,) = bench.sequence_laws([case], 3, max_new_tokens=1)
    assert_law(law, {(0,): 0.25, (1,): 0.75})


@pytest.mark.parametrize("verifier", [verifiers.token(), verifiers.exact_match()])
def test_cells_are_decided_by_the_step_that_users_call(verifier):
    """`step` runs one by one what the enumerator batches: their outcomes are equal."""
    random = np.random.default_rng(4)
    table, draft = random.dirichlet(np.ones(3), (2, 3))
    target = targets.tabular(3, max_length=8)
    decoder = strata.speculative_decoder(
        target,
        drafters.model(target, num_draft_tokens=2),
        gates.picked(0.3),
        verifier,
        draft_rule="sample",
    )
    params = strata.Params(
        target=TabularParams(jnp.log(jnp.asarray(table, float))),
        drafter=TabularParams(jnp.log(jnp.asarray(draft, float))),
    )
    state = decoder.init(params, [0])
    enumerator = audit.WindowEnumerator(decoder, params, state, batch_size=64)
    many = audit.stack([params]), audit.host_states(audit.stack([state]))
    cells = enumerator.cells(*many, np.zeros(1, int))
    step = jax.jit(decoder.step)
    template = jax.eval_shape(decoder.step, params, state)[1].draws
    leaves, treedef = jax.tree.flatten(template.verifier)
    for index in random.permutation(len(cells.volume))[:40]:
        uniforms = cells.uniforms[index].astype(jnp.zeros((), float).dtype)
        rows, rest = uniforms[:6].reshape(2, 3), uniforms[6:]
        parts = []
        for leaf in leaves:
            parts.append(jnp.asarray(rest[: leaf.size].reshape(leaf.shape)))
            rest = rest[leaf.size :]
        draws = strata.Draws(
            draft=jnp.asarray(rows[:, :2]),
            gate=jnp.asarray(rows[:, 2]),
            verifier=jax.tree.unflatten(treedef, parts),
        )
        after, window = step(params, state, draws)
        np.testing.assert_array_equal(window.verdict.tokens, cells.tokens[index])
        np.testing.assert_array_equal(window.proposal.kind, cells.kind[index])
        length = int(after.context.length)
        np.testing.assert_array_equal(
            after.context.tokens[:length],
            cells.states.context.tokens[index][:length],
        )
