"""A multi-token-prediction head in singleton arithmetic, cell by cell."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from strata_jax.models._attention import cache_shape, rms_norm
from strata_jax.models._head import head_logits
from strata_jax.models._moe import moe_layer_rows
from strata_jax.models._moe_params import MoeParams, MtpParams


@flax.struct.dataclass
class MtpCache:
    """Keys and values of a draft head's layer; S is a multiple of 128.

    Cells from the current one on hold anything, NaN included.
    """

    keys: jax.Array  # [num_kv_heads, S, head_dim]
    values: jax.Array  # [num_kv_heads, S, head_dim]


def empty_mtp_cache(mtp: MtpParams, max_length: int) -> MtpCache:
    """Returns an empty cache.

    Args:
      mtp: the draft head.
      max_length: how many cells it must hold.

    Returns:
      The cache.

    Exactness: a cell's bits do not depend on the capacity.
    """
    shape = cache_shape(mtp.config, max_length)
    dtype = mtp.projection.dtype
    return MtpCache(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def with_shared_tables(params: MoeParams | MtpParams) -> MtpParams:
    """Returns a draft head that has its embedding and head, its own or the target's.

    Args:
      params: a model with a draft head; or a draft head that has both tables.

    Returns:
      The draft head.

    Raises:
      ValueError: if there is no draft head, or it lacks a table.

    Exactness: nothing is computed.
    """
    if isinstance(params, MtpParams):
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
    head = params.embedding if params.head is None else params.head
    return dataclasses.replace(
        mtp,
        embedding=params.embedding if mtp.embedding is None else mtp.embedding,
        head=head if mtp.head is None else mtp.head,
    )


def run_cell(
    mtp: MtpParams,
    cache: MtpCache,
    hidden: jax.Array,
    token: jax.Array,
    cell: jax.Array,
) -> tuple[jax.Array, MtpCache, jax.Array]:
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
    config = mtp.config
    assert mtp.embedding is not None
    embedded = rms_norm(mtp.embedding[token], mtp.embedding_norm, config.norm_epsilon)
    normed = rms_norm(hidden, mtp.hidden_norm, config.norm_epsilon)
    state = jnp.concatenate([embedded, normed]) @ mtp.projection
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


def draft_logits(mtp: MtpParams, state: jax.Array) -> jax.Array:
    """Returns the logits of a draft over the target's vocabulary.

    Args:
      mtp: the head, with its tables.
      state: `[D]`, from `run_cell`.

    Returns:
      `[V]`; -inf for tokens outside its draft vocabulary.

    Exactness: a function of one token.
    """
    assert mtp.head is not None and mtp.embedding is not None
    logits = head_logits(mtp.config, mtp.final_norm, mtp.head, state)
    if mtp.draft_tokens is None:
        return logits
    vocab_size = mtp.embedding.shape[0]
    return jnp.full(vocab_size, -jnp.inf, logits.dtype).at[mtp.draft_tokens].set(logits)
