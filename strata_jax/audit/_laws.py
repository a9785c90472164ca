"""Laws of token sequences by enumeration, and references to compare them with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks
from strata_jax._types import FinishReason, SpeculativeDecoder
from strata_jax.audit._cells import WindowEnumerator, host_states


def sequence_laws(
    decoder: SpeculativeDecoder,
    params: Any,
    states: Any,
    num_tokens: int,
    *,
    enumerator: WindowEnumerator | None = None,
) -> list[dict[tuple[int, ...], float]]:
    """Enumerates the law of the next tokens of several requests, across windows.

    Args:
      decoder: the decoder, whose own `step` is called.
      params: leading axis of instances on every leaf.
      states: states of `decoder.init`, leading axis of instances on every leaf.
      num_tokens: length of the sequences; a request that ends earlier contributes
        shorter ones.
      enumerator: one made before for the same decoder, to compile once.

    Returns:
      For each instance, token tuple to probability in float64.

    Exactness: the law of the code as it runs, see `WindowEnumerator.cells`.
    """
    num_tokens = _checks.check_integer("num_tokens", num_tokens, 1)
    num_instances = jax.tree.leaves(states)[0].shape[0]
    if enumerator is None:
        first_params, first_state = (
            jax.tree.map(lambda leaf: leaf[0], tree) for tree in (params, states)
        )
        enumerator = WindowEnumerator(decoder, first_params, first_state)
    laws: list[dict[tuple[int, ...], float]] = [{} for _ in range(num_instances)]
    # One entry per distinct (instance, emitted tokens, state).
    owner = np.arange(num_instances)
    states = host_states(states)
    emitted: list[tuple[int, ...]] = [()] * num_instances
    weight = np.ones(num_instances)
    while len(owner):
        cells = enumerator.cells(params, states, owner)
        next_of: dict[Any, int] = {}
        rows, next_owner, next_emitted, next_weight = [], [], [], []
        fingerprints = _fingerprints(cells.states)
        is_running = cells.states.finish_reason == FinishReason.RUNNING
        for cell, parent in enumerate(cells.state_index):
            tokens = tuple(int(t) for t in cells.tokens[cell] if t >= 0)
            sequence = (emitted[parent] + tokens)[:num_tokens]
            probability = weight[parent] * cells.volume[cell]
            instance = int(owner[parent])
            if len(sequence) == num_tokens or not is_running[cell]:
                law = laws[instance]
                law[sequence] = law.get(sequence, 0.0) + probability
                continue
            key = (instance, sequence, fingerprints[cell])
            if key not in next_of:
                next_of[key] = len(rows)
                rows.append(cell)
                next_owner.append(instance)
                next_emitted.append(sequence)
                next_weight.append(0.0)
            next_weight[next_of[key]] += probability
        owner = np.asarray(next_owner, int)
        emitted = next_emitted
        weight = np.asarray(next_weight)
        if len(owner):
            chosen = np.asarray(rows)
            states = jax.tree.map(lambda leaf: leaf[chosen], cells.states)  # noqa: B023
    return laws


def sequence_law(
    decoder: SpeculativeDecoder, params: Any, state: Any, num_tokens: int
) -> dict[tuple[int, ...], float]:
    """Enumerates the law of the next tokens of one request, across windows.

    Args:
      decoder: the decoder, whose own `step` is called.
      params: its weights.
      state: a state of `decoder.init`.
      num_tokens: length of the sequences; 1 gives the law of one row.

    Returns:
      Token tuple to probability in float64.

    Exactness: the law of the code as it runs, see `WindowEnumerator.cells`.
    """
    params, state = (
        jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)
        for tree in (params, state)
    )
    return sequence_laws(decoder, params, state, num_tokens)[0]


def markov_law(
    table: np.ndarray, context: Sequence[int], num_tokens: int
) -> dict[tuple[int, ...], float]:
    """Returns the law of the next tokens of a Markov table, by multiplication.

    Args:
      table: `[V] * n + [V]` float, probabilities of the next token after n tokens.
      context: the text so far; places before it count as token 0.
      num_tokens: length of the sequences.

    Returns:
      Token tuple to probability; zero-probability sequences are left out.

    Exactness: the reference in float64.
    """
    order = np.ndim(table) - 1
    table = np.asarray(table, np.float64)
    law = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for sequence, probability in law.items():
            text = [0] * order + list(context) + list(sequence)
            row = table[tuple(text[len(text) - order :])]
            for token in np.flatnonzero(row):
                longer[(*sequence, int(token))] = probability * float(row[token])
        law = longer
    return law


@dataclasses.dataclass(frozen=True)
class LawDifference:
    """How far an enumerated law is from a reference.

    Attributes:
      total_variation: half the sum of absolute differences.
      worst: the largest absolute difference of a cell.
      worst_tokens: the sequence where it occurs.
    """

    total_variation: float
    worst: float
    worst_tokens: tuple[int, ...]


def compare_laws(
    law: dict[tuple[int, ...], float], reference: dict[tuple[int, ...], float]
) -> LawDifference:
    """Compares two laws over token sequences.

    Args:
      law: token tuple to probability.
      reference: likewise; what is missing in one has probability 0.

    Returns:
      The difference.

    Exactness: computed in float64.
    """
    keys = sorted(set(law) | set(reference))
    gaps = np.array([law.get(key, 0.0) - reference.get(key, 0.0) for key in keys])
    place = int(np.argmax(np.abs(gaps)))
    return LawDifference(
        total_variation=float(np.abs(gaps).sum() / 2),
        worst=float(np.abs(gaps[place])),
        worst_tokens=keys[place],
    )


def _fingerprints(states: Any) -> list[bytes]:
    """Returns the bytes of each state, so that equal states can be merged."""
    rows = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(states)]
    rows = [np.ascontiguousarray(leaf) for leaf in rows]
    return [b"".join(leaf[i].tobytes() for leaf in rows) for i in range(len(rows[0]))]
