"""Products of a few rows with stored matrices, each row by itself, at streaming speed.

A matrix is cut into tiles of 32 rows and 8 columns, so that one elementwise expression
multiplies a tile with all rows of a window: a weight comes from memory once for the
window, and from the nearest cache for its further rows, and a row's numbers come from
additions in a written order. XLA's own product picks another order for another number
of rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from strata_jax.models._processor import has_wide_vectors
from strata_jax.models._rows import put_row
from strata_jax.models._tiles import TILE_COLUMNS, TILE_ROWS, Tiles

# Chains of additions in a tile; one alone would wait for itself.
_CHAINS = 4
# Tiles above each other that are added in one step.
_MOST_AT_ONCE = 24
# Column blocks from which a matrix by itself is worth a second core.
_MANY_BLOCKS = 64


class _Turns(NamedTuple):
    """How several rows pass over a matrix: a matter of speed, none of bits."""

    run: int
    """Column blocks, at most, that a row passes before the next one does."""
    most_paired: int
    """Rows, at most, that share in pairs what a packed weight is decoded to."""


# With rows in turn on every block, such processors read float32 weights at half the
# speed: a run is enough for them to see a stream and fetch ahead, and stays in the
# nearest cache. Those with wide vectors look ahead by themselves, and lose by runs; and
# they decode faster than they take pairs of numbers apart, where there is more than one
# pair.
_NARROW = _Turns(run=8, most_paired=8)
_WIDE = _Turns(run=1, most_paired=2)


@flax.struct.dataclass
class TiledRows:
    """Rows that are ready to be multiplied; they must come out of a loop.

    XLA would otherwise compute them again for every column, and round them otherwise.
    """

    states: jax.Array  # [C, T, 32]
    sums: jax.Array  # [C, T]


def empty_rows(num_rows: int, size: int, dtype: jnp.dtype) -> TiledRows:
    """Returns zeros for T rows `[K]`."""
    chunks = -(-size // TILE_ROWS)
    return TiledRows(
        states=jnp.zeros((chunks, num_rows, TILE_ROWS), dtype),
        sums=jnp.zeros((chunks, num_rows), dtype),
    )


def set_row(rows: TiledRows, row: jax.Array, state: jax.Array) -> TiledRows:
    """Puts a state `[K]` into row `row`."""
    padded = jnp.pad(state, (0, -state.shape[0] % TILE_ROWS))
    chunks = padded.reshape(-1, TILE_ROWS)
    columns = [lax.slice_in_dim(chunks, n, n + 1, axis=1) for n in range(TILE_ROWS)]
    sums = lax.squeeze(functools.reduce(lax.add, columns), (1,))
    return TiledRows(
        states=put_row(rows.states, row, chunks, axis=1),
        sums=put_row(rows.sums, row, sums, axis=1),
    )


def one_row(state: jax.Array) -> jax.Array:
    """Returns 1, [] int32, in a way that XLA cannot tell, so that a loop stays one."""
    bits = lax.bitcast_convert_type(state.reshape(-1)[0], jnp.uint32)
    counted = lax.population_count(bits | jnp.uint32(1)).astype(jnp.int32)
    return jnp.minimum(counted, 1)


def multiply(
    rows: TiledRows,
    tiles: Tiles,
    layer: jax.Array,
    first_block: jax.Array | None = None,
    num_blocks: int | None = None,
) -> jax.Array:
    """Multiplies T rows with a layer's matrix, or with some of its column blocks.

    Args:
      rows: the rows.
      tiles: the matrices.
      layer: [] int32.
      first_block: [] int32, of 8 columns each; None for all columns.
      num_blocks: how many blocks, static.

    Returns:
      `[T, 8 * num_blocks]`, or `[T, N]` for all columns.

    Exactness: a row is a function of that row, whatever T.
    """
    num_layers, num_chunks, all_blocks, _, _ = tiles.values.shape
    if num_layers == 1 and num_blocks is None and all_blocks >= _MANY_BLOCKS:
        return _multiply_halves(rows, tiles)
    # As a number it would be lowered anew wherever it stands, some hundred times.
    zero = lax.sub(layer, layer)
    start = zero if first_block is None else first_block
    width = all_blocks if num_blocks is None else num_blocks
    dtype = rows.states.dtype

    # The second row of a pair is where a complex number has its imaginary part: XLA
    # then decodes a weight once for both. No two parts of a number ever meet.
    num_rows = rows.states.shape[1]
    turns = _WIDE if has_wide_vectors() else _NARROW
    is_paired = 1 < num_rows <= turns.most_paired and tiles.scale is not None
    num_pairs = -(-num_rows // 2) if is_paired else num_rows
    run = math.gcd(width, turns.run)
    shape = (num_chunks, width // run, num_pairs, run, TILE_COLUMNS)
    wide = (num_chunks, width // run, run, TILE_COLUMNS)

    def part_of(array: jax.Array, *row: int) -> jax.Array:
        """The layer's chunks and blocks, of one row where there are rows."""
        place = (layer, zero, start, *map(np.int32, row), zero)
        size = (1, num_chunks, width, *(1 for _ in row), TILE_COLUMNS)
        part = lax.dynamic_slice(array, place, size, allow_negative_indices=False)
        return lax.convert_element_type(lax.reshape(part, wide), dtype)

    def of_blocks(array: jax.Array) -> jax.Array:
        return part_of(array)[:, :, None]

    # Of `lax`, here and below: hundreds of jnp's operations take seconds to trace.
    weights = [
        lax.broadcast_in_dim(part_of(tiles.values, row), shape, (0, 1, 3, 4))
        for row in range(TILE_ROWS)
    ]

    def products_of(some: TiledRows) -> jax.Array:
        """Products of each tile with each of some rows."""

        def product(row: int) -> jax.Array:
            state = lax.slice_in_dim(some.states, row, row + 1, axis=2)
            return lax.mul(lax.broadcast_in_dim(state, shape, (0, 2, 3)), weights[row])

        parts = chained_sum([product(row) for row in range(TILE_ROWS)])
        if tiles.scale is not None:
            parts = parts * of_blocks(tiles.scale)
        if tiles.offset is not None:
            parts = parts + some.sums[:, None, :, None, None] * of_blocks(tiles.offset)
        return parts

    if is_paired:
        first, second = (_every_other(rows, place, num_pairs) for place in range(2))
        parts = lax.complex(products_of(first), products_of(second))
    else:
        parts = products_of(rows)
    total = jnp.swapaxes(_add_chunks(parts), 0, 1).reshape(num_pairs, -1)
    if is_paired:
        pairs = jnp.stack([total.real, total.imag], axis=1)
        total = pairs.reshape(2 * num_pairs, -1)[:num_rows]
    return total[:, : tiles.num_columns] if num_blocks is None else total


