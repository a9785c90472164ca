"""Mixture-of-experts models with tokens sharing their products: for training.

All tokens of a batch go to their experts in blocks of one expert each. No token is
dropped and no expert has a capacity, so this is the function that the singleton
arithmetic computes, in another order of rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from strata_jax.experts import ExpertWeights, run_jobs
from strata_jax.models._attention import (
    AttentionLayer,
    AttentionShape,
    norm_heads,
    rms_norm,
    rotary_angles,
    rotate,
)
from strata_jax.models._attention_batched import attend_together
from strata_jax.models._llama_params import LlamaLayer
from strata_jax.models._moe import MoeCache
from strata_jax.models._moe_layer_params import MoeConfig, MoeLayer, SharedExpert
from strata_jax.models._moe_params import MoeParams
from strata_jax.models._mtp_params import MtpParams
from strata_jax.models._rounded_product import rounded_product
from strata_jax.models._router import route

# Tokens that share one product with an expert's weights.
_BLOCK = 128

_Multiply = Callable[[jax.Array, jax.Array], jax.Array]


class MoeOutputs(NamedTuple):
    """What a forward pass over whole texts gives."""

    logits: jax.Array
    """[B, L, V] float, of the token after each position."""
    hidden: jax.Array
    """[B, L, D] float, after the last layer and before the final norm."""
    balance: jax.Array
    """[] float, the load-balancing loss summed over layers; num_layers if even."""


class _Attended(NamedTuple):
    """Keys and values by position, and the new states."""

    keys: jax.Array  # [B * kv, L, head_dim]
    values: jax.Array  # [B * kv, L, head_dim]


def moe_forward(config: MoeConfig, params: MoeParams, tokens: jax.Array) -> MoeOutputs:
    """Returns logits and hidden states of every position of some texts at once.

    Args:
      config: the model's shape.
      params: its weights, experts as `ExpertWeights`.
      tokens: `[B, L]` int32.

    Returns:
      The outputs.

    Exactness: not bit-exact to the singleton; differentiable.
    """
    hidden = params.embedding[tokens]
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    balance = jnp.zeros((), hidden.dtype)
    for layer in params.layers:
        hidden, _, layer_balance = _layer(
            config, layer, hidden, positions, [], jnp.matmul
        )
        balance = balance + layer_balance
    table = params.embedding if params.head is None else params.head
    normed = rms_norm(hidden, params.final_norm, config.norm_epsilon)
    return MoeOutputs(logits=normed @ table.T, hidden=hidden, balance=balance)


def mtp_forward(
    params: Any,
    mtp: MtpParams,
    hidden: jax.Array,
    tokens: jax.Array,
    num_steps: int,
    *,
    is_rounded: bool = False,
) -> tuple[list[jax.Array], jax.Array]:
    """Runs a draft head over whole texts, chained as it drafts.

    Step j (from 1) at cell c sees the target's hidden states up to cell c - j + 1 and,
    for the cells after that, the head's own states of the steps before.

    Args:
      params: the target's weights, for the embedding and head that are shared.
      mtp: the draft head.
      hidden: `[B, L, D]`, the target's, before its final norm.
      tokens: `[B, L + 1]` int32; cell c pairs `hidden[:, c]` and `tokens[:, c + 1]`.
      num_steps: how many drafts to chain.
      is_rounded: whether factors of products with matrices, but for those of experts
        and the router, are rounded to bfloat16.

    Returns:
      For each step logits `[B, L, n]` of the token at c + 2, n the draft vocabulary
      (in step j the cells before j - 1 mean nothing); and the load-balancing loss.

    Raises:
      ValueError: at trace time, if products are to be rounded that are not float32.

    Exactness: not bit-exact to the singleton; differentiable.
    """
    config = mtp.config
    if is_rounded and {hidden.dtype, mtp.projection.dtype} != {jnp.dtype("float32")}:
        raise ValueError(
            f"is_rounded needs float32, got states in {hidden.dtype} and weights "
            f"in {mtp.projection.dtype}"
        )
    table = params.embedding if mtp.embedding is None else mtp.embedding
    head = params.embedding if params.head is None else params.head
    head = head if mtp.head is None else mtp.head
    multiply = rounded_product if is_rounded else jnp.matmul
    embedded = rms_norm(table[tokens[:, 1:]], mtp.embedding_norm, config.norm_epsilon)
    positions = jnp.arange(hidden.shape[1], dtype=jnp.int32)
    earlier: list[_Attended] = []
    logits = []
    balance = jnp.zeros((), hidden.dtype)
    for _ in range(num_steps):
        normed = rms_norm(hidden, mtp.hidden_norm, config.norm_epsilon)
        joined = jnp.concatenate([embedded, normed], axis=-1)
        state, attended, step_balance = _layer(
            config,
            mtp.layer,
            multiply(joined, mtp.projection),
            positions,
            earlier,
            multiply,
        )
        earlier.append(attended)
        balance = balance + step_balance
        normed = rms_norm(state, mtp.final_norm, config.norm_epsilon)
        logits.append(multiply(normed, head.T))
        # The next step's cell c takes what this step made of cell c - 1.
        hidden = jnp.roll(state, 1, axis=1)
    return logits, balance


def batched_moe_rows(
    config: MoeConfig,
    params: MoeParams,
    cache: MoeCache,
    tokens: jax.Array,
    position: jax.Array,
) -> tuple[jax.Array, jax.Array, MoeCache]:
    """Runs the tokens of a window through the model together.

    Args:
      config: the model's shape.
      params: its weights, experts in any form.
      cache: holds the tokens before `position`, with room for T more.
      tokens: `[T]` int32, standing at `position`, `position + 1`, ...
      position: [] int32.

    Returns:
      Logits `[T, V]`, hidden states before the final norm `[T, D]`, the cache.

    Exactness: neither law nor bits of the singleton: the negative control.
    """
    num_tokens = tokens.shape[0]
    positions = position + jnp.arange(num_tokens, dtype=jnp.int32)
    hidden = params.embedding[tokens]
    keys, values, status = list(cache.keys), list(cache.values), cache.status
    for index, layer in enumerate(params.layers):
        mixed, keys[index], values[index] = attend_together(
            config, layer, hidden, keys[index], values[index], positions
        )
        hidden = hidden + mixed
        normed = rms_norm(hidden, layer.feed_forward_norm, config.norm_epsilon)
        experts, weights, _ = route(config, layer.router, normed)
        outputs, fault = run_jobs(
            layer.experts,
            cache.experts[index],
            normed,
            experts,
            jnp.asarray(num_tokens, jnp.int32),
            mode="batched",
        )
        status = status | fault
        hidden = hidden + jnp.sum(outputs * weights[..., None], axis=1)
        if layer.shared_expert is not None:
            hidden = hidden + _shared(layer.shared_expert, normed)
    table = params.embedding if params.head is None else params.head
    normed = rms_norm(hidden, params.final_norm, config.norm_epsilon)
    cache = dataclasses.replace(
        cache, keys=tuple(keys), values=tuple(values), status=status
    )
    return normed @ table.T, hidden, cache


def _layer(
    config: Any,
    layer: MoeLayer | LlamaLayer,
    hidden: jax.Array,
    positions: jax.Array,
    earlier: list[_Attended],
    multiply: _Multiply,
) -> tuple[jax.Array, _Attended, jax.Array]:
    mixed, attended = _attention(config, layer, hidden, positions, earlier, multiply)
    hidden = hidden + multiply(mixed, layer.output)
    normed = rms_norm(hidden, layer.feed_forward_norm, config.norm_epsilon)
    if isinstance(layer, LlamaLayer):
        inner = jax.nn.silu(multiply(normed, layer.gate)) * multiply(normed, layer.up)
        fed = multiply(inner, layer.down)
        return hidden + fed, attended, jnp.zeros((), hidden.dtype)
    width = hidden.shape[-1]
    fed, balance = _experts(config, layer, normed.reshape(-1, width))
    return hidden + fed.reshape(hidden.shape), attended, balance


def _attention(
    config: AttentionShape,
    layer: AttentionLayer,
    hidden: jax.Array,
    positions: jax.Array,
    earlier: list[_Attended],
    multiply: _Multiply,
) -> tuple[jax.Array, _Attended]:
    num_texts, length, _ = hidden.shape
    normed = rms_norm(hidden, layer.attention_norm, config.norm_epsilon)

    def heads(weight: jax.Array) -> jax.Array:
        states = multiply(normed, weight)
        return states.reshape(num_texts, length, -1, config.head_dim)

    query, key, value = heads(layer.query), heads(layer.key), heads(layer.value)
    query, key = norm_heads(config, layer, query, key)
    cosine, sine = rotary_angles(config, positions, hidden.dtype)
    query = rotate(query, cosine[None], sine[None])
    key = rotate(key, cosine[None], sine[None])
    groups = config.num_heads // config.num_kv_heads
    # One product per text and key head: [B * kv, groups * L, head_dim] by L.
    query = _by_head(query * config.head_dim**-0.5).reshape(
        num_texts * config.num_kv_heads, groups, length, config.head_dim
    )
    own = _Attended(keys=_by_head(key), values=_by_head(value))
    steps = [*earlier, own]
    # All but the last len(steps) - 1 cells come from the first step, the others, one
    # each, from the steps since.
    first, lag = steps[0], len(steps) - 1
    is_visible = positions[None, :] <= positions[:, None] - lag
    scores = jnp.einsum("hgtd,hsd->hgts", query, first.keys)
    pieces = [jnp.where(is_visible[None, None], scores, -jnp.inf)]
    for index, step in enumerate(steps[1:], 1):
        moved = jnp.roll(step.keys, lag - index, axis=1)
        scores = jnp.sum(query * moved[:, None], axis=-1, keepdims=True)
        is_there = (positions >= lag - index)[None, None, :, None]
        pieces.append(jnp.where(is_there, scores, -jnp.inf))
    scores = pieces[0] if lag == 0 else jnp.concatenate(pieces, axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("hgts,hsd->hgtd", weights[..., :length], first.values)
    for index, step in enumerate(steps[1:], 1):
        moved = jnp.roll(step.values, lag - index, axis=1)
        weight = weights[..., length - 1 + index, None]
        mixed = mixed + weight * moved[:, None]
    mixed = mixed.reshape(num_texts, config.num_heads, length, config.head_dim)
    return jnp.swapaxes(mixed, 1, 2).reshape(num_texts, length, -1), own


def _by_head(states: jax.Array) -> jax.Array:
    """`[B, L, heads, head_dim]` to `[B * heads, L, head_dim]`."""
    num_texts, length, heads, head_dim = states.shape
    swapped = jnp.swapaxes(states, 1, 2)
    return swapped.reshape(num_texts * heads, length, head_dim)


def _experts(
    config: MoeConfig, layer: MoeLayer, states: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sends every token `[N, D]` through its experts; also the balance loss."""
    experts, weights, probs = route(config, layer.router, states)
    num_experts, per_token = config.num_experts, config.num_experts_per_token
    expert = jnp.arange(num_experts, dtype=jnp.int32)
    is_sent = experts[..., None] == expert[None, None]
    share = jnp.mean(jnp.any(is_sent, axis=1).astype(states.dtype), axis=0)
    balance = num_experts * jnp.sum(share * jnp.mean(probs, axis=0)) / per_token
    outputs = _in_blocks(layer.experts, states, experts)
    mixed = jnp.sum(outputs * weights[..., None], axis=1)
    if layer.shared_expert is not None:
        mixed = mixed + _shared(layer.shared_expert, states)
    return mixed, balance


