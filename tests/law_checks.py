"""What the tests of the law share: instances, and the check that all rules must pass.

The check is the same for the library's own rules and for the biased ones of
`strata_jax.audit.negative_controls`, so that it is seen to fail on the latter.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

import strata_jax as strata
from strata_jax import audit, gates
from strata_jax._types import GateSetting
from strata_jax.targets import TabularParams

MAX_LENGTH = 10
"""Room for a context, three tokens across windows, and K = 3 drafts."""

_NUM_PARAMS = 1024


def tolerance() -> float:
    """The largest gap of a probability: contract V1."""
    return 1e-12 if jax.config.jax_enable_x64 else 1e-6


@flax.struct.dataclass
class DraftParams:
    """A draft table, and whether the drafter has anything to say."""

    table: TabularParams
    is_available: jax.Array  # [] bool


class Case(NamedTuple):
    """One instance: a target table, a draft table and the gate's settings."""

    label: str
    target: np.ndarray  # [V, V], p after each token
    draft: np.ndarray  # [V, V], q after each token
    settings: dict[str, float] = {}  # noqa: RUF012
    is_available: bool = True

    def key(self) -> tuple:
        """What makes two instances distinct."""
        settings = tuple(sorted(self.settings.items()))
        tables = self.target.tobytes(), self.draft.tobytes()
        return (*tables, settings, self.is_available)


class FirstTokens(NamedTuple):
    """What one window of every instance does, summed over its cells."""

    laws: np.ndarray  # [N, V], of the first emitted token
    num_accepted: np.ndarray  # [N], expected
    num_emitted: np.ndarray  # [N], expected
    kind_mass: np.ndarray  # [N, K, 3], probability of each row kind


def logits(table: np.ndarray) -> TabularParams:
    with np.errstate(divide="ignore"):
        return TabularParams(logits=np.log(table).astype(jnp.result_type(float)))


@functools.cache
def _chain(vocab_size: int):
    zero = jnp.zeros((), jnp.int32)
    counts = strata.sampling.count_tokens(
        jnp.zeros(1, jnp.int32), zero, zero, vocab_size
    )
    settings = strata.sampling.sampling_settings(vocab_size)
    return jax.jit(
        lambda logits: strata.sampling.chain_probs(settings, logits, counts)[0]
    )


def chain_row(row: np.ndarray) -> np.ndarray:
    """The row as the sampling chain makes it from its logits, to place exact ties."""
    return np.asarray(_chain(len(row))(logits(row).logits))


def table_drafter(vocab_size: int, num_draft_tokens: int):
    """`drafters.model` over a table, for `DraftParams`: it can also be unavailable."""
    inner = strata.drafters.model(
        strata.targets.tabular(vocab_size, max_length=MAX_LENGTH),
        num_draft_tokens=num_draft_tokens,
        select_params=lambda params: params.table,
    )

    def propose(params, state, context, offer):
        def offer_available(row_fn, carry):
            def available_row(carry, step):
                carry, row = row_fn(carry, step)
                is_available = row.is_available & params.is_available
                return carry, row._replace(is_available=is_available)

            return offer(available_row, carry)

        return inner.propose(params, state, context, offer_available)

    return inner._replace(propose=propose)


def decoder_for(
    vocab_size: int,
    num_draft_tokens: int,
    *,
    gate=None,
    verifier=None,
    draft_rule: str | None = None,
    control=lambda drafter: drafter,
):
    """A decoder over tables; `control` wraps its drafter."""
    drafter = None
    if num_draft_tokens:
        drafter = control(table_drafter(vocab_size, num_draft_tokens))
    return strata.speculative_decoder(
        strata.targets.tabular(vocab_size, max_length=MAX_LENGTH),
        drafter,
        gate,
        strata.verifiers.token() if verifier is None else verifier,
        draft_rule=draft_rule,
    )


