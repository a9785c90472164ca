"""The trellis formats: check vectors, the ring of bits, and how good the encoder is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import experts
from strata_jax.experts import _codebooks, _trellis, _viterbi

CODEBOOKS = {codebook.name: codebook for codebook in _codebooks.CODEBOOKS}
ALL_STATES = np.arange(2**16, dtype=np.uint32)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "mul1",
            "-3.453125 0.64111328125 -0.448486328125 "
            "-0.5771484375 -0.8681640625 -0.6513671875",
        ),
        (
            "mcg",
            "1.84375 0.134521484375 -0.75927734375 "
            "1.5146484375 -0.63525390625 0.85009765625",
        ),
        (
            "3inst",
            "0.76806640625 -0.91943359375 0.931640625 "
            "-2.19921875 -0.498046875 -0.158203125",
        ),
    ],
)
def test_check_vectors(name, wanted):
    states = np.array([0, 1, 2, 0x1234, 0x8000, 0xFFFF], np.uint32)
    codebook = CODEBOOKS[name]
    wanted = [float(word) for word in wanted.split()]
    assert codebook.reference(states).tolist() == wanted
    assert codebook.decode(jnp.asarray(states)).tolist() == wanted


@pytest.mark.parametrize("name", CODEBOOKS)
def test_all_states(name):
    codebook = CODEBOOKS[name]
    values = codebook.reference(ALL_STATES)
    found = np.asarray(jax.jit(codebook.decode)(ALL_STATES))
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))
    # They are halves, and the rounding to halves is needed to get them.
    np.testing.assert_array_equal(values.astype(np.float16), values)
    deviation = _codebooks.standard_deviation(codebook)
    assert round(deviation, 3) == (1.0 if name == "mul1" else 1.244)
    assert abs(values.mean(dtype=np.float64)) < 0.02
    if name == "mul1":
        assert len(np.unique(values)) == 913


def test_a_sum_that_is_not_rounded_to_half_is_seen():
    word = ALL_STATES * np.uint32(0xCBAC1FED) & 0x8FFF8FFF ^ 0x3B603B60
    halves = word.view(np.float16).reshape(-1, 2).astype(np.float32)
    assert np.any(halves.sum(axis=1) != CODEBOOKS["mcg"].reference(ALL_STATES))


def states_of(ring, num_bits):
    """States of one tile from its ring, an integer of 256 K bits."""
    size = 256 * num_bits
    starts = [(t * num_bits + num_bits - 16) % size for t in range(256)]
    doubled = ring | ring << size
    return [doubled >> start & 0xFFFF for start in starts]


@pytest.mark.parametrize("num_bits", [2, 3, 4])
def test_order_of_bits_and_tiles(num_bits):
    """Decoded by the definition, with integers of any size."""
    rng = np.random.default_rng(num_bits)
    sizes = (32, 48)
    each = experts.find_format(f"trellis{num_bits}_mcg")
    words = rng.integers(0, 2**32, each.num_words(*sizes), np.uint32)
    words[0] = np.float32(0.75).view(np.uint32)
    rings = words[1:].reshape(-1, 8 * num_bits)
    assert len(rings) == 6
    wanted = np.zeros(sizes, np.float32)
    for tile, ring in enumerate(rings):
        number = int.from_bytes(ring.astype("<u4").tobytes(), "little")
        states = np.array(states_of(number, num_bits), np.uint32)
        values = np.float32(0.75) * CODEBOOKS["mcg"].reference(states)
        row, column = 16 * (tile // 3), 16 * (tile % 3)
        wanted[row : row + 16, column : column + 16] = values.reshape(16, 16)
    np.testing.assert_array_equal(each.reference(words, *sizes), wanted)
    decode = jax.jit(each.decode, static_argnums=(1, 2))
    np.testing.assert_array_equal(decode(words, *sizes), wanted)


@pytest.mark.parametrize(("num_bits", "length"), [(2, 8), (3, 5), (4, 4)])
def test_no_path_is_better(num_bits, length):
    """All paths from one stem, compared one by one."""
    values = _codebooks.all_values(CODEBOOKS["3inst"])
    stem_bits = 16 - num_bits
    stems = np.array([5, 2**stem_bits - 7], np.int32)
    targets = normal(num_bits, length, 2)
    costs = np.full((2**stem_bits, 2), 1e30, np.float32)
    costs[stems, [0, 1]] = 0
    costs, choices = _viterbi._forward(
        jnp.asarray(targets), jnp.asarray(values), jnp.asarray(costs), num_bits
    )
    last = jnp.argmin(costs, axis=0).astype(jnp.int32)
    first, states = _viterbi._backward(choices, last, num_bits)
    assert first.tolist() == stems.tolist()
    found = np.square(values[np.asarray(states)] - targets).sum(axis=0)
    for tile in range(2):
        branches = np.arange(2 ** (num_bits * length), dtype=np.uint32)
        total = np.zeros(len(branches), np.float32)
        state = np.full(len(branches), stems[tile] << num_bits, np.uint32)
        for place in range(length):
            own = branches >> np.uint32(num_bits * place) & np.uint32(2**num_bits - 1)
            state = state >> np.uint32(num_bits) | own << np.uint32(stem_bits)
            total += np.square(values[state] - targets[place, tile])
        np.testing.assert_allclose(found[tile], total.min(), rtol=1e-5)
        # The second best is another one.
        assert np.partition(total, 1)[1] > total.min() * (1 + 1e-4)


@pytest.mark.parametrize("num_bits", [2, 3, 4])
def test_paths_close(num_bits):
    values = _codebooks.all_values(CODEBOOKS["mul1"])
    targets = normal(10 + num_bits, 17, 256)
    states = _viterbi.closest_states(targets, values, num_bits)
    before = np.roll(states, 1, axis=1)
    np.testing.assert_array_equal(
        states & np.uint32(2 ** (16 - num_bits) - 1), before >> np.uint32(num_bits)
    )
    # Each tile is encoded for itself: batches and padding leave no trace.
    alone = _viterbi.closest_states(targets[16:], values, num_bits)
    np.testing.assert_array_equal(alone, states[16:])


def relative_error(name, num_tiles, seed, encode=None):
    each = experts.find_format(name)
    weights = normal(seed, 16, 16 * num_tiles)
    words = (encode or each.encode)(weights)
    decoded = each.reference(words, *weights.shape).astype(np.float64)
    return np.mean((decoded - weights) ** 2)


def greedy_encode(name):
    """Takes the best next value, weight by weight, and ignores the future."""
    num_bits = int(name[len("trellis")])
    codebook = CODEBOOKS[name.split("_")[1]]
    values = _codebooks.all_values(codebook)

    def encode(weights):
        scale = _trellis._round_scale(1 / _codebooks.standard_deviation(codebook))
        targets = _trellis._split_tiles(weights / scale)
        own = np.zeros(targets.shape, np.uint32)
        branches = np.arange(2**num_bits, dtype=np.uint32)[None, :]
        # The second time around, the ring's start knows its end.
        state = np.zeros(len(targets), np.uint32)
        for place in [*range(256), *range(256)]:
            states = state[:, None] >> np.uint32(num_bits)
            states = states | branches << np.uint32(16 - num_bits)
            best = np.abs(values[states] - targets[:, place, None]).argmin(axis=1)
            own[:, place] = best
            state = states[np.arange(len(targets)), best]
        bits = own[:, :, None] >> np.arange(num_bits, dtype=np.uint32) & 1
        packed = np.packbits(bits.reshape(-1).astype(np.uint8), bitorder="little")
        return np.concatenate([np.array([scale]).view(np.uint32), packed.view("<u4")])

    return encode


# What a thousand tiles may have, and what 32 may. On a normal source no code of K bits
# is better than 4**-K.
BOUNDS = {
    "trellis2_mul1": (0.070, 0.072),
    "trellis2_mcg": (0.070, 0.072),
    "trellis2_3inst": (0.070, 0.072),
    "trellis3_mul1": (0.0180, 0.0186),
    "trellis3_mcg": (0.0180, 0.0186),
    "trellis3_3inst": (0.0180, 0.0186),
    "trellis4_mul1": (0.0047, 0.0049),
    "trellis4_mcg": (0.0047, 0.0049),
    "trellis4_3inst": (0.0047, 0.0049),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_error_on_normal_weights(name):
    num_bits = int(name[len("trellis")])
    found = relative_error(name, num_tiles=32, seed=20)
    assert 4.0**-num_bits < found < BOUNDS[name][1]
    # An encoder that does not look ahead fails the bound, and so does a random path.
    assert relative_error(name, 32, 20, greedy_encode(name)) > 1.5 * found
    each = experts.find_format(name)
    rng = np.random.default_rng(0)

    def random_path(weights):
        words = rng.integers(0, 2**32, each.num_words(*weights.shape), np.uint32)
        words[0] = np.float32(1).view(np.uint32)
        return words

    assert relative_error(name, 32, 20, random_path) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_error_on_a_thousand_tiles(name):
    found = relative_error(name, num_tiles=1024, seed=21)
    print(f"{name}: mean squared error {found:.5f}")
    assert found <= BOUNDS[name][0]


def test_the_scale_follows_the_weights():
    each = experts.find_format("trellis2_mul1")
    weights = normal(30, 32, 32)
    words = each.encode(weights)
    larger = each.encode(weights * np.float32(2**70))
    np.testing.assert_array_equal(larger[1:], words[1:])
    scales = [found[:1].view(np.float32)[0] for found in (words, larger)]
    assert scales[1] == scales[0] * 2**70
    norm = np.sqrt(np.mean(weights**2, dtype=np.float64))
    assert abs(scales[0] / norm - 1) < 1e-3
    # 13 bits, so that products with halves are exact.
    assert int(words[0]) & 0x7FF == 0


@pytest.mark.parametrize("factor", [0.0, 2.0**-140])
def test_weights_that_vanish(factor):
    each = experts.find_format("trellis3_3inst")
    words = each.encode(normal(31, 16, 16) * np.float32(factor))
    assert words[0] == 0
    assert not np.any(each.reference(words, 16, 16))
