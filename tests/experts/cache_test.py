"""The cache of experts: what it counts, what it exchanges, and what it asks for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import Status, experts

NUM_EXPERTS, NUM_WORDS = 6, 3

count = jax.jit(experts.count_uses)


class Shelf:
    """A source that keeps every request, and fails when it is told to."""

    def __init__(self):
        self.words = np.arange(NUM_EXPERTS, dtype=np.uint32)[:, None] + 100
        self.asked = []
        self.status = Status.OK

    def read(self, wanted):
        def read(wanted):
            wanted = np.asarray(wanted)
            self.asked.append(wanted.tolist())
            words = np.where(wanted[:, None] >= 0, self.words[wanted], 0)
            words = np.broadcast_to(words, (len(wanted), NUM_WORDS))
            return words.astype(np.uint32), np.int32(self.status)

        result = (
            jax.ShapeDtypeStruct((wanted.shape[0], NUM_WORDS), jnp.uint32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        return jax.pure_callback(read, result, wanted)


SHELF = Shelf()
adapt_jitted = jax.jit(functools.partial(experts.adapt, SHELF))


@pytest.fixture
def shelf():
    SHELF.asked.clear()
    SHELF.status = Status.OK
    return SHELF


def holding(held, uses):
    """A cache with some experts in its slots, -1 for an empty one."""
    held = jnp.asarray(held, jnp.int32)
    words = jnp.where(held >= 0, 100 + held, 0).astype(jnp.uint32)
    cache = experts.empty_expert_cache(len(held), NUM_WORDS, NUM_EXPERTS)
    return cache.replace(
        expert=held,
        words=jnp.broadcast_to(words[:, None], cache.words.shape),
        uses=jnp.asarray(uses, jnp.float32),
    )


def adapt(cache):
    """The cache after `adapt`, with the right words for what it holds."""
    cache, status = adapt_jitted(cache)
    held = np.asarray(cache.expert)
    expected = np.broadcast_to(100 + held[:, None], cache.words.shape)
    np.testing.assert_array_equal(cache.words[held >= 0], expected[held >= 0])
    return cache, Status(int(status))


def test_an_empty_cache_holds_nothing():
    cache = experts.empty_expert_cache(2, NUM_WORDS, NUM_EXPERTS)
    assert cache.expert.tolist() == [-1, -1]
    assert not cache.uses.any()


def test_slots_fill_with_what_is_used_most(shelf):
    cache, status = adapt(holding([-1, -1, -1], [0, 2, 0.5, 9, 2, 1]))
    # Ties go to the lower id; all that is new comes in one read.
    assert sorted(cache.expert.tolist()) == [1, 3, 4]
    assert status == Status.OK
    assert [sorted(asked) for asked in shelf.asked] == [[1, 3, 4]]


def test_what_was_never_used_is_not_fetched(shelf):
    cache, _ = adapt(holding([-1, -1, -1], [0, 0, 3, 0, 0, 0]))
    assert sorted(cache.expert.tolist()) == [-1, -1, 2]
    assert [sorted(asked) for asked in shelf.asked] == [[-1, -1, 2]]
    shelf.asked.clear()
    adapt(holding([-1, -1, -1], [0] * NUM_EXPERTS))
    assert shelf.asked == []


def test_a_newcomer_must_be_used_clearly_more(shelf):
    kept, _ = adapt(holding([0, 1, 2], [3, 2, 5, 2.99, 1, 0]))
    assert kept.expert.tolist() == [0, 1, 2]
    assert shelf.asked == []
    changed, _ = adapt(holding([0, 1, 2], [3, 2, 5, 3.0, 1, 0]))
    assert changed.expert.tolist() == [0, 3, 2]
    assert shelf.asked == [[-1, 3, -1]]
    # And what was put out does not come back at once.
    again, _ = adapt(changed)
    assert again.expert.tolist() == [0, 3, 2]
    assert len(shelf.asked) == 1


def test_the_least_used_go_first(shelf):
    cache, _ = adapt(holding([0, 1, 2], [1, 7, 2, 9, 8, 2.5]))
    # 3 replaces 0, 4 replaces 2; then 5 is not used more than what is left.
    assert cache.expert.tolist() == [3, 1, 4]
    assert shelf.asked == [[3, -1, 4]]


def test_a_cache_of_all_experts_fills_and_then_rests(shelf):
    cache = holding([-1] * NUM_EXPERTS, [1, 2, 3, 4, 5, 6])
    cache, _ = adapt(cache)
    assert sorted(cache.expert.tolist()) == list(range(NUM_EXPERTS))
    assert len(shelf.asked) == 1
    rested, _ = adapt(cache.replace(uses=cache.uses[::-1]))
    assert rested.expert.tolist() == cache.expert.tolist()
    assert len(shelf.asked) == 1


def test_after_a_fault_what_was_asked_for_is_not_held(shelf):
    before = holding([0, -1, 2], [3, 0, 5, 9, 0, 0])
    shelf.status = Status.EXPERT_FAULT
    cache, status = adapt(before)
    assert status == Status.EXPERT_FAULT
    assert cache.expert.tolist() == [0, -1, 2]
    # Also where an expert had to make room: its words may have been written over.
    cache, _ = adapt(holding([0, 1, 2], [3, 1, 5, 9, 0, 0]))
    assert cache.expert.tolist() == [0, -1, 2]
    # Once it can be read again, it is.
    shelf.status = Status.OK
    cache, status = adapt(cache)
    assert status == Status.OK
    assert cache.expert.tolist() == [0, 3, 2]


def counted(uses, routing, num_rows):
    cache = holding([0, 1, 2], uses)
    cache = count(cache, jnp.asarray(routing, jnp.int32), jnp.int32(num_rows))
    return np.asarray(cache.uses)


def test_uses_are_counted_and_decay():
    routing = [[0, 3], [3, 5], [3, 0], [1, 2]]
    found = counted([10, 0, 0, 1, 0, 0], routing, 3)
    np.testing.assert_allclose(found, [9 + 2, 0, 0, 0.9 + 3, 0, 1], rtol=1e-6)


def test_a_window_without_rows_counts_nothing():
    uses = [10, 0, 0.3, 1, 0, 0]
    found = counted(uses, [[0, 3], [3, 5], [3, 0], [1, 2]], 0)
    np.testing.assert_array_equal(found, np.asarray(uses, np.float32))


def test_rejected_rows_do_not_count():
    uses, kept = [1, 2, 0, 0, 0, 0], [[0, 3], [3, 5]]
    first = counted(uses, [*kept, [1, 2], [4, 0]], 2)
    second = counted(uses, [*kept, [5, 5], [5, 3]], 2)
    np.testing.assert_array_equal(first, second)
    # The count can see them.
    assert (counted(uses, [*kept, [5, 5], [5, 3]], 3) != first).any()