def _shared(expert: SharedExpert, states: jax.Array) -> jax.Array:
    output = (jax.nn.silu(states @ expert.gate) * (states @ expert.up)) @ expert.down
    if expert.router is None:
        return output
    return jax.nn.sigmoid(states @ expert.router)[:, None] * output


def _in_blocks(
    weights: ExpertWeights, states: jax.Array, experts: jax.Array
) -> jax.Array:
    """Returns each token's expert outputs, `[N, k, D]`."""
    num_tokens, width = states.shape
    num_experts = weights.gate.shape[0]
    flat = experts.reshape(-1)
    block = min(_BLOCK, flat.shape[0])
    num_blocks = flat.shape[0] // block + num_experts
    # An expert's assignments fill whole blocks; the last one of each is padded.
    is_sent = flat[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None]
    rank = jnp.cumsum(is_sent.astype(jnp.int32), axis=0) - 1
    counts = rank[-1] + 1
    ends = jnp.cumsum((counts + block - 1) // block)
    starts = ends - (counts + block - 1) // block
    own_rank = jnp.take_along_axis(rank, flat[:, None], axis=1)[:, 0]
    slot = starts[flat] * block + own_rank
    token = jnp.arange(flat.shape[0], dtype=jnp.int32) // experts.shape[1]
    source = jnp.full(num_blocks * block, num_tokens, jnp.int32).at[slot].set(token)
    padded = jnp.concatenate([states, jnp.zeros((1, width), states.dtype)])
    inputs = padded[source].reshape(num_blocks, block, width)
    index = jnp.arange(num_blocks, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, index, side="right")
    expert = jnp.minimum(expert, num_experts - 1)
    gate = jnp.einsum("nbd,nfd->nbf", inputs, weights.gate[expert])
    up = jnp.einsum("nbd,nfd->nbf", inputs, weights.up[expert])
    inner = jax.nn.silu(gate) * up
    outputs = jnp.einsum("nbf,ndf->nbd", inner, weights.down[expert])
    return outputs.reshape(-1, width)[slot].reshape(*experts.shape, width)
