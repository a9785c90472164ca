"""Jobs: how entries are grouped, and a token's bits whatever shares its job."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_experts import random_packed

from strata_jax import experts
from strata_jax.experts import ExpertLayout, ExpertWeights, uniform_layout

# Wide enough that a batched product has other bits than that of one token.
WIDTH, NUM_EXPERTS, PER_TOKEN, NUM_TOKENS = 256, 8, 2, 8

group = jax.jit(experts.group_by_expert)
run = jax.jit(experts.run_jobs, static_argnames="mode")


def jobs_of_a_plain_loop(routing, num_rows):
    jobs = {}
    for row in range(num_rows):
        for place, expert in enumerate(routing[row]):
            jobs.setdefault(int(expert), []).append(row * routing.shape[1] + place)
    return jobs


def check_jobs(jobs, routing, num_rows):
    expected = jobs_of_a_plain_loop(routing, num_rows)
    num_jobs = int(jobs.num_jobs)
    stops = jobs.start + jobs.count
    found = [
        (int(jobs.expert[job]), jobs.entry[jobs.start[job] : stops[job]].tolist())
        for job in range(num_jobs)
    ]
    assert found == list(expected.items())
    assert not jobs.count[num_jobs:].any()
    assert sorted(jobs.entry.tolist()) == list(range(routing.size))


def grouped(routing, num_rows):
    jobs = group(jnp.asarray(routing, jnp.int32), jnp.int32(num_rows))
    return jax.tree.map(np.asarray, jobs)


@pytest.mark.parametrize(
    ("num_tokens", "per_token", "num_experts"),
    [(8, 2, 8), (4, 3, 3), (5, 1, 3), (1, 2, 4), (6, 2, 1)],
)
def test_jobs_are_those_of_a_plain_loop(num_tokens, per_token, num_experts):
    rng = np.random.default_rng(num_tokens)
    shape = (num_tokens, per_token)
    # Repeated experts in a row as well, which no router gives.
    routings = [rng.integers(0, num_experts, shape) for _ in range(8)]
    routings += [np.full(shape, expert) for expert in (0, num_experts - 1)]
    for routing in routings:
        for num_rows in range(num_tokens + 1):
            check_jobs(grouped(routing, num_rows), routing, num_rows)


def test_the_check_of_jobs_sees_another_order_and_other_rows():
    routing = np.array([[5, 3], [3, 0], [5, 1], [7, 2]])
    by_expert = np.sort(routing, axis=1)
    with pytest.raises(AssertionError):
        check_jobs(grouped(by_expert, 4), routing, 4)
    with pytest.raises(AssertionError):
        check_jobs(grouped(routing, 3), routing, 4)


@functools.cache
def random_weights():
    rng = np.random.default_rng(0)

    def matrix():
        values = rng.normal(size=(NUM_EXPERTS, WIDTH, WIDTH)) * WIDTH**-0.5
        return jnp.asarray(values, jnp.float32)

    return ExpertWeights(gate=matrix(), up=matrix(), down=matrix())


@functools.cache
def random_window():
    """States and routing in which most experts have several tokens, one has one."""
    rng = np.random.default_rng(1)
    states = jnp.asarray(rng.normal(size=(NUM_TOKENS, WIDTH)), jnp.float32)
    rows = [[6, 1], [1, 4], [4, 6], [1, 6], [0, 1], [3, 4], [1, 3], [6, 4]]
    return states, jnp.asarray(rows, jnp.int32)


def run_window(bank, num_rows, mode, num_tokens=NUM_TOKENS, states=None):
    given, routing = random_window()
    states = (given if states is None else states)[:num_tokens]
    outputs, status = run(
        bank, None, states, routing[:num_tokens], jnp.int32(num_rows), mode=mode
    )
    assert int(status) == 0
    return np.asarray(outputs)


@functools.cache
def outputs_alone(mode="singleton"):
    """Every token through the program of one token: [T, k, D]."""
    states, routing = random_window()
    singles = [
        run(
            random_weights(),
            None,
            states[row][None],
            routing[row][None],
            jnp.int32(1),
            mode=mode,
        )[0]
        for row in range(NUM_TOKENS)
    ]
    return np.concatenate(singles)


def swiglu(gate, up, down, state):
    inner = gate @ state
    return down @ (inner / (1 + np.exp(-inner)) * (up @ state))


def test_outputs_are_those_of_the_experts():
    weights, (states, routing) = random_weights(), random_window()
    matrices = [
        np.asarray(array, np.float64)
        for array in (weights.gate, weights.up, weights.down)
    ]
    expected = [
        [swiglu(*(array[expert] for array in matrices), state) for expert in row]
        for row, state in zip(
            np.asarray(routing), np.asarray(states, np.float64), strict=True
        )
    ]
    np.testing.assert_allclose(outputs_alone(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "num_tokens",
    [*(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8)), 8],
)
@pytest.mark.parametrize("mode", ["singleton", "shared"])
def test_every_width_has_the_bits_of_one_token(mode, num_tokens):
    for num_rows in range(num_tokens + 1):
        outputs = run_window(random_weights(), num_rows, mode, num_tokens)
        np.testing.assert_array_equal(outputs[:num_rows], outputs_alone()[:num_rows])
        assert not outputs[num_rows:].any()


def test_one_token_has_the_same_bits_in_both_modes():
    np.testing.assert_array_equal(outputs_alone("shared"), outputs_alone())


def test_the_batched_control_has_other_bits():
    outputs = run_window(random_weights(), NUM_TOKENS, "batched")
    is_different = (outputs != outputs_alone()).any(axis=-1)
    assert is_different.mean() > 0.5
    # They are the same experts all the same.
    np.testing.assert_allclose(outputs, outputs_alone(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["singleton", "shared"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_token_touches_no_other(mode, value):
    states, _ = random_window()
    bad = 3
    spoiled = states.at[bad].set(value)
    outputs = run_window(random_weights(), NUM_TOKENS, mode, states=spoiled)
    others = np.arange(NUM_TOKENS) != bad
    np.testing.assert_array_equal(outputs[others], outputs_alone()[others])
    assert np.isnan(outputs[bad]).any()


@functools.cache
def packed_float32(is_folded):
    layout = uniform_layout("float32", is_folded=is_folded)
    return experts.pack_experts(random_weights(), layout)


@pytest.mark.parametrize("mode", ["singleton", "shared"])
def test_packed_float32_has_the_bits_of_plain_arrays(mode):
    outputs = run_window(packed_float32(False), NUM_TOKENS, mode)
    np.testing.assert_array_equal(outputs, outputs_alone())


def test_folded_float32_is_close_to_plain_arrays():
    folded = packed_float32(True)
    outputs = run_window(folded, NUM_TOKENS, "singleton")
    np.testing.assert_allclose(outputs, outputs_alone(), rtol=0, atol=1e-5)
    assert (outputs != outputs_alone()).any()
    # The inputs are turned: weights that are not do not fit.
    plain = folded.replace(words=packed_float32(False).words)
    outputs = run_window(plain, NUM_TOKENS, "singleton")
    assert np.abs(outputs - outputs_alone()).max() > 0.1


LAYOUTS = (
    uniform_layout("float32"),
    ExpertLayout(gate="q4_1", up="q8_0", down="q4_0", is_folded=True, seed=5),
    ExpertLayout(gate="bfloat16", up="q8_0", down="bfloat16"),
    ExpertLayout(
        gate="trellis3_mcg", up="trellis3_mcg", down="q8_0", is_folded=True, seed=9
    ),
)


@functools.cache
def mixed_experts():
    return random_packed(LAYOUTS, NUM_EXPERTS, WIDTH, seed=2)


def only(packed, expert):
    """A layer with one of the experts, in its own layout."""
    layout = packed.shape.layouts[int(packed.layout[expert])]
    shape = experts.PackedShape((layout,), WIDTH, WIDTH)
    words = packed.words[expert : expert + 1, : shape.num_words]
    return experts.PackedExperts(words, jnp.zeros(1, jnp.int32), shape)


def decoded_on_the_host(layout, words, state):
    """One expert on one token, by the formats' references, in float64."""
    sizes = layout.num_words(WIDTH, WIDTH)
    pieces = np.split(words, np.cumsum(sizes))[:3]
    names = (layout.gate, layout.up, layout.down)
    gate, up, down = (
        experts.find_format(name).reference(piece, WIDTH, WIDTH).astype(np.float64)
        for name, piece in zip(names, pieces, strict=True)
    )

    def turn(values, signs):
        if not layout.is_folded:
            return values
        return experts.hadamard_reference((values * signs).astype(np.float32))

    inner_signs, outer_signs = layout.signs(WIDTH, WIDTH)
    state = turn(state, inner_signs)
    inner = gate @ state
    inner = inner / (1 + np.exp(-inner)) * (up @ state)
    return down @ turn(inner, outer_signs)


