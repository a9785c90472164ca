"""Some experts of a layer kept on the device, chosen by what the text has used.

Every tier computes the same bits, so the choice may change between windows. It follows
committed text alone: the routing of rejected rows does not count.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

# Older uses count less, window by window; a newcomer must be used clearly more often
# than what it replaces, or two experts would take turns.
_DECAY = 0.9
_MARGIN = 1.0


@flax.struct.dataclass
class ExpertCache:
    """R experts of one layer on the device, and how often each expert was used."""

    words: jax.Array  # [R, W] uint32
    expert: jax.Array  # [R] int32, which expert each slot holds, or -1
    uses: jax.Array  # [E] float32, of committed tokens, decayed


class CacheSource(Protocol):
    """Where a cache gets its experts from."""

    def read(self, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(experts [n], -1 for none) -> (words [n, W], Status bits)."""
        ...


def empty_expert_cache(num_slots: int, num_words: int, num_experts: int) -> ExpertCache:
    """Returns a cache that holds nothing.

    Args:
      num_slots: R, experts to keep.
      num_words: W, words of one expert.
      num_experts: E.

    Returns:
      The cache.

    Exactness: not concerned.
    """
    return ExpertCache(
        words=jnp.zeros((num_slots, num_words), jnp.uint32),
        expert=jnp.full(num_slots, -1, jnp.int32),
        uses=jnp.zeros(num_experts, jnp.float32),
    )


def find_slot(cache: ExpertCache, expert: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns where an expert is, and whether it is there."""
    is_here = cache.expert == expert
    return jnp.argmax(is_here).astype(jnp.int32), jnp.any(is_here)


def count_uses(
    cache: ExpertCache, experts: jax.Array, num_rows: jax.Array
) -> ExpertCache:
    """Counts the experts that committed rows used.

    Args:
      cache: the cache.
      experts: `[T, k]` int32, the routing of a window.
      num_rows: [] int32, rows that were kept; the others do not count.

    Returns:
      The cache.

    Exactness: statistics only.
    """
    row = jnp.arange(experts.shape[0], dtype=jnp.int32)
    kept = jnp.where((row < num_rows)[:, None], experts, -1).reshape(-1)
    num_experts = cache.uses.shape[0]
    is_used = kept[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None]
    uses = jnp.sum(is_used.astype(jnp.float32), axis=0)
    decay = jnp.where(num_rows > 0, jnp.float32(_DECAY), jnp.float32(1))
    return dataclasses.replace(cache, uses=cache.uses * decay + uses)


def adapt(source: CacheSource, cache: ExpertCache) -> tuple[ExpertCache, jax.Array]:
    """Replaces the least used experts of a cache by ones that are used more.

    Args:
      source: where experts come from; read once at most, and not if nothing changes.
      cache: the cache.

    Returns:
      The cache, and Status bits of a fault: the slots that were asked for are then
      empty.

    Exactness: changes where weights are read from, and no bit.
    """
    num_slots = cache.expert.shape[0]
    expert_id = jnp.arange(cache.uses.shape[0], dtype=jnp.int32)

    def choose(_: jax.Array, chosen: jax.Array) -> jax.Array:
        is_here = jnp.any(expert_id[:, None] == chosen[None], axis=1)
        newcomer = jnp.argmax(jnp.where(is_here, -jnp.inf, cache.uses))
        uses = jnp.where(chosen < 0, -_MARGIN, cache.uses[jnp.maximum(chosen, 0)])
        slot = jnp.argmin(uses)
        gain = jnp.where(is_here[newcomer], -jnp.inf, cache.uses[newcomer])
        is_better = (gain > 0) & (gain >= uses[slot] + _MARGIN)
        new = jnp.where(is_better, newcomer.astype(jnp.int32), chosen[slot])
        return chosen.at[slot].set(new)

    chosen = lax.fori_loop(0, num_slots, choose, cache.expert)
    is_new = chosen != cache.expert

    def replace(
        index: jax.Array, carry: tuple[ExpertCache, jax.Array]
    ) -> tuple[ExpertCache, jax.Array]:
        # One batch for all slots. A loop that rarely runs, since a cond would copy the
        # cache; the index in the operand keeps the read inside it.
        cache, _ = carry
        wanted = jnp.where(is_new, chosen + index, -1)
        words, status = source.read(wanted)

        def write(slot: jax.Array, kept: jax.Array) -> jax.Array:
            start = (slot, jnp.zeros_like(slot))
            old = lax.dynamic_slice(kept, start, (1, kept.shape[1]))
            row = jnp.where(is_new[slot], words[slot][None], old)
            return lax.dynamic_update_slice(kept, row, start)

        kept = lax.fori_loop(0, num_slots, write, cache.words)
        # After a fault nothing that was asked for is trusted.
        expert = jnp.where(is_new, jnp.where(status == 0, chosen, -1), cache.expert)
        return dataclasses.replace(cache, words=kept, expert=expert), status

    num_reads = jnp.any(is_new).astype(jnp.int32)
    return lax.fori_loop(0, num_reads, replace, (cache, jnp.zeros((), jnp.int32)))
