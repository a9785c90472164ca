"""Draws: by hand, against NumPy, and the tails that float32 loses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax._rng import Stream, position_uniforms, request_key
from strata_jax.sampling import (
    BLOCK_SIZE,
    chain_probs,
    count_tokens,
    draw_token,
    sampling_settings,
)
from strata_jax.testing import _oracle as oracle

_LARGEST_UNIFORM = np.float32(1 - 2**-24)
_draw = jax.jit(draw_token)
_draws = jax.jit(jax.vmap(draw_token, in_axes=(None, 0)))


def draw(weights, u_token, u_block=0.0):
    uniforms = np.array([u_block, u_token], np.float32)
    return int(_draw(jnp.asarray(np.asarray(weights, np.float32)), uniforms))


@pytest.mark.parametrize(
    ("weights", "uniform", "token"),
    [
        ([0.25, 0.5, 0.25], 0.0, 0),
        ([0.25, 0.5, 0.25], 0.24999, 0),
        ([0.25, 0.5, 0.25], 0.25, 1),
        ([0.25, 0.5, 0.25], 0.74999, 1),
        ([0.25, 0.5, 0.25], 0.75, 2),
        ([0.0, 1.0], 0.0, 1),
        ([1.0, 0.0], 1 - 2**-24, 0),
        ([0.0, 2.0, 0.0, 6.0, 0.0], 0.0, 1),
        ([0.0, 2.0, 0.0, 6.0, 0.0], 0.25, 3),
        ([0.0, 2.0, 0.0, 6.0, 0.0], 1 - 2**-24, 3),
        ([1e-20, 3e-20], 0.2499, 0),
        ([1e-20, 3e-20], 0.2501, 1),
        ([1e30, 3e30], 0.5, 1),
        ([0.0, 0.0], 0.5, -1),
        ([5.0], 1 - 2**-24, 0),
    ],
)
def test_smallest_index_whose_running_sum_exceeds(weights, uniform, token):
    assert draw(weights, uniform) == token
    # One block: the first uniform does not count.
    assert draw(weights, uniform, u_block=0.875) == token


def test_blocks_are_drawn_before_tokens():
    weights = np.zeros(3 * BLOCK_SIZE, np.float32)
    weights[[7, 9]] = 0.125, 0.125  # block 0, a quarter of the mass
    weights[2 * BLOCK_SIZE + 5] = 0.75  # block 2; block 1 is empty
    assert draw(weights, 0.49, u_block=0.2499) == 7
    assert draw(weights, 0.51, u_block=0.0) == 9
    assert draw(weights, 0.0, u_block=0.25) == 2 * BLOCK_SIZE + 5
    assert draw(weights, _LARGEST_UNIFORM, u_block=_LARGEST_UNIFORM) == (
        2 * BLOCK_SIZE + 5
    )
    assert draw(np.zeros_like(weights), 0.5) == -1


def test_a_last_block_that_is_not_full():
    weights = np.zeros(BLOCK_SIZE + 1, np.float32)
    weights[[0, BLOCK_SIZE]] = 1.0
    assert draw(weights, 0.9, u_block=0.4999) == 0
    assert draw(weights, 0.9, u_block=0.5) == BLOCK_SIZE


def edge_uniforms(rng, count):
    values = rng.integers(0, 2**24, (count, 2)) * 2.0**-24
    values[: count // 4] = rng.choice([0.0, 0.5, 1 - 2**-24], (count // 4, 2))
    return values.astype(np.float32)


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 4096, 49_152])
def test_equals_the_oracle(vocab_size):
    rng = np.random.default_rng(vocab_size)
    for sparsity in (0.0, 0.6, 0.99):
        weights = rng.exponential(size=vocab_size) ** 4
        weights *= rng.random(vocab_size) >= sparsity
        weights[rng.integers(vocab_size)] += 1e-3
        weights = (weights / weights.sum()).astype(np.float32)
        uniforms = edge_uniforms(rng, 200)
        found = np.asarray(_draws(jnp.asarray(weights), jnp.asarray(uniforms)))
        wanted = [oracle.oracle_draw(weights, *pair) for pair in uniforms]
        np.testing.assert_array_equal(found, wanted)
        assert np.all(weights[found] > 0)
        alone = [int(_draw(jnp.asarray(weights), pair)) for pair in uniforms[:5]]
        assert alone == wanted[:5]


def test_float32_rows_whose_sum_ends_below_one():
    weights = np.full(19, np.float32(1 / 19))
    # Compared with u itself, a running sum would never exceed the largest uniform.
    assert np.cumsum(weights, dtype=np.float32)[-1] < _LARGEST_UNIFORM
    assert float(jnp.cumsum(jnp.asarray(weights))[-1]) < _LARGEST_UNIFORM
    assert draw(weights, _LARGEST_UNIFORM) == 18
    for size in (19, 700, 5000):
        for scale in (1.0, 0.999, 1e-3):
            row = np.zeros(size, np.float32)
            row[: size - size // 3] = np.float32(scale / size)
            token = draw(row, _LARGEST_UNIFORM, u_block=_LARGEST_UNIFORM)
            assert row[token] > 0
            assert token == size - size // 3 - 1


def test_running_sums_that_shrink_never_give_a_token_without_weight():
    # In a tree of rounded additions a running sum can fall; so it does here.
    rng = np.random.default_rng(0)
    num_falling = 0
    for _ in range(200):
        weights = (rng.exponential(size=256) ** 3).astype(np.float32)
        weights[rng.random(256) < 0.5] = 0.0
        running = oracle.doubling_sum(weights, np.float32)
        num_falling += np.any(np.diff(running) < 0)
        for uniform in (*running[::37] / running[-1], 0.0, _LARGEST_UNIFORM):
            token = draw(weights, min(uniform, _LARGEST_UNIFORM))
            assert weights[token] > 0
    assert num_falling > 0


def tail_hits(draw_many):
    """Draws 200,000 tokens of bug-035's row and counts those off its head."""
    logits = jnp.full(65_537, -17.0).at[0].set(0.0)
    counts = count_tokens(jnp.zeros(1, jnp.int32), jnp.int32(1), jnp.int32(1), 65_537)
    probs, status = jax.jit(chain_probs)(sampling_settings(65_537), logits, counts)
    assert int(status) == 0
    positions = jnp.arange(200_000, dtype=jnp.int32)
    uniforms = jax.jit(
        lambda: position_uniforms(request_key(0), Stream.PICK, positions, 2)
    )()
    tokens = np.concatenate(
        [np.asarray(draw_many(probs, part)) for part in jnp.split(uniforms, 20)]
    )
    return tokens[tokens != 0]


