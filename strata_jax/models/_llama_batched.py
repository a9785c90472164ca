"""The llama family with rows sharing their products: for training, and as a control.

The rows of a window share matrix products here, so that a row's last bits depend on how
many rows there are. That is what the singleton arithmetic avoids.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax.models._attention import rms_norm
from strata_jax.models._attention_batched import attend_together
from strata_jax.models._llama import LlamaCache
from strata_jax.models._llama_params import LlamaConfig, LlamaLayer, LlamaParams


def forward(config: LlamaConfig, params: LlamaParams, tokens: jax.Array) -> jax.Array:
    """Returns the logits of every position of a text at once.

    Args:
      config: the model's shape.
      params: its weights.
      tokens: `[T]` int32; `vmap` over texts is fine here.

    Returns:
      `[T, V]` float.

    Exactness: not bit-exact to the singleton; differentiable.
    """
    num_tokens = tokens.shape[0]
    dtype = params.embedding.dtype
    shape = (config.num_kv_heads, num_tokens, config.head_dim)
    empty = tuple(jnp.zeros(shape, dtype) for _ in params.layers)
    cache = LlamaCache(keys=empty, values=empty)
    start = jnp.zeros((), jnp.int32)
    logits, _, _ = batched_rows(config, params, cache, tokens, start)
    return logits


def batched_rows(
    config: LlamaConfig,
    params: LlamaParams,
    cache: LlamaCache,
    tokens: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array, LlamaCache]:
    """Runs the tokens of a window through the model together.

    Args:
      config: the model's shape.
      params: its weights.
      cache: holds the tokens before `position`, with room for T more.
      tokens: `[T]` int32, standing at `position`, `position + 1`, ...
      position: [] int32.

    Returns:
      Logits `[T, V]`, hidden states before the final norm `[T, D]`, the cache.

    Exactness: neither law nor bits of the singleton: the negative control.
    """
    positions = position + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    hidden = params.embedding[tokens]
    keys, values = list(cache.keys), list(cache.values)
    for index, layer in enumerate(params.layers):
        hidden, keys[index], values[index] = _layer(
            config, layer, hidden, keys[index], values[index], positions
        )
    table = params.embedding if params.head is None else params.head
    normed = rms_norm(hidden, params.final_norm, config.norm_epsilon)
    cache = LlamaCache(keys=tuple(keys), values=tuple(values))
    return normed @ table.T, hidden, cache


def _layer(
    config: LlamaConfig,
    layer: LlamaLayer,
    hidden: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    mixed, keys, values = attend_together(
        config, layer, hidden, keys, values, positions
    )
    hidden = hidden + mixed
    normed = rms_norm(hidden, layer.feed_forward_norm, config.norm_epsilon)
    fed = (jax.nn.silu(normed @ layer.gate) * (normed @ layer.up)) @ layer.down
    return hidden + fed, keys, values
