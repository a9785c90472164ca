"""Exact match with given uniforms: the target's own draws, and nothing else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import Proposal, RowKind, Source, Status, verifiers
from strata_jax.testing import _oracle as oracle
from strata_jax.verifiers import ExactMatchDraws

_ABSENT, _OFFERED, _NULL = (int(kind) for kind in RowKind)
_verify = jax.jit(verifiers.exact_match().verify)


def verify(target, tokens, kinds, pick, measure=None):
    target = np.asarray(target, np.float32)
    count = len(tokens)
    if measure is None:
        measure = np.full((count, target.shape[1]), 1 / target.shape[1])
    picks = np.broadcast_to(np.asarray(pick, np.float32), (count + 1,))
    verdict = _verify(
        ExactMatchDraws(
            pick=jnp.stack([jnp.full(count + 1, 0.5), jnp.asarray(picks)], axis=1)
        ),
        jnp.asarray(target),
        Proposal(
            tokens=jnp.asarray(tokens, jnp.int32).reshape(-1),
            measure=jnp.asarray(measure, jnp.float32),
            kind=jnp.asarray(kinds, jnp.int32).reshape(-1),
        ),
    )
    emitted = int(verdict.num_emitted)
    found = verdict.tokens.tolist()
    assert found[emitted:] == [-1] * (len(found) - emitted)
    assert emitted == int(verdict.num_accepted) + 1
    assert verdict.kind.tolist() == list(kinds)
    return (
        found[:emitted],
        int(verdict.num_accepted),
        Source(int(verdict.source)),
        Status(int(verdict.status)),
    )


# Row 0 draws 1, row 1 draws 0, row 2 draws 2 with the uniform 1/2.
_TARGET = [[0.25, 0.75, 0.0], [0.75, 0.0, 0.25], [0.0, 0.25, 0.75]]


@pytest.mark.parametrize(
    ("tokens", "kinds", "wanted"),
    [
        ([1, 0], [_OFFERED, _OFFERED], ([1, 0, 2], 2, Source.BONUS)),
        ([1, 2], [_OFFERED, _OFFERED], ([1, 0], 1, Source.REJECTION)),
        ([0, 0], [_OFFERED, _OFFERED], ([1], 0, Source.REJECTION)),
        ([1, -1], [_OFFERED, _NULL], ([1, 0], 1, Source.NULL)),
        ([1, -1], [_OFFERED, _ABSENT], ([1, 0], 1, Source.BONUS)),
        ([-1, -1], [_NULL, _ABSENT], ([1], 0, Source.NULL)),
        ([-1, -1], [_ABSENT, _ABSENT], ([1], 0, Source.BONUS)),
    ],
)
def test_decisions(tokens, kinds, wanted):
    assert verify(_TARGET, tokens, kinds, 0.5) == (*wanted, Status.OK)


def test_a_mismatch_emits_the_draw_it_was_compared_with():
    # Not a second draw, and not the argmax, which is 1.
    for uniform, token in ((0.2, 0), (0.3, 1)):
        found = verify(_TARGET, [2, 0], [_OFFERED, _OFFERED], uniform)
        assert found == ([token], 0, Source.REJECTION, Status.OK)


def test_a_window_without_drafts():
    for uniform, token in ((0.2499, 0), (0.25, 1)):
        found = verify([[0.25, 0.75]], [], [], uniform, measure=np.zeros((0, 2)))
        assert found == ([token], 0, Source.BONUS, Status.OK)


def test_each_row_uses_its_own_uniform():
    target = np.full((3, 4), 0.25)
    found = verify(target, [0, 3], [_OFFERED, _OFFERED], [0.1, 0.8, 0.6])
    assert found == ([0, 3, 2], 2, Source.BONUS, Status.OK)


@pytest.mark.parametrize("seed", range(3))
def test_emitted_tokens_are_a_prefix_of_the_stream_for_every_draft(seed):
    rng = np.random.default_rng(seed)
    target = rng.dirichlet(np.ones(3), 3).astype(np.float32)
    picks = rng.integers(0, 2**24, 3) * 2.0**-24
    stream = [
        oracle.oracle_draw(row, 0.5, pick)
        for row, pick in zip(target, picks, strict=True)
    ]
    for drafts in itertools.product(range(3), repeat=2):
        for kinds in itertools.product((_ABSENT, _OFFERED, _NULL), repeat=2):
            tokens, accepted, *_ = verify(target, drafts, kinds, picks)
            assert tokens == stream[: len(tokens)]
            wanted = 0
            while wanted < 2 and (kinds[wanted], drafts[wanted]) == (
                _OFFERED,
                stream[wanted],
            ):
                wanted += 1
            assert accepted == wanted


def test_the_measure_decides_nothing():
    wanted = verify(_TARGET, [1, 2], [_OFFERED, _OFFERED], 0.5)
    for measure in ([[0.1, 0.1, 0.8], [0.0, 0.0, 1e-9]], [[0, 1, 0], [0, 0, 1]]):
        found = verify(_TARGET, [1, 2], [_OFFERED, _OFFERED], 0.5, measure=measure)
        assert found == wanted


def test_an_offered_token_without_mass_is_reported():
    zero = Status.ZERO_MEASURE_OFFERED
    bad = [[1.0, 0, 0], [1.0, 0, 0]]
    found = verify(_TARGET, [1, 0], [_OFFERED, _OFFERED], 0.5, measure=bad)
    assert found[3] == zero
    bad = [[1.0, 0, 0], [0.0, 0, 1.0]]
    # Also at a row that is not reached; not at one that is not offered.
    found = verify(_TARGET, [0, 0], [_OFFERED, _OFFERED], 0.5, measure=bad)
    assert found == ([1], 0, Source.REJECTION, zero)
    found = verify(_TARGET, [0, 0], [_OFFERED, _NULL], 0.5, measure=bad)
    assert found == ([1], 0, Source.REJECTION, Status.OK)


def test_tokens_of_rows_that_are_not_offered_are_not_read():
    for kinds in ([_ABSENT, _ABSENT], [_NULL, _ABSENT], [_OFFERED, _NULL]):
        wanted = verify(_TARGET, [1, 0], kinds, 0.5)
        for hidden in (-1, 2, 99, -7):
            changed = [
                token if kind == _OFFERED else hidden
                for token, kind in zip([1, 0], kinds, strict=True)
            ]
            assert verify(_TARGET, changed, kinds, 0.5) == wanted


def test_a_row_without_mass_gives_no_token():
    found = verify([[0.0, 0.0], [1.0, 0.0]], [0], [_OFFERED], 0.5)
    assert found[:2] == ([-1], 0)


@pytest.mark.parametrize(
    ("target", "measure", "kind", "tokens", "pick", "match"),
    [
        ((2, 4), (2, 4), (2,), (2,), (3, 2), "target_probs must have shape"),
        ((3, 5), (2, 4), (2,), (2,), (3, 2), "proposal.measure must have shape"),
        ((3, 4), (3, 4), (2,), (2,), (3, 2), "proposal.measure must have shape"),
        ((3, 4), (2, 4), (1,), (2,), (3, 2), "proposal.kind must have shape"),
        ((3, 4), (2, 4), (2,), (2, 1), (3, 2), "proposal.tokens must have shape"),
        ((3, 4), (2, 4), (2,), (2,), (2, 2), "draws.pick must have shape"),
        ((3, 4), (2, 4), (2,), (2,), (3,), "draws.pick must have shape"),
    ],
)
def test_wrong_shapes(target, measure, kind, tokens, pick, match):
    with pytest.raises(ValueError, match=match):
        verifiers.exact_match().verify(
            ExactMatchDraws(pick=jnp.zeros(pick)),
            jnp.zeros(target),
            Proposal(
                tokens=jnp.zeros(tokens, jnp.int32),
                measure=jnp.zeros(measure),
                kind=jnp.zeros(kind, jnp.int32),
            ),
        )


@pytest.mark.parametrize(
    ("name", "dtype", "match"),
    [
        ("target", jnp.bfloat16, "target_probs must be float32"),
        ("measure", jnp.float16, "proposal.measure .float16."),
        ("tokens", jnp.float32, "proposal.tokens must be an integer"),
        ("kind", bool, "proposal.kind must be an integer"),
    ],
)
def test_wrong_dtypes(name, dtype, match):
    dtypes = {
        "target": jnp.float32,
        "measure": jnp.float32,
        "tokens": jnp.int32,
        "kind": jnp.int32,
        name: dtype,
    }
    with pytest.raises(ValueError, match=match):
        verifiers.exact_match().verify(
            ExactMatchDraws(pick=jnp.zeros((3, 2))),
            jnp.zeros((3, 4), dtypes["target"]),
            Proposal(
                tokens=jnp.zeros(2, dtypes["tokens"]),
                measure=jnp.zeros((2, 4), dtypes["measure"]),
                kind=jnp.zeros(2, dtypes["kind"]),
            ),
        )


def test_what_it_declares():
    match = verifiers.exact_match()
    assert match.draft_rule == "argmax"
    assert match.draft_rules == ("argmax", "sample")
