"""The library against an oracle in NumPy that was written separately.

(a) Verification: the oracle is given the library's own p, mu and uniforms, and every
decision of every row must be the same. (b) The whole chain: the oracle starts from the
logits in float64; what differs from the library's float32 is listed, and each
difference must stand within 1e-6 of a cut of the chain or of a border of a draw.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import Proposal, RowKind, Source, Status, measures, verifiers
from strata_jax.sampling import (
    TokenCounts,
    chain_probs,
    draw_token,
    sampling_settings,
)
from strata_jax.testing import _oracle as oracle

_ABSENT, _OFFERED, _NULL = (int(kind) for kind in RowKind)
_SOURCES = {
    Source.BONUS: "bonus",
    Source.REJECTION: "rejection",
    Source.NULL: "null",
}
# (V, K, number of windows).
_PLAN = [
    (3, 1, 24),
    (3, 2, 24),
    (3, 5, 24),
    (3, 8, 16),
    (16, 1, 16),
    (16, 3, 24),
    (16, 8, 24),
    (257, 4, 16),
    (257, 8, 12),
    (4096, 8, 8),
    (49_152, 4, 4),
    (152_064, 2, 3),
]
_BORDER = 1e-6


def random_settings(rng):
    """A chain of any kind, in numbers that float32 holds."""
    settings = {
        "temperature": float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 2.0])),
        "top_k": int(rng.choice([0, 0, 1, 2, 40, 1500])),
        "top_p": float(rng.choice([1.0, 1.0, 0.95, 0.6, 0.1])),
        "min_p": float(rng.choice([0.0, 0.0, 0.01, 0.2])),
        "repetition_penalty": float(rng.choice([1.0, 1.0, 1.2])),
        "presence_penalty": float(rng.choice([0.0, 0.5])),
        "frequency_penalty": float(rng.choice([0.0, -0.3, 0.2])),
    }
    return {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in settings.items()
    }


_chain = jax.jit(chain_probs)
_retain = jax.jit(measures.retain)
_draw = jax.jit(draw_token)
_token = jax.jit(verifiers.token().verify)
_exact_match = jax.jit(verifiers.exact_match().verify)


def chain_row(vocab_size, settings, logits, in_prompt, in_output):
    """p of one row, float32, by the library."""
    counts = TokenCounts(
        in_prompt=jnp.asarray(in_prompt > 0),
        in_output=jnp.asarray(in_output, jnp.int32),
        num_output=jnp.asarray(in_output.sum(), jnp.int32),
    )
    probs, status = _chain(
        sampling_settings(vocab_size, **settings), jnp.asarray(logits), counts
    )
    assert int(status) == 0
    return np.asarray(probs)


def draw_uniforms(rng, shape):
    return (rng.integers(0, 2**24, shape) * 2.0**-24).astype(np.float32)


def make_window(vocab_size, num_drafts, seed):
    """One window: logits, rows by the library's chain, a packet and uniforms."""
    rng = np.random.default_rng([vocab_size, num_drafts, seed])
    settings = random_settings(rng)
    scale = rng.choice([1.0, 3.0, 6.0])
    target_logits = rng.normal(size=(num_drafts + 1, vocab_size)) * scale
    noise = (
        rng.normal(size=(num_drafts, vocab_size)) * scale * rng.choice([0, 0.1, 0.5])
    )
    draft_logits = (target_logits[:-1] + noise).astype(np.float32)
    target_logits = target_logits.astype(np.float32)
    prompt = np.bincount(rng.integers(0, vocab_size, 12), minlength=vocab_size)
    output = np.bincount(rng.integers(0, vocab_size, 12), minlength=vocab_size)

    uniforms = {
        "draft": draw_uniforms(rng, (num_drafts, 2)),
        "gate": draw_uniforms(rng, num_drafts),
        "accept": draw_uniforms(rng, num_drafts),
        "residual": draw_uniforms(rng, 2),
        "pick": draw_uniforms(rng, (num_drafts + 1, 2)),
    }
    for value in uniforms.values():
        extreme = rng.random(value.shape) < 0.05
        value[extreme] = rng.choice([0.0, 1 - 2**-24], int(extreme.sum()))

    threshold = rng.choice([0.0, 0.0, 0.05, 0.3])
    is_soft = rng.random() < 0.25
    limit = rng.integers(0, num_drafts + 1) if rng.random() < 0.3 else num_drafts
    tokens = np.full(num_drafts, -1, np.int32)
    kinds = np.full(num_drafts, _ABSENT, np.int32)
    measure = np.zeros((num_drafts, vocab_size), np.float32)
    probs = np.zeros((num_drafts, vocab_size), np.float32)
    counts = np.tile(output, (num_drafts + 1, 1))
    for row in range(limit):
        q = chain_row(vocab_size, settings, draft_logits[row], prompt, counts[row])
        probs[row] = q
        admit = (q >= np.float32(threshold)).astype(np.float32)
        if is_soft:
            admit = admit * np.float32(0.75)
        token = int(_draw(q, uniforms["draft"][row]))
        measure[row] = _retain(q, admit)
        if not uniforms["gate"][row] < admit[token]:
            kinds[row] = _NULL
            break
        kinds[row], tokens[row] = _OFFERED, token
        counts[row + 1 :, token] += 1
    return {
        "settings": settings,
        "target_logits": target_logits,
        "draft_logits": draft_logits,
        "prompt": prompt,
        "counts": counts,
        "target": np.stack(
            [
                chain_row(vocab_size, settings, target_logits[row], prompt, counts[row])
                for row in range(num_drafts + 1)
            ]
        ),
        "draft": probs,
        "measure": measure,
        "tokens": tokens,
        "kinds": kinds,
        "uniforms": uniforms,
    }


