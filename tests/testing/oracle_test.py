import fractions
import inspect
import itertools
import json
import pathlib

import numpy as np
import pytest

from strata_jax.testing import _oracle as oracle

ABSENT, OFFERED, NULL = 0, 1, 2
U_MAX = float(np.float32(1 - 2**-24))
_CASES = {
    case["id"]: case
    for case in json.loads(
        (pathlib.Path(__file__).parents[1] / "testdata" / "cases.json").read_text()
    )
}
_OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def load(case_id):
    case = _CASES[case_id]
    return case["inputs"], case["expected"], case["naive_wrong"]


def chain(logits, **changes):
    return oracle.oracle_chain(logits, **{**_OFF, **changes})


def cuts(logits, **changes):
    return oracle.oracle_chain_cuts(logits, **{**_OFF, **changes})


def log(probs):
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, np.float64))


def close(actual, expected, atol=1e-6):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def differs(actual, wrong, by=1e-3):
    assert np.abs(np.asarray(actual) - np.asarray(wrong, np.float64)).max() > by


def verify_row(p, mu, token, kind, u=0.0, residual=0.0, pick=0.0, dtype=np.float64):
    return oracle.oracle_verify_token(
        np.asarray([p, p], dtype),
        np.asarray([mu], dtype),
        [token],
        [kind],
        [u],
        [0.0, residual],
        [[0.0, pick], [0.0, pick]],
    )


def bisect(predicate, steps=50):
    """Returns the u up to which a predicate that can only turn false is true."""
    low, high = 0.0, 1.0
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if predicate(middle) else (low, middle)
    return low


def inverse_cdf_law(draw, size, steps=50):
    """Returns the law of a draw that is monotone in its uniform."""
    edges = [bisect(lambda u, i=i: draw(u) <= i, steps) for i in range(size - 1)]
    return np.diff([0.0, *edges, 1.0])


def accept_prob(p, mu, token):
    def accepted(u):
        return verify_row(p, mu, token, OFFERED, u=u).num_accepted == 1

    return bisect(accepted) if accepted(0.0) else 0.0


def residual_law(p, mu):
    return inverse_cdf_law(
        lambda u: verify_row(p, mu, 0, NULL, residual=u).tokens[0], len(p)
    )


def verifier_law(p, mu):
    """Returns acceptance, residual and emitted law of `oracle_verify_token`."""
    accept = np.array([accept_prob(p, mu, token) for token in range(len(p))])
    residual = residual_law(p, mu)
    accepted = np.asarray(mu) * accept
    return accept, residual, accepted + (1 - accepted.sum()) * residual


# Sampling chain.


@pytest.mark.parametrize("index", range(5))
def test_bug_022_top_p_boundary(index):
    inputs, expected, naive = load("bug-022")
    case = inputs["cases"][index]
    final = chain(log(case["probs"]), top_p=case["top_p"])
    close(final, expected["final"][index])
    if index < len(naive["cum_le"]):
        differs(final, naive["cum_le"][index])


def test_bug_023_top_p_extremes():
    inputs, expected, _ = load("bug-023")
    tiny, zero, one = (chain(inputs["logits"], top_p=t) for t in inputs["top_p"])
    assert tiny.tolist() == expected["tiny"]
    assert zero.tolist() == expected["tiny"]
    close(one, expected["one"])
    differs(tiny, [1, 0, 0, 0])  # token 0, the naive value
    large = inputs["large"]
    final = chain(np.zeros(large["V"]), top_p=large["top_p"])
    assert np.count_nonzero(final) == expected["large"]["kept_exact_arithmetic"]
    assert np.isfinite(final).all()
    close(final.sum(), expected["large"]["sum"])


@pytest.mark.parametrize("index", range(3))
def test_bug_025_top_k_ties(index):
    inputs, expected, naive = load("bug-025")
    case = inputs["cases"][index]
    final = chain(case["logits"], top_k=case["top_k"])
    close(final, expected["final"][index])
    differs(final, naive["threshold_mask"][index])
    found = cuts(case["logits"], top_k=case["top_k"])
    assert found["num_top_k"] == case["top_k"]
    assert found["top_k_gap"] == 0.0
    assert found["smallest_distance"] == np.inf  # a tie is no rounding matter


@pytest.mark.parametrize("index", range(3))
def test_bug_026_temperature_is_last(index):
    inputs, expected, naive = load("bug-026")
    case = dict(inputs["cases"][index])
    logits, temperature = case.pop("logits"), case.pop("T")
    final = chain(logits, temperature=temperature, **case)
    close(final, expected["final"][index])
    differs(final, naive["temperature_first"][index])


