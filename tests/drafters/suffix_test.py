"""The suffix drafter against an independent search, and at its edges."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import Context, RowKind, Status, drafters, gates
from strata_jax.sampling import count_tokens, sampling_settings
from strata_jax.testing import _oracle as oracle

_CASES = {
    case["id"]: case
    for case in json.loads(
        (pathlib.Path(__file__).parents[1] / "testdata" / "cases.json").read_text()
    )
}
_SIZE = 64  # S, larger than every text here


@functools.cache
def compiled(vocab_size, num_draft_tokens, min_match, max_match):
    drafter = drafters.suffix(
        num_draft_tokens=num_draft_tokens,
        vocab_size=vocab_size,
        min_match=min_match,
        max_match=max_match,
    )

    @jax.jit
    def run(context, limit, uniforms):
        def offer(row_fn, carry):
            proposal, record, carry = drafters.build_proposal(
                row_fn,
                carry,
                num_draft_tokens=num_draft_tokens,
                limit=limit,
                gate=gates.always(),
                gate_settings={},
                gate_state=(),
                sampling=sampling_settings(vocab_size),
                counts=count_tokens(
                    context.tokens, context.length, context.length, vocab_size
                ),
                context=context,
                draft_uniforms=uniforms,
                gate_uniforms=jnp.zeros(num_draft_tokens),
                draft_rule="sample",
                max_candidates=None,
                dtype=jnp.float32,
            )
            return (proposal, record), carry

        return drafter.propose(None, drafter.init(None, context, None), context, offer)[
            0
        ]

    return run


def propose(text, *, num_draft_tokens=4, min_match=1, max_match=3, vocab_size=10, **kw):
    """Returns the drafts; the place behind the text holds a decoy."""
    limit = kw.get("limit", num_draft_tokens)
    tokens = np.full(_SIZE, text[-1], np.int32)
    rest = np.random.default_rng(0).integers(0, vocab_size, _SIZE - len(text))
    tokens[len(text) :] = rest
    tokens[: len(text)] = text
    proposal, record = compiled(vocab_size, num_draft_tokens, min_match, max_match)(
        Context(tokens=jnp.asarray(tokens), length=jnp.asarray(len(text), jnp.int32)),
        jnp.asarray(limit, jnp.int32),
        jnp.full((num_draft_tokens, 2), kw.get("uniform", 0.5)),
    )
    assert int(record.status) == Status.OK
    kinds = proposal.kind.tolist()
    count = kinds.count(int(RowKind.OFFERED))
    # Without a match the row is ABSENT, not NULL.
    absent = [int(RowKind.ABSENT)] * (num_draft_tokens - count)
    assert kinds == [int(RowKind.OFFERED)] * count + absent
    drafts = proposal.tokens.tolist()[:count]
    wanted = np.zeros((num_draft_tokens, vocab_size), np.float32)
    wanted[np.arange(count), drafts] = 1.0
    np.testing.assert_array_equal(proposal.measure, wanted)
    return drafts


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4, 6])
def test_bug_050(index):
    case = _CASES["bug-050"]
    inputs, expected = case["inputs"]["cases"][index], case["expected"]
    found = propose(
        inputs["context"],
        num_draft_tokens=inputs["K"],
        min_match=inputs["n_min"],
        max_match=inputs["n_max"],
    )
    assert found == expected["latest"][index]
    if expected["latest"][index] != expected["earliest"][index]:
        assert found != expected["earliest"][index]


@pytest.mark.parametrize("seed", range(60))
def test_random_texts_against_the_oracle(seed):
    rng = np.random.default_rng(seed)
    for alphabet in (1, 2, 3, 10):
        text = rng.integers(0, alphabet, int(rng.integers(1, _SIZE + 1))).tolist()
        for min_match, max_match in ((1, 3), (2, 3), (3, 64)):
            found = propose(text, min_match=min_match, max_match=max_match)
            wanted = oracle.oracle_suffix(
                text, max_match=max_match, min_match=min_match, num_draft_tokens=4
            )
            assert found == wanted, (text, min_match, max_match)


def test_the_longest_match_beats_a_later_one():
    text = [1, 2, 3, 2, 4, 1, 2]
    assert propose(text, max_match=3, limit=1) == [3]
    assert propose(text, max_match=1, limit=1) == [4]


def test_among_equal_matches_the_latest_wins():
    text = [1, 2, 5, 1, 2, 6, 1, 2]
    assert propose(text, min_match=2, limit=1) == [6]


def test_a_copy_may_overlap_the_suffix_and_ends_with_the_text():
    assert propose([5, 5, 5], min_match=2, max_match=3) == [5]
    assert propose([7, 8, 7], min_match=1, max_match=3) == [8, 7]


def test_a_match_that_is_too_short_is_none():
    assert propose([1, 2, 3, 9, 1, 2], min_match=2) == [3, 9, 1, 2]
    assert propose([1, 2, 3, 9, 1, 2], min_match=3) == []
    assert propose([4], min_match=1) == []


def test_the_limit_and_the_uniforms():
    text = [1, 2, 3, 9, 1, 2]
    assert propose(text, limit=2) == [3, 9]
    assert propose(text, limit=0) == []
    for uniform in (0.0, 1 - 2**-24):
        assert propose(text, uniform=uniform) == [3, 9, 1, 2]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens must be at least 1"),
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 1"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"min_match": 0}, "min_match must be at least 1"),
        ({"min_match": 5, "max_match": 4}, "max_match must be at least 5"),
        ({"max_match": 2.0}, "max_match must be an integer"),
    ],
)
def test_what_the_factory_refuses(changes, match):
    with pytest.raises(ValueError, match=match):
        drafters.suffix(**{"num_draft_tokens": 3, "vocab_size": 9, **changes})
