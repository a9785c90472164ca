"""Products on tiles: the right values, and a row's bits whatever the other rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.experts import find_format
from strata_jax.models import cut_packed_tiles, cut_tiles, quantize, read_matrix
from strata_jax.models._tiled_product import (
    empty_rows,
    multiply,
    set_row,
)
from strata_jax.models._tiles import take_column

WIDTHS = range(1, 9)
LAYER = 1


def make(kind, num_rows, num_columns):
    """Tiles of two layers, and the matrix of the second in float64."""
    source = np.random.default_rng(num_rows + num_columns)
    shape = (num_rows, num_columns)
    if kind == "float32":
        matrices = [source.standard_normal(shape).astype(np.float32) for _ in range(2)]
        return cut_tiles(matrices), matrices[LAYER].astype(np.float64)
    low, high = (-127, 128) if kind == "q8_0" else (0, 16)
    # What half precision does not hold is stored in float32.
    dtype = np.float32 if kind.endswith("float32") else np.float16
    values = [source.integers(low, high, shape).astype(np.int8) for _ in range(2)]
    blocks = (num_rows // 32, num_columns)
    scale = [source.uniform(0.01, 0.02, blocks).astype(dtype) for _ in range(2)]
    offset = None
    if kind != "q8_0":
        offset = [source.uniform(-0.2, 0, blocks).astype(dtype) for _ in range(2)]
    matrix = values[LAYER] * np.repeat(scale[LAYER].astype(np.float64), 32, axis=0)
    if offset is not None:
        matrix = matrix + np.repeat(offset[LAYER].astype(np.float64), 32, axis=0)
    tiles = cut_packed_tiles(values, scale, offset)
    assert tiles.scale.dtype == dtype
    return tiles, matrix


@jax.jit
def product(states, tiles):
    def ready(row, rows):
        return set_row(rows, row, states[row])

    rows = empty_rows(*states.shape, jnp.dtype(jnp.float32))
    rows = jax.lax.fori_loop(0, states.shape[0], ready, rows)
    return multiply(rows, tiles, jnp.int32(LAYER))


CASES = [
    ("float32", 576, 1536),
    ("float32", 300, 250),
    ("q8_0", 256, 960),
    ("q4_1", 1536, 576),
    ("q4_1 in float32", 256, 960),
    # Column blocks in odd number, and twice that: rows take turns on one or two.
    ("q8_0", 256, 258),
    ("q8_0", 256, 266),
    ("q4_1", 256, 258),
]


# A matrix by itself is multiplied in halves, if it is large.
@pytest.mark.parametrize(
    ("kind", "num_rows", "num_columns", "num_layers"),
    [(*case, layers) for case in CASES for layers in (1, 2)],
)
def test_a_row_has_its_bits_at_every_width(
    kind, num_rows, num_columns, num_layers, set_processor
):
    tiles, matrix = make(kind, num_rows, num_columns)
    tiles = jax.tree.map(lambda leaf: leaf[-num_layers:], tiles)
    source = np.random.default_rng(0)
    states = source.standard_normal((8, num_rows)).astype(np.float32)
    alone = np.concatenate([product(states[i : i + 1], tiles) for i in range(8)])
    size = np.abs(states.astype(np.float64)) @ np.abs(matrix)
    assert (np.abs(alone - states @ matrix) <= 1e-5 * size).all()
    for processor in ("narrow", "wide"):
        set_processor(processor)
        for width in WIDTHS:
            found = product(states[:width], tiles)
            np.testing.assert_array_equal(found, alone[:width])


def test_a_processor_with_wide_vectors_gets_a_program_of_its_own(set_processor):
    tiles, _ = make("q4_1", 256, 960)
    texts = {}
    for processor in ("narrow", "wide"):
        set_processor(processor)
        for width in (1, 2, 3):
            states = jax.ShapeDtypeStruct((width, 256), jnp.float32)
            texts[processor, width] = product.lower(states, tiles).as_text()
    is_paired = {key: "complex<f32>" in text for key, text in texts.items()}
    assert [is_paired["narrow", width] for width in (1, 2, 3)] == [False, True, True]
    assert [is_paired["wide", width] for width in (1, 2, 3)] == [False, True, False]
    assert "x120x3x1x8x" in texts["wide", 3]
    assert "x15x2x8x8x" in texts["narrow", 3]


def rows_beside_bad_ones(bad):
    """Products of three rows of which one is not finite, and those of each alone."""
    tiles, _ = make("q4_1", 256, 960)
    states = np.random.default_rng(4).standard_normal((3, 256)).astype(np.float32)
    states[bad, 100] = np.inf
    found = np.asarray(product(states, tiles))
    assert not np.isfinite(found[bad]).any()
    alone = [np.asarray(product(states[i : i + 1], tiles))[0] for i in range(3)]
    return np.delete(found, bad, axis=0), np.delete(alone, bad, axis=0)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("bad", range(3))
def test_a_row_that_is_not_finite_leaves_the_others_alone(bad):
    np.testing.assert_array_equal(*rows_beside_bad_ones(bad))


@pytest.mark.parametrize("bad", [0, 1])
def test_parts_of_a_pair_that_touch_fail_the_same_check(
    bad, monkeypatch, set_processor
):
    set_processor("narrow")  # whose pairs are not of two rows alone
    exact = jax.lax.complex

    def touch(first, second):
        return exact(first + 0 * second, second + 0 * first)

    monkeypatch.setattr(jax.lax, "complex", touch)
    found, alone = rows_beside_bad_ones(bad)
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], alone[1])


def test_scales_in_half_precision_give_the_bits_of_float32():
    tiles, _ = make("q4_1", 256, 960)
    wide = dataclasses.replace(
        tiles,
        scale=tiles.scale.astype(jnp.float32),
        offset=tiles.offset.astype(jnp.float32),
    )
    states = np.random.default_rng(3).standard_normal((2, 256)).astype(np.float32)
    found = np.asarray(product(states, tiles))
    np.testing.assert_array_equal(found, np.asarray(product(states, wide)))
    rounded = dataclasses.replace(wide, scale=wide.scale * np.float32(1 + 2**-20))
    assert (found != np.asarray(product(states, rounded))).any()


def test_xlas_own_product_fails_the_same_check():
    _, matrix = make("float32", 576, 1536)
    states = np.random.default_rng(0).standard_normal((8, 576)).astype(np.float32)
    together = jax.jit(jnp.matmul)(states, matrix.astype(np.float32))
    alone = jax.jit(jnp.matmul)(states[:1], matrix.astype(np.float32))
    assert (np.asarray(together[0]) != np.asarray(alone[0])).mean() > 0.1


@pytest.mark.parametrize(("kind", "num_rows", "num_columns"), CASES)
def test_a_column_is_the_stored_one(kind, num_rows, num_columns):
    tiles, matrix = make(kind, num_rows, num_columns)
    for column in (0, 17, num_columns - 1):
        found = jax.jit(take_column, static_argnums=1)(tiles, LAYER, jnp.int32(column))
        assert found.shape == (num_rows,)
        np.testing.assert_allclose(found, matrix[:, column], rtol=1e-6, atol=1e-7)


CODES, SCALE = np.zeros((64, 16), np.int8), np.ones((2, 16), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([np.zeros((40, 16), np.int8)], [SCALE]), "multiples of 32, got 40: decode"),
        (([], []), "values must be matrices of one shape"),
        (([CODES, CODES[:32]], [SCALE, SCALE]), "values must be matrices of one shape"),
        (([CODES.astype(np.float32)], [SCALE]), "values must be int8, got float32"),
        (([CODES], [SCALE[:1]]), "scale must have shapes"),
        (([CODES], [SCALE, SCALE]), "scale must have shapes"),
        (([CODES], [SCALE], [SCALE[:, :8]]), "offset must have shapes"),
    ],
)
def test_parts_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cut_packed_tiles(*arguments)


def test_matrices_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="matrices must be matrices of one shape"):
        cut_tiles([np.zeros((4, 4)), np.zeros((4, 5))])
    with pytest.raises(ValueError, match="blocks of 1 x 32"):
        quantize(np.zeros((33, 4), np.float32))
    with pytest.raises(ValueError, match="tiles must have no offsets"):
        read_matrix(cut_packed_tiles([CODES], [SCALE], [SCALE]))


def test_quantized_entries_are_those_of_q8_0():
    matrix = np.random.default_rng(1).standard_normal((64, 24)).astype(np.float32)
    values, scale = quantize(matrix)
    form = find_format("q8_0")
    expected = form.reference(form.encode(matrix.T), 24, 64).T
    np.testing.assert_array_equal(values * np.repeat(scale, 32, axis=0), expected)
    tiles = cut_packed_tiles([values], [scale])
    codes, scales = read_matrix(tiles)
    np.testing.assert_array_equal(codes, values)
    np.testing.assert_array_equal(scales, scale)


@pytest.mark.parametrize("num_columns", [2060, 2048, 300])
def test_a_large_product_in_halves_has_all_its_columns(num_columns):
    # 258 blocks of columns, of which the second half goes back over one; 256; and 38,
    # which are not halved.
    source = np.random.default_rng(num_columns)
    values = source.integers(-127, 128, (256, num_columns)).astype(np.int8)
    scale = source.uniform(0.01, 0.02, (8, num_columns)).astype(np.float32)
    tiles = cut_packed_tiles([values], [scale])
    state = source.standard_normal(256).astype(np.float32)

    @jax.jit
    def run(state, tiles):
        rows = empty_rows(1, 256, jnp.dtype(jnp.float32))
        return multiply(set_row(rows, 0, state), tiles, jnp.int32(0))

    matrix = values * np.repeat(scale.astype(np.float64), 32, axis=0)
    found = np.asarray(run(state, tiles))
    assert found.shape == (1, num_columns)
    size = np.abs(state) @ np.abs(matrix)
    assert (np.abs(found[0] - state.astype(np.float64) @ matrix) <= 1e-5 * size).all()