@pytest.mark.parametrize("index", range(5))
def test_bug_028_min_p(index):
    inputs, expected, naive = load("bug-028")
    case = inputs["cases"][index]
    final = chain(case["logits"], min_p=case["min_p"])
    differs(final, naive["logit_zero_fill"])
    if index == 2:
        # The decimals of this case fall a hair below the cut; the case allows either.
        distance = cuts(case["logits"], min_p=case["min_p"])["smallest_distance"]
        assert distance < 1e-10
        final = chain(log([0.5, 0.25, 0.25]), min_p=case["min_p"])
    close(final, expected["final"][index])


def test_bug_029_penalties():
    inputs, expected, naive = load("bug-029")
    logits = inputs["logits"]
    counts = {
        "prompt_counts": np.bincount(inputs["prompt"], minlength=5),
        "output_counts": np.bincount(inputs["output"], minlength=5),
    }
    repetition = {"repetition_penalty": inputs["repetition_penalty"]}
    output_only = {
        "presence_penalty": inputs["presence_penalty"],
        "frequency_penalty": inputs["frequency_penalty"],
    }
    only_repetition = cuts(logits, **repetition, **counts)["logits"]
    only_output = cuts(logits, **output_only, **counts)["logits"]
    both = cuts(logits, **repetition, **output_only, **counts)["logits"]
    assert only_repetition.tolist() == expected["repetition_only"]
    assert only_output.tolist() == expected["presence_frequency_only"]
    assert both.tolist() == expected["all_three_in_order_rep_then_freq_presence"]
    differs(only_repetition, naive["divide_always"])
    differs(only_output, naive["prompt_counted"])
    final = chain(logits, **repetition, **output_only, **counts)
    close(final, np.exp(both) / np.exp(both).sum(), atol=1e-12)


def test_bug_031_ban_reaches_every_row():
    inputs, expected, naive = load("bug-031")
    p = chain(log(inputs["p_raw"]), banned_ids=inputs["ban"])
    close(p, expected["p"])
    mu = inputs["mu"]
    accept, residual, emit = verifier_law(p, mu)
    assert accept[inputs["draft_token"]] == expected["accept_prob_draft0"]
    close(residual, expected["residual"])
    close(emit, expected["emit"])
    close(oracle.oracle_row_law(p, mu, np.ones(3)), expected["emit"])
    differs(emit, naive["ratio_from_unmasked_p"])
    with pytest.raises(ValueError, match="empty support"):
        chain(log(inputs["p_raw"]), banned_ids=[0, 1, 2])


@pytest.mark.parametrize("index", range(6))
def test_bug_034_argmax_and_non_finite(index):
    inputs, expected, naive = load("bug-034")
    logits = [float(value) for value in inputs["cases"][index]]
    token = expected["token"][index]
    if token == "error":
        with pytest.raises(ValueError):
            chain(logits, temperature=0.0)
        return
    final = chain(logits, temperature=0.0)
    assert final.argmax() == token
    assert final.tolist() == np.eye(3)[token].tolist()
    assert token != (naive["last_wins"], naive["argmax_of_f32_softmax"])[index]


def test_chain_off_is_the_softmax():
    logits = np.array([0.5, -1.0, 2.0, 0.0])
    for top_k in (0, -1, 4, 9):
        close(chain(logits, top_k=top_k), np.exp(logits) / np.exp(logits).sum(), 1e-15)


def test_chain_filters_measure_renormalised_survivors():
    probs = [0.4, 0.2, 0.2, 0.1, 0.1]
    # top_k = 3 leaves (.5, .25, .25): mass before the third is .75, not .6.
    found = cuts(log(probs), top_k=3, top_p=0.7)
    assert found["kept"].tolist() == [0, 1]
    close(found["cum_before"], [0, 0.5, 0.75], 1e-12)
    close(found["top_p_distance"], 0.05, 1e-12)
    close(found["top_p_gap"], 0.0, 1e-12)
    close(found["top_k_gap"], np.log(2), 1e-12)
    # temperature 2 takes square roots of what is left.
    close(
        chain(log(probs), top_k=3, top_p=0.7, temperature=2.0),
        np.sqrt([2 / 3, 1 / 3, 0, 0, 0]) / np.sqrt([2 / 3, 1 / 3]).sum(),
        1e-12,
    )
    found = cuts(log(probs), min_p=0.3)
    assert (found["num_finite"], found["num_top_p"], found["num_min_p"]) == (5, 5, 3)
    close(found["ratio"], [1, 0.5, 0.5, 0.25, 0.25], 1e-12)
    close(found["smallest_distance"], 0.05, 1e-12)


def test_chain_bias_and_bans_come_before_penalties():
    logits = [1.0, -1.0, 0.0, 3.0]
    scores = cuts(
        logits,
        logit_bias=[-2.0, 3.0, 0.0, -np.inf],
        banned_ids=[2],
        repetition_penalty=2.0,
        output_counts=[1, 1, 1, 1],
    )["logits"]
    assert scores.tolist() == [-2.0, 1.0, -np.inf, -np.inf]


