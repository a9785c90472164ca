"""Keys: what a uniform depends on, and what it does not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import _rng
from strata_jax._rng import Stream, request_key

_POSITIONS = jnp.arange(64, dtype=jnp.int32)
position_uniforms = jax.jit(_rng.position_uniforms, static_argnums=(1, 3))
window_uniforms = jax.jit(_rng.window_uniforms, static_argnums=(1, 4))
_WINDOW_STREAMS = [Stream.DRAFT, Stream.GATE, Stream.ACCEPT, Stream.RESIDUAL]


def by_window(stream, window, positions=_POSITIONS, seed=0, width=2):
    window = jnp.asarray(window, jnp.int32)
    return np.asarray(
        window_uniforms(request_key(seed), stream, window, positions, width)
    )


def by_position(positions=_POSITIONS, seed=0, width=2):
    key = request_key(seed)
    return np.asarray(position_uniforms(key, Stream.PICK, positions, width))


def test_no_two_streams_windows_positions_or_requests_share_uniforms():
    rows = [by_position(), by_position(seed=1)]
    rows += [
        by_window(stream, window, seed=seed)
        for stream, window, seed in itertools.product(
            _WINDOW_STREAMS, range(3), range(2)
        )
    ]
    pairs = np.concatenate(rows)
    assert len(pairs) == 64 * 26
    # Two of 1,664 independent pairs on a grid of 2**48 agree once in 2e8 tries.
    assert len(np.unique(pairs, axis=0)) == len(pairs)


@pytest.mark.parametrize(
    "pair",
    [
        pair
        for pair in itertools.combinations(_WINDOW_STREAMS, 2)
        if Stream.RESIDUAL in pair
    ],
)
def test_residual_shares_no_uniform_with_another_stream_at_its_position(pair):
    first, second = (by_window(stream, 3) for stream in pair)
    assert np.all(np.any(first != second, axis=1))


def test_window_and_position_do_not_commute():
    one_two = by_window(Stream.DRAFT, 1, jnp.array([2], jnp.int32))
    two_one = by_window(Stream.DRAFT, 2, jnp.array([1], jnp.int32))
    assert np.any(one_two != two_one)


@pytest.mark.parametrize("count", [1, 2, 5, 33])
def test_values_do_not_depend_on_how_many_positions_are_asked_for(count):
    np.testing.assert_array_equal(
        by_position(_POSITIONS[:count]), by_position()[:count]
    )
    np.testing.assert_array_equal(
        by_position(_POSITIONS[-count:]), by_position()[-count:]
    )
    for stream in _WINDOW_STREAMS:
        np.testing.assert_array_equal(
            by_window(stream, 7, _POSITIONS[:count]), by_window(stream, 7)[:count]
        )


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_values_are_a_function_of_the_seed(seed):
    np.testing.assert_array_equal(by_position(seed=seed), by_position(seed=seed))
    key = request_key(seed)
    not_compiled = _rng.position_uniforms(key, Stream.PICK, _POSITIONS, 2)
    np.testing.assert_array_equal(not_compiled, by_position(seed=seed))


def test_the_default_generator_of_the_user_changes_nothing():
    before = by_position()
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(by_position(), before)


def test_wrap_key_inverts_key_data():
    key = request_key(5)
    again = _rng.wrap_key(jax.random.key_data(key))
    np.testing.assert_array_equal(
        position_uniforms(again, Stream.PICK, _POSITIONS, 1),
        by_position(seed=5, width=1),
    )


def test_uniforms_stand_on_a_grid_of_24_bits():
    values = by_position(jnp.arange(20_000, dtype=jnp.int32)).astype(np.float64)
    assert values.min() >= 0.0
    assert values.max() <= 1 - 2**-24
    scaled = values * 2**24
    np.testing.assert_array_equal(scaled, np.round(scaled))
    # Odd multiples occur: the grid is no coarser.
    assert 0.49 < np.mean(scaled % 2) < 0.51
    # Nor is it the one of 23 bits, [1, 2) - 1, that `jax.random.uniform` draws from.
    usual = np.asarray(jax.random.uniform(jax.random.key(0), (1000,)), np.float64)
    assert np.all(usual * 2**23 % 1 == 0)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(2**32 - 1, 1 - 2**-24), (0, 0.0), (255, 0.0), (256, 2**-24), (2**31, 0.5)],
)
def test_extreme_bits(monkeypatch, bits, expected):
    def constant(key, shape, dtype):
        del key
        return jnp.full(shape, bits, dtype)

    monkeypatch.setattr(jax.random, "bits", constant)
    zero = jnp.zeros(1, jnp.int32)
    # Not the compiled function, which may have been traced before.
    values = np.asarray(_rng.position_uniforms(request_key(0), Stream.PICK, zero, 2))
    assert values.dtype == np.float32
    assert values.astype(np.float64).tolist() == [[expected, expected]]
    assert np.all(values < 1)


# The same properties through what the verifiers and the loop draw.


def verifier_draws(verifier, window, position=5):
    return verifier.draw(
        request_key(3),
        jnp.asarray(position, jnp.int32),
        jnp.asarray(window, jnp.int32),
        4,
    )


def test_picks_depend_on_the_request_and_the_position_alone():
    token, match = strata.verifiers.token(), strata.verifiers.exact_match()
    picks = np.asarray(verifier_draws(token, 0).pick)
    for verifier in (token, match):
        for window in (0, 1, 100):
            found = verifier_draws(verifier, window)
            np.testing.assert_array_equal(found.pick, picks)
        later = verifier_draws(verifier, 0, position=7)
        np.testing.assert_array_equal(later.pick[:3], picks[2:])
        assert np.all(np.any(np.asarray(later.pick) != picks, axis=1))


def test_accept_and_residual_depend_on_the_window_too():
    token = strata.verifiers.token()
    first, again, second = (verifier_draws(token, window) for window in (0, 0, 1))
    np.testing.assert_array_equal(first.accept, again.accept)
    np.testing.assert_array_equal(first.residual, again.residual)
    assert np.all(np.asarray(first.accept) != np.asarray(second.accept))
    assert np.all(np.asarray(first.residual) != np.asarray(second.residual))


def decoder_draws(windows):
    decoder = strata.speculative_decoder(
        strata.targets.tabular(4, max_length=16),
        strata.drafters.scripted(np.full((16, 4), 0.25), num_draft_tokens=4),
        verifier=strata.verifiers.token(),
    )
    params = strata.targets.TabularParams(logits=jnp.zeros((4, 4)))
    step = jax.jit(decoder.step)
    for window in windows:
        state = decoder.init(params, [0, 1, 2, 3, 0], seed=3, window=window)
        yield step(params, state)[1].draws


def test_the_loop_draws_what_the_streams_give():
    positions = jnp.arange(5, 10, dtype=jnp.int32)
    first, tenth = decoder_draws((0, 9))
    for window, draws in ((0, first), (9, tenth)):
        np.testing.assert_array_equal(
            draws.draft, by_window(Stream.DRAFT, window, positions[:4], seed=3)
        )
        np.testing.assert_array_equal(
            draws.gate,
            by_window(Stream.GATE, window, positions[:4], seed=3, width=1)[:, 0],
        )
        np.testing.assert_array_equal(
            draws.verifier.accept,
            by_window(Stream.ACCEPT, window, positions[:4], seed=3, width=1)[:, 0],
        )
        np.testing.assert_array_equal(
            draws.verifier.residual,
            by_window(Stream.RESIDUAL, window, positions[:1], seed=3)[0],
        )
        np.testing.assert_array_equal(
            draws.verifier.pick, by_position(positions, seed=3)
        )
    assert np.all(np.asarray(first.draft) != np.asarray(tenth.draft))
