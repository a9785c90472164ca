"""One decoder layer on tiled weights, for the rows of a group.

Vector work (norms, rotary, attention, activations) is done row by row, in loops whose
bodies are the same for any number of rows; matrix products take all rows of a group,
and each element of a product is an expression of one row (see `_tiled_product`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from strata_jax.models._attention import rms_norm, rotary_angles, rotate
from strata_jax.models._llama_params import LlamaConfig
from strata_jax.models._rows import put_row, take_row
from strata_jax.models._tiled_product import (
    TiledRows,
    chained_sum,
    empty_rows,
    multiply,
    set_row,
)
from strata_jax.models._tiles import Tiles

# Cache rows that one step of attention takes in, and that one sum takes in; both are
# part of the arithmetic.
_BLOCK = 128
_PART = 64
# Numbers that stand together, one vector: a sum's terms then lie one behind the other.
_LANES = 8
FLOAT32 = jnp.dtype(jnp.float32)


class TiledLayers(Protocol):
    """The weights of some layers, all layers of a matrix together."""

    @property
    def attention_norm(self) -> jax.Array: ...
    @property
    def query_key_value(self) -> Tiles: ...
    @property
    def output(self) -> Tiles: ...
    @property
    def feed_forward_norm(self) -> jax.Array: ...
    @property
    def gate_up(self) -> Tiles: ...
    @property
    def down(self) -> Tiles: ...


@flax.struct.dataclass
class TiledLlamaCache:
    """Keys and values of all layers; S is a multiple of 128.

    Rows from the current position on hold anything, NaN included.
    """

    keys: jax.Array  # [L, num_kv_heads, S / 8, head_dim, 8]
    values: jax.Array  # [L, num_kv_heads, S / 64, head_dim / 8, 64, 8]


class Buffers(NamedTuple):
    """Memory for a layer's steps; what it holds before a layer does not matter.

    One set for all layers, since new ones would be filled each time.
    """

    scores: jax.Array
    """[num_kv_heads, num_heads / num_kv_heads, S / 8, 8], of one row's attention."""
    normed: TiledRows
    """T rows of D entries."""
    mixed: TiledRows
    """T rows of num_heads * head_dim entries."""
    active: TiledRows
    """T rows of F entries."""


class Group(NamedTuple):
    """Where the rows of a group stand."""

    position: jax.Array
    """[] int32, of the first."""
    count: jax.Array
    """[] int32, how many rows there are; those after them mean nothing."""
    cosine: jax.Array
    """[T, head_dim / 2], of the rotary angles."""
    sine: jax.Array


