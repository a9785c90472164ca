"""Mixture-of-experts models in singleton arithmetic.

A window passes through each layer in phases, and each phase handles its tokens one by
one: (A) norm, query, key, value, rotary, keys and values written; (B) attention, output
projection, norm, router; then the layer's jobs, expert by expert and within each token
by token; (C) the outputs summed in the router's order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from strata_jax.experts import (
    ExpertCache,
    adapt,
    count_uses,
    empty_expert_cache,
    run_jobs,
)
from strata_jax.models._attention import attend, cache_shape, project_rows, rms_norm
from strata_jax.models._head import head_rows
from strata_jax.models._moe_layer_params import MoeConfig, MoeLayer, SharedExpert
from strata_jax.models._moe_params import MoeParams
from strata_jax.models._router import route


@flax.struct.dataclass
class MoeCache:
    """Keys and values, and what the expert caches need; S is a multiple of 128.

    Rows from the current position on hold anything, NaN included.
    """

    keys: tuple[jax.Array, ...]  # [num_kv_heads, S, head_dim] each
    values: tuple[jax.Array, ...]  # [num_kv_heads, S, head_dim] each
    experts: tuple[ExpertCache | None, ...]  # one per layer; None: nothing cached
    routing: jax.Array | None  # [layers, T_max, k] int32 of the last window
    status: jax.Array  # [] int32, Status bits of a fault, kept


def empty_moe_cache(
    config: MoeConfig,
    params: MoeParams,
    max_length: int,
    *,
    num_cached_experts: int,
    max_window: int,
) -> MoeCache:
    """Returns an empty cache.

    Args:
      config: the model's shape.
      params: its weights.
      max_length: how many tokens it must hold.
      num_cached_experts: R, experts of each layer to keep on the device, of those that
        live on the host or on disk.
      max_window: the largest window whose routing is to be remembered.

    Returns:
      The cache.

    Exactness: a row's bits do not depend on the capacity, nor on R.
    """
    shape = cache_shape(config, max_length)
    dtype = params.embedding.dtype

    def expert_cache(layer: MoeLayer) -> ExpertCache | None:
        if not num_cached_experts or not needs_cache(layer.experts):
            return None
        num_words = layer.experts.shape.num_words
        return empty_expert_cache(num_cached_experts, num_words, config.num_experts)

    experts = tuple(expert_cache(layer) for layer in params.layers)
    routing = None
    if any(cache is not None for cache in experts):
        size = (config.num_layers, max_window, config.num_experts_per_token)
        routing = jnp.zeros(size, jnp.int32)
    return MoeCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in params.layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in params.layers),
        experts=experts,
        routing=routing,
        status=jnp.zeros((), jnp.int32),
    )


def needs_cache(bank: Any) -> bool:
    """Whether a layer's experts live on the host or on disk."""
    return getattr(bank, "is_on_host", hasattr(bank, "file"))


def adapt_experts(params: MoeParams, cache: MoeCache) -> MoeCache:
    """Brings the experts that committed text has used onto the device.

    Args:
      params: the model's weights.
      cache: its cache.

    Returns:
      The cache; a fault while reading is in its status.

    Exactness: changes where weights are read from, and no bit.
    """
    experts = list(cache.experts)
    status = cache.status
    for index, (layer, held) in enumerate(zip(params.layers, experts, strict=True)):
        if held is not None:
            experts[index], fault = adapt(layer.experts, held)
            status = status | fault
    return dataclasses.replace(cache, experts=tuple(experts), status=status)


def commit_experts(cache: MoeCache, num_kept: jax.Array) -> MoeCache:
    """Counts which experts the kept rows of the last window used.

    Args:
      cache: the cache after the window.
      num_kept: [] int32, rows that stay.

    Returns:
      The cache.

    Exactness: statistics only.
    """
    if cache.routing is None:
        return cache
    experts = tuple(
        None if held is None else count_uses(held, routing, num_kept)
        for held, routing in zip(cache.experts, cache.routing, strict=True)
    )
    return dataclasses.replace(cache, experts=experts)


