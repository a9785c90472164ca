import numpy as np
import pytest
import scipy.stats

from strata_jax import diagnostics


def test_total_variation_by_hand():
    assert diagnostics.total_variation([0.5, 0.5], [0.875, 0.125]) == 0.375
    assert diagnostics.total_variation([1.0, 0.0], [0.0, 1.0]) == 1.0
    rows = diagnostics.total_variation([[0.5, 0.5], [1, 0]], [[0.5, 0.5], [0, 1]])
    np.testing.assert_array_equal(rows, [0, 1])


def test_kl_divergence_by_hand():
    value = diagnostics.kl_divergence([0.5, 0.5], [0.25, 0.75])
    np.testing.assert_allclose(value, 0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert diagnostics.kl_divergence([0.5, 0.5], [1.0, 0.0]) == np.inf


def test_chi_square_by_hand():
    # (60 - 50)^2 / 50 + (40 - 50)^2 / 50 = 4, one degree of freedom.
    test = diagnostics.chi_square([60, 40], [0.5, 0.5])
    assert test.statistic == 4.0
    assert test.degrees_of_freedom == 1
    np.testing.assert_allclose(test.p_value, 0.0455002638963584, rtol=1e-9)


def test_chi_square_pools_rare_cells():
    # Expected 2, 4 and 94: the two rare cells become one of 6.
    test = diagnostics.chi_square([3, 3, 94], [0.02, 0.04, 0.94])
    assert test.degrees_of_freedom == 1
    assert test.statistic == 0.0
    # Expected 2, 8 and 90: the rare cell takes the next one in.
    assert diagnostics.chi_square([2, 8, 90], [0.02, 0.08, 0.9]).degrees_of_freedom == 1


def test_chi_square_agrees_with_scipy_on_common_cells():
    random = np.random.default_rng(0)
    probs = random.dirichlet(np.ones(10) * 5)
    counts = random.multinomial(10_000, probs)
    ours = diagnostics.chi_square(counts, probs)
    theirs = scipy.stats.chisquare(counts, probs * counts.sum())
    np.testing.assert_allclose(ours.statistic, theirs.statistic)
    np.testing.assert_allclose(ours.p_value, theirs.pvalue)


def test_chi_square_sees_another_law():
    random = np.random.default_rng(1)
    counts = random.multinomial(100_000, [0.5625, 0.4375])
    assert diagnostics.chi_square(counts, [0.5, 0.5]).p_value < 1e-6
    assert diagnostics.chi_square(counts, [0.5625, 0.4375]).p_value > 1e-6


def test_chi_square_with_an_impossible_count():
    test = diagnostics.chi_square([1, 99], [0.0, 1.0])
    assert test.statistic == np.inf
    assert test.p_value == 0.0


@pytest.mark.parametrize(
    ("counts", "probs", "match"),
    [
        ([1, 2], [0.5, 0.25, 0.25], "one shape"),
        ([0, 0], [0.5, 0.5], "at least one draw"),
        ([1, 1], [0.5, 0.6], "sum to 1"),
    ],
)
def test_chi_square_refuses(counts, probs, match):
    with pytest.raises(ValueError, match=match):
        diagnostics.chi_square(counts, probs)