def test_chain_top_k_counts_finite_survivors_only():
    found = cuts([0.0, -np.inf, 1.0, -np.inf], top_k=3)
    assert found["order"].tolist() == [2, 0]
    assert (found["num_finite"], found["num_top_k"]) == (2, 2)
    assert found["smallest_distance"] == np.inf


def test_chain_ties_go_to_the_lower_id_in_a_large_row():
    # A sort that is not stable shows only beyond a few dozen entries.
    logits = np.tile([0.0, 1.0], 3000)
    assert np.flatnonzero(chain(logits, top_k=4)).tolist() == [1, 3, 5, 7]
    assert cuts(logits)["order"].tolist() == [*range(1, 6000, 2), *range(0, 6000, 2)]
    assert chain(logits, temperature=0.0)[1] == 1.0


def test_chain_tiny_temperature_is_finite():
    assert chain([0.0, 1.0, 1.0], temperature=1e-300).tolist() == [0.0, 0.5, 0.5]


def test_chain_is_the_same_for_a_permutation_without_ties():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=50)
    shuffle = rng.permutation(50)
    settings = {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7}
    close(chain(logits[shuffle], **settings), chain(logits, **settings)[shuffle], 1e-15)


@pytest.mark.parametrize(
    ("logits", "changes", "match"),
    [
        ([0.0, np.nan], {}, "id 1"),
        ([0.0, np.inf], {}, "id 1"),
        ([0.0, -np.inf], {"logit_bias": [0.0, np.inf]}, "logit_bias"),
        ([-np.inf, -np.inf], {}, "empty support"),
        ([0.0, 1.0], {"banned_ids": [2]}, "banned_ids"),
        ([0.0, 1.0], {"banned_ids": [-1]}, "banned_ids"),
        ([0.0, 1.0], {"logit_bias": [0.0]}, "logit_bias"),
        ([0.0, 1.0], {"output_counts": [-1, 0]}, "output_counts"),
        ([0.0, 1.0], {"temperature": -1.0}, "temperature"),
        ([0.0, 1.0], {"temperature": np.nan}, "temperature"),
        ([0.0, 1.0], {"top_k": -2}, "top_k"),
        ([0.0, 1.0], {"top_p": 1.1}, "top_p"),
        ([0.0, 1.0], {"min_p": -0.1}, "min_p"),
        ([0.0, 1.0], {"repetition_penalty": 0.0}, "repetition_penalty"),
        ([[0.0, 1.0]], {}, "shape"),
    ],
)
def test_chain_errors(logits, changes, match):
    with pytest.raises(ValueError, match=match):
        chain(logits, **changes)
    with pytest.raises(ValueError, match=match):
        cuts(logits, **changes)


# Sums and draws.


def test_doubling_sum_order_of_additions():
    sums = oracle.doubling_sum(np.array([1e8, 1, -1e8, 1], np.float32), np.float32)
    assert sums.dtype == np.float32
    assert sums.tolist() == [1e8, 1e8, 0.0, 0.0]  # a sequential sum ends 0, 1
    for n in (0, 1, 2, 5, 8, 13):
        exact = oracle.doubling_sum(np.arange(n), np.float64)
        assert exact.tolist() == np.cumsum(np.arange(n)).tolist()


def test_halving_sum_order_of_additions():
    values = np.array([1e8, 1, -1e8], np.float32)
    total = oracle.halving_sum(values)
    assert total.dtype == np.float32
    assert total == 1.0  # (1e8 - 1e8) + (1 + 0); left to right gives 0
    table = np.arange(2 * 3 * 7, dtype=np.float64).reshape(2, 3, 7)
    assert oracle.halving_sum(table).tolist() == table.sum(-1).tolist()
    assert oracle.halving_sum(np.zeros((2, 0), np.float32)).tolist() == [0, 0]
    alone = np.random.default_rng(1).random((4, 100), np.float32)
    rows = [oracle.halving_sum(row) for row in alone]
    np.testing.assert_array_equal(oracle.halving_sum(alone), rows)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bug_008_strict_inequalities(dtype):
    inputs, expected, naive = load("bug-008")
    accepted = []
    for case in inputs["accept"]:
        verdict = verify_row(
            [case["p_d"], 1 - case["p_d"]],
            [case["mu_d"], 0.0],
            0,
            OFFERED,
            u=case["u"],
            dtype=dtype,
        )
        accepted.append(verdict.num_accepted == 1)
        assert verdict.zero_measure_offered == (case["mu_d"] == 0)
    assert accepted == expected["accept"]
    assert accepted != naive["inclusive"]["accept"]
    tokens = [
        oracle.oracle_draw(np.asarray(case["p"], dtype), 0.0, case["u"])
        for case in inputs["inverse_cdf"]
    ]
    assert tokens == expected["token"]
    assert tokens != naive["inclusive"]["token"]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draw_law_is_the_weights(block_size, dtype):
    weights = np.array([0, 2, 0, 0, 0, 0, 5, 1, 0], dtype) / 8
    # Block masses are eighths, so eight block uniforms integrate that level exactly.
    laws = [
        inverse_cdf_law(
            lambda u, i=i: oracle.oracle_draw(weights, i / 8, u, block_size), 9, 22
        )
        for i in range(8)
    ]
    law = np.mean(laws, axis=0)
    close(law, weights)
    # Ids without mass are never drawn (the last edge is 1 - 2^-22, not 1).
    assert not law[weights == 0][:-1].any()


