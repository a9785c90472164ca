"""The llama family on tiled weights: the singleton's law of one token, at window speed.

A window of up to eight rows is one group, with programs for one row, for two, for four
and for all, of which the smallest that suffices runs; a longer one, and a prompt, goes
in groups of eight. Programs differ in the number of rows only; `_tiled_layer` has their
layers.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from strata_jax import _checks
from strata_jax.models._llama_params import LlamaConfig, LlamaParams, check_params
from strata_jax.models._mtp_tiled import TiledMtpParams
from strata_jax.models._rows import put_row, take_row
from strata_jax.models._tiled_layer import (
    FLOAT32,
    TiledLlamaCache,
    empty_buffers,
    norm_rows,
    place_group,
    run_layer,
)
from strata_jax.models._tiled_product import empty_rows, multiply
from strata_jax.models._tiles import (
    TILE_COLUMNS,
    Tiles,
    check_narrow,
    check_tiles,
    cut_tiles,
    take_column,
)

# Rows, at most, that share a pass over the weights.
_LARGEST_GROUP = 8
# Rows of the smaller programs; those that a window does not have are computed in vain.
_GROUPS = (1, 2, 4)
# Column blocks of the head in one product, so that partial sums stay in the cache.
_HEAD_BLOCKS = 512


@flax.struct.dataclass
class TiledLlamaParams:
    """Weights of a llama-family decoder in tiles, all layers of a matrix together."""

    attention_norm: jax.Array  # [L, D]
    query_key_value: Tiles  # [D, (num_heads + 2 num_kv_heads) * head_dim]
    output: Tiles  # [num_heads * head_dim, D]
    feed_forward_norm: jax.Array  # [L, D]
    gate_up: Tiles  # [D, 2 F]
    down: Tiles  # [F, D]
    final_norm: jax.Array  # [D]
    embedding: Tiles | None  # [D, V], one layer; None if tied to `head`
    head: Tiles  # [D, V], one layer
    mtp: TiledMtpParams | None = None


def tile_params(config: LlamaConfig, params: LlamaParams) -> TiledLlamaParams:
    """Cuts the weights of a llama into tiles, on the host.

    Args:
      config: the model's shape.
      params: its weights.

    Returns:
      The same weights, in the dtype of the given ones.

    Raises:
      ValueError: naming the first tensor that does not fit the configuration; or if
        weights are float64.

    Exactness: the same weights; products add in another order than with `params`.
    """
    check_params(config, params)
    check_narrow("params", params)
    dtype = params.embedding.dtype

    def stack(field: str) -> jax.Array:
        return jnp.stack([getattr(layer, field) for layer in params.layers])

    def cut(*fields: str) -> Tiles:
        return cut_tiles(
            [
                np.concatenate(
                    [np.asarray(getattr(layer, field)) for field in fields], axis=1
                )
                for layer in params.layers
            ],
            dtype,
        )

    def table(array: jax.Array) -> Tiles:
        return cut_tiles([np.asarray(array).T], dtype)

    return TiledLlamaParams(
        attention_norm=stack("attention_norm"),
        query_key_value=cut("query", "key", "value"),
        output=cut("output"),
        feed_forward_norm=stack("feed_forward_norm"),
        gate_up=cut("gate", "up"),
        down=cut("down"),
        final_norm=params.final_norm,
        embedding=None if params.head is None else table(params.embedding),
        head=table(params.embedding if params.head is None else params.head),
    )


def check_tiled_params(config: LlamaConfig, params: TiledLlamaParams) -> None:
    """Checks that tiled weights have the shapes that a configuration states.

    Args:
      config: the configuration.
      params: the weights.

    Raises:
      ValueError: naming the first tensor that differs, and both shapes.

    Exactness: not concerned.
    """
    if not isinstance(params, TiledLlamaParams):
        raise ValueError(
            f"params must be models.TiledLlamaParams, got {type(params).__name__}"
        )
    if (params.embedding is None) != config.tie_embeddings:
        raise ValueError(
            f"params.embedding is {'' if params.embedding is None else 'not '}None, "
            f"and config.tie_embeddings is {config.tie_embeddings}: they must agree"
        )
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    for name in ("attention_norm", "feed_forward_norm"):
        _checks.check_shape(
            f"params.{name}", getattr(params, name), (config.num_layers, hidden)
        )
    _checks.check_shape("params.final_norm", params.final_norm, (hidden,))
    table = (1, hidden, config.vocab_size)
    expected = {
        "query_key_value": (config.num_layers, hidden, queries + 2 * keys),
        "output": (config.num_layers, queries, hidden),
        "gate_up": (config.num_layers, hidden, 2 * inner),
        "down": (config.num_layers, inner, hidden),
        "head": table,
    }
    if not config.tie_embeddings:
        expected["embedding"] = table
    for name, shape in expected.items():
        check_tiles(f"params.{name}", getattr(params, name), shape)


# A program of its own for the tracer: shapes are asked for before it runs.
@functools.partial(jax.jit, static_argnums=0)
def score_tiled_rows(
    config: LlamaConfig,
    params: TiledLlamaParams,
    cache: TiledLlamaCache,
    tokens: jax.Array,
    position: jax.Array,
    num_rows: jax.Array,
    first_logits_row: jax.Array,
) -> tuple[jax.Array, jax.Array, TiledLlamaCache]:
    """Runs the tokens of a window through the model, each by itself.

    Args:
      config: the model's shape.
      params: its weights.
      cache: holds the tokens before `position`.
      tokens: `[T]` int32, standing at `position`, `position + 1`, ...
      position: [] int32.
      num_rows: [] int32, how many of them to compute, at most T; `position +
        num_rows` must not exceed the cache.
      first_logits_row: [] int32, rows before it get no logits.

    Returns:
      Logits `[T, V]` (zero where not computed), hidden states after the last layer and
      before the final norm `[T, D]`, and the cache with the rows written.

    Exactness: bit-exact to a window of one token for every T, `num_rows`, split into
      windows and cache capacity; never `vmap` it, see `strata_jax.targets.singleton`.
    """
    num_tokens = tokens.shape[0]
    largest = min(num_tokens, _LARGEST_GROUP)
    groups = [largest]
    # A prompt is long: programs for its last few rows would only be compiled.
    if num_tokens == largest:
        groups = [*(size for size in _GROUPS if size < largest), largest]
    logits = jnp.zeros((num_tokens, config.vocab_size), jnp.float32)
    hidden = jnp.zeros((num_tokens, config.hidden_size), jnp.float32)
    padded = jnp.pad(tokens, (0, largest))

    def run_group(start: jax.Array, carry: tuple) -> tuple:
        count = jnp.minimum(num_rows - start, largest)
        smaller = 0
        for size in groups:
            fits = (count > smaller) & (count <= size)
            smaller = size

            def run(_: jax.Array, carry: tuple, size: int = size) -> tuple:
                logits, hidden, cache = carry
                piece = lax.dynamic_slice(padded, (start,), (size,))
                states, cache = _run_layers(
                    config, params, cache, piece, position + start, count
                )
                first = jnp.maximum(first_logits_row - start, 0)
                logits = _write_logits(
                    config, params, states, logits, start, first, count
                )
                hidden = _write_rows(hidden, states, start, count)
                return logits, hidden, cache

            # No trip rather than a branch: a branch would copy the cache.
            carry = lax.fori_loop(0, fits.astype(jnp.int32), run, carry)
        return carry

    def run_groups(index: jax.Array, carry: tuple) -> tuple:
        return run_group(index * largest, carry)

    carry = (logits, hidden, cache)
    num_groups = (num_rows + largest - 1) // largest
    return lax.fori_loop(0, num_groups, run_groups, carry)


def _write_rows(
    rows: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array
) -> jax.Array:
    def write(row: jax.Array, rows: jax.Array) -> jax.Array:
        return put_row(rows, start + row, take_row(new, row))

    return lax.fori_loop(0, count, write, rows)


def _run_layers(
    config: LlamaConfig,
    params: TiledLlamaParams,
    cache: TiledLlamaCache,
    tokens: jax.Array,
    position: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, TiledLlamaCache]:
    """Hidden states `[T, D]` of a group; rows from `count` on mean nothing."""
    size = tokens.shape[0]
    table = params.head if params.embedding is None else params.embedding

    def embed(row: jax.Array, states: jax.Array) -> jax.Array:
        state = take_column(table, 0, take_row(tokens, row)).astype(FLOAT32)
        return put_row(states, row, state)

    hidden = jnp.zeros((size, config.hidden_size), FLOAT32)
    hidden = lax.fori_loop(0, count, embed, hidden)
    group = place_group(config, position, count, size)

    def layer(index: jax.Array, carry: Any) -> Any:
        return run_layer(config, params, index, group, *carry)

    carry = (hidden, cache, empty_buffers(config, cache, size))
    hidden, cache, _ = lax.fori_loop(
        jnp.int32(0), jnp.int32(config.num_layers), layer, carry
    )
    return hidden, cache


def _write_logits(
    config: LlamaConfig,
    params: TiledLlamaParams,
    states: jax.Array,
    logits: jax.Array,
    start: jax.Array,
    first: jax.Array,
    count: jax.Array,
) -> jax.Array:
    rows = empty_rows(states.shape[0], config.hidden_size, FLOAT32)
    epsilon = config.norm_epsilon
    rows = norm_rows(states, params.final_norm, epsilon, count, rows, first)
    num_blocks = params.head.values.shape[2]
    step = min(_HEAD_BLOCKS, num_blocks)
    steps = -(-num_blocks // step)

    def columns(index: jax.Array, logits: jax.Array) -> jax.Array:
        # The last step goes back over columns that are there already: the same bits.
        block = jnp.minimum(index * step, num_blocks - step)
        piece = multiply(rows, params.head, jnp.int32(0), block, step)

        def write(row: jax.Array, logits: jax.Array) -> jax.Array:
            place = (start + row, block * TILE_COLUMNS)
            return lax.dynamic_update_slice(logits, take_row(piece, row)[None], place)

        return lax.fori_loop(first, count, write, logits)

    padding = num_blocks * TILE_COLUMNS - logits.shape[1]
    wide = jnp.pad(logits, ((0, 0), (0, padding))) if padding else logits
    num_steps = jnp.where(first < count, jnp.int32(steps), jnp.int32(0))
    wide = lax.fori_loop(0, num_steps, columns, wide)
    return wide[:, : config.vocab_size]
