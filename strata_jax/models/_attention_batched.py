"""Attention over a cache with rows sharing their products: the negative control."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax.models._attention import (
    AttentionLayer,
    AttentionShape,
    norm_heads,
    rms_norm,
    rotary_angles,
    rotate,
)


def attend_together(
    config: AttentionShape,
    layer: AttentionLayer,
    hidden: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the attention of a window `[T, D]`: its output, keys and values.

    Exactness: not bit-exact to the singleton.
    """
    num_tokens = hidden.shape[0]
    groups = config.num_heads // config.num_kv_heads
    normed = rms_norm(hidden, layer.attention_norm, config.norm_epsilon)

    def heads(weight: jax.Array) -> jax.Array:
        return (normed @ weight).reshape(num_tokens, -1, config.head_dim)

    query, key = norm_heads(config, layer, heads(layer.query), heads(layer.key))
    cosine, sine = rotary_angles(config, positions, hidden.dtype)
    query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
    start = (jnp.int32(0), positions[0], jnp.int32(0))
    keys = lax.dynamic_update_slice(keys, jnp.swapaxes(key, 0, 1), start)
    values = lax.dynamic_update_slice(
        values, jnp.swapaxes(heads(layer.value), 0, 1), start
    )
    query = query.reshape(num_tokens, config.num_kv_heads, groups, config.head_dim)
    scores = jnp.einsum("tkgd,ksd->tkgs", query, keys) * config.head_dim**-0.5
    row = jnp.arange(keys.shape[1], dtype=jnp.int32)
    is_visible = row[None] <= positions[:, None]
    scores = jnp.where(is_visible[:, None, None], scores, -jnp.inf)
    live = jnp.where((row <= positions[-1])[None, :, None], values, 0)
    mixed = jnp.einsum("tkgs,ksd->tkgd", jax.nn.softmax(scores, axis=-1), live)
    return mixed.reshape(num_tokens, -1) @ layer.output, keys, values
