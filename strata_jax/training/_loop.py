"""The optimisation loop: one compiled step, and a host loop around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from strata_jax import _checks

Params = Any
Metrics = dict[str, jax.Array]
# Of parameters and of what a step sees: tokens, or any tree of arrays.
LossFunction = Callable[[Params, Any], tuple[jax.Array, Metrics]]
History = Mapping[str, np.ndarray]


@flax.struct.dataclass
class TrainingState:
    """What a run needs to go on.

    Attributes:
      step: `[]` int32, number of steps taken.
      params: the model's parameters.
      optimizer_state: the optimizer's own.
    """

    step: jax.Array
    params: Any
    optimizer_state: Any


class Trainer(NamedTuple):
    """The two functions of a training run.

    Attributes:
      init: params -> the state before the first step; the parameters are copied.
      step: (state, what the loss function takes, such as tokens `[B, T]` int32) ->
        (state, metrics), compiled; the state that is given is consumed, as its buffers
        are used again.
    """

    init: Callable[[Params], TrainingState]
    step: Callable[[TrainingState, Any], tuple[TrainingState, Metrics]]


def trainer(loss_fn: LossFunction, optimizer: optax.GradientTransformation) -> Trainer:
    """Builds the functions of a training run.

    Args:
      loss_fn: (params, tokens) -> (loss, metrics), differentiable in params; the
        metrics are scalars by name. Instead of tokens it may take any tree of arrays.
        Large arrays belong there: those it closes over are copied into its program.
      optimizer: any optax optimizer.

    Returns:
      The functions. The metrics of a step are the loss function's, with `loss` and
      `gradient_norm` (before clipping).

    Exactness: neither; the same program on the same machine gives the same bits.
    """

    def init(params: Params) -> TrainingState:
        # Copied, since the first step consumes what it is given.
        params = jax.tree.map(jnp.array, params)
        return TrainingState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            optimizer_state=optimizer.init(params),
        )

    def step(state: TrainingState, inputs: Any) -> tuple[TrainingState, Metrics]:
        value_and_gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, metrics), gradient = value_and_gradient(state.params, inputs)
        # optax promotes: it raises floats to the power of an int32 count.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer_state = optimizer.update(
                gradient, state.optimizer_state, state.params
            )
        state = TrainingState(
            step=state.step + jnp.int32(1),
            params=optax.apply_updates(state.params, updates),
            optimizer_state=optimizer_state,
        )
        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)]
        norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
        return state, {**metrics, "loss": loss, "gradient_norm": norm}

    return Trainer(init=init, step=jax.jit(step, donate_argnums=0))


def train(
    trainer: Trainer,
    state: TrainingState,
    batch: Callable[[int], Any],
    num_steps: int,
    *,
    history: History | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> tuple[TrainingState, dict[str, np.ndarray]]:
    """Takes steps until the state has taken `num_steps`, counted from the start.

    Stopping after any step, by `num_steps` or by a checkpoint, and going on changes
    no bit.

    Args:
      trainer: the run's functions.
      state: where to start; consumed.
      batch: step -> what the loss function takes, such as tokens `[B, T]` int32 from
        what `sample_batches` returns; a function of the step alone.
      num_steps: steps in all, those already taken included.
      history: metrics of the steps before, `[step]` by name.
      on_step: called after each step with the number of steps taken and the metrics.

    Returns:
      The state, and the history with one float64 for each new step and metric.

    Raises:
      FloatingPointError: if the loss is not finite; naming the step.

    Exactness: neither; the same program on the same machine gives the same bits.
    """
    past = dict(history or {})
    new: dict[str, list[float]] = {}
    for index in range(int(state.step), num_steps):
        state, metrics = trainer.step(state, batch(index))
        values = {name: float(value) for name, value in metrics.items()}
        if not math.isfinite(values["loss"]):
            raise FloatingPointError(
                f"the loss of step {index + 1} is {values['loss']}; use a lower "
                "learning rate or a longer warm-up"
            )
        for name, value in values.items():
            new.setdefault(name, []).append(value)
        if on_step is not None:
            on_step(index + 1, values)
    added = {name: np.array(values, np.float64) for name, values in new.items()}
    for name, values in added.items():
        past[name] = np.concatenate([past[name], values]) if name in past else values
    return state, past


def evaluate(
    loss_fn: LossFunction, params: Params, windows: np.ndarray, *, batch_size: int
) -> dict[str, float]:
    """Averages a loss and its metrics over windows.

    Args:
      loss_fn: (params, tokens) -> (loss, metrics), means over their tokens.
      params: the model's parameters.
      windows: `[M, T]` int32.
      batch_size: windows at a time; the last batch may have fewer.

    Returns:
      `loss` and the metrics, averaged over all windows.

    Raises:
      ValueError: if there is no window, or `batch_size` is less than 1.

    Exactness: neither.
    """
    _checks.check_integer("batch_size", batch_size, 1)
    if not len(windows):
        raise ValueError("windows must not be empty")
    measure = jax.jit(loss_fn)
    totals: dict[str, float] = {}
    for start in range(0, len(windows), batch_size):
        piece = windows[start : start + batch_size]
        loss, metrics = measure(params, piece)
        for name, value in {**metrics, "loss": loss}.items():
            totals[name] = totals.get(name, 0.0) + float(value) * len(piece)
    return {name: total / len(windows) for name, total in totals.items()}
