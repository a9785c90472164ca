"""Every rule emits the target's law: enumerated through the real `step` (contract V1).

Each gate, verifier and kind of row is met at V = 2..4 and K = 0..3. The gates share one
compiled program per (V, K, verifier), see `law_checks.one_of`; one of them is built
alone as well.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_checks import (
    GATE_NAMES,
    MAX_LENGTH,
    Bench,
    Case,
    assert_laws_are_targets,
    chain_row,
    decoder_for,
    gate_settings,
    library_bench,
    one_instance,
    tolerance,
)

import strata_jax as strata
from strata_jax import gates
from strata_jax._rng import request_key
from strata_jax.audit import markov_law, negative_controls

GATES_THAT_FAIL_AFTER_THE_DRAW = {
    "picked",
    "soft_ratio",
    "soft_complement",
    "soft_given",
    "picked_and_top",
    "picked_and_stop",
}


def random_table(rng, vocab_size, concentration=0.7):
    return rng.dirichlet(np.full(vocab_size, concentration), vocab_size)


def one_hot_table(rng, vocab_size):
    return np.eye(vocab_size)[rng.integers(vocab_size, size=vocab_size)]


def adversarial_rows(vocab_size):
    """Pairs (p, q) at the edges: no overlap, zeros, point masses, tiny masses."""
    size = vocab_size
    uniform = np.full(size, 1 / size)
    first, last = np.eye(size)[0], np.eye(size)[-1]
    half = size // 2
    left = np.arange(size) < half
    left_row, right_row = left / left.sum(), ~left / (~left).sum()
    falling = np.arange(size, 0, -1) / np.arange(size, 0, -1).sum()
    without_first = np.where(np.arange(size) == 0, 0, falling)
    without_first = without_first / without_first.sum()
    tiny = 1e-7
    mostly_first = (1 - tiny) * first + tiny * right_row
    mostly_last = (1 - tiny) * last + tiny * left_row
    nudged = falling * (1 + 1e-6 * np.where(left, 1, -1))
    return {
        "disjoint supports": (left_row, right_row),
        "p without a token": (without_first, uniform),
        "q without a token": (uniform, without_first),
        "p == q": (falling, falling),
        "p nearly q": (nudged / nudged.sum(), falling),
        "the same point mass": (last, last),
        "p a point mass": (first, falling),
        "q a point mass": (falling, last),
        "other point masses": (first, last),
        "tiny q": (falling, mostly_first),
        "tiny p": (mostly_first, falling),
        "tiny against tiny": (mostly_first, mostly_last),
        "uniform": (uniform, uniform),
    }


def adversarial_case(name, gate, threshold, vocab_size, turn):
    """Rows of the table run through the list from a place of its own."""
    pairs = adversarial_rows(vocab_size)
    labels = list(pairs)
    labels = [labels[(turn + row) % len(labels)] for row in range(vocab_size)]
    target = np.stack([pairs[label][0] for label in labels])
    draft = np.stack([pairs[label][1] for label in labels])
    settings = gate_settings(gate, threshold, vocab_size)
    return Case(
        f"{name}, {gate}, {labels[0]}, t = {threshold}", target, draft, settings
    )


@functools.cache
def matrix_cases(vocab_size, num_draft_tokens):
    """Every gate x {soft, one-hot, empty} rows, and the adversarial ones."""
    rng = np.random.default_rng([1, vocab_size, num_draft_tokens])
    cases = []
    for gate in GATE_NAMES:

        def add(kind, draft, threshold, is_available=True, gate=gate):
            settings = gate_settings(gate, threshold, vocab_size)
            label = f"{gate}, {kind}, t = {threshold}"
            target = random_table(rng, vocab_size)
            cases.append(Case(label, target, draft, settings, is_available))

        soft = random_table(rng, vocab_size, 1.5)
        # A threshold that is exactly one of the row's own values.
        tie = float(np.sort(chain_row(soft[0]))[-1])
        add("soft, tie at the largest", soft, tie)
        add("soft", random_table(rng, vocab_size, 1.5), 0.3)
        # Deep windows are dear.
        if num_draft_tokens < 3:
            uniform = np.full((vocab_size, vocab_size), 1 / vocab_size)
            add("soft", soft, 0.0)
            add("uniform, tie", uniform, 1 / vocab_size)
        add("one-hot", one_hot_table(rng, vocab_size), 0.5)
        add("one-hot, tie at 1", one_hot_table(rng, vocab_size), 1.0)
        add("empty: nothing reaches 1", random_table(rng, vocab_size, 1.5), 1.0)
        add("empty: unavailable", random_table(rng, vocab_size), 0.25, False)
        turns = range(len(adversarial_rows(vocab_size)))
        # Tables of deep windows show several rows of the list at once.
        step = {0: 1, 1: 1, 2: 4, 3: 7}[num_draft_tokens]
        for turn in turns[::step]:
            for threshold in (0.25, 0.5) if num_draft_tokens == 1 else (0.25,):
                cases.append(
                    adversarial_case("adversarial", gate, threshold, vocab_size, turn)
                )
    return cases


# V and K with each verifier; exact match drafts by argmax or by sampling.
TOKEN = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 3)]
EXACT_MATCH = {
    (2, 0): "argmax",
    (2, 1): "argmax",
    (2, 2): "sample",
    (2, 3): "argmax",
    (3, 0): "argmax",
    (3, 1): "sample",
    (3, 2): "argmax",
    (4, 2): "sample",
}
# One program each. Among the short tests every K is met with both verifiers, and both
# draft rules of exact match.
LONG = {
    *[(4, 1, "token"), (4, 3, "token"), (3, 0, "token")],
    *[(*sizes, "exact_match") for sizes in [(2, 1), (2, 2), (3, 0), (4, 2)]],
}


def sizes_with(verifier, sizes):
    """Parameters of the tests, the long ones marked."""
    for size in sizes:
        is_long = (*size, verifier) in LONG
        name = verifier
        if verifier == "exact_match":
            name = f"exact_match, {EXACT_MATCH[size]}"
        yield pytest.param(*size, name, marks=[pytest.mark.slow] if is_long else [])


MATRIX = [*sizes_with("token", TOKEN), *sizes_with("exact_match", EXACT_MATCH)]


def test_precision_is_what_the_environment_asks_for():
    is_double = os.environ.get("JAX_ENABLE_X64", "0") == "1"
    cells = library_bench(2, 1, "token").cells(joint_cases(2))
    assert tolerance() == (1e-12 if is_double else 1e-6)
    assert cells.states.settings.sampling.temperature.dtype.itemsize == (
        8 if is_double else 4
    )
    grid = cells.uniforms * 2.0**24
    assert np.any(grid != np.round(grid)) == is_double


@pytest.mark.parametrize(("vocab_size", "num_draft_tokens", "verifier"), MATRIX)
def test_gate_by_verifier_by_row_kind(vocab_size, num_draft_tokens, verifier):
    cases = matrix_cases(vocab_size, num_draft_tokens)
    bench = library_bench(vocab_size, num_draft_tokens, verifier)
    assert_laws_are_targets(bench, cases)


@pytest.mark.parametrize(("vocab_size", "num_draft_tokens"), [(3, 1), (2, 2)])
def test_the_matrix_meets_every_kind_of_row(vocab_size, num_draft_tokens):
    # Otherwise the laws would be right for want of drafts.
    cases = matrix_cases(vocab_size, num_draft_tokens)
    first = library_bench(vocab_size, num_draft_tokens, "token").first_tokens(cases)
    for gate in GATE_NAMES:
        rows = [i for i, case in enumerate(cases) if case.label.startswith(f"{gate},")]
        absent, offered, null = first.kind_mass[rows].max(axis=(0, 1))
        assert offered >= 0.5
        assert (null > 0.1) == (gate in GATES_THAT_FAIL_AFTER_THE_DRAW), gate
        assert absent == 1.0
        assert first.num_accepted[rows].max() > 0.4
    for i, case in enumerate(cases):
        if not case.is_available:
            np.testing.assert_array_equal(first.kind_mass[i][:, 0], 1.0)
            assert first.num_accepted[i] == 0


def test_gate_built_alone():
    gate = gates.all_of(
        gates.picked(0.15, setting="stop_picked"),
        gates.include_then_stop(0.3, setting="picked_stop"),
    )
    bench = Bench(decoder_for(3, 2, gate=gate))
    rng = np.random.default_rng(2)
    cases = [
        Case(f"alone, {i}", random_table(rng, 3), random_table(rng, 3))
        for i in range(24)
    ]
    assert_laws_are_targets(bench, cases)
    assert_laws_are_targets(bench, cases[:2], num_tokens=3)
    # The same decisions as in the shared program.
    settings = gate_settings("picked_and_stop", 0.3, 3)
    shared = [case._replace(settings=settings) for case in cases]
    np.testing.assert_allclose(
        bench.first_tokens(cases).kind_mass,
        library_bench(3, 2, "token").first_tokens(shared).kind_mass,
        rtol=0,
        atol=tolerance(),
    )


def row_pair(rng, vocab_size, i):
    """Row pairs of many shapes: flat, peaked, and every seventh one at an edge."""
    if i % 7 == 6:
        pairs = list(adversarial_rows(vocab_size).values())
        return pairs[(i // 7) % len(pairs)]
    concentration = (0.3, 1.0, 3.0)[i % 3]
    return rng.dirichlet(np.full(vocab_size, concentration), 2)


def row_case(label, pair, settings):
    p, q = pair
    size = len(p)
    return Case(label, np.tile(p, (size, 1)), np.tile(q, (size, 1)), settings)


@functools.cache
def threshold_cases(gate, vocab_size, count):
    """Rows and thresholds: 0, 1, exact ties and anything between."""
    rng = np.random.default_rng([3, vocab_size, GATE_NAMES.index(gate)])
    cases = []
    for i in range(count):
        pair = row_pair(rng, vocab_size, i)
        values = np.sort(chain_row(pair[1]))
        kind = i % 10
        if kind < 3:
            threshold = float(values[-1 - kind % vocab_size])
        else:
            threshold = {3: 0.0, 4: 1.0}.get(kind, float(rng.uniform(0.02, 0.7)))
        settings = gate_settings(gate, min(threshold, 1.0), vocab_size)
        label = f"{gate}, V = {vocab_size}, row {i}, t = {threshold}"
        cases.append(row_case(label, pair, settings))
    return cases


def assert_distinct(cases):
    assert len({case.key() for case in cases}) == len(cases)


GATED = ("picked", "soft_ratio", "soft_complement", "picked_and_top", "picked_and_stop")


def gated_cases(vocab_size):
    cases = [case for gate in GATED for case in threshold_cases(gate, vocab_size, 30)]
    # The soft gates have no threshold, so the rows at the edges recur with them.
    return list({case.key(): case for case in cases}.values())


def top_cases(vocab_size):
    cases = threshold_cases("top", vocab_size, 320)
    return list({case.key(): case for case in cases}.values())


@pytest.mark.parametrize("vocab_size", [2, 3, 4])
def test_gated_instances(vocab_size):
    cases = gated_cases(vocab_size)
    assert_distinct(cases)
    assert_laws_are_targets(library_bench(vocab_size, 1, "token"), cases)


@pytest.mark.parametrize("vocab_size", [2, 3, 4])
def test_top_instances(vocab_size):
    cases = top_cases(vocab_size)
    assert_distinct(cases)
    assert_laws_are_targets(library_bench(vocab_size, 1, "token"), cases)


@functools.cache
def measure_cases(vocab_size):
    """Arbitrary p, q and g: sets, their edges, and anything in [0, 1]^V."""
    rng = np.random.default_rng([4, vocab_size])
    cases = {}
    i = 0
    while len(cases) < 910:
        p, q = row_pair(rng, vocab_size, i)
        kind = i % 5
        if kind == 0:
            g = rng.integers(2, size=vocab_size).astype(float)
        elif kind == 1:
            g = rng.uniform(size=vocab_size) * rng.integers(2, size=vocab_size)
        else:
            g = rng.uniform(size=vocab_size)
        if i % 50 == 0:
            g = np.full(vocab_size, float(i % 100 == 0))
        settings = gate_settings("soft_given", 1.0, vocab_size)
        settings |= {f"g{x}": float(g[x]) for x in range(vocab_size)}
        case = row_case(
            f"measure, V = {vocab_size}, row {i}, g = {g}", (p, q), settings
        )
        cases[case.key()] = case
        i += 1
    return list(cases.values())


@pytest.mark.parametrize("vocab_size", [2, 3, 4])
def test_measure_instances(vocab_size):
    cases = measure_cases(vocab_size)
    assert_distinct(cases)
    bench = library_bench(vocab_size, 1, "token")
    first = bench.first_tokens(cases)
    p = np.stack([case.target[0] for case in cases])
    q = np.stack([case.draft[0] for case in cases])
    g = np.stack(
        [[case.settings[f"g{x}"] for x in range(vocab_size)] for case in cases]
    )
    law_gap = np.abs(first.laws - p).max(axis=1)
    # A rule that ignored its drafts would have the law, but not this.
    overlap_gap = np.abs(first.num_accepted - np.minimum(p, q * g).sum(axis=1))
    null_gap = np.abs(first.kind_mass[:, 0, strata.RowKind.NULL] - (1 - (q * g).sum(1)))
    for case, *gaps in zip(cases, law_gap, overlap_gap, null_gap, strict=True):
        assert max(gaps) <= tolerance(), f"{case.label}: {gaps}"


def test_how_many_instances_there_are():
    sizes = (2, 3, 4)
    gated = [case.key() for size in sizes for case in gated_cases(size)]
    top = [case.key() for size in sizes for case in top_cases(size)]
    measure = [case.key() for size in sizes for case in measure_cases(size)]
    counts = [len(set(keys)) for keys in (gated, top, measure)]
    print(f"\ngated {counts[0]}, top {counts[1]}, measure {counts[2]}")
    assert counts[0] >= 266
    assert counts[1] >= 900
    assert counts[2] >= 2700


@functools.cache
def joint_cases(vocab_size):
    rng = np.random.default_rng([5, vocab_size])
    cases = []
    for gate in ("picked", "top", "soft_ratio"):
        for i in range(2):
            draft = random_table(rng, vocab_size, 1.0)
            threshold = float(np.sort(chain_row(draft[0]))[-1]) if i else 0.35
            settings = gate_settings(gate, threshold, vocab_size)
            target = random_table(rng, vocab_size)
            cases.append(Case(f"joint, {gate}, {i}", target, draft, settings))
        cases.append(adversarial_case("joint", gate, 0.25, vocab_size, 0))
        cases.append(adversarial_case("joint", gate, 0.25, vocab_size, 9))
    return cases


JOINT = [(2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 1), (3, 2)]


@pytest.mark.parametrize(
    ("vocab_size", "num_draft_tokens", "verifier"),
    [*sizes_with("token", JOINT), *sizes_with("exact_match", JOINT)],
)
def test_joint_law_of_three_tokens(vocab_size, num_draft_tokens, verifier):
    cases = joint_cases(vocab_size)
    bench = library_bench(vocab_size, num_draft_tokens, verifier)
    assert_laws_are_targets(bench, cases, num_tokens=3)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_joint_law_up_to_the_budget(max_new_tokens):
    # K = 3 rows do not fit; the packet is cut before its draws (contract P2).
    assert_laws_are_targets(
        library_bench(2, 3, "token"),
        joint_cases(2),
        num_tokens=max_new_tokens,
        max_new_tokens=max_new_tokens,
    )


@pytest.mark.parametrize("room", [1, 2, 3])
def test_joint_law_up_to_the_context_limit(room):
    context = [0] * (MAX_LENGTH - room)
    bench = library_bench(2, 3, "token")
    cases = joint_cases(2)
    assert_laws_are_targets(bench, cases, context=context, num_tokens=room)


NUM_REQUESTS = 60_000
FALSE_ALARM_RATE = 1e-6
SAMPLED = Case(
    "sampled",
    np.array([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [1 / 3, 1 / 3, 1 / 3]]),
    np.array([[0.6, 0.2, 0.2], [0.5, 0.25, 0.25], [0.1, 0.3, 0.6]]),
)


def sampled_p_value(decoder) -> float:
    """Chi-square of three tokens of many requests, each with derived draws."""
    params, state = one_instance(decoder, SAMPLED)

    @jax.jit
    def sample(seeds):
        def one(seed):
            own = state.replace(request_key=request_key(seed))
            # Each window emits a token at least.
            own, _ = strata.decode(decoder, params, own, 3, throw=False)
            return own.context.tokens[1:4], own.status

        return jax.vmap(one)(seeds)

    tokens, status = sample(jnp.arange(NUM_REQUESTS, dtype=jnp.uint32))
    assert not np.asarray(status).any()
    place = np.asarray(tokens) @ np.array([9, 3, 1])
    observed = np.bincount(place, minlength=27)
    law = markov_law(SAMPLED.target, [0], 3)
    expected = NUM_REQUESTS * np.array([law[digits_of(i)] for i in range(27)])
    assert expected.min() > 100  # so that the chi-square law holds far into its tail
    statistic = ((observed - expected) ** 2 / expected).sum()
    half_degrees = jnp.asarray((27 - 1) / 2, float)
    return float(
        jax.scipy.special.gammaincc(half_degrees, jnp.asarray(statistic / 2, float))
    )


def digits_of(place):
    return place // 9, place // 3 % 3, place % 3


def unaccounted(drafter):
    return negative_controls.unaccounted_gate(drafter, 0.5)


@pytest.mark.parametrize(
    ("gate", "verifier"),
    [
        pytest.param(gates.picked(0.5), strata.verifiers.token(), id="token"),
        pytest.param(
            *(gates.picked(0.5), strata.verifiers.exact_match()),
            id="exact_match",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.slow
def test_sampled_joint_law(gate, verifier):
    p_value = sampled_p_value(decoder_for(3, 2, gate=gate, verifier=verifier))
    print(f"\nsampled: p-value {p_value:.3g}")
    assert p_value > FALSE_ALARM_RATE


@pytest.mark.slow
def test_sampled_joint_law_sees_the_biased_gate():
    p_value = sampled_p_value(decoder_for(3, 2, control=unaccounted))
    print(f"\nsampled, unaccounted: p-value {p_value:.3g}")
    assert p_value < FALSE_ALARM_RATE