def empty_tiled_cache(config: LlamaConfig, max_length: int) -> TiledLlamaCache:
    """Returns an empty cache.

    Args:
      config: the model's shape.
      max_length: how many tokens it must hold.

    Returns:
      The cache, float32, filled with zeros.

    Exactness: a row's bits do not depend on the cache's capacity.
    """
    size = -(-max_length // _BLOCK) * _BLOCK
    outer = (config.num_layers, config.num_kv_heads)
    width = config.head_dim
    lanes = math.gcd(width, _LANES)
    return TiledLlamaCache(
        keys=jnp.zeros((*outer, size // _LANES, width, _LANES), FLOAT32),
        values=jnp.zeros(
            (*outer, size // _PART, width // lanes, _PART, lanes), FLOAT32
        ),
    )


def place_group(
    config: LlamaConfig, position: jax.Array, count: jax.Array, size: int
) -> Group:
    """Computes the rotary angles of a group of `size` rows, row by row."""

    def turn(row: jax.Array, angles: Any) -> Any:
        cosine, sine = rotary_angles(config, position + row, FLOAT32)
        return put_row(angles[0], row, cosine), put_row(angles[1], row, sine)

    empty = jnp.zeros((size, config.head_dim // 2), FLOAT32)
    cosine, sine = lax.fori_loop(0, count, turn, (empty, empty))
    return Group(position=position, count=count, cosine=cosine, sine=sine)


def norm_rows(
    states: jax.Array,
    scale: jax.Array,
    epsilon: float,
    count: jax.Array,
    ready: TiledRows,
    first: jax.Array | int = 0,
) -> TiledRows:
    """Norms the rows `first` .. `count - 1` of `[T, D]` for a product, into `ready`."""

    def norm(row: jax.Array, ready: TiledRows) -> TiledRows:
        return set_row(ready, row, rms_norm(take_row(states, row), scale, epsilon))

    return lax.fori_loop(first, count, norm, ready)


def empty_buffers(
    config: LlamaConfig, cache: TiledLlamaCache, num_rows: int
) -> Buffers:
    """Returns buffers for groups of `num_rows` rows."""
    groups = config.num_heads // config.num_kv_heads
    shape = (config.num_kv_heads, groups, cache.keys.shape[2], _LANES)

    def of_size(size: int) -> TiledRows:
        return empty_rows(num_rows, size, FLOAT32)

    return Buffers(
        scores=jnp.zeros(shape, FLOAT32),
        normed=of_size(config.hidden_size),
        mixed=of_size(config.num_heads * config.head_dim),
        active=of_size(config.intermediate_size),
    )


def run_layer(
    config: LlamaConfig,
    layers: TiledLayers,
    index: jax.Array,
    group: Group,
    hidden: jax.Array,
    cache: TiledLlamaCache,
    buffers: Buffers,
) -> tuple[jax.Array, TiledLlamaCache, Buffers]:
    """Runs layer `index` on the rows of a group: states `[T, D]`, cache, buffers.

    Exactness: a row is a function of one token, whatever T; never `vmap` it.
    """
    queries, keys = config.num_heads, config.num_kv_heads
    position, count = group.position, group.count

    def of_layer(norms: jax.Array) -> jax.Array:
        return take_row(norms, index)

    norm = of_layer(layers.attention_norm)
    normed = norm_rows(hidden, norm, config.norm_epsilon, count, buffers.normed)
    projected = multiply(normed, layers.query_key_value, index)

    def attend(row: jax.Array, carry: Any) -> Any:
        rows, cache, scores = carry
        parts = take_row(projected, row).reshape(queries + 2 * keys, config.head_dim)
        angles = take_row(group.cosine, row), take_row(group.sine, row)
        turned = rotate(parts[: queries + keys], *angles)
        cache = _store(
            cache, index, position + row, turned[queries:], parts[queries + keys :]
        )
        query = turned[:queries]
        mixed, scores = _attend(config, query, cache, index, position + row, scores)
        return set_row(rows, row, mixed), cache, scores

    carry = (buffers.mixed, cache, buffers.scores)
    mixed, cache, scores = lax.fori_loop(0, count, attend, carry)
    attended = multiply(mixed, layers.output, index)
    norm = of_layer(layers.feed_forward_norm)

    def add_and_norm(row: jax.Array, carry: Any) -> Any:
        hidden, rows = carry
        state = take_row(hidden, row) + take_row(attended, row)
        new = rms_norm(state, norm, config.norm_epsilon)
        return put_row(hidden, row, state), set_row(rows, row, new)

    hidden, normed = lax.fori_loop(0, count, add_and_norm, (hidden, normed))
    gates = multiply(normed, layers.gate_up, index)
    inner = config.intermediate_size

    def activate(row: jax.Array, rows: TiledRows) -> TiledRows:
        gate, up = jnp.split(take_row(gates, row), [inner])
        return set_row(rows, row, jax.nn.silu(gate) * up)

    active = lax.fori_loop(0, count, activate, buffers.active)
    fed = multiply(active, layers.down, index)

    def add(row: jax.Array, hidden: jax.Array) -> jax.Array:
        return put_row(hidden, row, take_row(hidden, row) + take_row(fed, row))

    hidden = lax.fori_loop(0, count, add, hidden)
    return hidden, cache, Buffers(scores, normed, mixed, active)


def _store(
    cache: TiledLlamaCache,
    layer: jax.Array,
    position: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> TiledLlamaCache:
    """Puts one token's key and value, `[num_kv_heads, head_dim]`, into the cache."""
    zero = jnp.int32(0)
    place = (layer, zero, position // _LANES, zero, position % _LANES)
    keys = lax.dynamic_update_slice(cache.keys, key[None, :, None, :, None], place)
    lanes = cache.values.shape[-1]
    value = value.reshape(1, key.shape[0], 1, -1, 1, lanes)
    place = (layer, zero, position // _PART, zero, position % _PART, zero)
    values = lax.dynamic_update_slice(cache.values, value, place)
    return TiledLlamaCache(keys=keys, values=values)


# A program of its own for the tracer: groups of all sizes then share it.
@functools.partial(jax.jit, static_argnums=0)
def _attend(
    config: LlamaConfig,
    query: jax.Array,
    cache: TiledLlamaCache,
    layer: jax.Array,
    position: jax.Array,
    scores: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one token over the cache rows 0 .. position, `[heads * head_dim]`.

    Scores of all blocks first, then the weighted sum, so that no block's result is
    scaled twice. Each place in a block has sums of its own, joined at the end.
    """
    num_kv, width = config.num_kv_heads, config.head_dim
    groups = config.num_heads // num_kv
    query = query.reshape(num_kv, groups, width) * jnp.float32(width**-0.5)
    start, parts, vectors = np.int32(0), _BLOCK // _PART, _BLOCK // _LANES
    num_blocks = position // _BLOCK + 1
    shape = (num_kv, groups, vectors, _LANES)
    places = jnp.arange(_BLOCK, dtype=jnp.int32)

    lanes = cache.values.shape[-1]
    wide = (num_kv, groups, parts, width // lanes, lanes)
    nothing = jnp.zeros(wide, FLOAT32)

    def key_of(first: jax.Array, lane: int, zero: jax.Array) -> jax.Array:
        """Number `lane` of the keys of the block that begins with vector `first`."""
        place = (layer, zero, first, np.int32(lane), zero)
        size = (1, num_kv, vectors, 1, _LANES)
        part = lax.dynamic_slice(cache.keys, place, size, allow_negative_indices=False)
        return lax.broadcast_in_dim(lax.squeeze(part, (0, 3)), shape, (0, 2, 3))

    def score(index: jax.Array, scores: jax.Array) -> jax.Array:
        # As a number it would be lowered anew wherever it stands.
        zero, first = lax.sub(index, index), index * vectors
        products = [
            lax.mul(
                lax.broadcast_in_dim(
                    lax.slice_in_dim(query, lane, lane + 1, axis=2), shape, (0, 1, 3)
                ),
                key_of(first, lane, zero),
            )
            for lane in range(width)
        ]
        is_visible = (index * _BLOCK + places <= position).reshape(shape[2:])
        block = jnp.where(is_visible[None, None], chained_sum(products), -jnp.inf)
        return lax.dynamic_update_slice(scores, block, (start, start, first, start))

    def scores_of(scores: jax.Array, index: jax.Array) -> jax.Array:
        return lax.dynamic_slice(scores, (start, start, index * vectors, start), shape)

    def compare(index: jax.Array, largest: jax.Array) -> jax.Array:
        return jnp.maximum(largest, scores_of(scores, index))

    scores = lax.fori_loop(0, num_blocks, score, scores)
    # In a loop of its own: where a sum has two uses, XLA computes it twice.
    largest = jnp.full(shape, -jnp.inf, FLOAT32)
    largest = lax.fori_loop(0, num_blocks, compare, largest)
    largest = jnp.max(largest, axis=(2, 3), keepdims=True)

    def value_of(
        first: jax.Array, row: int, zero: jax.Array, is_visible: jax.Array
    ) -> jax.Array:
        """Row `row` of each part of the block that begins with part `first`."""
        place = (layer, zero, first, zero, np.int32(row), zero)
        size = (1, num_kv, parts, width // lanes, 1, lanes)
        part = lax.dynamic_slice(
            cache.values, place, size, allow_negative_indices=False
        )
        rows = lax.broadcast_in_dim(lax.squeeze(part, (0, 4)), wide, (0, 2, 3, 4))
        # Weight 0 does not hide a NaN in a dead row; the row itself must go.
        is_row_visible = lax.broadcast_in_dim(
            lax.slice_in_dim(is_visible, row, row + 1, axis=1), wide, (2, 4)
        )
        return lax.select(is_row_visible, rows, nothing)

    def mix(index: jax.Array, carry: Any) -> Any:
        total, mixed = carry
        zero, first = lax.sub(index, index), index * parts
        weights = jnp.exp(scores_of(scores, index) - largest)
        by_row = weights.reshape(num_kv, groups, parts, _PART)
        is_visible = (index * _BLOCK + places <= position).reshape(parts, _PART)
        products = [
            lax.mul(
                lax.broadcast_in_dim(
                    lax.slice_in_dim(by_row, row, row + 1, axis=3), wide, (0, 1, 2, 4)
                ),
                value_of(first, row, zero, is_visible),
            )
            for row in range(_PART)
        ]
        return total + weights, mixed + chained_sum(products)

    carry = (jnp.zeros(shape, FLOAT32), nothing)
    total, mixed = lax.fori_loop(0, num_blocks, mix, carry)
    joined = mixed[:, :, 0]
    for part in range(1, parts):
        joined = joined + mixed[:, :, part]
    total = jnp.sum(total, axis=(2, 3))
    joined = joined.reshape(num_kv, groups, width)
    return (joined / total[..., None]).reshape(-1), scores
