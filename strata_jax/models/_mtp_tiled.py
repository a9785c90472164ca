"""A draft head with a dense layer on tiled weights."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from strata_jax import _checks
from strata_jax.models._attention import rms_norm
from strata_jax.models._llama_params import LlamaConfig, LlamaLayer
from strata_jax.models._mtp_params import MtpParams
from strata_jax.models._rows import take_row
from strata_jax.models._tiled_layer import (
    FLOAT32,
    TiledLlamaCache,
    empty_buffers,
    empty_tiled_cache,
    norm_rows,
    place_group,
    run_layer,
)
from strata_jax.models._tiled_product import (
    TiledRows,
    empty_rows,
    multiply,
    one_row,
    set_row,
)
from strata_jax.models._tiles import (
    Tiles,
    check_narrow,
    check_tiles,
    cut_packed_tiles,
    cut_tiles,
    quantize,
    take_column,
    take_columns,
)


@flax.struct.dataclass
class TiledMtpParams:
    """A multi-token-prediction head as `MtpParams`, with one dense layer, in tiles."""

    config: LlamaConfig = flax.struct.field(pytree_node=False)
    embedding_norm: jax.Array  # [D]
    hidden_norm: jax.Array  # [D]
    projection: Tiles  # [2 D, D], one; rows: embedding, then hidden
    attention_norm: jax.Array  # [1, D]
    query_key_value: Tiles  # [D, (num_heads + 2 num_kv_heads) * head_dim], one
    output: Tiles  # [num_heads * head_dim, D], one
    feed_forward_norm: jax.Array  # [1, D]
    gate_up: Tiles  # [D, 2 F], one
    down: Tiles  # [F, D], one
    final_norm: jax.Array  # [D]
    embedding: Tiles | None = None  # [D, V], one; None: the target's
    head: Tiles | None = None  # [D, V], or [D, n] with draft_tokens; None: the target's
    draft_tokens: jax.Array | None = None  # [n] int32, the ids that it can draft


def check_tiled_mtp_params(mtp: TiledMtpParams, name: str = "mtp") -> None:
    """Checks the shapes of a tiled draft head that has its tables.

    Args:
      mtp: the head.
      name: how messages call it.

    Raises:
      ValueError: naming the tensor and both shapes.

    Exactness: not concerned.
    """
    config = mtp.config
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    for field in ("embedding_norm", "hidden_norm", "final_norm"):
        _checks.check_shape(f"{name}.{field}", getattr(mtp, field), (hidden,))
    for field in ("attention_norm", "feed_forward_norm"):
        _checks.check_shape(f"{name}.{field}", getattr(mtp, field), (1, hidden))
    num_drafted = config.vocab_size
    if mtp.draft_tokens is not None:
        _checks.check_shape(f"{name}.draft_tokens", mtp.draft_tokens, (None,))
        num_drafted = mtp.draft_tokens.shape[0]
    shapes = {
        "projection": (1, 2 * hidden, hidden),
        "query_key_value": (1, hidden, queries + 2 * keys),
        "output": (1, queries, hidden),
        "gate_up": (1, hidden, 2 * inner),
        "down": (1, inner, hidden),
        "embedding": (1, hidden, config.vocab_size),
        "head": (1, hidden, num_drafted),
    }
    for field, shape in shapes.items():
        check_tiles(f"{name}.{field}", getattr(mtp, field), shape)


def tile_mtp(mtp: MtpParams, *, is_quantized: bool = False) -> TiledMtpParams:
    """Cuts a draft head with a dense layer into tiles, on the host.

    Args:
      mtp: the head; tables of its own are left behind, see `draft_from`.
      is_quantized: whether to round its matrices to GGUF's Q8_0.

    Returns:
      The head, without tables.

    Raises:
      ValueError: if its layer has experts, or weights are float64.

    Exactness: law-exact with any weights.
    """
    layer, config = mtp.layer, mtp.config
    if not isinstance(layer, LlamaLayer) or not isinstance(config, LlamaConfig):
        raise ValueError("mtp: only heads with a dense layer can be tiled")
    check_narrow("mtp", mtp)

    def cut(*matrices: jax.Array) -> Tiles:
        matrix = np.concatenate([np.asarray(matrix) for matrix in matrices], axis=1)
        if not is_quantized:
            return cut_tiles([matrix])
        values, scale = quantize(matrix)
        return cut_packed_tiles([values], [scale])

    return TiledMtpParams(
        config=config,
        embedding_norm=mtp.embedding_norm,
        hidden_norm=mtp.hidden_norm,
        projection=cut(mtp.projection),
        attention_norm=layer.attention_norm[None],
        query_key_value=cut(layer.query, layer.key, layer.value),
        output=cut(layer.output),
        feed_forward_norm=layer.feed_forward_norm[None],
        gate_up=cut(layer.gate, layer.up),
        down=cut(layer.down),
        final_norm=mtp.final_norm,
    )


def draft_from(
    mtp: TiledMtpParams, table: Tiles, draft_tokens: np.ndarray
) -> TiledMtpParams:
    """Lets a tiled draft head propose some tokens only, by the target's head.

    Args:
      mtp: the head.
      table: the target's head, `[D, V]`.
      draft_tokens: `[n]` ids, each at most once.

    Returns:
      The head with columns of its own for these ids: copies, as they are packed.

    Raises:
      ValueError: if an id is repeated or out of range.

    Exactness: law-exact; tokens that cannot be drafted come from the residual.
    """
    tokens = np.asarray(draft_tokens, np.int32)
    if tokens.ndim != 1 or not tokens.size or len(np.unique(tokens)) < tokens.size:
        raise ValueError("draft_tokens must be a list of ids, each at most once")
    if tokens.min() < 0 or tokens.max() >= table.num_columns:
        raise ValueError(
            f"draft_tokens has ids outside the vocabulary of {table.num_columns}"
        )
    return dataclasses.replace(
        mtp, head=take_columns(table, tokens), draft_tokens=jnp.asarray(tokens)
    )


def empty_tiled_mtp_cache(mtp: TiledMtpParams, max_length: int) -> TiledLlamaCache:
    """Returns an empty cache of one layer for `max_length` cells."""
    config = dataclasses.replace(mtp.config, num_layers=1)
    return empty_tiled_cache(config, max_length)


# A program of its own for the tracer, which then does it once for all callers.
@jax.jit
def run_tiled_cells(
    mtp: TiledMtpParams,
    cache: TiledLlamaCache,
    hidden: jax.Array,
    tokens: jax.Array,
    cell: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, TiledLlamaCache]:
    """Runs the cells `cell` .. `cell + count - 1` together: states `[T, D]`, cache.

    Args:
      mtp: the head, with its tables.
      cache: holds the cells before.
      hidden: `[T, D]`, as `run_cell` takes it for each of them.
      tokens: `[T]` int32, likewise.
      cell: [] int32, the first.
      count: [] int32, how many there are; states after those mean nothing.

    Exactness: a state is a function of its cell and the cells before it, whatever T;
      never `vmap` it.
    """
    config = mtp.config
    assert mtp.embedding is not None
    table = mtp.embedding
    num_rows, size = hidden.shape

    def join(row: jax.Array, rows: TiledRows) -> TiledRows:
        embedded = take_column(table, 0, take_row(tokens, row)).astype(FLOAT32)
        embedded = rms_norm(embedded, mtp.embedding_norm, config.norm_epsilon)
        normed = rms_norm(take_row(hidden, row), mtp.hidden_norm, config.norm_epsilon)
        return set_row(rows, row, jnp.concatenate([embedded, normed]))

    rows = lax.fori_loop(0, count, join, empty_rows(num_rows, 2 * size, FLOAT32))
    index = jnp.zeros((), jnp.int32)
    states = multiply(rows, mtp.projection, index)
    group = place_group(config, cell, count, num_rows)
    buffers = empty_buffers(config, cache, num_rows)
    states, cache, _ = run_layer(config, mtp, index, group, states, cache, buffers)
    return states, cache


def tiled_draft_logits(mtp: TiledMtpParams, state: jax.Array) -> jax.Array:
    """Returns logits `[V]` of a draft, -inf outside its draft vocabulary."""
    assert mtp.head is not None
    epsilon = mtp.config.norm_epsilon
    rows = empty_rows(1, state.shape[0], FLOAT32)
    rows = norm_rows(state[None], mtp.final_norm, epsilon, one_row(state), rows)
    logits = multiply(rows, mtp.head, jnp.int32(0))[0]
    if mtp.draft_tokens is None:
        return logits
    everywhere = jnp.full(mtp.config.vocab_size, -jnp.inf, logits.dtype)
    return everywhere.at[mtp.draft_tokens].set(logits)
