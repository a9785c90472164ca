"""Static checks: what passes, and a ValueError that names the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import _checks


@pytest.mark.parametrize("shape", [(2, 3), (None, 3), (2, None), (None, None)])
def test_shapes_that_fit(shape):
    _checks.check_shape("row", jnp.zeros((2, 3)), shape)


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 3, 1), (), (None,), (1, 3)])
def test_shapes_that_do_not(shape):
    with pytest.raises(ValueError, match=r"row must have shape .* got \(2, 3\)"):
        _checks.check_shape("row", jnp.zeros((2, 3)), shape)


def test_a_size_of_one_does_not_stand_for_any():
    with pytest.raises(ValueError, match="row"):
        _checks.check_shape("row", jnp.zeros((1, 3)), (2, 3))


def test_shapes_are_checked_under_jit():
    with pytest.raises(ValueError, match="row"):
        jax.jit(lambda row: _checks.check_shape("row", row, (2,)))(jnp.zeros(3))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.int32, bool])
def test_rows_are_of_at_least_32_bits(dtype):
    with pytest.raises(ValueError, match="row must be float32 or float64"):
        _checks.check_floating("row", jnp.zeros(2, dtype))
    _checks.check_floating("row", jnp.zeros(2, jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, bool])
def test_integer_dtypes(dtype):
    with pytest.raises(ValueError, match="ids must be an integer array"):
        _checks.check_integer_dtype("ids", jnp.zeros(2, dtype))
    for good in (jnp.int8, jnp.int32, jnp.uint32):
        _checks.check_integer_dtype("ids", jnp.zeros(2, good))


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, np.float32(0.5), jnp.float32(0.5)])
def test_numbers_in_range(value):
    assert _checks.check_number("top_p", value, 0.0, 1.0) == float(value)


@pytest.mark.parametrize(
    "value", [float("nan"), -1e-9, 1.0000001, float("inf"), -float("inf"), np.nan]
)
def test_numbers_out_of_range(value):
    with pytest.raises(ValueError, match=r"top_p must be in \[0, 1\], got"):
        _checks.check_number("top_p", value, 0.0, 1.0)


@pytest.mark.parametrize("value", [None, "high", "0.5", True, 10**400, [1.0, 2.0], {}])
def test_values_that_are_no_numbers(value):
    with pytest.raises(ValueError, match="top_p must be a number, got"):
        _checks.check_number("top_p", value, 0.0, 1.0)


def test_nan_is_refused_where_every_number_is_allowed():
    with pytest.raises(ValueError, match="bias"):
        _checks.check_number("bias", float("nan"), -float("inf"), float("inf"))


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_integers_in_range(value):
    found = _checks.check_integer("seed", value, 0, 3)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (-1, "seed must be at least 0, got -1"),
        (4, "seed must be at most 3, got 4"),
        (1.0, "seed must be an integer, got 1.0"),
        ("1", "seed must be an integer"),
        (None, "seed must be an integer, got None"),
        (True, "seed must be an integer, got True"),
        (np.float32(1), "seed must be an integer"),
        (float("nan"), "seed must be an integer"),
    ],
)
def test_integers_out_of_range(value, match):
    with pytest.raises(ValueError, match=match):
        _checks.check_integer("seed", value, 0, 3)


def test_integers_without_a_maximum():
    assert _checks.check_integer("seed", 10**12, 0) == 10**12