def one_of(named_gates):
    """Puts gates into one compiled program: the setting `gate` says which decides.

    Every gate's own `decide` runs; nothing of it is repeated here.
    """
    parts = list(named_gates.values())
    settings = {"gate": GateSetting(0.0, 0.0, float(len(parts) - 1))}
    for part in parts:
        assert not set(settings) & set(part.settings)
        settings |= part.settings

    def decide(settings, context, draft_probs):
        decisions = [
            part.decide(settings, context.replace(state=state), draft_probs)
            for part, state in zip(parts, context.state, strict=True)
        ]
        index = settings["gate"].astype(jnp.int32)
        return jax.tree.map(lambda leaf: leaf[index], audit.stack(decisions))

    def update(states, proposal, verdict):
        return tuple(
            part.update(state, proposal, verdict)
            for part, state in zip(parts, states, strict=True)
        )

    return gates.gate(
        decide,
        settings=settings,
        init=lambda: tuple(part.init() for part in parts),
        update=update,
    )


def _given(settings, context, draft_probs):
    """g as the settings g0, g1, ... say."""
    del context
    numbers = [settings[f"g{x}"] for x in range(draft_probs.shape[0])]
    return jnp.stack(numbers).astype(draft_probs.dtype)


def library_gates(vocab_size: int):
    """All gates of the library, each with names of its own for its settings."""
    return {
        "always": gates.always(),
        "picked": gates.picked(0.5, setting="picked"),
        "top": gates.top(0.5, setting="top"),
        "entropy": gates.entropy(0.5, setting="max_entropy"),
        "include_then_stop": gates.include_then_stop(0.5, setting="stop_below"),
        # Strictly inside (0, 1) where q is positive, and 0 or 1 at its ends.
        "soft_ratio": gates.soft(lambda settings, context, q: q / (q + 0.25)),
        "soft_complement": gates.soft(lambda settings, context, q: 1 - q),
        "soft_given": gates.soft(
            _given,
            settings={f"g{x}": GateSetting(1.0, 0.0, 1.0) for x in range(vocab_size)},
        ),
        "picked_and_top": gates.all_of(
            gates.picked(0.5, setting="top_picked"),
            gates.top(0.5, setting="picked_top"),
        ),
        "picked_and_stop": gates.all_of(
            gates.picked(0.5, setting="stop_picked"),
            gates.include_then_stop(0.5, setting="picked_stop"),
        ),
    }


GATE_NAMES = tuple(library_gates(2))


def gate_settings(name: str, threshold: float, vocab_size: int) -> dict[str, float]:
    """The settings that give a gate this threshold."""
    own = {
        "picked": {"picked": threshold},
        "top": {"top": threshold},
        # The higher the threshold, the less entropy is let pass.
        "entropy": {"max_entropy": (1 - threshold) * math.log(vocab_size)},
        "include_then_stop": {"stop_below": threshold},
        "soft_given": {f"g{x}": threshold for x in range(vocab_size)},
        "picked_and_top": {"top_picked": threshold, "picked_top": threshold},
        "picked_and_stop": {"stop_picked": threshold / 2, "picked_stop": threshold},
    }
    return {"gate": float(GATE_NAMES.index(name)), **own.get(name, {})}


VERIFIERS = {
    "token": (strata.verifiers.token, "sample"),
    "exact_match, argmax": (strata.verifiers.exact_match, "argmax"),
    "exact_match, sample": (strata.verifiers.exact_match, "sample"),
}


@functools.cache
def library_bench(vocab_size: int, num_draft_tokens: int, verifier: str) -> "Bench":
    """The library's own rule with any of its gates, compiled once for all tests."""
    make_verifier, draft_rule = VERIFIERS[verifier]
    return Bench(
        decoder_for(
            vocab_size,
            num_draft_tokens,
            gate=one_of(library_gates(vocab_size)),
            verifier=make_verifier(),
            draft_rule=draft_rule,
        )
    )


