"""Stored matrices, cut into tiles of 32 rows and 8 columns, and back.

`_tiled_product` says what the tiles are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks
from strata_jax.experts import find_format, read_blocks

# Part of the arithmetic, and of what XLA makes of it: 8 columns are one vector, 32 rows
# as many factors as there are registers. Above 96 rows the expression is cut in two.
TILE_ROWS = 32
TILE_COLUMNS = 8


@flax.struct.dataclass
class Tiles:
    """Matrices `[K, N]` of one shape, one for each layer, cut into tiles.

    C is K / 32 and B is N / 8, both rounded up. Entries are `values`, or with scales
    `values * scale + offset`.
    """

    values: jax.Array  # [L, C, B, 32, 8] float32, bfloat16 or int8
    scale: jax.Array | None  # [L, C, B, 8] float16 or float32, or None
    offset: jax.Array | None  # [L, C, B, 8] float16 or float32, or None
    num_rows: int = flax.struct.field(pytree_node=False)  # K
    num_columns: int = flax.struct.field(pytree_node=False)  # N


def cut_tiles(
    matrices: Sequence[np.ndarray], dtype: jax.typing.DTypeLike = jnp.float32
) -> Tiles:
    """Cuts floating matrices of one shape into tiles, on the host.

    Args:
      matrices: `[K, N]` each, one for each layer.
      dtype: of the stored entries; float32 is the fast one, since XLA converts others
        in a pass of its own.

    Returns:
      The tiles.

    Raises:
      ValueError: if there is no matrix, or they differ in shape.

    Exactness: the same weights if `dtype` holds them.
    """
    num_rows, num_columns = _common_shape("matrices", matrices)
    values = np.stack([_cut(np.asarray(matrix)) for matrix in matrices])
    return Tiles(
        values=jnp.asarray(values, dtype),
        scale=None,
        offset=None,
        num_rows=num_rows,
        num_columns=num_columns,
    )


def cut_packed_tiles(
    values: Sequence[np.ndarray],
    scale: Sequence[np.ndarray],
    offset: Sequence[np.ndarray] | None = None,
) -> Tiles:
    """Cuts matrices of small integers with block scales into tiles, on the host.

    They stay integers in memory: a product decodes them on the way.

    Args:
      values: `[K, N]` int8 each, one for each layer; K a multiple of 32.
      scale: `[K / 32, N]` float each: entry (k, n) is `values[k, n] *
        scale[k // 32, n]`. Kept in half precision if that holds all of them.
      offset: the same shape, added after scaling, or None; kept likewise.

    Returns:
      The tiles.

    Raises:
      ValueError: naming the argument, if there is no matrix, K is not a multiple of 32,
        codes are not int8, or shapes do not fit.

    Exactness: the same weights; a product scales sums of 32 entries, not each entry.
    """
    num_rows, num_columns = _common_shape("values", values)
    if any(value.dtype != np.int8 for value in values):
        raise ValueError(f"values must be int8, got {values[0].dtype}")
    if num_rows % TILE_ROWS:
        raise ValueError(
            f"values must have rows in multiples of {TILE_ROWS}, got {num_rows}: "
            "decode the matrices, and use cut_tiles"
        )

    def by_block(name: str, blocks: Sequence[np.ndarray]) -> jax.Array:
        wanted = (len(values), num_rows // TILE_ROWS, num_columns)
        found = (len(blocks), *_common_shape(name, blocks))
        if found != wanted:
            raise ValueError(f"{name} must have shapes {wanted}, got {found}")
        padded = np.stack([_pad_columns(np.asarray(b, np.float32)) for b in blocks])
        shape = (len(blocks), num_rows // TILE_ROWS, -1, TILE_COLUMNS)
        return jnp.asarray(_halved(padded).reshape(shape))

    return Tiles(
        values=jnp.asarray(np.stack([_cut(np.asarray(value)) for value in values])),
        scale=by_block("scale", scale),
        offset=None if offset is None else by_block("offset", offset),
        num_rows=num_rows,
        num_columns=num_columns,
    )


def quantize(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a matrix to GGUF's Q8_0, along its rows.

    Args:
      matrix: `[K, N]` float, K a multiple of 32.

    Returns:
      int8 `[K, N]`, and float32 scales `[K / 32, N]` that half precision holds.

    Raises:
      ValueError: if K is not a multiple of 32, or an entry is too large or not finite.

    Exactness: lossy; what it gives is decoded without a rounding.
    """
    num_rows, num_columns = matrix.shape
    words = find_format("q8_0").encode(np.asarray(matrix, np.float32).T)
    stored = words.astype("<u4").view(np.uint8)
    values, scale, _ = read_blocks("q8_0", stored, num_columns, num_rows)
    return values.T, scale.T


