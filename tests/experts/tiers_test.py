"""Tiers: the same bits from the device, the host and the disk, whatever is cached."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_experts import random_packed

from strata_jax import experts
from strata_jax.experts import ExpertFile, ExpertLayout, uniform_layout

# Wide enough that a batched product has other bits than that of one token.
WIDTH, NUM_EXPERTS, NUM_TOKENS = 256, 8, 4
LAYER = 1  # of two in the file
LAYOUTS = {
    "plain": (uniform_layout("float32"),),
    "mixed": (
        ExpertLayout(gate="q4_1", up="q8_0", down="q4_0", is_folded=True, seed=5),
        ExpertLayout(gate="trellis3_mul1", up="bfloat16", down="trellis3_mul1"),
    ),
}


def run_window(bank, cache, states, routing, num_rows, num_kept, mode):
    """What a model does with a layer's experts in a window."""
    status = jnp.zeros((), jnp.int32)
    if cache is not None:
        cache, status = experts.adapt(bank, cache)
    outputs, fault = experts.run_jobs(bank, cache, states, routing, num_rows, mode=mode)
    if cache is not None:
        cache = experts.count_uses(cache, routing, num_kept)
    return outputs, cache, status | fault


run = jax.jit(run_window, static_argnames="mode")


@functools.cache
def packed(layouts):
    return random_packed(LAYOUTS[layouts], NUM_EXPERTS, WIDTH, seed=3)


@pytest.fixture(scope="module")
def find_bank(tmp_path_factory):
    """(tier, layouts) -> the experts there; each file is opened once."""
    folder = tmp_path_factory.mktemp("tiers")

    @functools.cache
    def find(tier, layouts):
        bank = packed(layouts)
        if tier == "host":
            return experts.to_host(bank)
        if tier == "disk":
            other = bank.replace(words=bank.words[::-1])
            layers = [bank if layer == LAYER else other for layer in range(2)]
            return experts.write_expert_file(folder / layouts, layers).bank(LAYER)
        return bank

    return find


@pytest.fixture
def reads(monkeypatch):
    """The experts that each read of a file asked for, in their order."""
    asked = []
    read = ExpertFile.read

    def count(self, layer, wanted, num_words):
        assert layer == LAYER
        asked.append([expert for expert in np.asarray(wanted).tolist() if expert >= 0])
        return read(self, layer, wanted, num_words)

    monkeypatch.setattr(ExpertFile, "read", count)
    return asked


@functools.cache
def windows():
    """(states, routing, num_rows, num_kept) of some windows; the third has no rows.

    Some experts are used much more than others, so that a small cache is of use, and
    different ones at the end, so that it changes.
    """
    rng = np.random.default_rng(4)
    result = []
    for index, (num_rows, num_kept) in enumerate([(4, 4), (3, 1), (0, 0), (4, 2)] * 2):
        weights = 0.5 ** np.arange(NUM_EXPERTS)
        weights = (weights if index < 4 else weights[::-1]) / weights.sum()
        routing = [
            rng.choice(NUM_EXPERTS, 2, replace=False, p=weights)
            for _ in range(NUM_TOKENS)
        ]
        states = rng.normal(size=(NUM_TOKENS, WIDTH))
        result.append(
            (
                jnp.asarray(states, jnp.float32),
                jnp.asarray(np.array(routing), jnp.int32),
                num_rows,
                num_kept,
            )
        )
    return result


@functools.cache
def outputs_alone(layouts):
    """Every token of every window through the resident program of one token."""
    bank = packed(layouts)
    one = jnp.int32(1)
    result = []
    for states, routing, num_rows, _ in windows():
        outputs = np.zeros((NUM_TOKENS, 2, WIDTH), np.float32)
        for row in range(num_rows):
            alone, _, _ = run(
                bank, None, states[row][None], routing[row][None], one, one, "singleton"
            )
            outputs[row] = alone[0]
        result.append(outputs)
    return result


def empty_cache(bank, num_slots):
    if num_slots == 0:
        return None
    return experts.empty_expert_cache(num_slots, bank.shape.num_words, NUM_EXPERTS)


def full_cache(layouts, held, num_slots=None):
    """A cache that holds some experts already, and will not replace them."""
    words = packed(layouts).words[jnp.asarray(held, jnp.int32)]
    cache = empty_cache(packed(layouts), num_slots or len(held))
    return cache.replace(
        words=cache.words.at[: len(held)].set(words),
        expert=cache.expert.at[: len(held)].set(jnp.asarray(held, jnp.int32)),
    )


def run_window_number(index, bank, cache, mode):
    states, routing, num_rows, num_kept = windows()[index]
    return run(
        bank, cache, states, routing, jnp.int32(num_rows), jnp.int32(num_kept), mode
    )