@functools.cache
def windows_of(vocab_size, num_drafts, count):
    return [make_window(vocab_size, num_drafts, seed) for seed in range(count)]


def by_library(window):
    uniforms = window["uniforms"]
    proposal = Proposal(
        tokens=jnp.asarray(window["tokens"]),
        measure=jnp.asarray(window["measure"]),
        kind=jnp.asarray(window["kinds"]),
    )
    target, pick = jnp.asarray(window["target"]), jnp.asarray(uniforms["pick"])
    token_draws = verifiers.TokenDraws(
        accept=jnp.asarray(uniforms["accept"]),
        residual=jnp.asarray(uniforms["residual"]),
        pick=pick,
    )
    for verify, draws in (
        (_token, token_draws),
        (_exact_match, verifiers.ExactMatchDraws(pick=pick)),
    ):
        verdict = verify(draws, target, proposal)
        emitted = int(verdict.num_emitted)
        yield (
            verdict.tokens.tolist()[:emitted],
            int(verdict.num_accepted),
            emitted,
            _SOURCES[Source(int(verdict.source))],
            int(verdict.status) == Status.ZERO_MEASURE_OFFERED,
        )


def by_oracle(window, target=None, measure=None):
    uniforms = window["uniforms"]
    target = window["target"] if target is None else target
    measure = window["measure"] if measure is None else measure
    packet = window["tokens"], window["kinds"]
    yield tuple(
        oracle.oracle_verify_token(
            target,
            measure,
            *packet,
            uniforms["accept"],
            uniforms["residual"],
            uniforms["pick"],
        )
    )
    yield tuple(
        oracle.oracle_verify_exact_match(
            target, *packet, uniforms["pick"], measure=measure
        )
    )


def same_verdicts(window, **changes):
    return list(by_library(window)) == list(by_oracle(window, **changes))


# (a) Verification.


# One program each.
_LONG = {(3, 5), (16, 1), (16, 8), (257, 4), (4096, 8)}


@pytest.mark.parametrize(
    ("vocab_size", "num_drafts", "count"),
    [
        pytest.param(*plan, marks=[pytest.mark.slow] if plan[:2] in _LONG else [])
        for plan in _PLAN
    ],
)
def test_every_decision_equals_the_oracles(vocab_size, num_drafts, count):
    for seed, window in enumerate(windows_of(vocab_size, num_drafts, count)):
        found, wanted = list(by_library(window)), list(by_oracle(window))
        assert found == wanted, (vocab_size, num_drafts, seed)