def exact_draw(weights, u_block, u_token, block_size):
    """The same inverse CDF with fractions."""
    exact = [fractions.Fraction(float(w)) for w in weights]
    size = len(exact) if len(exact) <= block_size else block_size
    blocks = [exact[i : i + size] for i in range(0, len(exact), size)]

    def first_above(masses, u):
        threshold = fractions.Fraction(u) * sum(masses)
        running = itertools.accumulate(masses)
        return next(i for i, total in enumerate(running) if total > threshold)

    block = first_above([sum(b) for b in blocks], u_block) if len(blocks) > 1 else 0
    return block * size + first_above(blocks[block], u_token)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 17, 100, 256])
def test_draw_equals_exact_arithmetic_on_integer_weights(seed, vocab_size):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 9, vocab_size) * (rng.random(vocab_size) < 0.4)
    weights[rng.integers(vocab_size)] += 1
    weights = weights.astype(np.float32)
    uniforms = [0.0, 0.25, 0.5, 0.75, *(rng.integers(0, 2**12, 6) / 2**12)]
    for block_size in (16, 256):
        for u_block, u_token in itertools.product(uniforms, uniforms):
            drawn = oracle.oracle_draw(weights, u_block, u_token, block_size)
            assert drawn == exact_draw(weights, u_block, u_token, block_size)
            assert weights[drawn] > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draw_never_returns_a_token_without_mass(dtype):
    rng = np.random.default_rng(2)
    for vocab_size in (19, 300, 1000):
        for _ in range(20):
            weights = rng.exponential(size=vocab_size) ** 4
            weights *= rng.random(vocab_size) < rng.choice([0.02, 0.5, 1.0])
            weights[rng.integers(vocab_size)] += 1e-6
            weights = (weights / weights.sum()).astype(dtype)
            for pair in ((0.0, 0.0), (U_MAX, U_MAX), (0.0, U_MAX), rng.random(2)):
                pair = np.minimum(pair, U_MAX)
                assert weights[oracle.oracle_draw(weights, pair[0], pair[1], 64)] > 0


def test_draw_needs_no_fallback_where_running_sums_fall_short():
    weights = np.full(19, np.float32(1 / 19))
    assert np.cumsum(weights, dtype=np.float32)[-1] < U_MAX  # a test against u fails
    assert oracle.oracle_draw(weights, 0.0, U_MAX) == 18
    assert oracle.oracle_draw(weights, U_MAX, U_MAX, block_size=4) == 18


def test_draw_reaches_a_tail_that_single_running_sums_lose():
    # 2^-26 each: lost one by one behind 1.0 in float32, not as blocks.
    weights = np.full(1 + 2**16, np.float32(2.0**-26))
    weights[0] = 1.0
    drawn = oracle.oracle_draw(weights, U_MAX, 0.5)
    assert drawn > 60_000


def test_draw_one_block_ignores_the_block_uniform():
    weights = np.array([0.25, 0.25, 0.5], np.float32)
    drawn = {oracle.oracle_draw(weights, u, 0.6, 3) for u in (0.0, 0.5, U_MAX)}
    assert drawn == {2}


def test_draw_edges_and_errors():
    zero = np.zeros(5, np.float32)
    assert oracle.oracle_draw(zero, 0.0, 0.0) == -1
    assert oracle.oracle_draw(zero, 0.0, 0.0, 2) == -1
    smallest = np.array([0, 2**-149, 0], np.float32)
    assert oracle.oracle_draw(smallest, U_MAX, U_MAX) == 1
    good = np.ones(3, np.float32)
    for weights, pair, match in (
        (np.ones(3, np.float16), (0, 0), "float32 or float64"),
        (np.ones((1, 3)), (0, 0), "axes"),
        (np.array([1.0, np.nan]), (0, 0), "finite"),
        (np.array([1.0, -1.0]), (0, 0), "non-negative"),
        (good, (0, 1.0), "u_token"),
        (good, (1 - 2**-30, 0), "u_block"),  # 1 in float32
        (good, (-0.5, 0), "u_block"),
    ):
        with pytest.raises(ValueError, match=match):
            oracle.oracle_draw(weights, *pair)
    with pytest.raises(ValueError, match="block_size"):
        oracle.oracle_draw(good, 0, 0, 0)