@pytest.mark.parametrize(
    "mode", ["singleton", pytest.param("shared", marks=pytest.mark.slow)]
)
def test_every_layout_of_a_layer_has_the_bits_it_has_alone(mode):
    packed, (states, routing) = mixed_experts(), random_window()
    outputs = run_window(packed, NUM_TOKENS, mode)
    first = jnp.zeros((1, 1), jnp.int32)
    seen = set()
    for row in range(NUM_TOKENS):
        for place, expert in enumerate(routing[row].tolist()):
            alone, _ = run(
                only(packed, expert),
                None,
                states[row][None],
                first,
                jnp.int32(1),
                mode="singleton",
            )
            np.testing.assert_array_equal(outputs[row, place], alone[0, 0])
            layout = packed.shape.layouts[int(packed.layout[expert])]
            expected = decoded_on_the_host(
                layout,
                np.asarray(packed.words[expert]),
                np.asarray(states[row], np.float64),
            )
            np.testing.assert_allclose(outputs[row, place], expected, atol=1e-4)
            seen.add(layout)
    assert seen == set(LAYOUTS)


def test_the_batched_control_of_a_mixed_layer_has_other_bits():
    packed = mixed_experts()
    outputs = run_window(packed, NUM_TOKENS, "batched")
    expected = run_window(packed, NUM_TOKENS, "singleton")
    assert (outputs != expected).any(axis=-1).mean() > 0.5
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-4)