def _every_other(rows: TiledRows, place: int, count: int) -> TiledRows:
    """The rows `place`, `place + 2`, ...; zeros where there are fewer than `count`."""

    def take(array: jax.Array) -> jax.Array:
        taken = array[:, place::2]
        padding = [(0, 0)] * array.ndim
        padding[1] = (0, count - taken.shape[1])
        return jnp.pad(taken, padding)

    return TiledRows(states=take(rows.states), sums=take(rows.sums))


def _multiply_halves(rows: TiledRows, tiles: Tiles) -> jax.Array:
    """Multiplies T rows with the only matrix of some tiles in two steps.

    Where neither layer nor columns are to be found at run time, XLA counts the whole
    matrix as read for each of a tile's rows, takes the product for one that waits for
    memory, and leaves it to one core.
    """
    all_blocks = tiles.values.shape[2]
    half = -(-all_blocks // 2)

    def columns(step: jax.Array, total: jax.Array) -> jax.Array:
        # The second step may go back over a block that is there already: the same bits.
        block = jnp.minimum(step * half, all_blocks - half)
        piece = multiply(rows, tiles, jnp.int32(0), block, half)
        return lax.dynamic_update_slice(
            total, piece, (jnp.int32(0), block * TILE_COLUMNS)
        )

    shape = (rows.states.shape[1], all_blocks * TILE_COLUMNS)
    total = jnp.zeros(shape, rows.states.dtype)
    total = lax.fori_loop(jnp.int32(0), jnp.int32(2), columns, total)
    return total[:, : tiles.num_columns]


def chained_sum(terms: Sequence[jax.Array]) -> jax.Array:
    """Adds arrays in four chains, term i to chain i mod 4, and then the chains."""
    chains = list(terms[:_CHAINS])
    for index, term in enumerate(terms[_CHAINS:]):
        chains[index % _CHAINS] = lax.add(chains[index % _CHAINS], term)
    while len(chains) > 1:
        chains = [
            lax.add(*pair) for pair in zip(chains[::2], chains[1::2], strict=True)
        ]
    return chains[0]


def _add_chunks(parts: jax.Array) -> jax.Array:
    """Adds `[C, ...]` from the first to the last."""
    num_chunks = parts.shape[0]
    sizes = range(1, min(_MOST_AT_ONCE, max(num_chunks // 2, 1)) + 1)
    size = max(size for size in sizes if num_chunks % size == 0)

    shape = parts.shape[1:]
    # In one dimension, which XLA makes vectors of whatever the number of rows is.
    length = (math.prod(shape),)

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        zero = lax.sub(step, step)
        for place in range(size):
            start = (step * size + place, *(zero for _ in shape))
            part = lax.dynamic_slice(
                parts, start, (1, *shape), allow_negative_indices=False
            )
            total = lax.add(total, lax.reshape(part, length))
        return total

    # A loop, so that XLA makes the parts before it adds them.
    empty = jnp.zeros(length, parts.dtype)
    steps = jnp.int32(num_chunks // size)
    return lax.fori_loop(jnp.int32(0), steps, add, empty).reshape(shape)
