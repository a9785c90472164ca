"""Jobs: the tokens of a window grouped by the experts that they go to.

A job is one expert with its tokens. Whatever the mode, each token's numbers are a
function of that token and that expert: the loop over a job's tokens computes one at a
time. `batched` breaks this on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax.experts._hadamard import hadamard
from strata_jax.experts._matrices import ExpertMatrices

MODES = ("singleton", "shared", "batched")


class Jobs(NamedTuple):
    """A layer's work on a window; M entries, entry m is row m // k at place m % k."""

    expert: jax.Array
    """[M] int32, the distinct experts in the order of their first use."""
    start: jax.Array
    """[M] int32, where each job's entries start in `entry`."""
    count: jax.Array
    """[M] int32, how many it has."""
    entry: jax.Array
    """[M] int32, the entries, job after job."""
    num_jobs: jax.Array
    """[] int32."""


class Folding(NamedTuple):
    """Signs of Hadamard-folded inputs; see `strata_jax.experts.fold_hadamard`."""

    is_folded: jax.Array
    """[] bool."""
    inner_signs: jax.Array
    """[D] float32, of the input of gate and up."""
    outer_signs: jax.Array
    """[F] float32, of the input of down."""


class Prepared(NamedTuple):
    """A layer's experts, ready for its jobs."""

    load: Callable[[jax.Array, jax.Array], Any]
    """(job, expert) -> its weights as they are stored, on the device."""
    decode: Callable[[Any], ExpertMatrices]
    """What `load` gives -> matrices."""
    folding: Callable[[Any], Folding | None]
    """What `load` gives -> signs of folded inputs; None if no expert has any."""
    status: jax.Array
    """[] int32, Status bits."""
    is_shared_bitwise: bool = True
    """Whether decoding once for a job's tokens gives each token's own bits."""


class ExpertBank(Protocol):
    """The experts of one layer, in whatever form and wherever they are."""

    def prepare(self, jobs: Jobs, cache: Any) -> Prepared:
        """Makes the experts of a layer's jobs ready; one batch if they must be read."""
        ...


def group_by_expert(experts: jax.Array, num_rows: jax.Array) -> Jobs:
    """Groups the first rows of a window by distinct expert, in routing order.

    Args:
      experts: `[T, k]` int32.
      num_rows: [] int32.

    Returns:
      The jobs.

    Exactness: integers only.
    """
    num_entries, per_row = experts.size, experts.shape[1]
    expert = experts.reshape(-1)
    index = jnp.arange(num_entries, dtype=jnp.int32)
    is_live = index // per_row < num_rows
    is_same = (expert[:, None] == expert[None]) & is_live[:, None] & is_live[None]
    first = jnp.argmax(is_same, axis=1).astype(jnp.int32)
    is_first = is_live & (first == index)
    job = (jnp.cumsum(is_first.astype(jnp.int32)) - 1)[first]
    job = jnp.where(is_live, job, num_entries)
    rank = job * num_entries + index
    place = jnp.sum((rank[None] < rank[:, None]).astype(jnp.int32), axis=1)
    count = jnp.sum((job[None] == index[:, None]).astype(jnp.int32), axis=1)
    return Jobs(
        expert=jnp.zeros(num_entries, jnp.int32)
        .at[jnp.where(is_first, job, num_entries)]
        .set(expert, mode="drop"),
        start=jnp.cumsum(count) - count,
        count=count,
        entry=jnp.zeros(num_entries, jnp.int32).at[place].set(index),
        num_jobs=jnp.sum(is_first.astype(jnp.int32)),
    )


def run_jobs(
    bank: ExpertBank,
    cache: Any,
    states: jax.Array,
    experts: jax.Array,
    num_rows: jax.Array,
    *,
    mode: str,
) -> tuple[jax.Array, jax.Array]:
    """Sends the first rows of a window through their experts.

    Args:
      bank: the layer's experts.
      cache: those of them that are kept on the device, or None.
      states: `[T, D]`.
      experts: `[T, k]` int32, from the router.
      num_rows: [] int32, rows to compute.
      mode: "singleton" decodes an expert for each token, "shared" once for a job,
        "batched" computes a job's tokens in one product (the negative control).

    Returns:
      Outputs `[T, k, D]` by row and place in the router's order, zero where not
      computed; Status bits of a fault while reading.

    Raises:
      ValueError: with "shared", for a format that is not bitwise then.

    Exactness: "singleton" and "shared" are bit-exact to a window of one token.
    """
    jobs = group_by_expert(experts, num_rows)
    prepared = bank.prepare(jobs, cache)
    if mode == "shared" and not prepared.is_shared_bitwise:
        raise ValueError(
            "mode 'shared' is not bitwise the singleton's for a format of these "
            "experts: use 'singleton'"
        )
    num_tokens, per_row = experts.shape

    def run_job(job: jax.Array, outputs: jax.Array) -> jax.Array:
        stored = prepared.load(job, jobs.expert[job])
        folding = prepared.folding(stored)
        decoded = None if mode == "singleton" else _settle(prepared.decode(stored))
        together = None
        if mode == "batched":
            assert decoded is not None
            together = _run_together(decoded, folding, states)

        def run_entry(index: jax.Array, outputs: jax.Array) -> jax.Array:
            entry = jobs.entry[index]
            row = entry // per_row
            if together is not None:
                return outputs.at[entry].set(together[row])
            matrices = decoded
            if matrices is None:
                matrices = _settle(prepared.decode(stored))
            output = run_expert(matrices, states[row], folding)
            return outputs.at[entry].set(output)

        start = jobs.start[job]
        return lax.fori_loop(start, start + jobs.count[job], run_entry, outputs)

    outputs = jnp.zeros((num_tokens * per_row, states.shape[1]), states.dtype)
    outputs = lax.fori_loop(0, jobs.num_jobs, run_job, outputs)
    return outputs.reshape(num_tokens, per_row, -1), prepared.status


def run_expert(
    matrices: ExpertMatrices, state: jax.Array, folding: Folding | None = None
) -> jax.Array:
    """Runs one expert on one token.

    Args:
      matrices: the expert.
      state: `[D]`.
      folding: the signs of its folded inputs, or None.

    Returns:
      `[D]`.

    Exactness: a function of one token; never `vmap` it.
    """
    narrow = state.dtype
    state = state.astype(matrices.gate.dtype)
    state = state if folding is None else _fold(folding, state, folding.inner_signs)
    inner = jax.nn.silu(matrices.gate @ state) * (matrices.up @ state)
    inner = inner if folding is None else _fold(folding, inner, folding.outer_signs)
    return (matrices.down @ inner).astype(narrow)


def _run_together(
    matrices: ExpertMatrices, folding: Folding | None, states: jax.Array
) -> jax.Array:
    narrow = states.dtype
    states = states.astype(matrices.gate.dtype)
    if folding is not None:
        states = _fold(folding, states, folding.inner_signs[None])
    inner = jax.nn.silu(states @ matrices.gate.T) * (states @ matrices.up.T)
    if folding is not None:
        inner = _fold(folding, inner, folding.outer_signs[None])
    return (inner @ matrices.down.T).astype(narrow)


def _fold(folding: Folding, states: jax.Array, signs: jax.Array) -> jax.Array:
    return jnp.where(folding.is_folded, hadamard(states * signs), states)


def _settle(matrices: ExpertMatrices) -> ExpertMatrices:
    # In memory before it is multiplied: fused into a product, the decoding would
    # change the order of the product's sum.
    return lax.optimization_barrier(matrices)
