"""Formats: the bytes and values of `gguf`, and the same bits in every program."""

import warnings

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import experts

BLOCK_KINDS = {
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
}
KINDS = {"bfloat16": gguf.GGMLQuantizationType.BF16, **BLOCK_KINDS}
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
NAMES = list(experts.FORMATS)
SIZES = (256, 256)


def as_bytes(words):
    return words.astype("<u4").view(np.uint8)


def as_words(stored):
    flat = stored.reshape(-1)
    return np.pad(flat, (0, -flat.size % 4)).view("<u4").astype(np.uint32)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_words(name, seed, num_outputs, num_inputs):
    """Words that any encoder might have written, with finite scales."""
    words = np.random.default_rng(seed).integers(
        0, 2**32, experts.FORMATS[name].num_words(num_outputs, num_inputs), np.uint32
    )
    if name in BLOCK_BYTES:
        blocks = as_bytes(words)[: num_outputs * num_inputs // 32 * BLOCK_BYTES[name]]
        blocks = blocks.reshape(-1, BLOCK_BYTES[name])
        for upper in (1, 3) if name == "q4_1" else (1,):
            # Exponents of a half below its last, which is that of infinity.
            blocks[:, upper] &= 0xBB
        return as_words(blocks)
    if name.startswith("trellis"):
        words[0] = np.float32(0.40625).view(np.uint32)
    else:
        words &= np.uint32(0xBFFFBFFF)
    return words


def assert_same_bits(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_names():
    assert NAMES == [
        *("float32", "bfloat16", "q8_0", "q4_0", "q4_1"),
        *("trellis2_mul1", "trellis2_mcg", "trellis2_3inst"),
        *("trellis3_mul1", "trellis3_mcg", "trellis3_3inst"),
        *("trellis4_mul1", "trellis4_mcg", "trellis4_3inst"),
    ]
    for name, each in experts.FORMATS.items():
        assert each.name == name
        assert each.is_shared_bitwise
        assert experts.find_format(name) is each


def test_unknown_name():
    with pytest.raises(ValueError, match=r"one of float32, .*4_3inst, got 'q5_k'"):
        experts.find_format("q5_k")


@pytest.mark.parametrize(
    ("name", "sizes", "wanted"),
    [
        ("float32", (3, 5), 15),
        ("bfloat16", (3, 5), 8),
        ("q8_0", (1, 32), 9),
        ("q8_0", (2, 32), 17),
        ("q4_0", (1, 32), 5),
        ("q4_0", (3, 64), 27),
        ("q4_1", (3, 64), 30),
        ("trellis2_mul1", (16, 32), 33),
        ("trellis3_mcg", (16, 32), 49),
        ("trellis4_3inst", (32, 32), 129),
    ],
)
def test_number_of_words(name, sizes, wanted):
    assert experts.FORMATS[name].num_words(*sizes) == wanted


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("q8_0", (4, 48)), ("q4_0", (32, 8)), ("trellis2_mul1", (16, 24))],
)
def test_sizes_that_do_not_fit(name, sizes):
    each = experts.FORMATS[name]
    message = f"{sizes[0]} x {sizes[1]} .* does not divide; choose another format"
    for call in (
        lambda: each.num_words(*sizes),
        lambda: each.encode(normal(0, *sizes)),
        lambda: each.decode(jnp.zeros(9, jnp.uint32), *sizes),
        lambda: each.reference(np.zeros(9, np.uint32), *sizes),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="num_outputs must be at least 1"):
        each.num_words(0, 32)


