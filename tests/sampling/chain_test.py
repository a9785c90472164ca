"""The sampling chain: by hand, against the oracle, and beyond the candidates."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import Status
from strata_jax._precision import at_least_float32
from strata_jax.sampling import (
    TokenCounts,
    chain_probs,
    count_tokens,
    sampling_settings,
)
from strata_jax.testing import _oracle as oracle

_chain = jax.jit(chain_probs, static_argnames="max_candidates")
_OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def make_counts(vocab_size, prompt=(), output=()):
    return TokenCounts(
        in_prompt=jnp.asarray(np.bincount(prompt, minlength=vocab_size) > 0)
        if len(prompt)
        else jnp.zeros(vocab_size, bool),
        in_output=jnp.asarray(
            np.bincount(np.asarray(output, int), minlength=vocab_size), jnp.int32
        ),
        num_output=jnp.asarray(len(output), jnp.int32),
    )


def run(
    logits, prompt=(), output=(), max_candidates=None, dtype=jnp.float32, **changes
):
    logits = jnp.asarray(np.asarray(logits, np.float64), dtype)
    size = logits.shape[0]
    settings = sampling_settings(size, max_candidates=max_candidates, **changes)
    probs, status = _chain(
        settings,
        logits,
        make_counts(size, prompt, output),
        max_candidates=max_candidates,
    )
    return np.asarray(probs), int(status)


def chain(logits, **options):
    probs, status = run(logits, **options)
    assert status == 0
    assert abs(probs.sum(dtype=np.float64) - 1) < 1e-6
    return probs


def log(probs):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64))


def close(found, wanted, atol=1e-6):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def check_against_oracle(logits, **changes):
    """Compares the kept set exactly and the probabilities to 1e-6."""
    logits = np.asarray(logits, np.float32)
    rounded = {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in {**_OFF, **changes}.items()
    }
    cuts = oracle.oracle_chain_cuts(logits, **rounded)
    # The inputs are chosen such that rounding decides nothing.
    assert cuts["smallest_distance"] > 1e-5
    wanted = oracle.oracle_chain(logits, **rounded)
    found = chain(logits, **changes)
    np.testing.assert_array_equal(np.flatnonzero(found), np.flatnonzero(wanted))
    close(found, wanted)
    return cuts


# By hand.


def test_off_is_the_softmax():
    close(chain(log([0.5, 0.125, 0.375])), [0.5, 0.125, 0.375])
    for top_k in (0, -1, 3, 9):
        close(chain(log([0.5, 0.125, 0.375]), top_k=top_k), [0.5, 0.125, 0.375])


def test_top_k():
    close(chain(log([0.5, 0.125, 0.375]), top_k=2), [4 / 7, 0, 3 / 7])
    assert chain(log([0.5, 0.125, 0.375]), top_k=1).tolist() == [1, 0, 0]


def test_top_p_keeps_the_token_that_crosses():
    probs = [0.5, 0.25, 0.125, 0.125]
    close(chain(log(probs), top_p=0.76), [4 / 7, 2 / 7, 1 / 7, 0])
    close(chain(log(probs), top_p=0.6), [2 / 3, 1 / 3, 0, 0])
    assert chain(log(probs), top_p=0.0).tolist() == [1, 0, 0, 0]
    assert chain(log(probs), top_p=1e-8).tolist() == [1, 0, 0, 0]
    close(chain(log(probs), top_p=1.0), probs)


def test_min_p_is_relative_to_the_largest():
    probs = [0.4, 0.3, 0.2, 0.1]
    close(chain(log(probs), min_p=0.4), [4 / 9, 3 / 9, 2 / 9, 0])
    assert chain(log(probs), min_p=1.0).tolist() == [1, 0, 0, 0]
    # Equality keeps a token.
    assert chain([0.0, 1.0, 1.0], min_p=1.0).tolist() == [0, 0.5, 0.5]


def test_filters_measure_the_renormalised_survivors_untempered():
    probs = [0.4, 0.2, 0.2, 0.1, 0.1]
    # top_k = 3 leaves (.5, .25, .25): the mass before the third is .75, not .6.
    close(chain(log(probs), top_k=3, top_p=0.7), [2 / 3, 1 / 3, 0, 0, 0])
    # Temperature 2 takes square roots of what is left.
    roots = np.sqrt([2 / 3, 1 / 3])
    close(
        chain(log(probs), top_k=3, top_p=0.7, temperature=2.0)[:2], roots / roots.sum()
    )
    # min_p compares untempered ratios: .25 < .3 although .25**.5 is not.
    close(
        chain(log([0.5, 0.375, 0.125]), min_p=0.3, temperature=2.0),
        np.sqrt([0.5, 0.375, 0]) / np.sqrt([0.5, 0.375]).sum(),
    )


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_temperature_zero_is_the_argmax_lower_id_first(filters):
    assert chain([0, 3, 1, 3], temperature=0.0, **filters).tolist() == [0, 1, 0, 0]
    # The two differ by less than float32 probabilities can tell.
    assert chain([0.0, 1e-9, -5.0], temperature=0.0, **filters).tolist() == [0, 1, 0]


def test_temperature_near_zero_and_large():
    assert chain([0.0, 1.0, 0.5], temperature=1e-6).tolist() == [0, 1, 0]
    assert chain([0.0, 1.0, 1.0], temperature=1e-6).tolist() == [0, 0.5, 0.5]
    smallest = float(np.finfo(np.float32).tiny)
    assert chain([0.0, 1.0, 1.0], temperature=smallest).tolist() == [0, 0.5, 0.5]
    close(chain([0.0, 50.0, -50.0, 7.0], temperature=1e30), [0.25] * 4)
    close(chain([0.0, 50.0, -50.0], temperature=1e30, top_k=2), [0.5, 0.5, 0])
    close(chain([0.0, -np.inf, 1.0], temperature=1e30), [0.5, 0, 0.5])


def test_ties_go_to_the_lower_id():
    assert chain([1.0, 2.0, 2.0, 2.0], top_k=2).tolist() == [0, 0.5, 0.5, 0]
    # Four of one eighth: three are needed to reach .8 from .5.
    probs = [0.125, 0.125, 0.5, 0.125, 0.125]
    close(chain(log(probs), top_p=0.8), [1 / 7, 1 / 7, 4 / 7, 1 / 7, 0])
    # Minus zero and zero are one value.
    assert chain([-1.0, -0.0, 0.0], top_k=1).tolist() == [0, 1, 0]
    assert chain([-1.0, 0.0, -0.0], top_k=1).tolist() == [0, 1, 0]


def test_penalties():
    logits = [2.0, -2.0, 1.0, 0.0, -1.0]
    text = {"prompt": [0, 1, 1], "output": [1, 3, 3]}

    def softmax(values):
        return np.exp(values) / np.exp(values).sum()

    close(
        chain(logits, repetition_penalty=2.0, **text), softmax([1.0, -4.0, 1.0, 0, -1])
    )
    close(
        chain(logits, presence_penalty=0.5, frequency_penalty=0.25, **text),
        softmax([2.0, -2.75, 1.0, -1.0, -1.0]),
    )
    close(
        chain(
            logits,
            repetition_penalty=2.0,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            **text,
        ),
        softmax([1.0, -4.75, 1.0, -1.0, -1.0]),
    )
    # They come before the filters: token 0 would be the largest without them.
    found = chain(logits, repetition_penalty=4.0, top_k=1, **text)
    assert found.tolist() == [0, 0, 1, 0, 0]


def test_bias_comes_before_penalties():
    found = chain(
        [1.0, -1.0, 0.0, 3.0],
        logit_bias={0: -2.0, 1: 3.0, 3: -np.inf},
        repetition_penalty=2.0,
        output=[0, 1, 2, 3],
    )
    # -1 * 2, 2 / 2, 0, banned.
    weights = np.exp([-2.0, 1.0, 0.0, -np.inf])
    close(found, weights / weights.sum())
    assert found[3] == 0


def test_eos_is_banned_until_there_are_enough_output_tokens():
    for output, is_banned in (
        ([], True),
        ([0], True),
        ([0, 0], False),
        ([0] * 3, False),
    ):
        found = chain([0.0, 5.0, 0.0], eos_ids=[1], min_tokens=2, output=output)
        assert (found[1] == 0) == is_banned
    # Prompt tokens do not count, and several EOS ids are all banned.
    found = chain([0.0, 5.0, 4.0], eos_ids=[2, 1], min_tokens=1, prompt=[0, 0, 0])
    assert found.tolist() == [1, 0, 0]
    # Unused entries of eos_ids ban nothing, the last token least of all.
    assert chain([0.0, 1.0, 9.0], min_tokens=5, temperature=0.0).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.01}, {"temperature": 0.0}]
)
def test_banned_tokens_stay_banned(filters):
    banned = {0: -np.inf, 2: -np.inf}
    found = chain([9.0, 0.0, 8.0, -1.0], logit_bias=banned, output=[0, 2], **filters)
    assert found[0] == 0
    assert found[2] == 0
    again = chain(
        [9.0, 0.0, 8.0, -1.0],
        logit_bias=banned,
        output=[0, 2],
        repetition_penalty=0.5,
        frequency_penalty=-3.0,
        **filters,
    )
    assert again[0] == again[2] == 0


# Bad rows.


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 1},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"temperature": 0.0},
        {"logit_bias": {1: -np.inf}},
    ],
)
@pytest.mark.parametrize(
    ("logits", "status"),
    [
        ([1.0, np.nan, 3.0], Status.NON_FINITE_LOGITS),
        ([1.0, np.inf, 3.0], Status.NON_FINITE_LOGITS),
        ([np.nan] * 3, Status.NON_FINITE_LOGITS),
        ([-np.inf, np.nan, -np.inf], Status.NON_FINITE_LOGITS),
        ([-np.inf] * 3, Status.EMPTY_SUPPORT),
        ([-np.inf, 1.0, -np.inf], None),
    ],
)
def test_bad_rows_have_a_status_and_no_mass(logits, status, filters):
    if status is None:
        status = Status.EMPTY_SUPPORT if "logit_bias" in filters else Status.OK
    probs, found = run(logits, **filters)
    assert found == status
    assert probs.tolist() == ([0, 1, 0] if status == Status.OK else [0, 0, 0])


def test_everything_banned():
    probs, status = run([1.0, 2.0], logit_bias={0: -np.inf, 1: -np.inf})
    assert (probs.tolist(), status) == ([0, 0], Status.EMPTY_SUPPORT)
    probs, status = run([-np.inf, 2.0], eos_ids=[1], min_tokens=1)
    assert (probs.tolist(), status) == ([0, 0], Status.EMPTY_SUPPORT)


def test_a_penalty_that_overflows_a_logit():
    probs, status = run([1e38, 1.0], repetition_penalty=1e-3, output=[0])
    assert (probs.tolist(), status) == ([0, 0], Status.NON_FINITE_LOGITS)
    # The same penalty on a token that does not occur is harmless.
    assert chain([1e38, 1.0], repetition_penalty=1e-3, output=[1]).tolist() == [1, 0]
    probs, status = run([1.0, 1.0], presence_penalty=-3e38, output=[0])
    assert (probs.tolist(), status) == ([1, 0], Status.OK)
    probs, status = run([1e38, 1.0], presence_penalty=-3e38, output=[0])
    assert (probs.tolist(), status) == ([0, 0], Status.NON_FINITE_LOGITS)
    # To the other side: no more than a token without mass.
    assert chain([-1e38, 1.0], repetition_penalty=1e3, output=[0]).tolist() == [0, 1]


@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize(
    "edits",
    [
        {"eos_ids": [0], "min_tokens": 1},
        {"repetition_penalty": 2.0, "prompt": [0]},
        {"frequency_penalty": 1.0, "output": [0]},
        {"presence_penalty": 1.0, "output": [0]},
        {"logit_bias": {0: -np.inf}},
    ],
    ids=lambda edits: next(iter(edits)),
)
def test_a_fault_is_not_hidden_by_a_ban_or_a_penalty(fault, edits):
    probs, status = run([fault, 1.0], **edits)
    assert (probs.tolist(), status) == ([0, 0], Status.NON_FINITE_LOGITS)
    assert run([0.5, 1.0], **edits)[1] == Status.OK


def test_rows_with_and_without_penalties_under_vmap():
    every = [
        sampling_settings(3),
        sampling_settings(3, presence_penalty=1.0),
        sampling_settings(3, eos_ids=[1], min_tokens=1),
    ]
    every = [dataclasses.replace(s, eos_ids=every[2].eos_ids) for s in every]
    logits, counts = jnp.asarray([0.0, 1.0, 0.5]), make_counts(3, (), [0])
    counts = dataclasses.replace(counts, num_output=jnp.int32(0))
    alone = [chain_probs(settings, logits, counts)[0] for settings in every]
    assert len({tuple(probs.tolist()) for probs in alone}) == 3
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)
    probs, _ = jax.vmap(chain_probs, in_axes=(0, None, None))(together, logits, counts)
    np.testing.assert_array_equal(probs, jnp.stack(alone))


def test_a_bad_row_next_to_a_good_one():
    # The rows of a window go through one program.
    settings = sampling_settings(3)
    rows = jnp.asarray([[0.0, jnp.nan, 1.0], [0.0, -jnp.inf, -jnp.inf]])
    probs, status = jax.vmap(chain_probs, in_axes=(None, 0, None))(
        settings, rows, make_counts(3)
    )
    assert probs.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert status.tolist() == [Status.NON_FINITE_LOGITS, 0]


# Against the oracle; beyond 1,024 candidates the full sort is needed.


def midpoint(values, index):
    """A threshold halfway between two neighbours, so that `index` values are kept."""
    return float(np.float32((values[index - 1] + values[index]) / 2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("top_k", [1, 700, 1023, 1024, 1025, 2000, 4095, 4096, 0])
def test_top_k_at_and_beyond_the_candidates(top_k, seed):
    logits = np.random.default_rng(seed).normal(size=4096)
    cuts = check_against_oracle(logits, top_k=top_k, temperature=1.5)
    assert cuts["num_min_p"] == (top_k or 4096)


@pytest.mark.parametrize("num_kept", [1, 2, 900, 1023, 1024, 1025, 1500, 3000])
def test_top_p_cuts_at_and_beyond_the_candidates(num_kept):
    logits = np.random.default_rng(7).normal(size=4096).astype(np.float32)
    cuts = oracle.oracle_chain_cuts(logits, **_OFF)
    top_p = midpoint(cuts["cum_before"], num_kept)
    found = check_against_oracle(logits, top_p=top_p)
    assert found["num_top_p"] == num_kept


@pytest.mark.parametrize("num_kept", [1, 2, 900, 1023, 1024, 1025, 1500, 3000])
def test_min_p_cuts_at_and_beyond_the_candidates(num_kept):
    # Evenly spaced, so that no two ratios are close.
    logits = np.random.default_rng(8).permutation(np.linspace(0, -4, 4096))
    logits = logits.astype(np.float32)
    cuts = oracle.oracle_chain_cuts(logits, **_OFF)
    min_p = midpoint(cuts["ratio"], num_kept)
    found = check_against_oracle(logits, min_p=min_p)
    assert found["num_min_p"] == num_kept


@pytest.mark.parametrize(
    ("top_k", "num_top_p", "num_min_p"),
    [(1500, 1200, 1100), (1500, 800, 700), (900, 800, 20), (3000, 3000, 1025)],
)
def test_all_filters_together(top_k, num_top_p, num_min_p):
    logits = np.random.default_rng(9).permutation(np.linspace(0, -6, 4096))
    logits = logits.astype(np.float32)
    cuts = oracle.oracle_chain_cuts(logits, **{**_OFF, "top_k": top_k})
    cumulative = np.append(cuts["cum_before"], 1.0)
    changes = {
        "top_k": top_k,
        "top_p": midpoint(cumulative, num_top_p) if num_top_p < top_k else 1.0,
        "min_p": midpoint(cuts["ratio"], num_min_p),
        "temperature": 0.7,
    }
    found = check_against_oracle(logits, **changes)
    numbers = [found[name] for name in ("num_top_k", "num_top_p", "num_min_p")]
    assert numbers == [top_k, num_top_p, num_min_p]


@pytest.mark.parametrize("top_k", [5, 1023, 1024, 1025, 3000])
def test_ties_across_the_last_candidate(top_k):
    found = chain(np.zeros(5000), top_k=top_k)
    assert np.flatnonzero(found).tolist() == list(range(top_k))
    values = np.tile([0.0, 1.0], 2500)
    found = chain(values, top_k=top_k)
    wanted = [*range(1, 5000, 2), *range(0, 5000, 2)][:top_k]
    assert np.flatnonzero(found).tolist() == sorted(wanted)


@pytest.mark.parametrize("top_p", [0.1, 0.25, 0.5])
def test_ties_at_a_top_p_cut_beyond_the_candidates(top_p):
    # 4,096 equal tokens: the mass before token i is i / 4096, exactly.
    found = chain(np.zeros(4096), top_p=top_p)
    wanted = int(np.ceil(4096 * float(np.float32(top_p))))
    assert np.flatnonzero(found).tolist() == list(range(wanted))


@pytest.mark.parametrize("seed", range(30))
def test_random_settings_against_the_oracle(seed):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=257) * rng.choice([0.5, 3.0])).astype(np.float32)
    logits[rng.random(257) < rng.choice([0.0, 0.5])] = -np.inf
    prompt, output = rng.integers(0, 257, 20), rng.integers(0, 257, 30)
    changes = {
        "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.0])),
        "top_k": int(rng.choice([0, 1, 5, 60, 256])),
        "top_p": float(rng.choice([1.0, 0.95, 0.5])),
        "min_p": float(rng.choice([0.0, 0.02, 0.3])),
        "repetition_penalty": float(rng.choice([1.0, 1.25])),
        "presence_penalty": float(rng.choice([0.0, 0.5])),
        "frequency_penalty": float(rng.choice([0.0, -0.25])),
    }
    exact = {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in changes.items()
    }
    text = {
        "prompt_counts": np.bincount(prompt, minlength=257),
        "output_counts": np.bincount(output, minlength=257),
    }
    distance = oracle.oracle_chain_cuts(logits, **exact, **text)["smallest_distance"]
    assert distance > 1e-6  # holds for these seeds: rounding decides nothing
    wanted = oracle.oracle_chain(logits, **exact, **text)
    close(chain(logits, prompt=prompt, output=output, **changes), wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 4},
        {"top_k": 3, "top_p": 0.6},
        {"top_k": 4, "min_p": 0.3},
        {"top_k": 1},
        {"top_k": 4, "temperature": 0.0},
    ],
)
def test_max_candidates_changes_nothing_within_it(changes):
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(size=300)
        limited = chain(logits, max_candidates=4, **changes)
        np.testing.assert_array_equal(limited, chain(logits, **changes))
    ties = chain(np.zeros(300), max_candidates=4, **changes)
    np.testing.assert_array_equal(ties, chain(np.zeros(300), **changes))


def test_max_candidates_never_sorts_the_row():
    def sorted_sizes(max_candidates):
        text = str(
            jax.make_jaxpr(
                lambda settings, logits, counts: chain_probs(
                    settings, logits, counts, max_candidates=max_candidates
                )
            )(sampling_settings(5000), jnp.zeros(5000), make_counts(5000))
        )
        return [int(size) for size in re.findall(r"top_k\[.*?k=(\d+)", text)]

    assert sorted_sizes(40) == [40]
    # Without it the whole row is sorted in one branch, not on the common path.
    assert sorted(set(sorted_sizes(None))) == [1024, 5000]


# Dtypes and counts.


def test_small_dtypes_are_cast_once():
    logits = jnp.asarray([9.03, 9.0, 8.97, 8.0], jnp.bfloat16)
    found = chain(logits, dtype=jnp.bfloat16)
    assert found.dtype == np.float32
    wanted = np.exp(np.asarray(logits, np.float64) - 9)
    close(found, wanted / wanted.sum())
    assert at_least_float32(jnp.bfloat16) == jnp.float32
    assert at_least_float32(jnp.float16) == jnp.float32
    assert at_least_float32(jnp.float32) == jnp.float32
    assert at_least_float32(np.float64) == np.float64


def test_count_tokens_splits_prompt_and_output():
    tokens = jnp.asarray([3, 1, 3, 0, 0, 1, 2, 2], jnp.int32)
    counts = count_tokens(tokens, jnp.int32(3), jnp.int32(6), 4)
    assert counts.in_prompt.tolist() == [False, True, False, True]
    assert counts.in_output.tolist() == [2, 1, 0, 0]
    assert int(counts.num_output) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 0.3},
        {"presence_penalty": 0.7},
        {"repetition_penalty": 1.3},
        {"min_tokens": 5, "eos_ids": [2]},
        {"min_tokens": 4, "eos_ids": [2]},
    ],
)
def test_drafts_count_as_output(changes):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=40), jnp.float32)
    settings = sampling_settings(40, temperature=1.0, **changes)

    def probs(output, drafts):
        counts = make_counts(40, prompt=[1, 2], output=output)
        found, status = _chain(settings, logits, counts, jnp.asarray(drafts, jnp.int32))
        assert int(status) == 0
        return np.asarray(found)

    counted = probs([7, 7, 3, 39], [])
    for drafts in ([3, 39], [3, -1, 39, -1, -1]):
        np.testing.assert_array_equal(probs([7, 7], drafts), counted)
    is_seen = changes != {"min_tokens": 5, "eos_ids": [2]}
    for others in ([], [3], [-1, -1]):
        assert (probs([7, 7], others) != counted).any() == is_seen


def test_wrong_shapes():
    settings = sampling_settings(4)
    for wrong in (jnp.zeros(3), jnp.zeros((1, 4)), jnp.zeros(())):
        with pytest.raises(ValueError, match="logits must have shape"):
            chain_probs(settings, wrong, make_counts(4))
    fine = jnp.zeros(4), make_counts(4)
    with pytest.raises(ValueError, match="drafts must have shape"):
        chain_probs(settings, *fine, jnp.int32(1))
    with pytest.raises(ValueError, match="drafts must"):
        chain_probs(settings, *fine, jnp.zeros(2))
