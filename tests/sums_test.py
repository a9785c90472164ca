"""Sums in a written order: by hand, and bit for bit against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import _sums
from strata_jax.testing import _oracle as oracle

_halving = jax.jit(_sums.halving_sum)
_doubling = jax.jit(_sums.doubling_sum)


def test_halving_adds_the_second_half_to_the_first():
    # (1e8 - 1e8) + (1 + 0): from left to right the 1 would be lost.
    probe = np.array([1e8, 1, -1e8], np.float32)
    assert float(_halving(jnp.asarray(probe))) == 1.0
    assert np.float32(np.float32(probe[0] + probe[1]) + probe[2]) == 0.0


def test_doubling_adds_what_stands_a_power_of_two_before():
    # Rounds: (a, a+b, b+c, c+d), then the third and fourth get the first and second.
    probe = np.array([1e8, 1, -1e8, 1], np.float32)
    running = _doubling(jnp.asarray(probe))
    assert running.tolist() == [1e8, 1e8, 0.0, 0.0]
    assert np.cumsum(probe, dtype=np.float32).tolist() == [1e8, 1e8, 0.0, 1.0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 19, 64, 100, 255, 256, 257, 999])
def test_bits_equal_those_of_the_oracle(size):
    rows = np.random.default_rng(size).exponential(size=(3, size)).astype(np.float32)
    rows **= 3
    halving = _halving(jnp.asarray(rows))
    assert halving.dtype == jnp.float32
    np.testing.assert_array_equal(halving, oracle.halving_sum(rows))
    for row in rows:
        np.testing.assert_array_equal(
            _doubling(jnp.asarray(row)),
            oracle.doubling_sum(row, np.float32),
        )


def test_the_comparison_of_bits_can_tell_another_order():
    row = np.random.default_rng(0).exponential(size=999).astype(np.float32)
    assert np.cumsum(row, dtype=np.float32)[-1] != oracle.halving_sum(row)
    assert np.any(np.cumsum(row, dtype=np.float32) != oracle.doubling_sum(row, "f4"))


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 13, 300])
def test_whole_numbers_are_summed_exactly(size):
    values = np.arange(size, dtype=np.float32)
    running = _doubling(jnp.asarray(values))
    assert running.tolist() == np.cumsum(np.arange(size)).tolist()
    assert float(_halving(jnp.asarray(values))) == size * (size - 1) / 2


def test_a_row_does_not_depend_on_its_company():
    rows = np.random.default_rng(1).random((2, 5, 77)).astype(np.float32)
    together = _halving(jnp.asarray(rows))
    assert together.shape == (2, 5)
    mapped = jax.vmap(_doubling)(jnp.asarray(rows[0]))
    for index in range(5):
        row = jnp.asarray(rows[0, index])
        assert float(together[0, index]) == float(_halving(row))
        np.testing.assert_array_equal(mapped[index], _doubling(row))


def test_empty_rows():
    assert float(_halving(jnp.zeros(0))) == 0.0
    assert _doubling(jnp.zeros(0)).shape == (0,)


def test_compiled_and_uncompiled_bits_agree():
    row = jnp.asarray(np.random.default_rng(2).random(37).astype(np.float32))
    assert float(_sums.halving_sum(row)) == float(_halving(row))
    np.testing.assert_array_equal(_sums.doubling_sum(row), _doubling(row))
