"""The place of a row's largest entry, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax._largest import first_largest

_place = jax.jit(first_largest)


@pytest.mark.parametrize("size", [1, 2, 7, 256, 1000, 49_152])
def test_it_is_the_first_of_equals(size):
    rng = np.random.default_rng(size)
    for levels in (2, 5, 1000):
        row = rng.integers(0, levels, size).astype(np.float32) - 3
        found = _place(jnp.asarray(row))
        assert found.dtype == jnp.int32
        assert int(found) == np.argmax(row)
        assert int(first_largest(jnp.asarray(row), jnp.max(jnp.asarray(row)))) == found


@pytest.mark.parametrize("place", [0, 3, 9])
def test_rows_with_one_entry_that_is_not_minus_infinity(place):
    row = np.full(10, -np.inf, np.float32)
    row[place] = -1e30
    assert int(_place(jnp.asarray(row))) == place


def test_a_row_of_nan_gives_a_place_inside_the_row():
    assert 0 <= int(_place(jnp.full(5, jnp.nan))) < 5
