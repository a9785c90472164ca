"""One row's mathematics: by hand, at the edges, and for random rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import measures
from strata_jax.testing import _oracle as oracle

_PAIRS = [
    measures.overlap,
    measures.acceptance,
    measures.residual_weights,
    measures.residual,
]


def row(*values):
    return jnp.asarray(values, jnp.float32)


def close(found, wanted, atol=1e-6):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


# Dyadic numbers, so that every value is exact.


def test_retain():
    draft = row(0.5, 0.25, 0.25)
    assert measures.retain(draft, jnp.asarray([True, False, True])).tolist() == [
        0.5,
        0,
        0.25,
    ]
    assert measures.retain(draft, row(0.5, 1.0, 0.0)).tolist() == [0.25, 0.25, 0]
    assert measures.retain(draft, jnp.zeros(3, bool)).tolist() == [0, 0, 0]
    assert measures.retain(draft, jnp.ones(3, jnp.int32)).tolist() == draft.tolist()
    # Nothing is renormalised: that is another rule, which accepts less.
    assert float(jnp.sum(measures.retain(draft, row(1, 0, 0)))) == 0.5


def test_null_mass():
    assert float(measures.null_mass(row(0.5, 0.25, 0.0))) == 0.25
    assert float(measures.null_mass(row(0.0, 0.0))) == 1.0
    assert float(measures.null_mass(row(0.5, 0.5))) == 0.0
    assert measures.null_mass(jnp.zeros((2, 3))).tolist() == [1.0, 1.0]


def test_overlap_and_acceptance():
    target, measure = row(0.5, 0.25, 0.25, 0.0), row(0.25, 0.5, 0.0, 0.25)
    assert float(measures.overlap(target, measure)) == 0.5
    assert measures.acceptance(target, measure).tolist() == [1.0, 0.5, 0.0, 0.0]
    # Accepted mass is the overlap.
    accepted = measure * measures.acceptance(target, measure)
    assert float(jnp.sum(accepted)) == 0.5


def test_residual():
    target = row(0.5, 0.25, 0.25, 0.0)
    measure = row(0.25, 0.5, 0.125, 0.0)
    assert measures.residual_weights(target, measure).tolist() == [0.25, 0, 0.125, 0]
    close(measures.residual(target, measure), [2 / 3, 0, 1 / 3, 0])
    # Exactly zero where p <= mu, no small number.
    assert float(measures.residual(target, measure)[1]) == 0.0


@pytest.mark.parametrize(
    ("target", "measure", "wanted"),
    [
        ([1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]),
        ([0.25, 0.25, 0.5], [0.25, 0.25, 0.5], [0.25, 0.25, 0.5]),
        ([0.5, 0.5], [0.0, 0.0], [0.5, 0.5]),
        ([0.5, 0.5], [0.5000001, 0.4999999], [0.0, 1.0]),
        ([0.0, 1.0], [1.0, 0.0], [0.0, 1.0]),
        ([0.5, 0.5], [0.5, 0.0], [0.0, 1.0]),
    ],
)
def test_residual_at_the_edges(target, measure, wanted):
    for function in (measures.residual, jax.jit(measures.residual)):
        found = function(row(*target), row(*measure))
        assert np.isfinite(found).all()
        close(found, wanted)
    # Where p - mu is zero throughout, what is drawn from is p itself, unscaled.
    if target == measure:
        weights = measures.residual_weights(row(*target), row(*measure))
        assert weights.tolist() == row(*target).tolist()


def test_each_row_decides_for_itself_whether_its_residual_is_empty():
    target = jnp.asarray([[0.5, 0.5], [0.5, 0.5]])
    measure = jnp.asarray([[0.5, 0.5], [0.75, 0.25]])
    weights = measures.residual_weights(target, measure)
    assert weights.tolist() == [[0.5, 0.5], [0.0, 0.25]]


def random_rows(seed, size):
    rng = np.random.default_rng(seed)
    target, draft = rng.dirichlet(np.full(size, 0.5), 2).astype(np.float32)
    admit = (draft >= rng.choice([0.0, 0.05, 0.3, 2.0])).astype(np.float32)
    admit *= rng.choice([1.0, rng.random()])
    return target, draft, admit.astype(np.float32)


@pytest.mark.parametrize("seed", range(40))
def test_random_rows(seed):
    size = [2, 3, 17, 300][seed % 4]
    target, draft, admit = random_rows(seed, size)
    measure = np.asarray(measures.retain(jnp.asarray(draft), jnp.asarray(admit)))
    np.testing.assert_array_equal(measure, draft * admit)
    assert np.all((measure >= 0) & (measure <= draft))
    p, mu = target.astype(np.float64), measure.astype(np.float64)
    arrays = jnp.asarray(target), jnp.asarray(measure)
    close(measures.null_mass(arrays[1]), 1 - mu.sum())
    close(measures.overlap(*arrays), np.minimum(p, mu).sum())
    accept = np.asarray(measures.acceptance(*arrays), np.float64)
    ratio = np.minimum(p / np.where(mu > 0, mu, 1), 1)
    close(accept, np.where(mu > 0, ratio, 0))
    weights = np.asarray(measures.residual_weights(*arrays))
    positive = np.maximum(target - measure, 0)
    np.testing.assert_array_equal(weights, positive if positive.any() else target)
    residual = np.asarray(measures.residual(*arrays), np.float64)
    close(residual.sum(), 1)
    # The mass that is not accepted is at least the NULL mass, so that a NULL row has
    # something to draw from; and what comes out is p.
    assert positive.sum() >= 1 - mu.sum() - 1e-6
    close(mu * accept + (1 - (mu * accept).sum()) * residual, p)
    close(oracle.oracle_row_law(p / p.sum(), draft / draft.sum(), admit), p)
    # The rule that forgets the gate gives something else, whenever it could matter.
    admitted = admit > 0
    outside = draft[~admitted].sum()
    if 0.01 < outside < 0.99:
        biased = oracle.oracle_unaccounted_row_law(p / p.sum(), draft, admitted)
        assert np.abs(biased - p).max() > 1e-5


@pytest.mark.parametrize("function", _PAIRS)
def test_leading_axes_change_no_bit(function):
    target = np.stack([random_rows(seed, 50)[0] for seed in range(6)])
    measure = np.stack([random_rows(seed + 50, 50)[1] for seed in range(6)])
    together = function(jnp.asarray(target), jnp.asarray(measure))
    stacked = function(
        jnp.asarray(target.reshape(2, 3, 50)), jnp.asarray(measure.reshape(2, 3, 50))
    )
    np.testing.assert_array_equal(together, stacked.reshape(together.shape))
    for index in range(6):
        alone = function(jnp.asarray(target[index]), jnp.asarray(measure[index]))
        np.testing.assert_array_equal(together[index], alone)


@pytest.mark.parametrize("function", _PAIRS)
def test_wrong_shapes_and_dtypes(function):
    good = jnp.ones(3)
    with pytest.raises(ValueError, match=r"measure must have shape \(3,\)"):
        function(good, jnp.ones(4))
    # A leading axis is not spread over the other argument.
    with pytest.raises(ValueError, match="measure must have shape"):
        function(jnp.ones((2, 3)), good)
    with pytest.raises(ValueError, match="measure must be float32"):
        function(good, jnp.ones(3, jnp.bfloat16))
    with pytest.raises(ValueError, match="target_probs must be float32"):
        function(jnp.ones(3, jnp.int32), good)


def test_wrong_shapes_and_dtypes_of_retain():
    with pytest.raises(ValueError, match=r"admit must have shape \(3,\)"):
        measures.retain(jnp.ones(3), jnp.ones(1))
    with pytest.raises(ValueError, match="draft_probs must be float32"):
        measures.retain(jnp.ones(3, jnp.float16), jnp.ones(3))
    with pytest.raises(ValueError, match="measure must be float32"):
        measures.null_mass(jnp.ones(3, bool))
