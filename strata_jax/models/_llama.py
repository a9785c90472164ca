"""The llama family in singleton arithmetic: a token's numbers depend on one token.

A window passes through each layer in two phases, and each phase handles its tokens one
by one: (A) norm, query, key, value, rotary; then keys and values are written; (B)
attention over the cache, output projection, norm, feed-forward. The loop bodies are the
same whatever the number of tokens, so a row's bits are those of the T = 1 program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from strata_jax._precision import at_least_float32
from strata_jax.models._llama_params import LlamaConfig, LlamaLayer, LlamaParams

# The number of cache rows that one step of the running softmax takes in. It is part of
# the arithmetic: another size gives other bits.
CACHE_BLOCK = 128

_ConfigOrParams = TypeVar("_ConfigOrParams", LlamaConfig, LlamaParams)


@flax.struct.dataclass
class LlamaCache:
    """Keys and values, one array per layer; S is a multiple of `CACHE_BLOCK`.

    Rows from the current position on hold anything, NaN included.
    """

    keys: tuple[jax.Array, ...]  # [num_kv_heads, S, head_dim] each
    values: tuple[jax.Array, ...]  # [num_kv_heads, S, head_dim] each


def empty_cache(config: LlamaConfig, max_length: int, dtype: jnp.dtype) -> LlamaCache:
    """Returns an empty cache.

    Args:
      config: the model's shape.
      max_length: how many tokens it must hold.
      dtype: of keys and values.

    Returns:
      The cache, filled with zeros.

    Exactness: a row's bits do not depend on the cache's capacity.
    """
    size = -(-max_length // CACHE_BLOCK) * CACHE_BLOCK
    shape = (config.num_kv_heads, size, config.head_dim)
    layers = range(config.num_layers)
    return LlamaCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
    )


def select_layers(
    config_or_params: _ConfigOrParams, layers: Sequence[int]
) -> _ConfigOrParams:
    """Keeps some of the decoder layers, of a configuration or of its weights.

    Args:
      config_or_params: either of the two.
      layers: indices of the layers to keep, in increasing order.

    Returns:
      The same kind of object; weights are shared, not copied.

    Raises:
      ValueError: if `layers` is empty, not increasing or out of range.

    Exactness: a shorter model; what it drafts is verified like any draft.
    """
    is_config = isinstance(config_or_params, LlamaConfig)
    num_layers = (
        config_or_params.num_layers if is_config else len(config_or_params.layers)
    )
    layers = tuple(layers)
    is_increasing = all(a < b for a, b in itertools.pairwise(layers))
    if not layers or not is_increasing or layers[0] < 0 or layers[-1] >= num_layers:
        raise ValueError(
            f"layers must be increasing indices in [0, {num_layers - 1}], at least "
            f"one; got {list(layers)}"
        )
    if is_config:
        return dataclasses.replace(config_or_params, num_layers=len(layers))
    return dataclasses.replace(
        config_or_params,
        layers=tuple(config_or_params.layers[layer] for layer in layers),
    )


def score_rows(
    config: LlamaConfig,
    params: LlamaParams,
    cache: LlamaCache,
    tokens: jax.Array,
    position: jax.Array,
    num_rows: jax.Array,
    first_logits_row: jax.Array,
) -> tuple[jax.Array, jax.Array, LlamaCache]:
    """Runs the tokens of a window through the model, each by itself.

    Args:
      config: the model's shape.
      params: its weights.
      cache: holds the tokens before `position`.
      tokens: `[T]` int32, standing at `position`, `position + 1`, ...
      position: [] int32.
      num_rows: [] int32, how many of them to compute; `position + num_rows` must not
        exceed the cache.
      first_logits_row: [] int32, rows before it get no logits.

    Returns:
      Logits `[T, V]` (zero where not computed), hidden states after the last layer and
      before the final norm `[T, D]`, and the cache with the rows written.

    Exactness: bit-exact to the singleton for every T, `num_rows`, split into windows
      and cache capacity; never `vmap` it, see `strata_jax.targets.singleton`.
    """
    hidden = params.embedding[tokens]
    keys, values = list(cache.keys), list(cache.values)
    for index, layer in enumerate(params.layers):
        hidden, keys[index], values[index] = _layer(
            config, layer, hidden, keys[index], values[index], position, num_rows
        )
    table = params.embedding if params.head is None else params.head

    def head(row: jax.Array, logits: jax.Array) -> jax.Array:
        state = rms_norm(hidden[row], params.final_norm, config.norm_epsilon)
        return logits.at[row].set((table @ state).astype(logits.dtype))

    logits = jnp.zeros((tokens.shape[0], config.vocab_size), hidden.dtype)
    logits = lax.fori_loop(first_logits_row, num_rows, head, logits)
    return logits, hidden, LlamaCache(keys=tuple(keys), values=tuple(values))


def _layer(
    config: LlamaConfig,
    layer: LlamaLayer,
    hidden: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    num_rows: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    num_tokens = hidden.shape[0]

    def project(row: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        queries, keys, values = carry
        query, key, value = _project(config, layer, hidden[row], position + row)
        return (
            queries.at[row].set(query),
            lax.dynamic_update_slice(keys, key[:, None], (0, position + row, 0)),
            lax.dynamic_update_slice(values, value[:, None], (0, position + row, 0)),
        )

    def attend(row: jax.Array, hidden: jax.Array) -> jax.Array:
        mixed = _attend(config, queries[row], keys, values, position + row)
        state = hidden[row] + mixed @ layer.output
        return hidden.at[row].set(state + _feed_forward(config, layer, state))

    width = (num_tokens, config.num_heads, config.head_dim)
    queries = jnp.zeros(width, hidden.dtype)
    queries, keys, values = lax.fori_loop(0, num_rows, project, (queries, keys, values))
    hidden = lax.fori_loop(0, num_rows, attend, hidden)
    return hidden, keys, values


def _project(
    config: LlamaConfig, layer: LlamaLayer, state: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Phase A of one token `[D]`: query, key and value by head, rotary applied."""
    normed = rms_norm(state, layer.attention_norm, config.norm_epsilon)
    query = (normed @ layer.query).reshape(config.num_heads, config.head_dim)
    key = (normed @ layer.key).reshape(config.num_kv_heads, config.head_dim)
    value = (normed @ layer.value).reshape(config.num_kv_heads, config.head_dim)
    cosine, sine = rotary_angles(config, position, query.dtype)
    return rotate(query, cosine, sine), rotate(key, cosine, sine), value


def _attend(
    config: LlamaConfig,
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
        key = lax.dynamic_slice(keys, (0, start, 0), block_shape).astype(dtype)
        value = lax.dynamic_slice(values, (0, start, 0), block_shape).astype(dtype)
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


def _feed_forward(
    config: LlamaConfig, layer: LlamaLayer, state: jax.Array
) -> jax.Array:
    normed = rms_norm(state, layer.feed_forward_norm, config.norm_epsilon)
    return (jax.nn.silu(normed @ layer.gate) * (normed @ layer.up)) @ layer.down


def rms_norm(state: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Divides by the root mean square over the last axis, `[..., D]`, and scales.

    Exactness: a function of one row if called on one row.
    """
    wide = state.astype(at_least_float32(state.dtype))
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * lax.rsqrt(mean_square + epsilon)).astype(state.dtype)
    return normed * jnp.broadcast_to(scale, state.shape)


def rotary_angles(
    config: LlamaConfig, position: jax.Array, dtype: jnp.dtype
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