class Bench:
    """A decoder with its enumerator, which compiles once for all instances."""

    def __init__(self, decoder, *, batch_size: int = 512):
        self.decoder = decoder
        self._batch_size = batch_size
        self._enumerator = None

    def instances(self, cases, context=(0,), **request) -> tuple[Any, Any]:
        """Stacked params and states of the cases, on the host, keys as their data."""
        # The number of params is part of the compiled program: keep it the same.
        padding = [cases[0]] * (-len(cases) % _NUM_PARAMS)
        padded = [*cases, *padding]
        params = strata.Params(
            target=logits(np.stack([case.target for case in padded])),
            drafter=DraftParams(
                table=logits(np.stack([case.draft for case in padded])),
                is_available=np.array([case.is_available for case in padded]),
            ),
        )
        one = jax.tree.map(lambda leaf: leaf[0], params)
        first = cases[0].settings
        state = self.decoder.init(one, list(context), **first, **request)
        if self._enumerator is None:
            self._enumerator = audit.WindowEnumerator(
                self.decoder, one, state, batch_size=self._batch_size
            )
        # A table's cache is the text alone, so the states differ in the gate's numbers
        # only, and one `init` serves all cases.
        states = jax.tree.map(
            lambda leaf: np.repeat(leaf[None], len(cases), axis=0),
            audit.host_states(state),
        )
        numbers = {
            name: np.array(
                [case.settings.get(name, default) for case in cases], default.dtype
            )
            for name, default in states.settings.gate.items()
            for default in [np.asarray(state.settings.gate[name])]
        }
        return params, states.replace(settings=states.settings.replace(gate=numbers))

    @property
    def enumerator(self) -> audit.WindowEnumerator:
        assert self._enumerator is not None
        return self._enumerator

    def cells(self, cases, context=(0,), **request) -> audit.WindowCells:
        params, states = self.instances(cases, context, **request)
        return self.enumerator.cells(params, states, np.arange(len(cases)))

    def sequence_laws(self, cases, num_tokens, context=(0,), **request):
        """Laws of several tokens; a request that failed gives too short sequences."""
        params, states = self.instances(cases, context, **request)
        return audit.sequence_laws(
            self.decoder, params, states, num_tokens, enumerator=self.enumerator
        )

    def first_tokens(self, cases, context=(0,), **request) -> FirstTokens:
        """One window of every case; a status bit or a lost cell is an error."""
        cells = self.cells(cases, context, **request)
        owner, volume = cells.state_index, cells.volume
        num_cases = len(cases)
        vocab_size = cases[0].target.shape[-1]

        def total(weights: np.ndarray) -> np.ndarray:
            return np.bincount(owner, weights=weights, minlength=num_cases)

        np.testing.assert_allclose(total(volume), 1.0, rtol=0, atol=1e-13)
        assert not cells.states.status.any(), "a status bit is set"
        assert (cells.tokens[:, 0] >= 0).all(), "a window emitted nothing"
        num_emitted = (cells.tokens >= 0).sum(axis=1)
        laws = [total(volume * (cells.tokens[:, 0] == x)) for x in range(vocab_size)]
        kinds = [
            [total(volume * (kind == value)) for value in range(3)]
            for kind in cells.kind.T
        ]
        return FirstTokens(
            laws=np.stack(laws, axis=1),
            num_accepted=total(volume * cells.num_accepted),
            num_emitted=total(volume * num_emitted),
            kind_mass=np.moveaxis(np.array(kinds).reshape(-1, 3, num_cases), 2, 0),
        )


def one_instance(decoder, case: Case, context=(0,)) -> tuple[Any, Any]:
    """Params and state of one case, as a user has them."""
    params = strata.Params(
        target=logits(case.target),
        drafter=DraftParams(
            table=logits(case.draft), is_available=np.array(case.is_available)
        ),
    )
    params = jax.tree.map(jnp.asarray, params)
    return params, decoder.init(params, list(context), **case.settings)


def total_variation(law: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(np.asarray(law) - np.asarray(reference)).sum() / 2)


def assert_laws_are_targets(
    bench: Bench, cases, *, context=(0,), num_tokens: int = 1, **request
) -> None:
    """Fails unless every case emits its target's law, and names those that do not."""
    references = [audit.markov_law(case.target, context, num_tokens) for case in cases]
    if num_tokens == 1:
        rows = bench.first_tokens(cases, context, **request).laws
        laws = [{(x,): float(row[x]) for x in range(len(row))} for row in rows]
    else:
        laws = bench.sequence_laws(cases, num_tokens, context, **request)
    assert len(laws) == len(references) == len(cases)
    failures = []
    for case, law, reference in zip(cases, laws, references, strict=True):
        gap = audit.compare_laws(law, reference)
        if not gap.worst <= tolerance():
            failures.append(
                f"{case.label}: off by {gap.worst:.3g} at {gap.worst_tokens}, total "
                f"variation {gap.total_variation:.3g}"
            )
    assert not failures, (
        f"{len(failures)} of {len(cases)} laws are not the target's; " + failures[0]
    )
