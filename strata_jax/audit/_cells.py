"""The cells of a window: one call of the real `step` for each.

`step` is treated as a function of its uniforms that is known only by calling it. The
uniforms are taken one at a time, in the order in which the window uses them. As a
function of one uniform the outcome is piecewise constant; its borders are found by
bisection on the grid of representable uniforms, and each cell between two borders is
represented by its left end, weighted by its length. No rule of acceptance or residual
is written here, so the enumeration shows what the code does, not what it should do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks
from strata_jax._rng import wrap_key
from strata_jax._types import Draws, SpeculativeDecoder, Window

# Uniforms are multiples of 2**-24 in float32, as the library draws them, and of 2**-53
# in float64.
_GRID_BITS = {np.dtype(np.float32): 24, np.dtype(np.float64): 53}


@dataclasses.dataclass(frozen=True)
class WindowCells:
    """The cells of one window for several states at once.

    Attributes:
      state_index: `[N]` int, which state a cell belongs to.
      volume: `[N]` float64, its probability; sums to 1 for each state.
      tokens: `[N, K + 1]` int32, emitted tokens, then -1.
      kind: `[N, K]` int32, the rows' kinds.
      num_accepted: `[N]` int32.
      uniforms: `[N, D]`, the cell's left end in each of the D uniforms.
      states: the states after the window, leading axis N.
      borders: `[B, D + 2]` int64: state, index of the uniform, then D uniforms, as
        multiples of the grid's step, that stand exactly on a border: the next smaller
        value of that uniform gives another outcome.
    """

    state_index: np.ndarray
    volume: np.ndarray
    tokens: np.ndarray
    kind: np.ndarray
    num_accepted: np.ndarray
    uniforms: np.ndarray
    states: Any
    borders: np.ndarray


class WindowEnumerator:
    """Enumerates windows of one decoder; its compiled program is kept between calls."""

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        params: Any,
        state: Any,
        *,
        batch_size: int = 512,
    ):
        """Compiles nothing yet.

        Args:
          decoder: the decoder, whose own `step` is called.
          params: its params, one instance, for the shapes.
          state: a state of it, one instance, for the shapes.
          batch_size: how many calls of `step` run together, in one compiled program.
        """
        self._batch_size = _checks.check_integer("batch_size", batch_size, 1)
        window = jax.eval_shape(decoder.step, params, state)[1]
        self._decoder = decoder
        self._layout = _DrawsLayout(window)
        self.grid_bits = _GRID_BITS[self._layout.dtype]
        self.num_uniforms = self._layout.num_uniforms
        self._run = jax.jit(self._evaluate)

    def _evaluate(
        self, params: Any, states: Any, instance: jax.Array, uniforms: jax.Array
    ) -> tuple[jax.Array, Any]:
        def one(
            state: Any, instance: jax.Array, uniforms: jax.Array
        ) -> tuple[jax.Array, Any]:
            own_params = jax.tree.map(lambda leaf: leaf[instance], params)
            state, window = self._decoder.unguarded_step(
                own_params, state, self._layout.unflatten(uniforms)
            )
            verdict = window.verdict
            outcome = [
                window.draft_tokens,
                window.proposal.kind,
                window.proposal.tokens,
                verdict.tokens,
                verdict.num_accepted[None],
                verdict.source[None],
                verdict.status[None],
            ]
            return jnp.concatenate(outcome), state

        return jax.vmap(one)(states, instance, uniforms)

    def evaluate(
        self, params: Any, states: Any, instance: np.ndarray, grid: np.ndarray
    ) -> tuple[np.ndarray, Any]:
        """Calls `step` at given uniforms.

        Args:
          params: leading axis of instances.
          states: leading axis N, as `host_states` gives them.
          instance: `[N]` int, whose params each call uses.
          grid: `[N, D]` int64, uniforms as multiples of the grid's step.

        Returns:
          Outcomes `[N, ...]` int, and states with leading axis N.

        Exactness: calls the decoder's own `step`, batched by `vmap`: last bits may
          differ from those of a single call, the law does not.
        """
        pieces = []
        for start in range(0, len(instance), self._batch_size):
            piece = slice(start, start + self._batch_size)
            count = len(instance[piece])

            def padded(array: np.ndarray) -> np.ndarray:
                num_missing = self._batch_size - count  # noqa: B023
                pad = np.repeat(array[:1], num_missing, axis=0)
                return np.concatenate([array, pad])

            uniforms = np.ldexp(grid[piece].astype(np.float64), -self.grid_bits)
            results = self._run(
                params,
                jax.tree.map(lambda leaf: padded(leaf[piece]), states),  # noqa: B023
                padded(instance[piece].astype(np.int32)),
                padded(uniforms.astype(self._layout.dtype)),
            )
            pieces.append(
                jax.tree.map(lambda leaf: np.asarray(leaf)[:count], results)  # noqa: B023
            )
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)

    def cells(self, params: Any, states: Any, instance: np.ndarray) -> WindowCells:
        """Enumerates one window of every state.

        Args:
          params: leading axis of instances.
          states: leading axis M, as `host_states` gives them.
          instance: `[M]` int, whose params each state uses.

        Returns:
          All cells.

        Exactness: complete if, for each uniform, every outcome occupies an interval
          (a draw by inverse CDF, a coin against a threshold). Each outcome is looked at
          with the later uniforms at 0 and again at their largest value, so that a rule
          which uses one uniform twice is seen as well.
        """
        index = np.arange(len(instance))
        grid = np.zeros((len(instance), self.num_uniforms), np.int64)
        volume = np.ones(len(instance))

        def evaluate(index: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, Any]:
            own = jax.tree.map(lambda leaf: leaf[index], states)
            return self.evaluate(params, own, instance[index], grid)

        borders = []
        for axis in range(self.num_uniforms):
            index, grid, volume, found = self._split(
                evaluate, index, grid, volume, axis
            )
            borders.append(found)
        outcomes, after = evaluate(index, grid)
        width = self._decoder.num_draft_tokens
        tokens = outcomes[:, 3 * width : 4 * width + 1]
        return WindowCells(
            state_index=index,
            volume=volume,
            tokens=tokens,
            kind=outcomes[:, width : 2 * width],
            num_accepted=outcomes[:, 4 * width + 1],
            uniforms=np.ldexp(grid.astype(np.float64), -self.grid_bits),
            states=after,
            borders=np.concatenate(borders),
        )

    def _split(
        self,
        evaluate: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, Any]],
        index: np.ndarray,
        grid: np.ndarray,
        volume: np.ndarray,
        axis: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Cuts every entry into the cells of one uniform."""
        size = 1 << self.grid_bits

        def outcome_ids(entry: np.ndarray, value: np.ndarray) -> np.ndarray:
            """[N, ...] outcomes of entries with this uniform at `value`."""
            low = grid[entry]
            low[:, axis] = value
            high = low.copy()
            high[:, axis + 1 :] = size - 1
            both = np.concatenate([low, high])
            outcomes, _ = evaluate(np.tile(index[entry], 2), both)
            return np.concatenate(np.split(outcomes, 2), axis=1)

        entries = np.arange(len(index))
        first = outcome_ids(entries, np.zeros(len(index), np.int64))
        last = outcome_ids(entries, np.full(len(index), size - 1))
        left = (entries, np.zeros(len(index), np.int64), first)
        right = (np.full(len(index), size - 1, np.int64), last)
        border_entry, border_value = [], []
        entry, low, low_id = left
        high, high_id = right
        while True:
            differs = np.any(low_id != high_id, axis=1)
            entry, low, high = entry[differs], low[differs], high[differs]
            low_id, high_id = low_id[differs], high_id[differs]
            is_border = high - low == 1
            border_entry.append(entry[is_border])
            border_value.append(high[is_border])
            wide = ~is_border
            entry, low, high = entry[wide], low[wide], high[wide]
            low_id, high_id = low_id[wide], high_id[wide]
            if not len(entry):
                break
            middle = low + (high - low) // 2
            middle_id = outcome_ids(entry, middle)
            entry = np.concatenate([entry, entry])
            low, high = np.concatenate([low, middle]), np.concatenate([middle, high])
            low_id = np.concatenate([low_id, middle_id])
            high_id = np.concatenate([middle_id, high_id])

        cut_entry = np.concatenate(border_entry)
        cut_value = np.concatenate(border_value)
        start_entry = np.concatenate([entries, cut_entry])
        start_value = np.concatenate([np.zeros(len(index), np.int64), cut_value])
        order = np.lexsort((start_value, start_entry))
        start_entry, start_value = start_entry[order], start_value[order]
        is_last = np.append(start_entry[1:] != start_entry[:-1], True)
        end_value = np.where(is_last, size, np.append(start_value[1:], size))
        length = np.ldexp((end_value - start_value).astype(np.float64), -self.grid_bits)
        new_grid = grid[start_entry]
        new_grid[:, axis] = start_value
        found = np.column_stack(
            [
                index[cut_entry],
                np.full(len(cut_entry), axis),
                grid[cut_entry],
            ]
        )
        found[:, 2 + axis] = cut_value
        return index[start_entry], new_grid, volume[start_entry] * length, found


