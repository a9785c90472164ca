"""One decoder layer on tiled weights, for the rows of a group.

Vector work (norms, rotary, attention, activations) is done row by row, in loops whose
bodies are the same for any number of rows; matrix products take all rows of a group,
and each element of a product is an expression of one row (see `_tiles`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from strata_jax.models._attention import rms_norm, rotary_angles, rotate
from strata_jax.models._llama_params import LlamaConfig
from strata_jax.models._tiles import (
    TiledRows,
    Tiles,
    chained_sum,
    empty_rows,
    multiply,
    set_row,
)

# Cache rows that one step of attention takes in; part of the arithmetic.
_BLOCK = 64
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
    """Keys and values of all layers; S is a multiple of 64.

    Rows from the current position on hold anything, NaN included.
    """

    keys: jax.Array  # [L, num_kv_heads, head_dim, S]
    values: jax.Array  # [L, num_kv_heads, S, head_dim]


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
    return TiledLlamaCache(
        keys=jnp.zeros((*outer, config.head_dim, size), FLOAT32),
        values=jnp.zeros((*outer, size, config.head_dim), FLOAT32),
    )


def place_group(
    config: LlamaConfig, position: jax.Array, count: jax.Array, size: int
) -> Group:
    """Computes the rotary angles of a group of `size` rows, row by row."""

    def turn(row: jax.Array, angles: Any) -> Any:
        cosine, sine = rotary_angles(config, position + row, FLOAT32)
        return angles[0].at[row].set(cosine), angles[1].at[row].set(sine)

    empty = jnp.zeros((size, config.head_dim // 2), FLOAT32)
    cosine, sine = lax.fori_loop(0, count, turn, (empty, empty))
    return Group(position=position, count=count, cosine=cosine, sine=sine)


def norm_rows(
    states: jax.Array,
    scale: jax.Array,
    epsilon: float,
    count: jax.Array,
    first: jax.Array | int = 0,
) -> TiledRows:
    """Norms the rows `first` .. `count - 1` of `[T, D]` for a product."""

    def norm(row: jax.Array, rows: TiledRows) -> TiledRows:
        return set_row(rows, row, rms_norm(states[row], scale, epsilon))

    num_rows, size = states.shape
    return lax.fori_loop(first, count, norm, empty_rows(num_rows, size, FLOAT32))


def empty_scores(config: LlamaConfig, cache: TiledLlamaCache) -> jax.Array:
    """Returns a buffer for the scores of one row's attention.

    One for all layers and rows, since a new one would be filled each time.
    """
    groups = config.num_heads // config.num_kv_heads
    shape = (config.num_kv_heads, groups, cache.keys.shape[-1])
    return jnp.zeros(shape, FLOAT32)


def run_layer(
    config: LlamaConfig,
    layers: TiledLayers,
    index: jax.Array,
    group: Group,
    hidden: jax.Array,
    cache: TiledLlamaCache,
    scores: jax.Array,
) -> tuple[jax.Array, TiledLlamaCache, jax.Array]:
    """Runs layer `index` on the rows of a group: states `[T, D]`, cache, buffer.

    Exactness: a row is a function of one token, whatever T; never `vmap` it.
    """
    size, _ = hidden.shape
    queries, keys = config.num_heads, config.num_kv_heads
    position, count = group.position, group.count

    def of_layer(norms: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(norms, index, keepdims=False)

    def norm(states: jax.Array, norms: jax.Array) -> TiledRows:
        return norm_rows(states, of_layer(norms), config.norm_epsilon, count)

    ready = norm(hidden, layers.attention_norm)
    projected = multiply(ready, layers.query_key_value, index)

    def project(row: jax.Array, carry: Any) -> Any:
        heads, cache = carry
        parts = projected[row].reshape(queries + 2 * keys, config.head_dim)
        turned = rotate(parts[: queries + keys], group.cosine[row], group.sine[row])
        zero, place = jnp.int32(0), position + row
        key, value = turned[queries:], parts[queries + keys :]
        cache = TiledLlamaCache(
            keys=lax.dynamic_update_slice(
                cache.keys, key[None, :, :, None], (index, zero, zero, place)
            ),
            values=lax.dynamic_update_slice(
                cache.values, value[None, :, None], (index, zero, place, zero)
            ),
        )
        return heads.at[row].set(turned[:queries]), cache

    heads = jnp.zeros((size, queries, config.head_dim), FLOAT32)
    heads, cache = lax.fori_loop(0, count, project, (heads, cache))

    def attend(row: jax.Array, carry: Any) -> Any:
        rows, scores = carry
        mixed, scores = _attend(
            config, heads[row], cache, index, position + row, scores
        )
        return set_row(rows, row, mixed), scores

    mixed = empty_rows(size, queries * config.head_dim, FLOAT32)
    mixed, scores = lax.fori_loop(0, count, attend, (mixed, scores))
    hidden = _add(hidden, multiply(mixed, layers.output, index), count)

    ready = norm(hidden, layers.feed_forward_norm)
    fed = multiply(ready, layers.gate_up, index)
    inner = config.intermediate_size

    def activate(row: jax.Array, rows: TiledRows) -> TiledRows:
        gate, up = fed[row, :inner], fed[row, inner:]
        return set_row(rows, row, jax.nn.silu(gate) * up)

    active = lax.fori_loop(0, count, activate, empty_rows(size, inner, FLOAT32))
    hidden = _add(hidden, multiply(active, layers.down, index), count)
    return hidden, cache, scores


def _add(states: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    def add(row: jax.Array, states: jax.Array) -> jax.Array:
        return states.at[row].add(new[row])

    return lax.fori_loop(0, count, add, states)


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
    scaled twice.
    """
    num_kv, width = config.num_kv_heads, config.head_dim
    groups = config.num_heads // num_kv
    query = query.reshape(num_kv, groups, width) * jnp.float32(width**-0.5)
    zero = jnp.int32(0)
    num_blocks = position // _BLOCK + 1

    def is_visible(start: jax.Array) -> jax.Array:
        return start + jnp.arange(_BLOCK, dtype=jnp.int32) <= position

    def score(index: jax.Array, carry: Any) -> Any:
        scores, largest = carry
        start = index * _BLOCK

        def key(lane: int) -> jax.Array:
            place = (layer, zero, jnp.int32(lane), start)
            return lax.dynamic_slice(cache.keys, place, (1, num_kv, 1, _BLOCK))[0]

        products = [query[:, :, lane, None] * key(lane) for lane in range(width)]
        block = jnp.where(
            is_visible(start)[None, None], chained_sum(products), -jnp.inf
        )
        scores = lax.dynamic_update_slice(scores, block, (zero, zero, start))
        return scores, jnp.maximum(largest, jnp.max(block, axis=-1))

    largest = jnp.full((num_kv, groups), -jnp.inf, jnp.float32)
    scores, largest = lax.fori_loop(0, num_blocks, score, (scores, largest))

    def mix(index: jax.Array, carry: Any) -> Any:
        total, mixed = carry
        start = index * _BLOCK
        block = lax.dynamic_slice(scores, (zero, zero, start), (num_kv, groups, _BLOCK))
        weights = jnp.exp(block - largest[..., None])
        place = (layer, zero, start, zero)
        value = lax.dynamic_slice(cache.values, place, (1, num_kv, _BLOCK, width))[0]
        # Weight 0 does not hide a NaN in a dead row; the row itself must go.
        value = jnp.where(is_visible(start)[None, :, None], value, 0)
        products = [
            weights[:, :, row, None] * value[:, None, row] for row in range(_BLOCK)
        ]
        return total + jnp.sum(weights, axis=-1), mixed + chained_sum(products)

    carry = (
        jnp.zeros((num_kv, groups), jnp.float32),
        jnp.zeros((num_kv, groups, width), jnp.float32),
    )
    total, mixed = lax.fori_loop(0, num_blocks, mix, carry)
    return (mixed / total[..., None]).reshape(-1), scores
