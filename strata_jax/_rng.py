"""The only place where keys are folded, and where uniforms are made.

A request has one key, which is never split. PICK (the target's own draw) is a function
of (request, position); DRAFT, GATE, ACCEPT and RESIDUAL are functions of (request,
window, position), since a row that was drafted and discarded must not meet the same
uniforms again. Position is the 0-based index of the token being chosen.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp

# Named, so that a user's default generator changes no token; unlike the "unsafe" ones
# its folds do not commute.
_IMPLEMENTATION = "threefry2x32"


class Stream(enum.IntEnum):
    """Independent sources of randomness of a request."""

    PICK = 0
    DRAFT = 1
    GATE = 2
    ACCEPT = 3
    RESIDUAL = 4


def request_key(seed: int) -> jax.Array:
    """Returns the key of a request; `seed` is in [0, 2**32).

    Exactness: the same seed gives the same key on every backend.
    """
    return jax.random.key(seed, impl=_IMPLEMENTATION)


def wrap_key(data: jax.Array) -> jax.Array:
    """Returns the request key whose `jax.random.key_data` is `data`.

    Exactness: the inverse of `jax.random.key_data`.
    """
    return jax.random.wrap_key_data(data, impl=_IMPLEMENTATION)


def position_uniforms(
    key: jax.Array, stream: Stream, positions: jax.Array, width: int
) -> jax.Array:
    """Uniforms that depend on the request and on absolute positions alone.

    Args:
      key: the request's key; it is folded, never consumed.
      stream: the stream.
      positions: `[N]` int32.
      width: uniforms per position.

    Returns:
      `[N, width]` float32 in [0, 1).

    Exactness: row i is a function of `positions[i]`, whatever N is.
    """
    key = jax.random.fold_in(key, stream)
    return jax.vmap(lambda position: _uniforms(key, position, width))(positions)


def window_uniforms(
    key: jax.Array,
    stream: Stream,
    window: jax.Array,
    positions: jax.Array,
    width: int,
) -> jax.Array:
    """Uniforms that depend on the request, on the window and on positions.

    Args:
      key: the request's key; it is folded, never consumed.
      stream: the stream.
      window: [] int32, number of windows before this one.
      positions: `[N]` int32.
      width: uniforms per position.

    Returns:
      `[N, width]` float32 in [0, 1).

    Exactness: row i is a function of (`window`, `positions[i]`), whatever N is.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, stream), window)
    return jax.vmap(lambda position: _uniforms(key, position, width))(positions)


def _uniforms(key: jax.Array, position: jax.Array, width: int) -> jax.Array:
    # Multiples of 2**-24 are exact in float32 and in float64, so a later cast to the
    # dtype of the rows moves no border and never reaches 1.
    bits = jax.random.bits(jax.random.fold_in(key, position), (width,), jnp.uint32)
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)
