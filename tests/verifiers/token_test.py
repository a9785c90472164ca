"""Token verification with given uniforms: every decision by hand."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import Proposal, RowKind, Source, Status, verifiers
from strata_jax.verifiers import TokenDraws

_CASES = {
    case["id"]: case
    for case in json.loads(
        (pathlib.Path(__file__).parents[1] / "testdata" / "cases.json").read_text()
    )
}
_ABSENT, _OFFERED, _NULL = (int(kind) for kind in RowKind)
_LARGEST_UNIFORM = 1 - 2**-24
_verify = jax.jit(verifiers.token().verify)


def make_proposal(measure, tokens, kinds, dtype=jnp.float32):
    return Proposal(
        tokens=jnp.asarray(tokens, jnp.int32).reshape(-1),
        measure=jnp.asarray(measure, dtype),
        kind=jnp.asarray(kinds, jnp.int32).reshape(-1),
    )


def make_draws(num_drafts, accept=0.0, residual=0.0, pick=0.0):
    """Numbers stand for all rows; the block uniforms do not count here."""
    picks = np.broadcast_to(np.asarray(pick, np.float32), (num_drafts + 1,))
    accepts = np.broadcast_to(np.asarray(accept, np.float32), (num_drafts,))
    return TokenDraws(
        accept=jnp.asarray(accepts),
        residual=jnp.asarray([0.5, residual], jnp.float32),
        pick=jnp.stack([jnp.full(num_drafts + 1, 0.5), jnp.asarray(picks)], axis=1),
    )


def verify(target, measure, tokens, kinds, **draws):
    verdict = _verify(
        make_draws(len(tokens), **draws),
        jnp.asarray(target, jnp.float32),
        make_proposal(measure, tokens, kinds),
    )
    emitted = int(verdict.num_emitted)
    found = verdict.tokens.tolist()
    assert len(found) == len(tokens) + 1
    assert found[emitted:] == [-1] * (len(found) - emitted)
    assert emitted == int(verdict.num_accepted) + 1
    assert verdict.kind.tolist() == list(kinds)
    return (
        found[:emitted],
        int(verdict.num_accepted),
        Source(int(verdict.source)),
        Status(int(verdict.status)),
    )


@pytest.mark.parametrize("index", range(7))
def test_bug_013_golden_traces(index):
    case = _CASES["bug-013"]
    inputs, wanted = case["inputs"], case["expected"]["traces"][index]
    trace = inputs["traces"][index]
    q = np.asarray(inputs["Q_rows"], np.float32)
    admitted = q >= inputs["threshold"]
    kinds = [
        _OFFERED if admitted[i, d] else _NULL for i, d in enumerate(trace["drafts"])
    ]
    measure = np.where(admitted, q, 0)
    options = {"accept": trace["accept_u"], "residual": trace["final_u"]}
    found = verify(
        inputs["P_rows"],
        measure,
        trace["drafts"],
        kinds,
        pick=trace["final_u"],
        **options,
    )
    source = {
        "BONUS": Source.BONUS,
        "REJECT": Source.REJECTION,
        "NULL": Source.NULL,
    }[wanted["ended_by"].split("@")[0]]
    assert found == (wanted["emitted"], wanted["accepted"], source, Status.OK)
    if source == Source.BONUS:
        # The bonus comes from row 3 and from its own uniform: .27 gives 0 there, and
        # would give 1 from the last draft row.
        picks = [0.9, 0.9, 0.9, 0.27]
        again = verify(
            inputs["P_rows"], measure, trace["drafts"], kinds, pick=picks, **options
        )
        assert again[0] == [*wanted["emitted"][:-1], 0]
    if source == Source.NULL:
        # From p itself, .68 would give 1.
        assert np.cumsum(inputs["P_rows"][1])[1] > trace["final_u"]


@pytest.mark.parametrize(
    ("p", "mu", "uniform", "is_accepted"),
    [
        (0.0, 0.5, 0.0, False),  # u mu = p = 0: strict
        (0.25, 0.5, 0.5, False),  # u mu = p
        (0.25, 0.5, 0.5 - 2**-24, True),
        (0.5, 0.5, _LARGEST_UNIFORM, True),
        (0.75, 0.5, _LARGEST_UNIFORM, True),
        (0.25, 1.0, 0.25, False),
        (0.25, 1.0, 0.25 - 2**-24, True),
        (1.0, 1.0, _LARGEST_UNIFORM, True),
    ],
)
def test_acceptance_is_strict(p, mu, uniform, is_accepted):
    target = [[p, 1 - p], [0.5, 0.5]]
    found = verify(target, [[mu, 0.0]], [0], [_OFFERED], accept=uniform)
    assert found[1] == int(is_accepted)
    assert found[2] == (Source.BONUS if is_accepted else Source.REJECTION)
    assert found[3] == Status.OK


def test_rejection_and_null_draw_from_the_residual():
    target = [[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]
    measure = [[0.5, 0.0, 0.25]]
    # (p - mu)+ = (0, .25, .25).
    for kind, source in ((_OFFERED, Source.REJECTION), (_NULL, Source.NULL)):
        for uniform, token in ((0.0, 1), (0.4999, 1), (0.5, 2), (_LARGEST_UNIFORM, 2)):
            found = verify(target, measure, [0], [kind], accept=0.75, residual=uniform)
            assert found == ([token], 0, source, Status.OK)


def test_an_empty_residual_is_no_fault_and_gives_p():
    target = [[0.25, 0.75], [1.0, 0.0]]
    for uniform, token in ((0.2499, 0), (0.25, 1)):
        found = verify(target, [[0.25, 0.75]], [0], [_NULL], residual=uniform)
        assert found == ([token], 0, Source.NULL, Status.OK)
    # An admitted set that is empty: NULL for sure, and p.
    for uniform, token in ((0.2499, 0), (0.25, 1)):
        found = verify(target, [[0.0, 0.0]], [0], [_NULL], residual=uniform)
        assert found == ([token], 0, Source.NULL, Status.OK)


def test_absent_rows_and_full_windows_draw_from_p():
    target = [[0.25, 0.75], [0.5, 0.5], [0.125, 0.875]]
    mu = [[1.0, 0.0], [0.0, 1.0]]
    # The measure of an ABSENT row is not looked at.
    for uniform, token in ((0.2499, 0), (0.25, 1)):
        found = verify(target, mu, [0, 1], [_ABSENT, _ABSENT], pick=[uniform, 0.9, 0.9])
        assert found == ([token], 0, Source.BONUS, Status.OK)
    for uniform, token in ((0.4999, 0), (0.5, 1)):
        found = verify(target, mu, [0, 1], [_OFFERED, _ABSENT], pick=[0.9, uniform, 0])
        assert found == ([0, token], 1, Source.BONUS, Status.OK)
    for uniform, token in ((0.1249, 0), (0.125, 1)):
        found = verify(
            target, mu, [0, 1], [_OFFERED, _OFFERED], pick=[0.9, 0.9, uniform]
        )
        assert found == ([0, 1, token], 2, Source.BONUS, Status.OK)


def test_a_window_without_drafts():
    target = [[0.25, 0.75]]
    for uniform, token in ((0.2499, 0), (0.25, 1)):
        found = verify(target, np.zeros((0, 2)), [], [], pick=uniform)
        assert found == ([token], 0, Source.BONUS, Status.OK)


def test_each_draw_uses_its_own_uniforms():
    target = np.full((3, 4), 0.25)
    mu = [[1.0, 0, 0, 0], [0.0, 0, 0, 0.5]]
    options = {"residual": 0.8, "pick": [0.3, 0.6, 0.9]}

    def tokens(kinds, accept):
        return verify(target, mu, [0, 3], kinds, accept=accept, **options)[0]

    assert tokens([_ABSENT, _ABSENT], 0.0) == [1]
    assert tokens([_OFFERED, _ABSENT], 0.0) == [0, 2]
    assert tokens([_OFFERED, _OFFERED], 0.0) == [0, 3, 3]
    assert tokens([_OFFERED, _OFFERED], [0.5, 0.0]) == [3]  # thirds of 1, 2, 3
    assert tokens([_OFFERED, _NULL], 0.0) == [0, 2]  # thirds of 0, 1, 2
    assert tokens([_OFFERED, _OFFERED], [0.0, 0.5]) == [0, 2]


def test_block_uniforms_of_both_draws():
    # Two blocks; the token uniform is 0, so the block decides alone.
    row = np.zeros(512, np.float32)
    row[[3, 300]] = 0.5
    measure = np.zeros((1, 512), np.float32)
    target = jnp.asarray(np.stack([row, row]))
    for kind, name in ((_NULL, "residual"), (_ABSENT, "pick")):
        proposal = make_proposal(measure, [0], [kind])
        for block, token in ((0.25, 3), (0.75, 300)):
            residual = [block if name == "residual" else 1 - block, 0.0]
            pick = [block if name == "pick" else 1 - block, 0.0]
            draws = TokenDraws(
                accept=jnp.zeros(1),
                residual=jnp.asarray(residual),
                pick=jnp.asarray([pick, [1 - block, 0.0]]),
            )
            assert int(_verify(draws, target, proposal).tokens[0]) == token


def test_an_offered_token_without_mass_is_rejected_and_reported():
    target = [[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    zero = Status.ZERO_MEASURE_OFFERED
    found = verify(target, [[0, 1], [1, 0]], [0, 0], [_OFFERED, _OFFERED], residual=0.9)
    # p - mu = (.5, 0): only token 0 is left.
    assert found == ([0], 0, Source.REJECTION, zero)
    # At a row that is not reached as well.
    found = verify(target, [[0, 1], [1, 0]], [1, 1], [_OFFERED, _OFFERED], accept=0.75)
    assert found == ([0], 0, Source.REJECTION, zero)
    # Not at a row that is not offered.
    found = verify(target, [[1, 0], [1, 0]], [0, 1], [_OFFERED, _NULL])
    assert found == ([0, 1], 1, Source.NULL, Status.OK)


def test_tokens_of_rows_that_are_not_offered_are_not_read():
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.ones(5), 4)
    measure = rng.dirichlet(np.ones(5), 3) * 0.5
    for kinds in (
        [_ABSENT] * 3,
        [_NULL, _ABSENT, _ABSENT],
        [_OFFERED, _NULL, _ABSENT],
        [_OFFERED, _ABSENT, _ABSENT],
        [_OFFERED, _OFFERED, _NULL],
    ):
        for uniform in (0.0, 0.5, 0.95):
            draws = {"accept": uniform, "residual": uniform, "pick": uniform}
            tokens = [2, 1, 4]
            wanted = verify(target, measure, tokens, kinds, **draws)
            for hidden in (-1, 0, 3, 99, -7):
                changed = [
                    token if kind == _OFFERED else hidden
                    for token, kind in zip(tokens, kinds, strict=True)
                ]
                found = verify(target, measure, changed, kinds, **draws)
                assert found == wanted
            # An offered one is: with the uniform 0 it is accepted.
            if kinds[0] == _OFFERED and uniform == 0:
                other = verify(target, measure, [3, 1, 4], kinds, **draws)
                assert (wanted[0][0], other[0][0]) == (2, 3)


def test_rows_behind_the_end_of_the_window_are_not_read():
    target = np.array([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    measure = np.array([[0.0, 0.5], [0.25, 0.0]])
    kinds = [_NULL, _ABSENT]
    wanted = verify(target, measure, [-1, -1], kinds, residual=0.9)
    target[1:], measure[1:] = np.nan, np.nan
    assert verify(target, measure, [-1, -1], kinds, residual=0.9) == wanted


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"target": (2, 4)}, "target_probs must have shape"),
        ({"target": (4, 4)}, "target_probs must have shape"),
        ({"target": (4,)}, "target_probs must have shape"),
        ({"target": (3, 5)}, "proposal.measure must have shape"),
        ({"measure": (3, 4)}, "proposal.measure must have shape"),
        ({"measure": (4,)}, "proposal.measure must have shape"),
        ({"kind": (3,)}, "proposal.kind must have shape"),
        ({"kind": ()}, "proposal.kind must have shape"),
        ({"tokens": ()}, "proposal.tokens must have shape"),
        ({"tokens": (2, 1)}, "proposal.tokens must have shape"),
        ({"accept": (3,)}, "draws.accept must have shape"),
        ({"accept": (2, 1)}, "draws.accept must have shape"),
        ({"residual": ()}, "draws.residual must have shape"),
        ({"residual": (1, 2)}, "draws.residual must have shape"),
        ({"pick": (2, 2)}, "draws.pick must have shape"),
        ({"pick": (3,)}, "draws.pick must have shape"),
    ],
)
def test_wrong_shapes(changes, match):
    shapes = {
        "target": (3, 4),
        "measure": (2, 4),
        "kind": (2,),
        "tokens": (2,),
        "accept": (2,),
        "residual": (2,),
        "pick": (3, 2),
    }
    _call(shapes)
    with pytest.raises(ValueError, match=match):
        _call({**shapes, **changes})


def _call(shapes, **dtypes):
    def array(name, dtype):
        return jnp.zeros(shapes[name], dtypes.get(name, dtype))

    return verifiers.token().verify(
        TokenDraws(
            accept=array("accept", jnp.float32),
            residual=array("residual", jnp.float32),
            pick=array("pick", jnp.float32),
        ),
        array("target", jnp.float32),
        Proposal(
            tokens=array("tokens", jnp.int32),
            measure=array("measure", jnp.float32),
            kind=array("kind", jnp.int32),
        ),
    )


@pytest.mark.parametrize(
    ("dtypes", "match"),
    [
        ({"target": jnp.bfloat16}, "target_probs must be float32 or float64"),
        ({"target": jnp.int32}, "target_probs must be float32 or float64"),
        ({"measure": jnp.bfloat16}, "proposal.measure .bfloat16. and target_probs"),
        ({"tokens": jnp.float32}, "proposal.tokens must be an integer array"),
        ({"kind": jnp.float32}, "proposal.kind must be an integer array"),
    ],
)
def test_wrong_dtypes(dtypes, match):
    shapes = {
        "target": (3, 4),
        "measure": (2, 4),
        "kind": (2,),
        "tokens": (2,),
        "accept": (2,),
        "residual": (2,),
        "pick": (3, 2),
    }
    with pytest.raises(ValueError, match=match):
        _call(shapes, **dtypes)


def test_what_it_declares():
    token = verifiers.token()
    assert token.draft_rule == "sample"
    # An argmax draft is no draw from the soft measure.
    assert token.draft_rules == ("sample",)