class _DrawsLayout:
    """The uniforms of a window as one vector, in the order in which they are used."""

    def __init__(self, window: Window):
        num_rows = window.draws.gate.shape[0]
        leaves, self._treedef = jax.tree.flatten(window.draws.verifier)
        self._num_rows = num_rows
        self._shapes = [leaf.shape for leaf in leaves]
        self.dtype = np.dtype(window.target_probs.dtype)
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        self._offsets = np.cumsum([3 * num_rows, *sizes])
        self.num_uniforms = int(self._offsets[-1])

    def unflatten(self, uniforms: jax.Array) -> Draws:
        rows = uniforms[: 3 * self._num_rows].reshape(self._num_rows, 3)
        leaves = [
            uniforms[start:stop].reshape(shape)
            for start, stop, shape in zip(
                self._offsets[:-1], self._offsets[1:], self._shapes, strict=True
            )
        ]
        return Draws(
            draft=rows[:, :2],
            gate=rows[:, 2],
            verifier=jax.tree.unflatten(self._treedef, leaves),
        )


def stack(trees: Sequence[Any]) -> Any:
    """Stacks pytrees along a new leading axis of instances.

    Args:
      trees: pytrees of one structure, such as states of one decoder.

    Returns:
      A pytree of that structure.

    Exactness: bits are kept.
    """

    def stack_leaves(*leaves: jax.Array) -> jax.Array:
        if jnp.issubdtype(jnp.result_type(leaves[0]), jax.dtypes.prng_key):
            # By their data: to stack keys themselves counts as a use of each of them.
            return wrap_key(jnp.stack([jax.random.key_data(key) for key in leaves]))
        return jnp.stack(leaves)

    return jax.tree.map(stack_leaves, *trees)


def host_states(states: Any) -> Any:
    """Turns states of decoders into NumPy arrays, without their keys.

    Args:
      states: states, with or without a leading axis.

    Returns:
      The states; an enumerated window takes its uniforms from elsewhere.

    Exactness: bits are kept.
    """
    return jax.tree.map(np.asarray, dataclasses.replace(states, request_key=None))