@pytest.mark.parametrize("name", NAMES)
def test_words_of_the_wrong_size(name):
    each = experts.FORMATS[name]
    size = each.num_words(32, 32)
    message = rf"a 32 x 32 {name} matrix must be \[{size}\] uint32, got \[{size + 1}\]"
    with pytest.raises(ValueError, match=message):
        each.decode(jnp.zeros(size + 1, jnp.uint32), 32, 32)
    with pytest.raises(ValueError, match=message):
        each.reference(np.zeros(size + 1, np.uint32), 32, 32)
    with pytest.raises(ValueError, match=rf"\[{size}\] uint32, got \[{size}\] float32"):
        jax.eval_shape(lambda: each.decode(jnp.zeros(size), 32, 32))


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_cannot_be_stored(name):
    encode = experts.FORMATS[name].encode
    with pytest.raises(ValueError, match=r"weights must be float32 \[outputs, inputs]"):
        encode(np.zeros((32, 32)))
    with pytest.raises(ValueError, match=r"weights must be float32 \[outputs, inputs]"):
        encode(np.zeros((1, 32, 32), np.float32))
    for fault in (np.nan, np.inf):
        weights = normal(0, 32, 32)
        weights[3, 4] = fault
        with pytest.raises(ValueError, match=f"must be finite to be stored as {name}"):
            encode(weights)


@pytest.mark.parametrize("name", KINDS)
def test_weights_out_of_range(name):
    weights = np.full((1, 32), 3.4e38, np.float32)
    weights[0, 0] = -3.4e38
    with pytest.raises(ValueError, match="weights must not exceed"):
        experts.FORMATS[name].encode(weights)