# Verifiers.


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_bug_001_gate_null_mass(name):
    inputs, expected, naive = (part[name] for part in load("bug-001"))
    p, q = inputs["p"], np.array(inputs["q"])
    admitted = q >= inputs["threshold"]
    mu = np.where(admitted, q, 0.0)
    close(mu, expected["mu"])
    close(1 - mu.sum(), expected["null_mass"])
    accept, residual, emit = verifier_law(p, mu)
    close(accept, expected["accept_prob"])
    close(residual, expected["residual"])
    close(emit, expected["emit"])
    law = oracle.oracle_row_law(p, q, admitted)
    close(law, expected["emit"], 1e-12)
    close((mu * accept).sum(), expected.get("overall_accept", (mu * accept).sum()))
    biased = oracle.oracle_unaccounted_row_law(p, q, admitted)
    close(biased, naive.pop("failed_gate_samples_p"))
    for wrong in (biased, *naive.values()):
        differs(law, wrong)
        differs(emit, wrong)


def test_bug_002_thresholds():
    inputs, expected, naive = load("bug-002")
    p, q = inputs["p"], np.array(inputs["q"])
    for threshold in inputs["thresholds"]:
        admitted = q >= threshold
        mu = np.where(admitted, q, 0.0)
        if threshold == 0.0:
            close(mu, expected["threshold_0_is_plain_speculation_mu"])
        if threshold == 1.1:
            close(mu, expected["threshold_1_1_mu"])
            close(1 - mu.sum(), expected["threshold_1_1_null_mass"])
        for law in (oracle.oracle_row_law(p, q, admitted), verifier_law(p, mu)[2]):
            close(law, expected["emit_for_every_threshold"], 1e-12)
            for wrong in naive.values():
                differs(law, wrong)
    passing, failing = (expected["top_gate"][k] for k in ("passing", "failing"))
    accept, residual, emit = verifier_law(passing["p"], passing["q"])
    close(accept, passing["accept"])
    close(residual, passing["residual"])
    close(emit, passing["emit"])
    # A gate on max(q) that fails leaves an ABSENT row: a plain draw from p.
    law = inverse_cdf_law(
        lambda u: verify_row(failing["p"], failing["q"], 0, ABSENT, pick=u).tokens[0],
        3,
    )
    close(law, failing["emit"])
    differs(law, naive["failed_top_gate_treated_as_rejection_of_q"])


def test_bug_004_exact_match():
    inputs, expected, naive = load("bug-004")
    p, q = inputs["p"], inputs["q"]

    def verify(token, u):
        return oracle.oracle_verify_exact_match(
            np.array([p, p]), [token], [OFFERED], [[0.0, u], [0.0, 0.0]]
        )

    accepted = 0.0
    for token in range(3):
        law = inverse_cdf_law(lambda u, d=token: verify(d, u).tokens[0], 3)
        close(law, expected["emit"])
        for wrong in naive.values():
            differs(law, wrong)
        accept = sum(
            law[y]
            for y, u in ((0, 0.1), (1, 0.6), (2, 0.9))
            if verify(token, u).num_accepted == 1
        )
        accepted += q[token] * accept
    close(accepted, expected["accept_prob"])


def test_bug_005_residual_is_not_softmaxed():
    inputs, expected, naive = load("bug-005")
    _, residual, emit = verifier_law(inputs["p"], inputs["q"])
    close(residual, expected["residual"])
    close(emit, expected["emit"])
    differs(residual, naive["softmax_residual"])
    differs(emit, naive["emit"])
    for u in (0.0, 0.5, U_MAX):
        assert verify_row(inputs["p"], inputs["q"], 0, NULL, residual=u).tokens == [1]


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bug_007_empty_residual(index, dtype):
    inputs, expected, _ = load("bug-007")
    p, mu = (np.asarray(inputs["cases"][index][k], dtype) for k in ("p", "mu"))
    law = inverse_cdf_law(
        lambda u: verify_row(
            p, mu, 0, NULL, residual=min(u, U_MAX), dtype=dtype
        ).tokens[0],
        len(p),
    )
    assert np.isfinite(law).all()  # the naive value is NaN
    close(law, expected["residual"][index])
    wanted = expected["accept_on_support"][index]
    if wanted is not None:
        wanted = float(str(wanted).lstrip(">="))
        for token in np.flatnonzero(mu > 0):
            assert accept_prob(p, mu, int(token)) >= wanted - 1e-6
    assert np.maximum(p - mu, 0).sum() >= 1 - mu.sum() - 1e-7
    close(oracle.oracle_row_law(p, mu, np.ones(len(p))), p)


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bug_013_golden_traces(index, dtype):
    inputs, expected, _ = load("bug-013")
    trace, wanted = inputs["traces"][index], expected["traces"][index]
    p = np.asarray(inputs["P_rows"], dtype)
    q = np.asarray(inputs["Q_rows"], dtype)
    admitted = q >= inputs["threshold"]
    mu = np.where(admitted, q, dtype(0))
    kinds = [OFFERED if admitted[i, d] else NULL for i, d in enumerate(trace["drafts"])]
    final = trace["final_u"]
    verdict = oracle.oracle_verify_token(
        p,
        mu,
        trace["drafts"],
        kinds,
        trace["accept_u"],
        [0.5, final],
        [[0.5, final]] * 4,
    )
    sources = {"BONUS": "bonus", "REJECT": "rejection", "NULL": "null"}
    assert verdict.tokens == wanted["emitted"]
    assert verdict.num_accepted == wanted["accepted"]
    assert verdict.num_emitted == len(wanted["emitted"])
    assert verdict.source == sources[wanted["ended_by"].split("@")[0]]
    assert not verdict.zero_measure_offered
    if verdict.source == "null":  # the naive rule draws from p
        row = verdict.num_accepted
        assert oracle.oracle_draw(p[row], 0.5, final) != verdict.tokens[-1]
    if verdict.source == "bonus":
        # The traces' own uniforms cannot tell row 3 from the last draft row; .27 can.
        verdict = oracle.oracle_verify_token(
            p,
            mu,
            trace["drafts"],
            kinds,
            trace["accept_u"],
            [0.5, 0.9],
            [[0.5, 0.9]] * 3 + [[0.5, 0.27]],
        )
        assert verdict.tokens[-1] == 0
        assert oracle.oracle_draw(p[2], 0.5, 0.27) == 1


