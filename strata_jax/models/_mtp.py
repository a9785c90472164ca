"""A multi-token-prediction head in singleton arithmetic, cell by cell."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax.models._attention import cache_shape, rms_norm
from strata_jax.models._head import head_logits
from strata_jax.models._llama import layer_rows
from strata_jax.models._llama_params import LlamaConfig, LlamaLayer
from strata_jax.models._llama_tiled import TiledLlamaParams
from strata_jax.models._moe import moe_layer_rows
from strata_jax.models._moe_layer_params import MoeLayer
from strata_jax.models._moe_params import MoeParams
from strata_jax.models._mtp_params import MtpParams
from strata_jax.models._mtp_tiled import (
    TiledMtpParams,
    empty_tiled_mtp_cache,
    run_tiled_cells,
    tiled_draft_logits,
)
from strata_jax.models._tiled_layer import TiledLlamaCache
from strata_jax.models._tiled_product import one_row

# Cells of known tokens that share a pass over a tiled head's weights: after most
# windows, and at most after a long one.
_FEW_CELLS, _MOST_CELLS = 2, 8


@flax.struct.dataclass
class MtpCache:
    """Keys and values of a draft head's layer; S is a multiple of 128.

    Cells from the current one on hold anything, NaN included.
    """

    keys: jax.Array  # [num_kv_heads, S, head_dim]
    values: jax.Array  # [num_kv_heads, S, head_dim]


def empty_mtp_cache(
    mtp: MtpParams | TiledMtpParams, max_length: int
) -> MtpCache | TiledLlamaCache:
    """Returns an empty cache.

    Args:
      mtp: the draft head.
      max_length: how many cells it must hold.

    Returns:
      The cache.

    Exactness: a cell's bits do not depend on the capacity.
    """
    if isinstance(mtp, TiledMtpParams):
        return empty_tiled_mtp_cache(mtp, max_length)
    shape = cache_shape(mtp.config, max_length)
    dtype = mtp.projection.dtype
    return MtpCache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def with_shared_tables(
    params: MoeParams | TiledLlamaParams | MtpParams | TiledMtpParams,
) -> MtpParams | TiledMtpParams:
    """Returns a draft head that has its embedding and head, its own or the target's.

    Args:
      params: a model with a draft head; or a draft head that has both tables.

    Returns:
      The draft head.

    Raises:
      ValueError: if there is no draft head, or it lacks a table.

    Exactness: nothing is computed.
    """
    if isinstance(params, MtpParams | TiledMtpParams):
        if params.embedding is None or params.head is None:
            raise ValueError(
                "a draft head that is given by itself needs its embedding and head: "
                "set them to the target's arrays, they are not copied"
            )
        return params
    mtp = getattr(params, "mtp", None)
    if mtp is None:
        raise ValueError(
            "params has no draft head (params.mtp is None): give Params(target=..., "
            "drafter=MtpParams), or another drafter"
        )
    # Tied tables are called by one name: the embedding's, or in tiles the head's.
    head = params.embedding if params.head is None else params.head
    embedding = params.head if params.embedding is None else params.embedding
    return dataclasses.replace(
        mtp,
        embedding=embedding if mtp.embedding is None else mtp.embedding,
        head=head if mtp.head is None else mtp.head,
    )


def run_cell(
    mtp: MtpParams | TiledMtpParams,
    cache: Any,
    hidden: jax.Array,
    token: jax.Array,
    cell: jax.Array,
) -> tuple[jax.Array, Any, jax.Array]:
    """Runs one cell of a draft head; see `MtpParams` for what it joins.

    Args:
      mtp: the head, with its tables.
      cache: holds the cells before.
      hidden: `[D]`, the target's state at position `cell` before its final norm; or
        this function's of the cell before, to chain.
      token: [] int32, the token at position `cell + 1`.
      cell: [] int32.

    Returns:
      The layer's output `[D]` before the head's norm, the cache, Status bits.

    Exactness: a function of one cell and the cells before it; never `vmap` it.
    """
    if isinstance(mtp, TiledMtpParams):
        states, cache = run_tiled_cells(
            mtp, cache, hidden[None], token[None], cell, one_row(hidden)
        )
        return states[0], cache, jnp.zeros((), jnp.int32)
    config = mtp.config
    assert mtp.embedding is not None
    embedded = rms_norm(mtp.embedding[token], mtp.embedding_norm, config.norm_epsilon)
    normed = rms_norm(hidden, mtp.hidden_norm, config.norm_epsilon)
    state = jnp.concatenate([embedded, normed]) @ mtp.projection
    if isinstance(config, LlamaConfig):
        assert isinstance(mtp.layer, LlamaLayer)
        states, keys, values = layer_rows(
            config,
            mtp.layer,
            state[None],
            cache.keys,
            cache.values,
            cell,
            jnp.ones((), jnp.int32),
        )
        cache = MtpCache(keys=keys, values=values)
        return states[0], cache, jnp.zeros((), jnp.int32)
    assert isinstance(mtp.layer, MoeLayer)
    states, keys, values, _, status = moe_layer_rows(
        config,
        mtp.layer,
        None,
        state[None],
        cache.keys,
        cache.values,
        cell,
        jnp.ones((), jnp.int32),
        mode="singleton",
    )
    return states[0], MtpCache(keys=keys, values=values), status


def run_cells(
    mtp: MtpParams | TiledMtpParams,
    cache: Any,
    hidden: jax.Array,
    tokens: jax.Array,
    cell: jax.Array,
    count: jax.Array,
    before: jax.Array,
) -> tuple[jax.Array, Any]:
    """Runs the cells of tokens that are known, as `run_cell` runs each of them.

    Args:
      mtp: the head, with its tables.
      cache: holds the cells before.
      hidden: `[T, D]`, the target's states at `cell` and after.
      tokens: `[T]` int32, each at the position behind its state.
      cell: [] int32, the first.
      count: [] int32, how many of the T; not more.
      before: `[D]`, what to return as the last output if there is none.

    Returns:
      The layer's output `[D]` for the last of them, and the cache.

    Raises:
      ValueError: at trace time, if shapes do not fit, or T is 0.

    Exactness: a cell has the bits that it has alone; never `vmap` it.
    """
    _checks.check_shape("hidden", hidden, (None, mtp.config.hidden_size))
    num_rows = hidden.shape[0]
    _checks.check_shape("tokens", tokens, (num_rows,))
    if not num_rows:
        raise ValueError("hidden must have at least one row; count may be 0")
    if not isinstance(mtp, TiledMtpParams):

        def one(index: jax.Array, carry: tuple[Any, jax.Array]) -> Any:
            cache, _ = carry
            state, cache, _ = run_cell(
                mtp, cache, hidden[index], tokens[index], cell + index
            )
            return cache, state

        cache, last = lax.fori_loop(0, count, one, (cache, before))
        return last, cache
    # Few for a prompt: each width is a program to be compiled and loaded.
    size = num_rows if num_rows <= _MOST_CELLS else _FEW_CELLS
    missing = -num_rows % size
    hidden = jnp.pad(hidden, ((0, missing), (0, 0)))
    tokens = jnp.pad(tokens, (0, missing))

    def run_groups(width: int, count: jax.Array, carry: Any) -> Any:
        def group(index: jax.Array, carry: tuple[Any, jax.Array]) -> Any:
            cache, _ = carry
            start = index * width
            num_cells = jnp.minimum(count - start, width)
            states, cache = run_tiled_cells(
                mtp,
                cache,
                lax.dynamic_slice_in_dim(hidden, start, width),
                lax.dynamic_slice_in_dim(tokens, start, width),
                cell + start,
                num_cells,
            )
            return cache, states[num_cells - 1]

        return lax.fori_loop(0, (count + width - 1) // width, group, carry)

    carry = (cache, before)
    if size <= _FEW_CELLS:
        cache, last = run_groups(size, count, carry)
        return last, cache
    # All cells in groups of one width, and none in groups of the other.
    carry = run_groups(_FEW_CELLS, jnp.where(count > _FEW_CELLS, 0, count), carry)
    cache, last = run_groups(size, jnp.where(count > _FEW_CELLS, count, 0), carry)
    return last, cache


def draft_logits(mtp: MtpParams | TiledMtpParams, state: jax.Array) -> jax.Array:
    """Returns the logits of a draft over the target's vocabulary.

    Args:
      mtp: the head, with its tables.
      state: `[D]`, from `run_cell`.

    Returns:
      `[V]`; -inf for tokens outside its draft vocabulary.

    Exactness: a function of one token.
    """
    if isinstance(mtp, TiledMtpParams):
        return tiled_draft_logits(mtp, state)
    assert mtp.head is not None and mtp.embedding is not None
    logits = head_logits(mtp.config, mtp.final_norm, mtp.head, state)
    if mtp.draft_tokens is None:
        return logits
    vocab_size = mtp.embedding.shape[0]
    return jnp.full(vocab_size, -jnp.inf, logits.dtype).at[mtp.draft_tokens].set(logits)