def test_number_of_rows_compared():
    rows = {"token": 0, "exact_match": 0}
    sources, kinds = set(), set()
    for plan in _PLAN:
        for window in windows_of(*plan):
            for name, verdict in zip(rows, by_oracle(window), strict=True):
                # Each emitted token is one row's decision.
                rows[name] += verdict[2]
                sources.add((name, verdict[3]))
            kinds |= set(window["kinds"].tolist())
    print(f"rows decided: {rows}, windows: {sum(plan[2] for plan in _PLAN)}")
    assert min(rows.values()) >= 432
    assert len(sources) == 6
    assert kinds == {_ABSENT, _OFFERED, _NULL}


def test_a_measure_that_forgets_the_gate_is_seen():
    # The oracle is given q in place of mu: the rule that the gate biases.
    found = [
        same_verdicts(window, measure=window["draft"])
        for plan in _PLAN[:6]
        for window in windows_of(*plan)
    ]
    assert not all(found)


def test_a_target_row_that_is_off_by_little_is_seen():
    found = []
    for plan in _PLAN[:6]:
        for window in windows_of(*plan):
            target = window["target"] * np.float32(0.98) + np.float32(0.02 / plan[0])
            found.append(same_verdicts(window, target=target))
    assert not all(found)


# (b) The whole chain in float64.


def oracle_rows(window, name):
    """p or q of each row in float64, and how far each stands from its cuts."""
    logits = window[f"{name}_logits"]
    for row, found in enumerate(window[name]):
        if not found.any():
            continue  # a draft row that was not made
        text = {
            "prompt_counts": window["prompt"],
            "output_counts": window["counts"][row],
        }
        exact = oracle.oracle_chain(logits[row], **window["settings"], **text)
        cuts = oracle.oracle_chain_cuts(logits[row], **window["settings"], **text)
        # At temperature 0 the argmax decides, too.
        gap = cuts["argmax_gap"] if window["settings"]["temperature"] == 0 else np.inf
        yield row, found, exact, min(cuts["smallest_distance"], gap)


def row_difference(found, exact, distance):
    """None if the rows agree; else a description, if a cut explains it."""
    is_kept, is_kept_exactly = found > 0, exact > 0
    # Below float32's smallest normal number a kept token may have no weight.
    is_tiny = (exact > 0) & (exact < 1e-37)
    differs = (is_kept != is_kept_exactly) & ~is_tiny
    if differs.any():
        assert distance < _BORDER, f"kept tokens differ, nearest cut {distance:.3g}"
        return f"{differs.sum()} kept tokens differ, nearest cut {distance:.3g}"
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6)
    return None


def draw_distance(weights, uniforms):
    """How far the uniforms of a draw stand from a border, relative to the totals."""

    def level(masses, uniform):
        # Borders between one entry with mass and the next.
        has_mass = masses > 0
        running = np.cumsum(masses) / masses.sum()
        borders = running[has_mass][:-1]
        distance = np.abs(borders - uniform).min() if len(borders) else np.inf
        return distance, int(np.argmax((running > uniform) & has_mass))

    blocks = np.pad(weights, (0, -len(weights) % 256)).reshape(-1, 256)
    distance, block = level(blocks.sum(1), uniforms[0])
    return min(distance, level(blocks[block], uniforms[1])[0])


def verdict_difference(window, exact_target, exact_measure):
    """None if the token rule decides alike in float64; else what explains it."""
    (found, _), (wanted, _) = (
        list(by_library(window)),
        list(by_oracle(window, exact_target, exact_measure)),
    )
    if found == wanted:
        return None
    row = min(found[1], wanted[1])
    p, uniforms = exact_target[row], window["uniforms"]
    if found[1] != wanted[1]:
        token = window["tokens"][row]
        distance = abs(uniforms["accept"][row] * exact_measure[row, token] - p[token])
    elif found[3] == "bonus":
        distance = draw_distance(p, uniforms["pick"][row])
    else:
        weights = np.maximum(p - exact_measure[row], 0)
        weights = weights if weights.any() else p
        # A residual is a difference: its error is that of p, relative to its total.
        distance = draw_distance(weights, uniforms["residual"]) * weights.sum()
    assert distance < _BORDER, (found, wanted, distance)
    return f"{found[:2]} for {wanted[:2]}, border at {distance:.3g}"