def test_bug_017_position_keyed_draws():
    inputs, expected, naive = load("bug-017")
    p, uniforms = inputs["p_every_position"], inputs["u_by_position"]
    limit = inputs["max_new_tokens"]

    def generate(drafts, start=()):
        tokens = list(start)
        while len(tokens) < limit:
            window = drafts[: len(uniforms) - len(tokens) - 1]
            pick = [[0.0, uniforms[len(tokens) + i]] for i in range(len(window) + 1)]
            verdict = oracle.oracle_verify_exact_match(
                np.array([p] * (len(window) + 1)), window, [OFFERED] * len(window), pick
            )
            tokens += verdict.tokens
        return tokens[:limit]

    for drafts in inputs["drafts_tried"]:
        assert generate(drafts) == expected["tokens"]
        assert generate(drafts) != naive["sequential_stream_with_drafts_0_0"]
        assert generate(drafts, expected["tokens"][:2]) == expected["tokens"]


def random_rows(rng, size):
    p, q = rng.dirichlet(np.full(size, 0.5), 2)
    return p, q, q * (q >= rng.choice([0.0, 0.1, 0.3, 2.0]))


@pytest.mark.parametrize("seed", range(12))
def test_token_rule_emits_p(seed):
    rng = np.random.default_rng(seed)
    p, q, mu = random_rows(rng, int(rng.integers(2, 5)))
    accept, residual, emit = verifier_law(p, mu)
    close(emit, p, 1e-12)
    close((mu * accept).sum(), np.minimum(p, mu).sum(), 1e-12)
    close(oracle.oracle_row_law(p, q, mu > 0), p, 1e-12)
    positive = np.maximum(p - mu, 0)
    if mu.sum() < 1:
        close(residual, positive / positive.sum(), 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_unaccounted_law_equals_the_theorem(seed):
    rng = np.random.default_rng(seed)
    p, q, mu = random_rows(rng, 4)
    outside = ~(mu > 0)
    law = oracle.oracle_unaccounted_row_law(p, q, mu > 0)
    residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    refused = np.maximum(q - p, 0)[outside].sum()
    failed = q[outside].sum()
    moved = np.where(outside, np.minimum(p, q), 0) + refused * residual
    close(law, p + failed * p - moved, 1e-12)
    close(law.sum(), 1.0, 1e-12)
    if failed == 0 or outside.all():
        close(law, p, 1e-12)


def test_unaccounted_law_of_a_target_that_drafts_for_itself():
    q = [0.6, 0.3, 0.1]
    law = oracle.oracle_unaccounted_row_law(q, q, np.array([True, False, False]))
    close(law, [0.84, 0.12, 0.04], 1e-12)
    close(oracle.oracle_row_law(q, q, [1, 0, 0]), q, 1e-12)


def test_soft_admission_is_exact():
    p, q, g = [0.2, 0.3, 0.5], np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.25, 1.0])
    close(verifier_law(p, q * g)[2], p, 1e-12)
    close(oracle.oracle_row_law(p, q, g), p, 1e-12)


