"""The cost model: against the field's closed forms, and against decoding itself."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import drafters, gates, targets, verifiers
from strata_jax.diagnostics import cost
from strata_jax.diagnostics.cost import _windows
from strata_jax.targets import TabularParams

VOCAB, NUM_DRAFTS = 5, 3
PRIOR = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
DRAFT = np.array([0.1, 0.5, 0.2, 0.15, 0.05])


def drafter_of(probs, num_draft_tokens=NUM_DRAFTS):
    row = strata.DraftRow(jnp.asarray(probs, float), jnp.asarray(True))
    return drafters.stateless(
        lambda context: lambda step: row,
        num_draft_tokens=num_draft_tokens,
        vocab_size=VOCAB,
    )


def costs(num_drafts, *, call=0.0, row=0.0, plain=1.0):
    return cost.WindowCosts(
        plain=plain,
        window=1.0,
        draft_call=call,
        offered=tuple(row * count for count in range(num_drafts + 1)),
        residual=0.0,
    )


def records(acceptance, draft_prob=None):
    acceptance = np.asarray(acceptance, float)
    prob = np.ones_like(acceptance) if draft_prob is None else np.asarray(draft_prob)
    return cost.DraftRecords(
        is_drafted=np.ones(acceptance.shape, bool),
        draft_prob=prob,
        top_prob=np.maximum(prob, 1 - prob),
        entropy=-np.log(np.maximum(prob, 1 - prob)),
        acceptance=acceptance,
    )


@pytest.mark.parametrize(
    ("rate", "count", "speed"),
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 10, 6.86)],
)
def test_free_drafts_give_the_published_speeds(rate, count, speed):
    found = cost.predict(
        costs(count),
        records(np.full((1, count), rate)),
        cost.Policy("always", None, count),
    )
    assert abs(found.tokens_per_second - speed) < 0.005


@pytest.mark.parametrize(
    ("rate", "call", "best"), [(0.8, 0.05, 8), (0.9, 0.05, 13), (0.7, 0.1, 4)]
)
def test_the_best_number_of_drafts_is_the_published_one(rate, call, best):
    ranked = cost.choose(
        costs(16, call=call), records(np.full((1, 16), rate)), gate_names=["always"]
    )
    assert ranked[0].policy == cost.Policy("always", None, best)


def test_a_gate_of_the_drawn_token_ends_the_chain_where_it_drops():
    # Half of the draws are sure: all patterns of three rows once.
    sure = np.array(list(itertools.product([0.9, 0.2], repeat=3)))
    policy = cost.Policy("picked", 0.5, 3)
    drafts = records(np.full(sure.shape, 0.75), sure)
    model = costs(3, call=0.25, row=0.5)
    found = cost.predict(model, drafts, policy)
    m, alpha = 0.5, 0.5 * 0.75
    assert found.calls_per_window == (1 - m**3) / (1 - m)
    assert found.offered_per_window == m * (1 - m**3) / (1 - m)
    expected = (1 - alpha**4) / (1 - alpha)
    assert abs(found.tokens_per_window - expected) < 1e-12
    seconds = 1 + 0.25 * 1.75 + 0.5 * 0.875
    assert abs(found.seconds_per_window - seconds) < 1e-12
    # The same rule, but the doubtful token is offered and the chain then stops.
    stop = dataclasses.replace(policy, gate="include_then_stop")
    stopped = cost.predict(model, drafts, stop)
    assert stopped.calls_per_window == stopped.offered_per_window == 1.75
    assert stopped.tokens_per_window > found.tokens_per_window


def test_a_gate_before_the_draw_costs_a_call_where_it_fails():
    sure = np.array([[0.9, 0.9], [0.55, 0.9], [0.9, 0.55], [0.55, 0.55]])
    drafts = records(np.ones((4, 2)), sure)
    for policy in (
        cost.Policy("top", 0.7, 2),
        cost.Policy("entropy", -np.log(0.7), 2),
    ):
        found = cost.predict(costs(2), drafts, policy)
        assert (found.calls_per_window, found.offered_per_window) == (1.5, 0.75)


def test_plain_decoding_is_chosen_where_drafts_do_not_pay():
    drafts = records(np.full((4, 2), 0.1))
    ranked = cost.choose(costs(2, call=0.2, row=0.2), drafts)
    assert ranked[0].policy == cost.Policy("none", None, 0)
    assert ranked[0].tokens_per_second == 1.0
    assert len(ranked) == 1 + 2 * len(cost.GATES)
    # The control: where drafts are free they pay.
    assert cost.choose(costs(2), drafts)[0].policy.gate != "none"


def decoded(gate, seeds, **settings):
    """What really happens: tokens, calls and offered rows of each window."""
    params = TabularParams(jnp.log(PRIOR))
    decoder = strata.speculative_decoder(
        targets.tabular(VOCAB, max_length=512, order=0),
        drafter_of(DRAFT),
        gate,
        verifiers.token(),
    )
    found = []
    for seed in seeds:
        state = decoder.init(params, [0], seed=seed, **settings)
        _, verdicts = strata.decode(decoder, params, state, 60)
        kind = np.asarray(verdicts.kind)
        found.append(
            np.stack(
                [verdicts.num_emitted, (kind != 0).sum(1), (kind == 1).sum(1)], axis=1
            )
        )
    return np.concatenate(found)


@pytest.fixture(scope="module")
def recorded():
    params = TabularParams(jnp.log(PRIOR))
    target = targets.tabular(VOCAB, max_length=512, order=0)
    drafter = drafter_of(DRAFT)
    return cost.record(target, drafter, params, [[0], [1]], max_new_tokens=400, seed=7)


def test_records_hold_the_acceptance_of_each_draw(recorded):
    first = recorded.is_drafted[:, 0]
    assert first.mean() > 0.99  # but where the budget ends
    # The mean over draws from q of min(1, p / q) is the overlap.
    overlap = np.minimum(PRIOR, DRAFT).sum()
    rates = recorded.acceptance[first, 0]
    assert abs(rates.mean() - overlap) < 4 * rates.std() / len(rates) ** 0.5
    q = DRAFT
    np.testing.assert_allclose(recorded.top_prob[first, 0], q.max(), rtol=1e-6)
    np.testing.assert_allclose(
        recorded.entropy[first, 0], -(q * np.log(q)).sum(), rtol=1e-5
    )
    drawn = np.unique(recorded.draft_prob[first, 0])
    np.testing.assert_allclose(drawn, np.unique(q), rtol=1e-6)


@pytest.mark.parametrize("name", ["always", "picked", "include_then_stop"])
def test_predictions_are_what_decoding_does(recorded, name):
    threshold = None if name == "always" else 0.18
    policy = cost.Policy(name, threshold, NUM_DRAFTS)
    found = cost.predict(costs(NUM_DRAFTS), recorded, policy)
    predicted = np.array(
        [found.tokens_per_window, found.calls_per_window, found.offered_per_window]
    )
    settings = {} if threshold is None else {"threshold": threshold}
    windows = decoded(getattr(gates, name)(), range(10), **settings)
    # The records end at a budget, where rows are cut: hence the rest.
    error = windows.std(axis=0) * (1 / len(windows) + 1 / 300) ** 0.5 + 1e-9
    assert (abs(predicted - windows.mean(axis=0)) < 4 * error + 0.03).all()
    # The control: the prediction for another gate is not.
    other = "always" if name == "picked" else "picked"
    policy = cost.Policy(other, None if other == "always" else 0.18, NUM_DRAFTS)
    wrong = cost.predict(costs(NUM_DRAFTS), recorded, policy)
    assert abs(wrong.offered_per_window - windows.mean(axis=0)[2]) > 5 * error[2]


def test_exact_match_accepts_a_draft_by_its_probability(recorded):
    params = TabularParams(jnp.log(PRIOR))
    found = cost.record(
        targets.tabular(VOCAB, max_length=64, order=0),
        drafter_of(np.eye(VOCAB)[1], 2),
        params,
        [[0]],
        max_new_tokens=40,
        verifier=verifiers.exact_match(),
    )
    rates = found.acceptance[found.is_drafted]
    np.testing.assert_allclose(rates, PRIOR[1], rtol=1e-6)


def test_measured_costs_have_a_number_for_each_count_of_rows():
    found = cost.measure(
        targets.tabular(VOCAB, max_length=512, order=0),
        drafter_of(DRAFT),
        TabularParams(jnp.log(PRIOR)),
        [0, 1],
        rounds=1,
    )
    assert len(found.offered) == NUM_DRAFTS + 1 and found.offered[0] == 0
    numbers = [*found.offered, found.plain, found.window, found.draft_call]
    assert np.isfinite(numbers).all() and found.plain > 0 and found.window > 0


def test_fitted_costs_are_those_that_the_windows_had():
    # windows, calls, windows that offered 1, 2, 3 rows; none offered 2.
    features = np.array(
        [
            [8, 0, 0, 0, 0],
            [8, 8, 0, 0, 0],
            [8, 8, 8, 0, 0],
            [8, 24, 0, 0, 8],
            [8, 20, 2, 0, 6],
        ],
        float,
    )
    truth = np.array([2.0, 0.25, 0.5, 0.0, 3.0])
    found = _windows._fit(1.5, features, features @ truth)
    assert (found.plain, found.residual < 1e-9) == (1.5, True)
    np.testing.assert_allclose([found.window, found.draft_call], truth[:2])
    np.testing.assert_allclose(found.offered, [0, 0.5, 1.75, 3.0], atol=1e-9)
    assert found.row == found.offered[-1] / 3
    # Where no window offered three, the last known row goes on.
    found = _windows._fit(1.5, features[:3], features[:3] @ truth)
    np.testing.assert_allclose(found.offered, [0, 0.5, 1.0, 1.5], atol=1e-9)
    with pytest.raises(ValueError, match="the drafter offered nothing"):
        _windows._fit(1.5, features[:2], features[:2] @ truth)


def test_noise_makes_no_cost_negative_and_no_row_cheaper_than_fewer():
    # windows, calls, windows that offered 1, 2 rows.
    features = np.array(
        [[8, 0, 0, 0], [8, 8, 0, 0], [8, 8, 8, 0], [8, 16, 0, 8]], float
    )
    seconds = features @ np.array([2.0, 0.1, 0.5, 0.6]) + [0.8, -0.8, 2.0, -2.0]
    scaled = features / seconds[:, None]
    free = np.linalg.lstsq(scaled, np.ones(4), rcond=None)[0]
    assert free[1] < 0 and free[3] < free[2]  # what a fit without bounds finds
    found = _windows._fit(1.5, features, seconds)
    assert found.draft_call >= 0 and found.window > 0
    assert (np.diff(found.offered) >= 0).all()
    assert found.residual < 0.1


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (cost.Policy("sure", 0.1, 1), "policy.gate must be one of"),
        (cost.Policy("none", None, 1), "policy.num_draft_tokens must be 0"),
        (cost.Policy("always", None, 0), "policy.num_draft_tokens must be at least 1"),
        (cost.Policy("always", None, 3), "policy.num_draft_tokens must be at most 2"),
        (cost.Policy("always", None, 1.5), "policy.num_draft_tokens must be an integ"),
        (cost.Policy("picked", float("nan"), 1), r"policy.threshold must be in \[0, 1"),
        (cost.Policy("picked", None, 1), "must be a number for the gate picked"),
        (cost.Policy("always", 0.5, 1), "must be None for the gate always"),
    ],
)
def test_policies_that_mean_nothing_are_refused(policy, match):
    with pytest.raises(ValueError, match=match):
        cost.predict(costs(2), records(np.ones((1, 2))), policy)


def test_requests_that_cannot_be_measured_are_refused():
    target = targets.tabular(VOCAB, max_length=16, order=0)
    drafter = drafter_of(DRAFT)
    params = TabularParams(jnp.log(PRIOR))
    with pytest.raises(ValueError, match="there is no room for 32 more"):
        cost.measure(target, drafter, params, [0])
    with pytest.raises(ValueError, match="drafter drafts nothing"):
        cost.measure(target, drafters.none(), params, [0])
    with pytest.raises(ValueError, match="at least one prompt"):
        cost.record(target, drafter, params, [], max_new_tokens=1)
    renamed = verifiers.token()._replace(name="mine")
    with pytest.raises(ValueError, match=r"verifier mine: use verifiers\.token"):
        cost.record(target, drafter, params, [[0]], max_new_tokens=1, verifier=renamed)
    with pytest.raises(ValueError, match=r"gate_names must be of .* got ..none"):
        cost.choose(costs(2), records(np.ones((1, 2))), gate_names=["none", "top"])
    broken = TabularParams(jnp.full(VOCAB, jnp.nan))
    with pytest.raises(strata.DecodingError, match="NON_FINITE_LOGITS"):
        cost.measure(
            targets.tabular(VOCAB, max_length=512, order=0), drafter, broken, [0]
        )
    empty = cost.record(target, drafter, params, [[0]], max_new_tokens=0)
    with pytest.raises(ValueError, match="records are empty"):
        cost.predict(costs(3), empty, cost.Policy("always", None, 1))
