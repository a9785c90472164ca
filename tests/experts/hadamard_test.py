"""Hadamard-folded inputs: the matrix, its order of operations, and the signs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from strata_jax import experts
from strata_jax.experts._hadamard import split_mix

MATRIX = scipy.linalg.hadamard(128) / np.sqrt(128)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_same_bits(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_is_the_natural_order_sylvester_matrix():
    rows = experts.hadamard_reference(np.eye(128, dtype=np.float32))
    np.testing.assert_array_equal(np.sign(rows), np.sign(MATRIX))
    np.testing.assert_allclose(rows, MATRIX, rtol=1e-7)
    values = normal(0, 5, 3, 384)
    wanted = (values.reshape(5, 3, 3, 128) @ MATRIX).reshape(values.shape)
    found = experts.hadamard_reference(values)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    # It is its own inverse.
    again = experts.hadamard_reference(found)
    np.testing.assert_allclose(again, values, atol=2e-6)


def test_same_bits_in_every_program():
    values, factor, bias = normal(1, 3, 8, 640)
    wanted = experts.hadamard_reference(values)
    assert_same_bits(experts.hadamard(jnp.asarray(values)), wanted)

    @jax.jit
    def programs(values, factor, bias):
        def place(index, found):
            row = jax.lax.dynamic_index_in_dim(values, index, keepdims=False)
            return found.at[index].set(experts.hadamard(row))

        looped = jax.lax.fori_loop(0, len(values), place, jnp.zeros_like(values))
        together = experts.hadamard(values)
        by_row = jax.vmap(experts.hadamard)(values)
        widths = [experts.hadamard(values[:width]) for width in (1, 2, 5)]
        # A product before and an addition after are not contracted with it.
        between = experts.hadamard(values * factor) + bias
        return looped, together, by_row, widths, between

    looped, together, by_row, widths, between = programs(values, factor, bias)
    assert_same_bits(looped, wanted)
    assert_same_bits(together, wanted)
    assert_same_bits(by_row, wanted)
    for rows in widths:
        assert_same_bits(rows, wanted[: len(rows)])
    product = experts.hadamard_reference(values * factor)
    assert_same_bits(between, product + bias)


def test_other_arithmetic_is_seen():
    values, bias = normal(2, 2, 8, 128)
    wanted = experts.hadamard_reference(values)
    matrix = MATRIX.astype(np.float32)
    product = jax.jit(lambda values: values @ matrix)(values)
    np.testing.assert_allclose(product, wanted, atol=2e-6)
    assert np.any(np.asarray(product) != wanted)

    @jax.jit
    def contracted(values, bias):
        scale = jnp.float32(128**-0.5)
        return experts.hadamard(values) / scale * scale + bias

    assert np.any(np.asarray(contracted(values, bias)) != wanted + bias)


def test_folded_weights_and_turned_inputs_give_the_product():
    weights, inputs = normal(3, 48, 256), normal(4, 256)
    # An input channel with outliers, which the fold spreads.
    weights[:, 17] *= 20
    signs = experts.hadamard_signs(256, seed=5)
    folded = experts.fold_hadamard(weights, signs)
    blocks = np.kron(np.eye(2), MATRIX)
    wanted = weights.astype(np.float64) * signs @ blocks
    np.testing.assert_array_equal(folded, wanted.astype(np.float32), strict=True)
    assert np.abs(folded).max() < np.abs(weights).max() / 3
    turned = experts.hadamard_reference(signs * inputs)
    product = weights.astype(np.float64) @ inputs
    error = np.abs(folded.astype(np.float64) @ turned - product).max()
    assert error < 1e-6 * np.linalg.norm(product)
    # Other signs, or none, give another product.
    for other in (np.ones(256, np.float32), experts.hadamard_signs(256, seed=6)):
        turned = experts.hadamard_reference(other * inputs)
        assert np.abs(folded.astype(np.float64) @ turned - product).max() > 1


@pytest.mark.parametrize(
    ("seed", "wanted"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]),
    ],
)
def test_split_mix(seed, wanted):
    assert split_mix(seed, np.arange(3, dtype=np.uint64)).tolist() == wanted


def test_signs():
    signs = experts.hadamard_signs(2560, seed=0)
    assert signs.dtype == np.float32
    # The outputs above are odd, even, odd.
    assert signs[:3].tolist() == [-1, 1, -1]
    assert set(signs) == {-1, 1}
    assert abs(signs.mean()) < 5 / np.sqrt(2560)
    np.testing.assert_array_equal(experts.hadamard_signs(128, seed=0), signs[:128])
    largest = experts.hadamard_signs(2560, seed=2**64 - 1)
    assert abs(np.mean(signs * largest)) < 5 / np.sqrt(2560)


def test_arguments():
    for size in (0, 64, 200):
        with pytest.raises(ValueError, match=f"multiple of 128 input channels.*{size}"):
            experts.hadamard(jnp.zeros((2, size)))
        with pytest.raises(ValueError, match="values must have a multiple of 128"):
            experts.hadamard_reference(np.zeros(size, np.float32))
    with pytest.raises(ValueError, match="values must have a multiple of 128"):
        experts.hadamard(jnp.float32(1))
    with pytest.raises(ValueError, match="values must be float32, got bfloat16"):
        experts.hadamard(jnp.zeros(128, jnp.bfloat16))
    with pytest.raises(ValueError, match="num_inputs must have a multiple of 128"):
        experts.hadamard_signs(100, 0)
    with pytest.raises(ValueError, match="seed must be at least 0"):
        experts.hadamard_signs(128, -1)
    weights, signs = np.zeros((4, 128), np.float32), np.ones(128, np.float32)
    with pytest.raises(ValueError, match=r"weights must have shape \('any', 'any'\)"):
        experts.fold_hadamard(weights[0], signs)
    with pytest.raises(ValueError, match="weights must be float32, got float64"):
        experts.fold_hadamard(weights.astype(np.float64), signs)
    with pytest.raises(ValueError, match=r"signs must have shape \(128,\)"):
        experts.fold_hadamard(weights, signs[:64])
    with pytest.raises(ValueError, match=r"signs must be \+1 or -1"):
        experts.fold_hadamard(weights, signs * 0.5)
