"""Every known-biased rule is seen to be biased, by the check that our rules pass."""

import functools
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law_checks import (
    Bench,
    Case,
    assert_laws_are_targets,
    decoder_for,
    gate_settings,
    library_bench,
    one_instance,
    tolerance,
    total_variation,
)
from moe_weights import quick_compilation

import strata_jax as strata
from strata_jax import gates
from strata_jax.audit import negative_controls

# The rows of the worked values; a third token may have no mass.
EVEN, SKEWED = (0.5, 0.5, 0.0), (0.875, 0.125, 0.0)
UNEVEN = (0.6, 0.3, 0.1)


def by_hindsight(tokens):
    """Two rows if the first token is 0, else none."""
    return jnp.where(tokens[0] == 0, 2, 0)


def admits_only_zero_at_first():
    """The exact form of `by_hindsight`: only token 0 passes row 0."""

    def admission(settings, context, draft_probs):
        del settings
        is_zero = jnp.arange(draft_probs.shape[0], dtype=jnp.int32) == 0
        return (is_zero | (context.row > 0)).astype(draft_probs.dtype)

    return gates.soft(admission)


class Control(NamedTuple):
    name: str
    wrap: object  # drafter -> drafter; or decoder -> decoder
    target: tuple[float, ...]  # p, of every row
    draft: tuple[float, ...]  # q, of every row
    law: tuple[float, ...]  # worked by hand
    bound: float  # what the total variation exceeds
    picked: float | None = None  # threshold of the gate, where there is one
    num_draft_tokens: int = 1


def unaccounted(inner):
    return negative_controls.unaccounted_gate(inner, 0.5)


def ungated(inner):
    return negative_controls.ungated_residual(inner, 0.5)


def hindsight(inner):
    return negative_controls.hindsight_cut(inner, by_hindsight)


def cut_to_nothing(inner):
    return negative_controls.budget_cut_after_draw(inner, 0)


def suffix_at_zero(inner):
    return negative_controls.draw_dependent_suffix(inner, 0)


CONTROLS = [
    # 0 is accepted (.5) or rejected (.375) to 1; 1 is dropped (.125) to p.
    Control("unaccounted_gate", unaccounted, EVEN, SKEWED, (0.5625, 0.4375, 0), 0.06),
    # 0 is accepted (.6); the rest (.4) is dropped to p.
    Control(
        "unaccounted_gate, p = q",
        unaccounted,
        UNEVEN,
        UNEVEN,
        (0.84, 0.12, 0.04),
        0.23,
    ),
    # 0 is accepted (.2) or rejected (.4) to (p - q)+ = (0, .3, .1); .4 goes to p.
    Control(
        "unaccounted_gate, three tokens",
        unaccounted,
        (0.2, 0.5, 0.3),
        (0.6, 0.2, 0.2),
        (0.28, 0.5, 0.22),
        0.07,
    ),
    # The same, but rejections go to (p - mu)+ = (0, .5, .3).
    Control(
        "mixed_repair",
        negative_controls.mixed_repair,
        (0.2, 0.5, 0.3),
        (0.6, 0.2, 0.2),
        (0.28, 0.45, 0.27),
        0.07,
        picked=0.5,
    ),
    # 0 is accepted (.2); rejections (.4) and NULL (.4) go to (p - q)+ = (0, .3, .1).
    Control(
        "ungated_residual",
        ungated,
        (0.2, 0.5, 0.3),
        (0.6, 0.2, 0.2),
        (0.2, 0.6, 0.2),
        0.09,
    ),
    # 0 is drafted, accepted with .5 / .6, and rejected to (p - q)+ = (0, 0, .1).
    Control(
        "argmax_with_soft_measure",
        negative_controls.argmax_with_soft_measure,
        (0.5, 0.3, 0.2),
        UNEVEN,
        (5 / 6, 0.0, 1 / 6),
        0.33,
    ),
    # 0 (.5) is kept and accepted; 1 (.5) is cut to p = (.7, .3).
    Control(
        "hindsight_cut",
        hindsight,
        (0.7, 0.3, 0.0),
        EVEN,
        (0.85, 0.15, 0.0),
        0.14,
        num_draft_tokens=2,
    ),
    # 0 (.875) is cut to p; 1 (.125) is NULL and goes to (p - mu)+ = (0, .5).
    Control(
        "budget_cut_after_draw",
        cut_to_nothing,
        EVEN,
        SKEWED,
        (0.4375, 0.5625, 0.0),
        0.06,
        picked=0.5,
    ),
    # 0 (.5) is accepted with .5 / 1, else (p - onehot)+ = (0, .5); 1 is accepted.
    Control("draw_dependent_suffix", suffix_at_zero, EVEN, EVEN, (0.25, 0.75, 0), 0.24),
    # Rejected (.8) are u < .5 only; the residual (0, .875, .125) gives 1 for all of
    # them, where .05 should go to 2.
    Control(
        "shared_draft_and_residual_key",
        negative_controls.shared_draft_and_residual_key,
        (0.1, 0.6, 0.3),
        (0.5, 0.25, 0.25),
        (0.1, 0.65, 0.25),
        0.04,
    ),
    # Rejected (.75) are u < .8 only; the residual is 1 for u < 1/3, 2 above:
    # .75 / 3 + .1 and .75 * (.8 - 1/3) + .1.
    Control(
        "shared_draft_and_residual_key, border inside",
        negative_controls.shared_draft_and_residual_key,
        (0.2, 0.3, 0.5),
        (0.8, 0.1, 0.1),
        (0.2, 0.35, 0.45),
        0.04,
    ),
]