def hard_blocks():
    """Blocks that show where an encoder differs from another."""
    line = np.arange(32, dtype=np.float32)
    blocks = [
        np.zeros(32),
        -np.zeros(32),
        np.full(32, 3.0),
        np.full(32, -3.0),
        line - 16,
        16 - line,
        # Halves of a step: ties in every format.
        (line - 16) / 2,
        np.where(line == 7, 127, line / 2),
        np.where(line == 7, -127, line / 2),
        np.where(line == 7, -8, line / 2 - 7.5),
        np.where(line == 7, 15, line / 4),
        # Equal magnitudes of both signs: the first decides q4_0's sign.
        np.where(line % 2, 1.0, -1.0),
        np.where(line % 2, -1.0, 1.0),
        # Scales that are subnormal halves, that vanish, and the largest.
        normal(1, 32) * 2.0**-20,
        normal(2, 32) * 2.0**-26,
        normal(3, 32) * 2.0**-60,
        np.where(line == 3, 2.0**-24, 0),
        (line - 16) * 30000,
        # One value far out.
        np.where(line == 30, -1000, normal(4, 32)),
        # Just below a tie: adding a half first would round up.
        np.where(line == 0, 127, 0.49999997),
    ]
    rows = np.stack(blocks).astype(np.float32)
    return np.resize(rows, (len(rows) // 4, 128))


@pytest.mark.parametrize("name", KINDS)
def test_bytes_and_values_are_those_of_gguf(name):
    hard = hard_blocks()
    if name == "q4_1":
        # It stores the least weight itself.
        hard = np.maximum(hard, -65504)
    each, kind = experts.FORMATS[name], KINDS[name]
    decode = jax.jit(each.decode, static_argnums=(1, 2))
    heavy_tails = normal(6, *hard.shape) ** 5
    for weights in (hard, normal(5, *hard.shape), heavy_tails):
        words = each.encode(weights)
        wanted = gguf.quants.quantize(weights, kind)
        np.testing.assert_array_equal(words, as_words(wanted))
        values = gguf.quants.dequantize(wanted, kind)
        assert_same_bits(each.reference(words, *weights.shape), values)
        assert_same_bits(decode(words, *weights.shape), values)
        # An encoder that rounds otherwise is seen.
        other = each.encode(weights * np.float32(0.99))
        assert np.any(other != words)


def test_blocks_too_small_for_a_reciprocal_are_zero():
    tiny = np.full((1, 32), 1e-42, np.float32)
    for name in BLOCK_KINDS:
        each = experts.FORMATS[name]
        words = each.encode(tiny)
        assert not np.any(each.reference(words, 1, 32))


@pytest.mark.parametrize("name", KINDS)
def test_every_scale_decodes_as_in_gguf(name):
    """All halves, subnormal and not finite too, with random codes."""
    each, kind = experts.FORMATS[name], KINDS[name]
    if name == "bfloat16":
        stored = np.arange(2**16, dtype="<u2").reshape(256, 256)
        sizes = (256, 256)
        stored = stored.view(np.uint8)
    else:
        rng = np.random.default_rng(7)
        stored = rng.integers(0, 256, (2**16, BLOCK_BYTES[name]), np.uint8)
        stored[:, :2] = np.arange(2**16, dtype="<u2").view(np.uint8).reshape(-1, 2)
        sizes = (2**16, 32)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(stored, kind)
    found = np.asarray(each.decode(jnp.asarray(as_words(stored)), *sizes))
    for values in (found, each.reference(as_words(stored), *sizes)):
        is_number = ~np.isnan(wanted)
        assert np.mean(is_number) > 0.9
        np.testing.assert_array_equal(np.isnan(values), ~is_number)
        assert_same_bits(values[is_number], wanted[is_number])


def test_float32_and_bfloat16():
    weights = normal(8, 3, 5)
    full, half = experts.FORMATS["float32"], experts.FORMATS["bfloat16"]
    np.testing.assert_array_equal(
        full.encode(weights), weights.reshape(-1).view(np.uint32)
    )
    assert_same_bits(full.reference(full.encode(weights), 3, 5), weights)
    # Ties to even: 1 + 2**-8 goes down, 1 + 3 * 2**-8 goes up.
    words = half.encode(np.array([[1 + 2**-8, 1 + 3 * 2**-8, -2.0]], np.float32))
    assert words.tolist() == [0x3F823F80, 0x0000C000]
    np.testing.assert_allclose(
        half.reference(half.encode(weights), 3, 5), weights, rtol=2**-8
    )


@pytest.mark.parametrize("name", NAMES)
def test_same_bits_in_every_program(name):
    each = experts.FORMATS[name]
    stack = np.stack([random_words(name, seed, *SIZES) for seed in range(3)])
    wanted = np.stack([each.reference(words, *SIZES) for words in stack])
    assert np.all(np.isfinite(wanted))
    assert np.any(wanted[0] != wanted[1])
    assert_same_bits(each.decode(jnp.asarray(stack[0]), *SIZES), wanted[0])

    bias = normal(9, *SIZES)

    @jax.jit
    def programs(stack, bias, order):
        def place(index, found):
            words = jax.lax.dynamic_index_in_dim(stack, order[index], keepdims=False)
            return found.at[order[index]].set(each.decode(words, *SIZES))

        found = jnp.zeros((len(stack), *SIZES), jnp.float32)
        looped = jax.lax.fori_loop(0, len(stack), place, found)
        together = jax.vmap(lambda words: each.decode(words, *SIZES))(stack)
        alone = each.decode(stack[1], *SIZES)
        return looped, together, alone, alone + bias

    order = jnp.asarray([2, 0, 1], jnp.int32)
    looped, together, alone, added = programs(stack, bias, order)
    assert_same_bits(looped, wanted)
    assert_same_bits(together, wanted)
    assert_same_bits(alone, wanted[1])
    # Nothing is contracted with an addition that follows.
    assert_same_bits(added, wanted[1] + bias)
    # A single flipped bit is seen. The first word may hold two halves or a scale.
    stack[0, 1] ^= np.uint32(1 << 20)
    changed, *_ = programs(stack, bias, order)
    assert np.any(np.asarray(changed)[0] != wanted[0])


def test_a_scale_of_24_bits_is_contracted_with_an_addition():
    """Why scales have 13 bits: the test above does see what it looks for."""
    each = experts.FORMATS["trellis2_mul1"]
    words = random_words("trellis2_mul1", 0, *SIZES)
    words[0] = np.float32(0.37).view(np.uint32)
    bias = normal(9, *SIZES)
    added = jax.jit(lambda words, bias: each.decode(words, *SIZES) + bias)(words, bias)
    assert np.any(np.asarray(added) != each.reference(words, *SIZES) + bias)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1"])
def test_scales_that_are_not_finite_pass_without_a_warning(name):
    each = experts.FORMATS[name]
    words = np.full(each.num_words(4, 32), 0xFFFF7C00, np.uint32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = each.reference(words, 4, 32)
    assert not np.all(np.isfinite(values))