def check_narrow(name: str, params: Any) -> None:
    """Raises ValueError for weights beyond float32, in which rows are computed."""
    for leaf in jax.tree.leaves(params):
        if leaf.dtype == np.float64:
            raise ValueError(
                f"{name} must be float32 or narrower, got float64: tiles are "
                "multiplied in float32; cast the weights first"
            )


def check_tiles(name: str, tiles: Tiles, shape: tuple[int, int, int]) -> None:
    """Raises ValueError unless tiles hold L matrices `[K, N]`."""
    if not isinstance(tiles, Tiles):
        raise ValueError(f"{name} must be models.Tiles, got {type(tiles).__name__}")
    found = (tiles.values.shape[0], tiles.num_rows, tiles.num_columns)
    if found != shape:
        raise ValueError(f"{name} must hold matrices {shape}, got {found}")
    chunks = -(-tiles.num_rows // TILE_ROWS)
    blocks = -(-tiles.num_columns // TILE_COLUMNS)
    cut = (shape[0], chunks, blocks, TILE_ROWS, TILE_COLUMNS)
    _checks.check_shape(f"{name}.values", tiles.values, cut)
    for field in ("scale", "offset"):
        if (array := getattr(tiles, field)) is not None:
            size = (shape[0], chunks, blocks, TILE_COLUMNS)
            _checks.check_shape(f"{name}.{field}", array, size)


def _common_shape(name: str, matrices: Sequence[np.ndarray]) -> tuple[int, int]:
    shapes = {np.shape(matrix) for matrix in matrices}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2:
        raise ValueError(
            f"{name} must be matrices of one shape, one for each layer, at least one; "
            f"got {sorted(map(np.shape, matrices))}"
        )
    return shape


def _cut(matrix: np.ndarray) -> np.ndarray:
    """`[K, N]` to `[C, B, 32, 8]`, padded with zeros."""
    rows = -matrix.shape[0] % TILE_ROWS
    padded = _pad_columns(np.pad(matrix, ((0, rows), (0, 0))))
    tiled = padded.reshape(padded.shape[0] // TILE_ROWS, TILE_ROWS, -1, TILE_COLUMNS)
    return np.ascontiguousarray(np.swapaxes(tiled, 1, 2))


def _halved(values: np.ndarray) -> np.ndarray:
    """In half precision if that holds all of them: up to a tenth less to be read."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    return halves if np.array_equal(halves, values) else values


def _pad_columns(matrix: np.ndarray) -> np.ndarray:
    return np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % TILE_COLUMNS)))


def take_column(tiles: Tiles, layer: int, column: jax.Array) -> jax.Array:
    """Returns column `column` of a layer's matrix, `[K]`.

    Exactness: the stored entry, with one rounding for its scale and one for its offset.
    """
    block, lane = column // TILE_COLUMNS, column % TILE_COLUMNS

    def of_blocks(numbers: jax.Array) -> jax.Array:
        found = numbers[layer, :, block, lane].astype(jnp.float32)
        return jnp.repeat(found, TILE_ROWS)

    values = tiles.values[layer, :, block, :, lane].reshape(-1)
    if tiles.scale is not None:
        values = values.astype(jnp.float32) * of_blocks(tiles.scale)
    if tiles.offset is not None:
        values = values + of_blocks(tiles.offset)
    return values[: tiles.num_rows]


def read_matrix(tiles: Tiles) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the first matrix of some tiles as it is stored, on the host.

    Args:
      tiles: the tiles, without offsets.

    Returns:
      `[K, N]`, and its scales `[K / 32, N]` float32, or None if it has none.

    Raises:
      ValueError: if there are offsets.

    Exactness: nothing is computed.
    """
    if tiles.offset is not None:
        raise ValueError("tiles must have no offsets: only Q8_0 is read")
    values = np.asarray(tiles.values)[0]
    matrix = np.swapaxes(values, 1, 2).reshape(-1, values.shape[1] * TILE_COLUMNS)
    matrix = matrix[: tiles.num_rows, : tiles.num_columns]
    if tiles.scale is None:
        return matrix, None
    scale = np.asarray(tiles.scale, np.float32)[0].reshape(values.shape[0], -1)
    return matrix, scale[:, : tiles.num_columns]


def take_columns(tiles: Tiles, columns: np.ndarray) -> Tiles:
    """Copies some columns of the first matrix into tiles of their own, on the host."""
    block, lane = columns // TILE_COLUMNS, columns % TILE_COLUMNS
    values = np.asarray(tiles.values)[0][:, block, :, lane]  # [n, C, 32]
    matrix = values.reshape(len(columns), -1).T

    def of_blocks(array: jax.Array | None) -> list[np.ndarray] | None:
        return None if array is None else [np.asarray(array)[0][:, block, lane]]

    scale = of_blocks(tiles.scale)
    if scale is None:
        return cut_tiles([matrix[: tiles.num_rows]], tiles.values.dtype)
    return cut_packed_tiles([matrix], scale, of_blocks(tiles.offset))