@functools.cache
def biased_bench(wrap, num_draft_tokens: int, picked: float | None) -> Bench:
    gate = gates.always() if picked is None else gates.picked(picked)
    if wrap is negative_controls.shared_draft_and_residual_key:
        return Bench(wrap(decoder_for(3, num_draft_tokens, gate=gate)))
    return Bench(decoder_for(3, num_draft_tokens, gate=gate, control=wrap))


def table(row):
    return np.tile(np.asarray(row, np.float64), (len(row), 1))


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_control_is_biased_as_worked_by_hand(control):
    case = Case(control.name, table(control.target), table(control.draft))
    biased = biased_bench(control.wrap, control.num_draft_tokens, control.picked)
    with quick_compilation():
        law = biased.first_tokens([case]).laws[0]
    distance = total_variation(law, control.target)
    row = ", ".join(f"{mass:.6f}" for mass in law)
    print(f"\n{control.name:45s} total variation {distance:.6f}, law ({row})")
    np.testing.assert_allclose(law, control.law, rtol=0, atol=tolerance())
    assert distance > control.bound
    # The same check: fails on the control, passes on the library's rule.
    with pytest.raises(AssertionError, match="1 of 1 laws are not the target's"):
        assert_laws_are_targets(biased, [case])
    own = library_bench(3, control.num_draft_tokens, "token")
    name = "always" if control.picked is None else "picked"
    settings = gate_settings(name, control.picked or 0.0, 3)
    assert_laws_are_targets(own, [case._replace(settings=settings)])


def test_every_control_is_tested():
    public = {name for name in vars(negative_controls) if not name.startswith("_")}
    defined = {
        name
        for name in public
        if getattr(vars(negative_controls)[name], "__module__", None)
        == negative_controls.__name__
    }
    assert defined == {control.name.split(",")[0] for control in CONTROLS}


def test_hindsight_in_its_exact_form():
    # mu_1 = (.5, 0), then q: accepted .5, and then sum min(p, q) = .8 more.
    bench = Bench(decoder_for(2, 2, gate=admits_only_zero_at_first()))
    case = Case("hindsight as a gate", table((0.7, 0.3)), table((0.5, 0.5)))
    with quick_compilation():
        first = bench.first_tokens([case])
    np.testing.assert_allclose(first.laws[0], (0.7, 0.3), rtol=0, atol=tolerance())
    np.testing.assert_allclose(first.num_accepted, [0.9], rtol=0, atol=tolerance())
    assert_laws_are_targets(bench, [case], num_tokens=3)


def test_unaccounted_gate_follows_its_closed_form():
    # With p = q it emits g q + (1 - sum(g q)) q.
    rng = np.random.default_rng(7)
    rows = [rng.dirichlet(np.ones(3)) for _ in range(24)]
    cases = [Case(f"row {i}", table(row), table(row)) for i, row in enumerate(rows)]
    laws = biased_bench(unaccounted, 1, None).first_tokens(cases).laws
    num_biased = 0
    for row, law in zip(rows, laws, strict=True):
        kept = row * (row >= 0.5)
        expected = kept + (1 - kept.sum()) * row
        np.testing.assert_allclose(law, expected, rtol=0, atol=tolerance())
        num_biased += total_variation(law, row) > 0.01
    # It is unbiased where the gate is constant on the row: no entry reaches .5.
    assert num_biased == sum(row.max() >= 0.5 for row in rows) > 10


def test_shared_key_holds_for_derived_draws():
    own = decoder_for(3, 1)
    decoder = negative_controls.shared_draft_and_residual_key(own)
    case = Case("derived", table((0.1, 0.6, 0.3)), table((0.5, 0.25, 0.25)))
    params, state = one_instance(decoder, case)

    def derived(decoder):
        # Only the draws are asked for, so little else is compiled.
        return jax.jit(lambda *args: decoder.step(*args)[1].draws)(params, state)

    draws, own_draws = derived(decoder), derived(own)
    np.testing.assert_array_equal(draws.verifier.residual, draws.draft[0])
    np.testing.assert_array_equal(draws.draft, own_draws.draft)
    np.testing.assert_array_equal(draws.verifier.pick, own_draws.verifier.pick)
    assert (own_draws.verifier.residual != own_draws.draft[0]).any()


def test_controls_refuse_what_they_cannot_wrap():
    drafter = strata.drafters.scripted(np.eye(3), num_draft_tokens=1)
    for control in (
        negative_controls.unaccounted_gate,
        negative_controls.ungated_residual,
    ):
        for threshold in (-0.1, 1.1, float("nan")):
            with pytest.raises(ValueError, match="threshold"):
                control(drafter, threshold)
    with pytest.raises(ValueError, match="num_rows"):
        negative_controls.budget_cut_after_draw(drafter, -1)
    with pytest.raises(ValueError, match="root"):
        negative_controls.draw_dependent_suffix(drafter, -1)
    with pytest.raises(ValueError, match="vocab_size"):
        negative_controls.argmax_with_soft_measure(drafter._replace(vocab_size=None))
    with pytest.raises(ValueError, match="drafts nothing"):
        negative_controls.shared_draft_and_residual_key(decoder_for(3, 0))
    exact_match = decoder_for(3, 1, verifier=strata.verifiers.exact_match())
    control = negative_controls.shared_draft_and_residual_key(exact_match)
    case = Case("no residual", table(UNEVEN), table(UNEVEN))
    with pytest.raises(ValueError, match="no residual"):
        Bench(control).instances([case])


def test_nothing_imports_the_controls():
    code = (
        "import sys, strata_jax, strata_jax.audit\n"
        "assert 'strata_jax.audit.negative_controls' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
