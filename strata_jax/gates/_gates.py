"""Gates: rules that admit draft tokens without seeing the draw (contract G1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax._sums import halving_sum
from strata_jax._types import Gate, GateContext, GateDecision, GateFn, GateSetting


def gate(
    decide: GateFn,
    *,
    settings: Mapping[str, GateSetting] | None = None,
    init: Callable[[], Any] = tuple,
    update: Callable[[Any, Any, Any], Any] = lambda state, proposal, verdict: state,
) -> Gate:
    """Builds a gate from a decision function.

    Args:
      decide: (settings, context, draft_probs `[V]`) -> GateDecision.
      settings: names of the traced numbers that `decide` reads, with their ranges.
      init: () -> the gate's own state at the start of a request.
      update: (state, proposal, verdict) -> state, after every window.

    Returns:
      The gate.

    Raises:
      ValueError: if a default lies outside its range.

    Exactness: law-exact under every verifier, provided `decide` is a function of its
      arguments; `strata_jax.testing.check_gate` tests that.
    """
    settings = dict(settings or {})
    for name, setting in settings.items():
        if setting.default is not None:
            _checks.check_number(
                name, setting.default, setting.minimum, setting.maximum
            )
    return Gate(decide=decide, settings=settings, init=init, update=update)


def always() -> Gate:
    """Admits everything: ordinary speculative sampling.

    Returns:
      The gate; it has no settings.

    Exactness: law-exact.
    """

    def decide(
        settings: Mapping[str, jax.Array], context: GateContext, draft_probs: jax.Array
    ) -> GateDecision:
        del settings, context
        return _decision(draft_probs)

    return gate(decide)


def picked(threshold: float | None = None, *, setting: str = "threshold") -> Gate:
    """Admits the tokens of draft probability at least t: {x : q(x) >= t}.

    The accounted form of "drop the drawn token if its probability is below t". With
    t = 0 it is `always`.

    Args:
      threshold: t in [0, 1], a request's default; None makes it obligatory there.
      setting: the name by which requests give t.

    Returns:
      The gate.

    Raises:
      ValueError: if `threshold` is NaN or outside [0, 1].

    Exactness: law-exact; the dropped mass becomes a NULL row.
    """

    def decide(
        settings: Mapping[str, jax.Array], context: GateContext, draft_probs: jax.Array
    ) -> GateDecision:
        del context
        admit = draft_probs >= settings[setting].astype(draft_probs.dtype)
        return _decision(draft_probs, admit=admit)

    return gate(decide, settings={setting: GateSetting(threshold, 0.0, 1.0)})


def top(threshold: float | None = None, *, setting: str = "threshold") -> Gate:
    """Attempts a row iff its largest draft probability is at least t.

    Args:
      threshold: t in [0, 1], a request's default; None makes it obligatory there.
      setting: the name by which requests give t.

    Returns:
      The gate.

    Raises:
      ValueError: if `threshold` is NaN or outside [0, 1].

    Exactness: law-exact; decided before the draw, so a failed row is ABSENT.
    """

    def decide(
        settings: Mapping[str, jax.Array], context: GateContext, draft_probs: jax.Array
    ) -> GateDecision:
        del context
        attempt = jnp.max(draft_probs) >= settings[setting].astype(draft_probs.dtype)
        return _decision(draft_probs, attempt=attempt)

    return gate(decide, settings={setting: GateSetting(threshold, 0.0, 1.0)})


def entropy(max_entropy: float | None = None, *, setting: str = "max_entropy") -> Gate:
    """Attempts a row iff its draft entropy is at most a limit, in nats.

    Args:
      max_entropy: the limit, at least 0, a request's default; None makes it
        obligatory there. ln(V) or more is `always`.
      setting: the name by which requests give the limit.

    Returns:
      The gate.

    Raises:
      ValueError: if `max_entropy` is NaN or negative.

    Exactness: law-exact; decided before the draw, so a failed row is ABSENT.

    References:
      Agrawal et al., `AdaEDL: Early Draft Stopping for Speculative Decoding
      <https://arxiv.org/abs/2410.18351>`_, 2024 (a bound on the same statistic).
    """

    def decide(
        settings: Mapping[str, jax.Array], context: GateContext, draft_probs: jax.Array
    ) -> GateDecision:
        del context
        is_positive = draft_probs > 0
        safe = jnp.where(is_positive, draft_probs, jnp.ones_like(draft_probs))
        nats = -halving_sum(jnp.where(is_positive, safe * jnp.log(safe), 0))
        limit = settings[setting].astype(draft_probs.dtype)
        return _decision(draft_probs, attempt=nats <= limit)

    setting_range = GateSetting(max_entropy, 0.0, float("inf"))
    return gate(decide, settings={setting: setting_range})


def include_then_stop(
    threshold: float | None = None, *, setting: str = "threshold"
) -> Gate:
    """Offers every drawn token, and stops after one of probability below t.

    Args:
      threshold: t in [0, 1], a request's default; None makes it obligatory there.
      setting: the name by which requests give t.

    Returns:
      The gate.

    Raises:
      ValueError: if `threshold` is NaN or outside [0, 1].

    Exactness: law-exact; the doubtful token is itself offered, so no mass is missing.
    """

    def decide(
        settings: Mapping[str, jax.Array], context: GateContext, draft_probs: jax.Array
    ) -> GateDecision:
        del context
        go_on = draft_probs >= settings[setting].astype(draft_probs.dtype)
        return _decision(draft_probs, go_on=go_on)

    return gate(decide, settings={setting: GateSetting(threshold, 0.0, 1.0)})


def soft(
    admission: Callable[[Mapping[str, jax.Array], GateContext, jax.Array], jax.Array],
    *,
    settings: Mapping[str, GateSetting] | None = None,
) -> Gate:
    """Admits each token with a probability of its own, decided by the gate's coin.

    Args:
      admission: (settings, context, draft_probs `[V]`) -> `[V]` float in [0, 1], g.
      settings: names of the traced numbers that `admission` reads.

    Returns:
      The gate. At run time a value outside [0, 1] sets `Status.INVALID_GATE`.

    Raises:
      ValueError: if a default lies outside its range.

    Exactness: law-exact for any g; the measure is q * g.
    """

    def decide(
        settings: Mapping[str, jax.Array], context: GateContext, draft_probs: jax.Array
    ) -> GateDecision:
        admit = admission(settings, context, draft_probs)
        return _decision(draft_probs, admit=admit)

    return gate(decide, settings=settings)


def all_of(*gates: Gate) -> Gate:
    """Combines gates: attempts if all do, admits the product, goes on if all do.

    Args:
      *gates: at least one gate; settings of the same name would be one number, so
        they must be told apart with `setting=`.

    Returns:
      The gate.

    Raises:
      ValueError: if there is no gate, or two share the name of a setting.

    Exactness: law-exact, as each of its parts is.
    """
    if not gates:
        raise ValueError("gates must hold at least one gate; use always() for none")
    settings: dict[str, GateSetting] = {}
    for part in gates:
        for name, setting in part.settings.items():
            if name in settings:
                raise ValueError(
                    f"two gates share the setting {name!r}: give one another name, "
                    f'as in picked(setting="picked_{name}")'
                )
            settings[name] = setting

    def decide(
        settings: Mapping[str, jax.Array], context: GateContext, draft_probs: jax.Array
    ) -> GateDecision:
        combined = _decision(draft_probs)
        for part, state in zip(gates, context.state, strict=True):
            own = dataclasses.replace(context, state=state)
            decision = part.decide(settings, own, draft_probs)
            combined = GateDecision(
                attempt=combined.attempt & decision.attempt,
                admit=combined.admit * decision.admit,
                go_on=combined.go_on & decision.go_on,
            )
        return combined

    def init() -> tuple[Any, ...]:
        return tuple(part.init() for part in gates)

    def update(states: tuple[Any, ...], proposal: Any, verdict: Any) -> tuple[Any, ...]:
        return tuple(
            part.update(state, proposal, verdict)
            for part, state in zip(gates, states, strict=True)
        )

    return gate(decide, settings=settings, init=init, update=update)


def _decision(
    draft_probs: jax.Array,
    *,
    attempt: jax.Array | None = None,
    admit: jax.Array | None = None,
    go_on: jax.Array | None = None,
) -> GateDecision:
    everything = jnp.ones_like(draft_probs)
    if admit is None:
        admit = everything
    return GateDecision(
        attempt=jnp.asarray(True) if attempt is None else attempt,
        admit=admit.astype(draft_probs.dtype),
        go_on=everything > 0 if go_on is None else go_on,
    )
