"""Each gate's decision by hand, at its edges, and what a factory refuses."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import Context, gates
from strata_jax._types import GateContext, GateDecision, GateSetting

_ROW = jnp.asarray([0.5, 0.25, 0.125, 0.125], jnp.float32)


def make_context(state=(), row=0):
    return GateContext(
        committed=Context(
            tokens=jnp.zeros(4, jnp.int32), length=jnp.asarray(1, jnp.int32)
        ),
        row=jnp.asarray(row, jnp.int32),
        draft_tokens=jnp.full(2, -1, jnp.int32),
        draft_token_probs=jnp.zeros(2),
        state=state,
    )


def decide(gate, row=_ROW, state=(), **settings):
    settings = {name: jnp.asarray(value, float) for name, value in settings.items()}
    decision = jax.jit(gate.decide)(settings, make_context(state), row)
    assert decision.attempt.shape == ()
    assert decision.admit.shape == row.shape
    assert decision.admit.dtype == row.dtype
    assert decision.go_on.shape == row.shape
    assert decision.go_on.dtype == bool
    return (
        bool(decision.attempt),
        decision.admit.tolist(),
        decision.go_on.tolist(),
    )


_ALL, _EVERY = [1.0] * 4, [True] * 4


def test_always():
    assert decide(gates.always()) == (True, _ALL, _EVERY)
    assert gates.always().settings == {}
    assert gates.always().init() == ()


@pytest.mark.parametrize(
    ("threshold", "admit"),
    [
        (0.0, [1, 1, 1, 1]),
        (0.125, [1, 1, 1, 1]),  # equality admits
        (0.126, [1, 1, 0, 0]),
        (0.25, [1, 1, 0, 0]),
        (0.5, [1, 0, 0, 0]),
        (0.50001, [0, 0, 0, 0]),  # an empty set is legal
        (1.0, [0, 0, 0, 0]),
    ],
)
def test_picked(threshold, admit):
    assert decide(gates.picked(), threshold=threshold) == (True, admit, _EVERY)


def test_picked_admits_a_point_mass_at_threshold_one():
    row = jnp.asarray([0.0, 1.0])
    assert decide(gates.picked(), row, threshold=1.0)[1] == [0, 1]


@pytest.mark.parametrize(
    ("threshold", "attempt"), [(0.0, True), (0.5, True), (0.50001, False), (1.0, False)]
)
def test_top(threshold, attempt):
    assert decide(gates.top(), threshold=threshold) == (attempt, _ALL, _EVERY)


# ln 2 (1/2 * 1 + 1/4 * 2 + 2/8 * 3) = 1.75 ln 2.
@pytest.mark.parametrize(
    ("limit", "attempt"),
    [
        (0.0, False),
        (1.7499 * np.log(2), False),
        (1.7501 * np.log(2), True),
        (np.inf, True),
    ],
)
def test_entropy(limit, attempt):
    assert decide(gates.entropy(), max_entropy=limit) == (attempt, _ALL, _EVERY)


def test_entropy_of_a_point_mass_is_zero():
    row = jnp.asarray([0.0, 1.0, 0.0])
    assert decide(gates.entropy(), row, max_entropy=0.0)[0] is True


@pytest.mark.parametrize(
    ("threshold", "go_on"),
    [
        (0.0, [True] * 4),
        (0.125, [True] * 4),
        (0.25, [True, True, False, False]),
        (0.3, [True, False, False, False]),
        (1.0, [False] * 4),
    ],
)
def test_include_then_stop(threshold, go_on):
    found = decide(gates.include_then_stop(), threshold=threshold)
    assert found == (True, _ALL, go_on)


def test_soft():
    gate = gates.soft(
        lambda settings, context, probs: jnp.sqrt(probs) * settings["scale"],
        settings={"scale": GateSetting(0.5, 0.0, 1.0)},
    )
    attempt, admit, go_on = decide(gate, jnp.asarray([0.25, 0.5625, 0.1875]), scale=0.5)
    assert attempt and all(go_on)
    np.testing.assert_allclose(admit, [0.25, 0.375, 0.5 * 0.1875**0.5], rtol=1e-6)
    assert gate.settings["scale"].default == 0.5


def test_all_of_joins_its_parts():
    both = gates.all_of(
        gates.picked(setting="least"),
        gates.top(setting="peak"),
        gates.include_then_stop(setting="stop"),
        gates.soft(lambda settings, context, probs: jnp.full_like(probs, 0.5)),
    )
    assert set(both.settings) == {"least", "peak", "stop"}
    numbers = {"least": 0.2, "peak": 0.5, "stop": 0.3}
    wanted = (True, [0.5, 0.5, 0, 0], [True, False, False, False])
    assert decide(both, state=both.init(), **numbers) == wanted
    numbers["peak"] = 0.6
    assert decide(both, state=both.init(), **numbers)[0] is False


def test_all_of_multiplies_admissions_and_joins_stops():
    halves = gates.soft(lambda settings, context, probs: jnp.full_like(probs, 0.5))
    both = gates.all_of(halves, halves)
    assert decide(both, state=both.init()) == (True, [0.25] * 4, _EVERY)
    stops = gates.all_of(
        gates.include_then_stop(setting="one"), gates.include_then_stop(setting="two")
    )
    found = decide(stops, state=stops.init(), one=0.2, two=0.4)
    assert found[2] == [True, False, False, False]


def counting_gate(name, step):
    """Attempts once its own state has reached a number; counts `step` a window."""

    def decide(settings, context, probs):
        return GateDecision(
            attempt=context.state >= settings[name],
            admit=jnp.ones_like(probs),
            go_on=probs >= 0,
        )

    return gates.gate(
        decide,
        settings={name: GateSetting(None, 0.0, 100.0)},
        init=lambda: jnp.zeros(()),
        update=lambda state, proposal, verdict: state + step,
    )


def test_all_of_keeps_the_states_of_its_parts_apart():
    both = gates.all_of(counting_gate("one", 1.0), counting_gate("two", 10.0))
    state = both.init()
    for windows, attempt in ((0, False), (1, False), (2, True)):
        assert [float(part) for part in state] == [windows, 10.0 * windows]
        found = decide(both, state=state, one=2.0, two=15.0)
        assert found[0] is attempt
        state = both.update(state, None, None)


def test_all_of_can_be_nested():
    inner = gates.all_of(gates.picked(), counting_gate("count", 1.0))
    outer = gates.all_of(inner, gates.top(setting="peak"))
    numbers = {"threshold": 0.25, "count": 0.0, "peak": 0.5}
    found = decide(outer, state=outer.init(), **numbers)
    assert found == (True, [1, 1, 0, 0], _EVERY)


def test_all_of_refuses_two_settings_of_one_name():
    with pytest.raises(ValueError, match=r"share the setting 'threshold'.*setting="):
        gates.all_of(gates.picked(), gates.top())
    gates.all_of(gates.picked(), gates.top(setting="top_threshold"))
    with pytest.raises(ValueError, match=r"always\(\)"):
        gates.all_of()


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.1, float("inf"), "low"])
@pytest.mark.parametrize("factory", [gates.picked, gates.top, gates.include_then_stop])
def test_thresholds_out_of_range(factory, value):
    with pytest.raises(ValueError, match="threshold must be"):
        factory(value)
    with pytest.raises(ValueError, match="level must be"):
        factory(value, setting="level")


@pytest.mark.parametrize("value", [0.0, 1.0, 0.3, None])
@pytest.mark.parametrize("factory", [gates.picked, gates.top, gates.include_then_stop])
def test_thresholds_in_range(factory, value):
    assert factory(value).settings == {"threshold": GateSetting(value, 0.0, 1.0)}


@pytest.mark.parametrize("value", [float("nan"), -0.1, -float("inf")])
def test_entropies_out_of_range(value):
    with pytest.raises(ValueError, match="max_entropy must be"):
        gates.entropy(value)


def test_a_custom_setting_is_checked():
    with pytest.raises(ValueError, match=r"level must be in \[0, 2\]"):
        gates.gate(
            gates.always().decide, settings={"level": GateSetting(3.0, 0.0, 2.0)}
        )
    with pytest.raises(ValueError, match=r"level must be in \[0, 2\]"):
        gates.soft(lambda *_: _ROW, settings={"level": GateSetting(-1.0, 0.0, 2.0)})


def test_no_gate_is_shown_the_draw():
    # Contract G1 by construction: neither the arguments nor the context hold it.
    names = set(inspect.signature(gates.always().decide).parameters)
    assert names == {"settings", "context", "draft_probs"}
    assert set(GateContext.__dataclass_fields__) == {
        "committed",
        "row",
        "draft_tokens",
        "draft_token_probs",
        "state",
    }