def check_tail(hits):
    # The tail has 65,536 exp(-17) / (1 + 65,536 exp(-17)) = 0.0027058 of the mass.
    tail = 65_536 * np.exp(-17.0)
    mean = 200_000 * tail / (1 + tail)
    assert abs(len(hits) - mean) < 5 * np.sqrt(mean)
    # All of it is reached: no part of 16 gets less than half or more than double.
    parts = np.histogram(hits, bins=16, range=(0, 65_537))[0]
    assert parts.min() > 0.3 * mean / 16
    assert parts.max() < 2 * mean / 16


def test_bug_035_tail_mass_is_reached():
    check_tail(tail_hits(_draws))


def test_bug_035_one_level_of_running_sums_fails_the_same_check():
    logits = np.full(65_537, -17.0)
    logits[0] = 0.0
    probs = (np.exp(logits) / np.exp(logits).sum()).astype(np.float32)
    # Sums of 2**-24 and less cannot be added to 1 one by one.
    running = np.cumsum(probs, dtype=np.float32)

    def one_level(_, uniforms):
        return np.searchsorted(running, np.asarray(uniforms)[:, 1], side="right")

    with pytest.raises(AssertionError):
        check_tail(tail_hits(one_level))
    # Nor can Gumbel noise made of a 24-bit uniform bridge the gap of 17 nats.
    assert -np.log(-np.log(1 - 2**-24)) < 17


def test_wrong_shapes_and_dtypes():
    good, pair = jnp.ones(3), jnp.zeros(2)
    with pytest.raises(ValueError, match="weights must have shape"):
        draw_token(jnp.ones((2, 3)), pair)
    with pytest.raises(ValueError, match="weights must be float32"):
        draw_token(jnp.ones(3, jnp.bfloat16), pair)
    with pytest.raises(ValueError, match="weights must be float32"):
        draw_token(jnp.ones(3, jnp.int32), pair)
    for wrong in (jnp.zeros(3), jnp.zeros(()), jnp.zeros((1, 2))):
        with pytest.raises(ValueError, match="uniforms must have shape"):
            draw_token(good, wrong)