# Every two of these settings meet in one case; the other cases are slow.
PAIRS = (
    ("device", 0, "singleton", "plain"),
    ("device", 1, "shared", "mixed"),
    ("device", 8, "singleton", "mixed"),
    ("host", 0, "shared", "mixed"),
    ("host", 1, "singleton", "plain"),
    ("host", 8, "shared", "plain"),
    ("disk", 0, "singleton", "mixed"),
    ("disk", 1, "shared", "plain"),
    ("disk", 8, "singleton", "plain"),
)
CASES = tuple(
    itertools.product(
        ("device", "host", "disk"), (0, 1, 8), ("singleton", "shared"), LAYOUTS
    )
)


def test_the_cases_that_are_not_slow_cover_all_pairs():
    for first, second in itertools.combinations(range(4), 2):
        pairs = {(case[first], case[second]) for case in PAIRS}
        assert pairs == {(case[first], case[second]) for case in CASES}


@pytest.mark.parametrize(
    ("tier", "num_slots", "mode", "layouts"),
    [
        pytest.param(*case, marks=() if case in PAIRS else pytest.mark.slow)
        for case in CASES
    ],
)
def test_every_tier_has_the_bits_of_one_resident_token(
    find_bank, tier, num_slots, mode, layouts
):
    bank = find_bank(tier, layouts)
    cache = empty_cache(bank, num_slots)
    held = set()
    for index, expected in enumerate(outputs_alone(layouts)):
        outputs, cache, status = run_window_number(index, bank, cache, mode)
        assert int(status) == 0
        np.testing.assert_array_equal(outputs, expected)
        if cache is not None:
            held.add(tuple(cache.expert.tolist()))
    # The cache was in use, and what it held has changed.
    assert len(held) >= (2 if num_slots else 0)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_the_batched_control_has_other_bits(find_bank, layouts):
    bank = find_bank("device", layouts)
    outputs, _, _ = run_window_number(0, bank, None, "batched")
    expected = outputs_alone(layouts)[0]
    assert (outputs != expected).any(axis=-1).mean() > 0.5
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_is_cached_is_taken_from_the_cache(find_bank, tier):
    mode = {"host": "singleton", "disk": "shared"}[tier]
    bank = find_bank(tier, "plain")
    _, routing, num_rows, _ = windows()[0]
    expert = int(routing[0, 0])
    cache = full_cache("plain", [expert])
    outputs, _, _ = run_window_number(0, bank, cache, mode)
    np.testing.assert_array_equal(outputs, outputs_alone("plain")[0])
    # Were it read from below, these words would not be seen.
    spoiled = cache.replace(words=jnp.zeros_like(cache.words))
    outputs, _, _ = run_window_number(0, bank, spoiled, mode)
    is_its = np.asarray(routing[:num_rows]) == expert
    assert not outputs[is_its].any()
    np.testing.assert_array_equal(outputs[~is_its], outputs_alone("plain")[0][~is_its])


def distinct_experts(index):
    _, routing, num_rows, _ = windows()[index]
    return list(dict.fromkeys(np.asarray(routing[:num_rows]).reshape(-1).tolist()))


def test_a_window_reads_its_distinct_experts_at_once(find_bank, reads):
    bank = find_bank("disk", "mixed")
    for index in range(len(windows())):
        reads.clear()
        run_window_number(index, bank, None, "singleton")
        distinct = distinct_experts(index)
        assert reads == ([distinct] if distinct else [])
    assert any(not distinct_experts(index) for index in range(len(windows())))


def test_what_is_cached_is_not_read(find_bank, reads):
    bank = find_bank("disk", "plain")
    distinct = distinct_experts(0)
    assert len(distinct) > 1
    for expert in distinct:
        reads.clear()
        run_window_number(0, bank, full_cache("plain", [expert]), "shared")
        assert reads == [[other for other in distinct if other != expert]]
    reads.clear()
    full = full_cache("plain", list(range(NUM_EXPERTS)))
    outputs, _, _ = run_window_number(0, bank, full, "singleton")
    assert reads == []
    np.testing.assert_array_equal(outputs, outputs_alone("plain")[0])


def test_a_cache_reads_its_newcomers_at_once(find_bank, reads):
    bank = find_bank("disk", "plain")
    cache = empty_cache(bank, NUM_EXPERTS)
    _, cache, _ = run_window_number(0, bank, cache, "singleton")
    # Nothing was counted before this window.
    assert reads == [distinct_experts(0)]
    reads.clear()
    _, cache, _ = run_window_number(0, bank, cache, "singleton")
    # All rows of that window were kept, so all its experts came in one read.
    assert [sorted(asked) for asked in reads] == [sorted(distinct_experts(0))]
    reads.clear()
    run_window_number(0, bank, cache, "singleton")
    assert reads == []


def test_programs_with_cold_experts_contain_a_callback(find_bank):
    bank = find_bank("disk", "mixed")
    states, routing, num_rows, num_kept = windows()[0]
    lowered = run.lower(
        bank,
        None,
        states,
        routing,
        jnp.int32(num_rows),
        jnp.int32(num_kept),
        mode="singleton",
    )
    assert "callback" in lowered.as_text()