def test_bug_014_joint_law():
    inputs, expected, naive = load("bug-014")
    p1, q1 = inputs["p1"], np.array(inputs["q1"])
    rows = list(zip(inputs["p2_given_1"], inputs["q2_given_1"], strict=True))

    def joint(law):
        first = law(p1, q1, q1 >= inputs["threshold"])
        second = [
            law(p, np.array(q), np.array(q) >= inputs["threshold"]) for p, q in rows
        ]
        return first[:, None] * np.array(second)

    exact = joint(oracle.oracle_row_law)
    close(exact, expected["joint_first_two_tokens"], 1e-12)
    close(exact.sum(0), expected["marginal_token2"], 1e-12)

    def mu_rule_with_plain_null(p, q, admitted):
        # The wrong rule of this case: mu in ratio and residual, p at a NULL row.
        # (In bug-001 the same name has q in ratio and residual.)
        p, mu = np.array(p), np.where(admitted, q, 0.0)
        accepted, positive = np.minimum(p, mu), np.maximum(p - mu, 0)
        refused = mu.sum() - accepted.sum()
        return accepted + refused * positive / positive.sum() + (1 - mu.sum()) * p

    wrong = joint(mu_rule_with_plain_null)
    close(wrong, naive["failed_gate_samples_p_joint"], 1e-12)
    differs(exact, wrong)
    differs(exact, joint(oracle.oracle_unaccounted_row_law))


def test_window_reads_the_row_it_stops_at():
    eye = np.eye(4, dtype=np.float32)
    mu = np.zeros((3, 4), np.float32)
    mu[0, 0] = mu[1, 1] = mu[2, 2] = 1.0

    def verify(kinds, tokens=(0, 1, 2)):
        return oracle.oracle_verify_token(
            eye, mu, tokens, kinds, [0.5] * 3, [0.0, 0.0], [[0.0, 0.0]] * 4
        )

    full = verify([OFFERED] * 3)
    assert full == ([0, 1, 2, 3], 3, 4, "bonus", False)
    assert verify([OFFERED, ABSENT, OFFERED]) == ([0, 1], 1, 2, "bonus", False)
    assert verify([OFFERED, NULL, ABSENT]) == ([0, 1], 1, 2, "null", False)
    # Token 3 has mu = 0 at row 1: refused and reported; p - mu is empty, so p.
    assert verify([OFFERED] * 3, (0, 3, 2)) == ([0, 1], 1, 2, "rejection", True)
    # A fault behind the end of the window is reported too.
    assert verify([OFFERED] * 3, (1, 1, 3)) == ([0], 0, 1, "rejection", True)
    assert verify([NULL, OFFERED, ABSENT], (0, 3, 2)) == ([0], 0, 1, "null", True)
    # One on a row that is not offered is none.
    assert verify([NULL, ABSENT, ABSENT], (3, 3, 3)) == ([0], 0, 1, "null", False)
    # Tokens of rows that are not offered are not read.
    assert verify([ABSENT] * 3, (-1, 99, 7)) == ([0], 0, 1, "bonus", False)


def test_window_without_drafts():
    p = np.array([[0.25, 0.75]], np.float32)
    none = np.zeros((0, 2), np.float32)
    verdict = oracle.oracle_verify_token(p, none, [], [], [], [0, 0], [[0, 0.5]])
    assert verdict == ([1], 0, 1, "bonus", False)
    assert oracle.oracle_verify_exact_match(p, [], [], [[0, 0.5]]) == verdict


def test_exact_match_reads_the_measure_only_to_report_a_zero():
    p = np.full((3, 2), 0.5, np.float32)
    good = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    bad = np.array([[1.0, 0.0], [1.0, 0.0]], np.float32)

    def verify(kinds, measure):
        # The first row draws 1 and refuses the 0: the second is never reached.
        return oracle.oracle_verify_exact_match(
            p, [0, 1], kinds, [[0.0, 0.75]] * 3, measure=measure
        )

    assert verify([OFFERED, OFFERED], None) == ([1], 0, 1, "rejection", False)
    assert verify([OFFERED, OFFERED], good) == ([1], 0, 1, "rejection", False)
    assert verify([OFFERED, OFFERED], bad) == ([1], 0, 1, "rejection", True)
    assert verify([OFFERED, NULL], bad) == ([1], 0, 1, "rejection", False)
    with pytest.raises(ValueError, match="measure"):
        verify([OFFERED, OFFERED], good[:1])