def score_moe_rows(
    config: MoeConfig,
    params: MoeParams,
    cache: MoeCache,
    tokens: jax.Array,
    position: jax.Array,
    num_rows: jax.Array,
    first_logits_row: jax.Array,
    *,
    mode: str = "singleton",
) -> tuple[jax.Array, jax.Array, MoeCache]:
    """Runs the tokens of a window through the model, each by itself.

    Args:
      config: the model's shape.
      params: its weights.
      cache: holds the tokens before `position`.
      tokens: `[T]` int32, standing at `position`, `position + 1`, ...
      position: [] int32.
      num_rows: [] int32, how many of them to compute.
      first_logits_row: [] int32, rows before it get no logits.
      mode: how jobs run, see `strata_jax.experts.run_jobs`.

    Returns:
      Logits `[T, V]` (zero where not computed), hidden states after the last layer and
      before the final norm `[T, D]`, and the cache with the rows written.

    Exactness: bit-exact to the singleton for every T, `num_rows`, split into windows,
      cache capacity and place of the experts, unless the mode is "batched"; never
      `vmap` it.
    """
    hidden = params.embedding[tokens]
    keys, values = list(cache.keys), list(cache.values)
    routing, status = cache.routing, cache.status
    for index, layer in enumerate(params.layers):
        hidden, keys[index], values[index], experts, fault = moe_layer_rows(
            config,
            layer,
            cache.experts[index],
            hidden,
            keys[index],
            values[index],
            position,
            num_rows,
            mode=mode,
        )
        status = status | fault
        if routing is not None:
            width = min(routing.shape[1], tokens.shape[0])
            routing = routing.at[index, :width].set(experts[:width])
    table = params.embedding if params.head is None else params.head
    logits = head_rows(
        config, params.final_norm, table, hidden, first_logits_row, num_rows
    )
    cache = dataclasses.replace(
        cache, keys=tuple(keys), values=tuple(values), routing=routing, status=status
    )
    return logits, hidden, cache


def moe_layer_rows(
    config: MoeConfig,
    layer: MoeLayer,
    cached: ExpertCache | None,
    hidden: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    num_rows: jax.Array,
    *,
    mode: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Runs one layer: hidden states, keys, values, experts `[T, k]`, Status bits."""
    num_tokens = hidden.shape[0]
    queries, keys, values = project_rows(
        config, layer, hidden, keys, values, position, num_rows
    )

    def choose(row: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        hidden, normed, experts, weights = carry
        mixed = attend(config, queries[row], keys, values, position + row)
        state = hidden[row] + mixed @ layer.output
        ready = rms_norm(state, layer.feed_forward_norm, config.norm_epsilon)
        row_experts, row_weights, _ = route(config, layer.router, ready)
        return (
            hidden.at[row].set(state),
            normed.at[row].set(ready),
            experts.at[row].set(row_experts),
            weights.at[row].set(row_weights),
        )

    shape = (num_tokens, config.num_experts_per_token)
    carry = (
        hidden,
        jnp.zeros_like(hidden),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros(shape, hidden.dtype),
    )
    hidden, normed, experts, weights = lax.fori_loop(0, num_rows, choose, carry)
    outputs, status = run_jobs(
        layer.experts, cached, normed, experts, num_rows, mode=mode
    )

    def combine(row: jax.Array, hidden: jax.Array) -> jax.Array:
        mixed = weights[row, 0] * outputs[row, 0]
        for place in range(1, config.num_experts_per_token):
            mixed = mixed + weights[row, place] * outputs[row, place]
        if layer.shared_expert is not None:
            mixed = mixed + _run_shared(layer.shared_expert, normed[row])
        return hidden.at[row].set(hidden[row] + mixed)

    hidden = lax.fori_loop(0, num_rows, combine, hidden)
    return hidden, keys, values, experts, status


def _run_shared(expert: SharedExpert, state: jax.Array) -> jax.Array:
    inner = jax.nn.silu(state @ expert.gate) * (state @ expert.up)
    output = inner @ expert.down
    if expert.router is None:
        return output
    return jax.nn.sigmoid(state @ expert.router) * output