def test_every_difference_of_the_whole_chain_is_explained():
    listed, num_rows, num_windows = [], 0, 0
    for plan in _PLAN:
        for seed, window in enumerate(windows_of(*plan)):
            exact = {}
            for name in ("target", "draft"):
                exact[name] = window[name].astype(np.float64)
                for row, found, probs, distance in oracle_rows(window, name):
                    num_rows += 1
                    difference = row_difference(found, probs, distance)
                    if difference is None:
                        exact[name][row] = probs
                    else:
                        listed.append((*plan[:2], seed, name, row, difference))
            # The gate's admission as it was: 0, 3/4 or 1.
            admit = np.divide(
                window["measure"],
                window["draft"],
                out=np.zeros_like(window["measure"]),
                where=window["draft"] > 0,
            ).astype(np.float64)
            num_windows += 1
            difference = verdict_difference(
                window, exact["target"], exact["draft"] * np.round(admit, 2)
            )
            if difference is not None:
                listed.append((*plan[:2], seed, "verdict", difference))
    print(f"{num_rows} rows and {num_windows} windows; differences: {len(listed)}")
    for entry in listed:
        print("  ", *entry)
    assert num_rows >= 432


def test_a_cut_at_which_float32_differs_is_listed_and_explained():
    # top_p is put on a running sum, so that only rounding decides.
    rng = np.random.default_rng(0)
    num_listed = 0
    off = {
        "temperature": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    none = np.zeros(257, int)
    for _ in range(40):
        logits = rng.normal(size=(1, 257)).astype(np.float32)
        cuts = oracle.oracle_chain_cuts(logits[0], top_p=1.0, **off)
        top_p = float(np.float32(cuts["cum_before"][rng.integers(20, 200)]))
        settings = {**off, "top_p": top_p}
        found = chain_row(257, settings, logits[0], none, none)
        exact = oracle.oracle_chain(logits[0], **settings)
        distance = oracle.oracle_chain_cuts(logits[0], **settings)["smallest_distance"]
        num_listed += row_difference(found, exact, distance) is not None
    print(f"{num_listed} of 40 rows differ at their cut")
    assert 0 < num_listed < 40


def test_a_draw_at_a_border_differs_and_is_explained():
    # The uniform is put on a running sum, so that only rounding decides.
    rng = np.random.default_rng(1)
    num_listed = 0
    for _ in range(40):
        weights = rng.dirichlet(np.ones(257)).astype(np.float32)
        exact = weights.astype(np.float64)
        first = exact[:256]
        border = np.cumsum(first)[rng.integers(20, 200)] / first.sum()
        pair = np.array([0.0, np.round(border * 2**24) * 2.0**-24], np.float32)
        found = int(_draw(weights, pair))
        wanted = oracle.oracle_draw(exact, *pair)
        if found != wanted:
            num_listed += 1
            assert abs(found - wanted) == 1
            assert draw_distance(exact, pair) < _BORDER
        # Elsewhere no border is near, and nothing differs.
        pair[1] = np.float32(border + exact.max() / 1e3)
        if draw_distance(exact, pair) > _BORDER:
            found = int(_draw(weights, pair))
            assert found == oracle.oracle_draw(exact, *pair)
    print(f"{num_listed} of 40 draws differ at their border")
    assert 0 < num_listed < 40


def test_differences_without_a_cut_are_refused():
    found = np.array([0.5, 0.5, 0.0], np.float32)
    exact = np.array([0.5, 0.5, 0.0])
    assert row_difference(found, exact, np.inf) is None
    with pytest.raises(AssertionError, match="kept tokens differ"):
        row_difference(found, np.array([1.0, 0.0, 0.0]), 1e-3)
    assert "nearest cut" in row_difference(found, np.array([1.0, 0.0, 0.0]), 1e-9)
    # A probability that is off is refused even at a cut.
    with pytest.raises(AssertionError):
        row_difference(np.array([0.6, 0.4, 0.0], np.float32), exact, 1e-9)
    # So is a verdict that is off where no border is near.
    refused = 0
    for window in windows_of(3, 1, 24):
        target = np.roll(window["target"].astype(np.float64), 1, axis=1)
        try:
            verdict_difference(window, target, window["measure"].astype(np.float64))
        except AssertionError:
            refused += 1
    assert refused > 0
