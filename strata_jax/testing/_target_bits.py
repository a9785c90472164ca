"""A target's arithmetic, bit by bit: contracts T1 and T2."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import audit
from strata_jax._types import (
    TargetModel,
)
from strata_jax.drafters import ModelDrafterState, MtpDrafterState
from strata_jax.models import LlamaCache, MoeCache, MtpCache, TiledLlamaCache
from strata_jax.testing._broken import ConformanceError, as_int, require


def check_target(
    target: TargetModel,
    params: Any,
    tokens: Sequence[int],
    *,
    max_width: int = 8,
    poison: Callable[[Any, jax.Array], Any] | None = None,
) -> dict[str, int]:
    """Checks a target's arithmetic bit by bit against its T = 1 program (T1, T2).

    Widths 1 .. `max_width`, windows whose drafts are rejected, prefill in one piece and
    in several, and `vmap` over two requests.

    Args:
      target: the target; a float32 width of at least 256 makes the test meaningful.
      params: its weights.
      tokens: a text, at least `2 * max_width` token ids.
      max_width: the largest window.
      poison: (state, position) -> state with NaN in all slots from `position` on,
        jittable; if given, windows are scored on poisoned caches. `poison_cache` does
        it for the library's models.

    Returns:
      How many logit rows were compared, by check.

    Raises:
      ConformanceError: naming the contract, the width and the row.

    Exactness: every comparison is of bits.
    """
    text = np.asarray(tokens, np.int32)
    if not 2 * max_width <= len(text) <= target.max_length:
        raise ValueError(
            f"tokens must hold between 2 * max_width = {2 * max_width} and the "
            f"target's max_length = {target.max_length} ids, got {len(text)}"
        )
    one = jax.jit(target.score, donate_argnums=1)
    window = jax.jit(target.score, donate_argnums=1)
    prefill = jax.jit(target.prefill)
    commit = jax.jit(target.commit)
    spoil = jax.jit(poison or (lambda state, position: state), donate_argnums=0)

    expected = []
    state = target.init(params)
    for position in range(len(text)):
        rows, state = one(
            params, state, text[position : position + 1], as_int(position), as_int(1)
        )
        state = commit(state, as_int(position), as_int(1))
        expected.append(np.asarray(rows.logits[0]))

    def run(width: int, num_kept: int) -> int:
        """Scores windows of `width` rows and keeps `num_kept` of each."""
        state = target.init(params)
        position, compared = 0, 0
        while position < len(text):
            count = min(width, len(text) - position)
            piece = np.zeros(max_width, np.int32)
            piece[:count] = text[position : position + count]
            # Rows that will be rejected hold other tokens than the text.
            piece[num_kept:count] = (piece[num_kept:count] + 1) % target.vocab_size
            state = spoil(state, as_int(position))
            rows, state = window(params, state, piece, as_int(position), as_int(count))
            logits = np.asarray(rows.logits)
            kept = min(num_kept, count)
            for row in range(kept):
                if not np.array_equal(
                    logits[row], expected[position + row], equal_nan=True
                ):
                    differing = int((logits[row] != expected[position + row]).sum())
                    raise ConformanceError(
                        f"T1: window of {width} rows at position {position}, row "
                        f"{row}: {differing} of {logits.shape[1]} logits differ from "
                        "the singleton's"
                    )
            state = commit(state, as_int(position), as_int(kept))
            position += kept
            compared += kept
        return compared

    counts = {"widths": 0, "rejections": 0, "prefill": 0, "vmap": 0}
    for width in range(1, max_width + 1):
        counts["widths"] += run(width, width)
    for num_kept in range(1, max_width, 3):
        counts["rejections"] += run(max_width, num_kept)

    last = len(text) - 1
    for cuts in ([0, last], [0, last // 3, last // 3 + 1, last]):
        state = target.init(params)
        for start, stop in itertools.pairwise(cuts):
            state, _ = prefill(params, state, text, as_int(start), as_int(stop))
        rows, _ = one(
            params, spoil(state, as_int(last)), text[last:], as_int(last), as_int(1)
        )
        require(
            np.array_equal(rows.logits[0], expected[last], equal_nan=True),
            f"T1: prefill in pieces {cuts} gives other logits than decoding",
        )
        counts["prefill"] += 1

    position = max_width
    states = [
        prefill(
            params,
            target.init(params),
            (text + shift) % target.vocab_size,
            as_int(0),
            as_int(position),
        )[0]
        for shift in (0, 1)
    ]
    stop = position + max_width
    pieces = [(text[position:stop] + shift) % target.vocab_size for shift in (0, 1)]
    batched = jax.jit(jax.vmap(target.score, in_axes=(None, 0, 0, None, None)))
    together, _ = batched(
        params, audit.stack(states), jnp.stack(pieces), as_int(position), as_int(2)
    )
    for request in (0, 1):
        alone, _ = window(
            params, states[request], pieces[request], as_int(position), as_int(2)
        )
        require(
            np.array_equal(together.logits[request], alone.logits, equal_nan=True),
            "T1: a request under vmap gets other logits than alone",
        )
        counts["vmap"] += 2
    return counts


def poison_cache(cache: Any, position: jax.Array) -> Any:
    """Fills a cache with NaN from a position on, for the checks of dead slots.

    Args:
      cache: a `LlamaCache`, `TiledLlamaCache`, `MoeCache` or `MtpCache`; or the state
        of `drafters.model` or `drafters.mtp` that holds one, which is filled from the
        first slot on that it has not committed itself.
      position: [] int32, the first dead slot.

    Returns:
      The poisoned cache.

    Raises:
      ValueError: if it is no such cache.

    Exactness: no bit of any logit may change by it.
    """
    if isinstance(cache, ModelDrafterState):
        position = jnp.minimum(position, cache.num_cached)
        target_state = poison_cache(cache.target_state, position)
        return dataclasses.replace(cache, target_state=target_state)
    if isinstance(cache, MtpDrafterState):
        position = jnp.minimum(position, cache.num_cells)
        return dataclasses.replace(cache, cache=poison_cache(cache.cache, position))
    if isinstance(cache, TiledLlamaCache):

        def is_dead(num_pieces: int, size: int) -> jax.Array:
            places = jnp.arange(num_pieces * size, dtype=jnp.int32)
            return (places >= position).reshape(num_pieces, 1, size)

        _, _, pieces, _, size = cache.keys.shape
        dead_keys = is_dead(pieces, size)
        _, _, pieces, _, size, _ = cache.values.shape
        dead_values = is_dead(pieces, size)[..., None]
        return TiledLlamaCache(
            keys=jnp.where(dead_keys, jnp.nan, cache.keys),
            values=jnp.where(dead_values, jnp.nan, cache.values),
        )
    if not isinstance(cache, LlamaCache | MoeCache | MtpCache):
        raise ValueError(
            f"cache is a {type(cache).__name__}, no cache of the library's models: "
            "give a poison of your own"
        )

    def spoil(rows: jax.Array) -> jax.Array:
        is_dead = jnp.arange(rows.shape[1], dtype=jnp.int32) >= position
        return jnp.where(is_dead[None, :, None], jnp.nan, rows)

    keys, values = jax.tree.map(spoil, (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)
