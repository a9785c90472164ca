"""Attention of one token in singleton arithmetic, shared by the model families."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax._precision import at_least_float32

# The number of cache rows that one step of the running softmax takes in. It is part of
# the arithmetic: another size gives other bits.
CACHE_BLOCK = 128


class AttentionShape(Protocol):
    """What attention needs of a configuration."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def norm_epsilon(self) -> float: ...


class AttentionLayer(Protocol):
    """What attention needs of a layer's weights."""

    @property
    def attention_norm(self) -> jax.Array: ...
    @property
    def query(self) -> jax.Array: ...
    @property
    def key(self) -> jax.Array: ...
    @property
    def value(self) -> jax.Array: ...
    @property
    def output(self) -> jax.Array: ...
    @property
    def query_norm(self) -> jax.Array | None: ...
    @property
    def key_norm(self) -> jax.Array | None: ...


def cache_shape(config: AttentionShape, max_length: int) -> tuple[int, int, int]:
    """Returns `[num_kv_heads, S, head_dim]`, S rounded up to whole blocks."""
    size = -(-max_length // CACHE_BLOCK) * CACHE_BLOCK
    return config.num_kv_heads, size, config.head_dim


def project_rows(
    config: AttentionShape,
    layer: AttentionLayer,
    hidden: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    num_rows: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Phase A of a window: queries `[T, heads, head_dim]`, keys and values written."""

    def project(row: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        queries, keys, values = carry
        query, key, value = _project(config, layer, hidden[row], position + row)
        zero = jnp.int32(0)
        place = (zero, position + row, zero)
        return (
            queries.at[row].set(query),
            lax.dynamic_update_slice(keys, key[:, None], place),
            lax.dynamic_update_slice(values, value[:, None], place),
        )

    width = (hidden.shape[0], config.num_heads, config.head_dim)
    queries = jnp.zeros(width, hidden.dtype)
    return lax.fori_loop(0, num_rows, project, (queries, keys, values))


def _project(
    config: AttentionShape, layer: AttentionLayer, state: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Phase A of one token `[D]`: query, key and value by head, rotary applied."""
    normed = rms_norm(state, layer.attention_norm, config.norm_epsilon)
    query = (normed @ layer.query).reshape(config.num_heads, config.head_dim)
    key = (normed @ layer.key).reshape(config.num_kv_heads, config.head_dim)
    value = (normed @ layer.value).reshape(config.num_kv_heads, config.head_dim)
    query, key = norm_heads(config, layer, query, key)
    cosine, sine = rotary_angles(config, position, query.dtype)
    return rotate(query, cosine, sine), rotate(key, cosine, sine), value


def attend(
    config: AttentionShape,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """Attention of one token over the cache rows 0 .. position, `[heads * head_dim]`.

    A running softmax over blocks of the cache, so that the cost grows with the
    position and the bits do not depend on the capacity.
    """
    narrow, dtype = query.dtype, at_least_float32(query.dtype)
    groups = config.num_heads // config.num_kv_heads
    shape = (config.num_kv_heads, groups)
    query = query.reshape(*shape, config.head_dim).astype(dtype)
    scale = jnp.asarray(config.head_dim**-0.5, dtype)
    block_shape = (config.num_kv_heads, CACHE_BLOCK, config.head_dim)

    def block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, mixed = carry
        start = index * CACHE_BLOCK
        place = (jnp.int32(0), start, jnp.int32(0))
        key = lax.dynamic_slice(keys, place, block_shape).astype(dtype)
        value = lax.dynamic_slice(values, place, block_shape).astype(dtype)
        rows = start + jnp.arange(CACHE_BLOCK, dtype=jnp.int32)
        is_visible = (rows <= position)[None, None]
        scores = jnp.einsum("kgd,ksd->kgs", query, key) * scale
        scores = jnp.where(is_visible, scores, -jnp.inf)
        # Weight 0 does not hide a NaN in a dead row; the row itself must go.
        value = jnp.where(jnp.swapaxes(is_visible, 1, 2), value, 0)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
        decay = jnp.exp(largest - new_largest)
        weights = jnp.exp(scores - new_largest[..., None])
        total = total * decay + jnp.sum(weights, axis=-1)
        mixed = mixed * decay[..., None] + jnp.einsum("kgs,ksd->kgd", weights, value)
        return new_largest, total, mixed

    carry = (
        jnp.full(shape, -jnp.inf, dtype),
        jnp.zeros(shape, dtype),
        jnp.zeros((*shape, config.head_dim), dtype),
    )
    num_blocks = position // CACHE_BLOCK + 1
    _, total, mixed = lax.fori_loop(0, num_blocks, block, carry)
    return (mixed / total[..., None]).reshape(-1).astype(narrow)


def norm_heads(
    config: AttentionShape, layer: AttentionLayer, query: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Normalises queries and keys by head, `[..., head_dim]`, if the layer does."""
    if layer.query_norm is not None:
        query = rms_norm(query, layer.query_norm, config.norm_epsilon)
    if layer.key_norm is not None:
        key = rms_norm(key, layer.key_norm, config.norm_epsilon)
    return query, key


def rms_norm(state: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Divides by the root mean square over the last axis, `[..., D]`, and scales.

    Exactness: a function of one row if called on one row.
    """
    wide = state.astype(at_least_float32(state.dtype))
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * lax.rsqrt(mean_square + epsilon)).astype(state.dtype)
    return normed * jnp.broadcast_to(scale, state.shape)


def rotary_angles(
    config: AttentionShape, position: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of the rotary angles, `[..., head_dim / 2]` each.

    Args:
      config: the model's shape.
      position: `[...]` int32.
      dtype: of the result; a narrow dtype does not tell neighbouring positions
        apart, so angles are computed in at least float32.

    Returns:
      Cosines and sines.

    Exactness: elementwise.
    """
    half = config.head_dim // 2
    wide = at_least_float32(dtype)
    exponent = jnp.arange(half, dtype=wide) / half
    frequencies = 1.0 / (jnp.asarray(config.rope_theta, wide) ** exponent)
    angles = position[..., None].astype(wide) * frequencies.reshape(
        (1,) * position.ndim + (-1,)
    )
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(heads: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + head_dim / 2) of `[..., heads, head_dim]`.

    Exactness: elementwise.
    """
    first, second = jnp.split(heads, 2, axis=-1)
    cosine, sine = cosine[..., None, :], sine[..., None, :]
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