def test_each_draw_uses_its_own_uniforms():
    p = np.full((3, 4), 0.25)
    mu = np.array([[1.0, 0, 0, 0], [0.0, 0, 0, 0.5]])
    pick = [[0.9, 0.3], [0.9, 0.6], [0.9, 0.9]]

    def verify(kinds, u, block_size=256):
        return oracle.oracle_verify_token(
            p, mu, [0, 3], kinds, u, [0.1, 0.8], pick, block_size
        ).tokens

    assert verify([ABSENT, ABSENT], [0, 0]) == [1]
    assert verify([OFFERED, ABSENT], [0, 0]) == [0, 2]
    assert verify([OFFERED, OFFERED], [0, 0]) == [0, 3, 3]
    assert verify([OFFERED, OFFERED], [0.5, 0]) == [3]  # thirds of 1, 2, 3
    assert verify([OFFERED, NULL], [0, 0]) == [0, 2]  # thirds of 0, 1, 2
    # Blocks of two: the block uniform 0.1 selects tokens 0 and 1, 0.8 the second.
    assert verify([OFFERED, NULL], [0, 0], block_size=2) == [0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_exact_match_emits_the_same_tokens_for_every_draft(seed):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(6), 4).astype(np.float32)
    pick = np.minimum(rng.random((4, 2)), U_MAX)
    stream = [oracle.oracle_draw(p[i], *pick[i], block_size=4) for i in range(4)]
    for drafts in itertools.product(range(6), repeat=2):
        window = [*drafts, stream[2]]
        for kinds in itertools.product((ABSENT, OFFERED, NULL), repeat=3):
            verdict = oracle.oracle_verify_exact_match(p, window, kinds, pick, 4)
            assert verdict.tokens == stream[: verdict.num_emitted]
            accepted = 0
            while (
                accepted < 3
                and kinds[accepted] == OFFERED
                and window[accepted] == stream[accepted]
            ):
                accepted += 1
            assert verdict.num_accepted == accepted
            if accepted == 3:
                assert verdict.source == "bonus"
            else:
                names = {ABSENT: "bonus", OFFERED: "rejection", NULL: "null"}
                assert verdict.source == names[kinds[accepted]]


def test_verifier_errors():
    p, mu = np.full((2, 2), 0.5), np.full((1, 2), 0.5)
    good = {
        "target_probs": p,
        "measure": mu,
        "tokens": [0],
        "kind": [1],
        "accept_uniforms": [0.5],
        "residual_uniforms": [0.5, 0.5],
        "pick_uniforms": [[0.5, 0.5]] * 2,
    }
    oracle.oracle_verify_token(**good)
    for name, value, match in (
        ("target_probs", p[:1], "rows"),
        ("target_probs", p * np.nan, "finite"),
        ("target_probs", p * 0, "empty support"),
        ("measure", mu.astype(np.float32), "measure"),
        ("measure", np.zeros((1, 3)), "measure"),
        ("tokens", [2], "offered token"),
        ("tokens", [-1], "offered token"),
        ("kind", [3], "kind"),
        ("kind", [1, 1], "kind"),
        ("accept_uniforms", [1.0], "accept_uniforms"),
        ("accept_uniforms", [0.5, 0.5], "accept_uniforms"),
        ("residual_uniforms", [0.5], "residual_uniforms"),
        ("pick_uniforms", [[0.5, 0.5]], "pick_uniforms"),
    ):
        with pytest.raises(ValueError, match=match):
            oracle.oracle_verify_token(**{**good, name: value})
    for bad in ([0.5, 0.4], [0.5, -0.5]):
        with pytest.raises(ValueError):
            oracle.oracle_row_law(bad, [0.5, 0.5], [1, 1])
    with pytest.raises(ValueError, match="g must"):
        oracle.oracle_row_law([0.5, 0.5], [0.5, 0.5], [1, 2])
    with pytest.raises(ValueError, match="admitted_mask"):
        oracle.oracle_unaccounted_row_law([0.5, 0.5], [0.5, 0.5], [1, 0])


# Suffix drafts.


@pytest.mark.parametrize("index", range(7))
def test_bug_050_suffix(index):
    inputs, expected, _ = load("bug-050")
    case = inputs["cases"][index]
    found = oracle.oracle_suffix(
        case["context"],
        max_match=case["n_max"],
        min_match=case["n_min"],
        num_draft_tokens=case["K"],
    )
    assert found == expected["latest"][index]
    if index == 1:
        assert found != expected["earliest"][index]


def test_suffix_longer_match_beats_a_later_one():
    context = [1, 2, 3, 2, 4, 1, 2]
    assert oracle.oracle_suffix(
        context, max_match=2, min_match=1, num_draft_tokens=1
    ) == [3]
    assert oracle.oracle_suffix(
        context, max_match=1, min_match=1, num_draft_tokens=1
    ) == [4]
    # The copy overlaps the suffix.
    assert oracle.oracle_suffix(
        [5, 5, 5], max_match=3, min_match=2, num_draft_tokens=4
    ) == [5]
    for changes in ({"min_match": 0}, {"max_match": 0}, {"num_draft_tokens": -1}):
        settings = {"max_match": 2, "min_match": 1, "num_draft_tokens": 1, **changes}
        with pytest.raises(ValueError):
            oracle.oracle_suffix(context, **settings)


# Documentation.


def test_every_public_function_states_its_exactness():
    names = [name for name in vars(oracle) if name.startswith(("oracle_", "doubling"))]
    for function in map(vars(oracle).get, [*names, "halving_sum"]):
        text = inspect.getdoc(function)
        assert text is not None
        assert text.count("Exactness:") == 1
        for section in ("Args:", "Returns:", "Raises:"):
            assert section in text
