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

from strata_jax.models._attention import (
    attend,
    cache_shape,
    project_rows,
    rms_norm,
)
from strata_jax.models._head import head_rows
from strata_jax.models._llama_params import LlamaConfig, LlamaLayer, LlamaParams

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
    shape = cache_shape(config, max_length)
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
      ValueError: if `layers` is empty, not increasing or out of range; or of weights
        in another form.

    Exactness: a shorter model; what it drafts is verified like any draft.
    """
    is_config = isinstance(config_or_params, LlamaConfig)
    if not is_config and not isinstance(config_or_params, LlamaParams):
        raise ValueError(
            "layers are selected of models.LlamaParams, such as checkpoints.load_gguf "
            f"gives; got {type(config_or_params).__name__}"
        )
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
        hidden, keys[index], values[index] = layer_rows(
            config, layer, hidden, keys[index], values[index], position, num_rows
        )
    table = params.embedding if params.head is None else params.head

    logits = head_rows(
        config, params.final_norm, table, hidden, first_logits_row, num_rows
    )
    return logits, hidden, LlamaCache(keys=tuple(keys), values=tuple(values))


def layer_rows(
    config: LlamaConfig,
    layer: LlamaLayer,
    hidden: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    num_rows: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs one layer on the rows of a window: states `[T, D]`, keys and values.

    Exactness: a row is a function of one token; never `vmap` it.
    """

    def finish(row: jax.Array, hidden: jax.Array) -> jax.Array:
        mixed = attend(config, queries[row], keys, values, position + row)
        state = hidden[row] + mixed @ layer.output
        return hidden.at[row].set(state + _feed_forward(config, layer, state))

    queries, keys, values = project_rows(
        config, layer, hidden, keys, values, position, num_rows
    )
    hidden = lax.fori_loop(0, num_rows, finish, hidden)
    return hidden, keys, values


def _feed_forward(
    config: LlamaConfig, layer: LlamaLayer, state: jax.Array
) -> jax.Array:
    normed = rms_norm(state, layer.feed_forward_norm, config.norm_epsilon)
    return (jax.nn.silu(normed @ layer.gate) * (normed @ layer.up)) @ layer.down