def test_outputs_have_the_dtype_of_the_states():
    states, routing = random_window()
    states = states.astype(jnp.bfloat16)
    for bank in (random_weights(), packed_float32(False), mixed_experts()):
        outputs, _ = jax.eval_shape(
            functools.partial(experts.run_jobs, mode="singleton"),
            bank,
            None,
            states,
            routing,
            jnp.int32(4),
        )
        assert outputs.dtype == jnp.bfloat16
        assert outputs.shape == (NUM_TOKENS, PER_TOKEN, WIDTH)


def with_size(size):
    return jax.tree.map(lambda array: array[:, :size, :size], random_weights())


@pytest.mark.parametrize(
    ("size", "layouts", "message"),
    [
        (64, [uniform_layout("q8_0")] * 7, "layouts has 7 entries for 8 experts"),
        (64, [], "layouts has 0 entries"),
        (64, "q8_0", "layouts .*ExpertLayout.*uniform_layout"),
        (64, ["float32"] * 8, "layouts .*ExpertLayout.*uniform_layout"),
        (48, uniform_layout("q4_0"), "q4_0 stores blocks of 1 x 32"),
        (40, uniform_layout("trellis2_mul1"), "blocks of 16 x 16"),
        (64, uniform_layout("float32", is_folded=True), "multiple of 128"),
    ],
)
def test_bad_layouts_are_refused(size, layouts, message):
    with pytest.raises(ValueError, match=message):
        experts.pack_experts(with_size(size), layouts)


def test_weights_that_are_not_finite_are_refused():
    weights = with_size(64)
    weights = weights.replace(up=weights.up.at[2, 0, 0].set(jnp.nan))
    with pytest.raises(ValueError, match="finite"):
        experts.pack_experts(weights, uniform_layout("q8_0"))


def test_bad_names_and_seeds_are_refused():
    with pytest.raises(ValueError, match=r"format must be one of float32, .*'q9_9'"):
        uniform_layout("q9_9")
    with pytest.raises(ValueError, match="'q2'"):
        ExpertLayout(gate="q8_0", up="q8_0", down="q2")
    with pytest.raises(ValueError, match="seed must be at least 0"):
        ExpertLayout(gate="q8_0", up="q8_0", down="q8_0", seed=-1)


def test_a_layout_for_each_expert_is_the_layout_for_all():
    layout = uniform_layout("q8_0")
    one = experts.pack_experts(with_size(64), layout)
    each = experts.pack_experts(with_size(64), [layout] * NUM_EXPERTS)
    assert one.shape == each.shape
    np.testing.assert_array_equal(one.words, each.words)
    np.testing.assert_array_equal(each.layout, np.zeros(NUM_EXPERTS))


def test_unpacked_experts_are_those_that_were_packed():
    weights = with_size(128)
    layouts = [
        uniform_layout("float32", is_folded=expert % 2 == 1)
        for expert in range(NUM_EXPERTS)
    ]
    unpacked = experts.unpack_experts(experts.pack_experts(weights, layouts))
    plain = np.arange(NUM_EXPERTS) % 2 == 0
    for name in ("gate", "up", "down"):
        found, wanted = getattr(unpacked, name), getattr(weights, name)
        np.testing.assert_array_equal(found[plain], wanted[plain])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_shared_decoding_is_refused_where_it_is_not_bitwise(monkeypatch):
    odd = experts.FORMATS["float32"]._replace(is_shared_bitwise=False)
    formats = {**experts.FORMATS, "float32": odd}
    monkeypatch.setattr("strata_jax.experts._formats.FORMATS", formats)
    bank = random_packed([uniform_layout("float32")], 2, 32, 0)
    states, routing = jnp.zeros((1, 32)), jnp.zeros((1, 1), jnp.int32)

    def outputs(mode):
        return experts.run_jobs(bank, None, states, routing, jnp.int32(1), mode=mode)

    assert outputs("singleton")[0].shape == (1, 1, 32)
    with pytest.raises(ValueError, match=r"'shared' is not bitwise.*use 'singleton'"):
        outputs("shared")
