"""Optimizers with the schedule that runs here use: warm-up, then half a cosine."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
import optax.contrib

from strata_jax import _checks

# Size of Muon's steps beside AdamW's, as recommended in arXiv:2502.16982.
_MUON_STEP_SIZE = 0.2


def adamw(
    num_steps: int,
    *,
    learning_rate: float,
    warmup_steps: int,
    final_fraction: float = 0.02,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    first_decay: float = 0.9,
    second_decay: float = 0.95,
) -> optax.GradientTransformation:
    """AdamW with warm-up, a cosine schedule and clipping by the global norm.

    Args:
      num_steps: length of the run; the schedule ends there.
      learning_rate: its peak.
      warmup_steps: steps of linear rise from 0.
      final_fraction: the last learning rate, as a fraction of the peak.
      weight_decay: decay of the parameters with two or more axes; vectors, such as
        the weights of norms, are left alone.
      clip_norm: largest global norm of a gradient.
      first_decay: decay of the running mean.
      second_decay: decay of the running mean of squares.

    Returns:
      The optimizer.

    Raises:
      ValueError: naming the argument that is out of range.

    Exactness: neither.
    """
    schedule = _schedule(num_steps, learning_rate, warmup_steps, final_fraction)
    _check(weight_decay, clip_norm, first_decay=first_decay, second_decay=second_decay)

    def is_matrix(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(
            schedule,
            b1=first_decay,
            b2=second_decay,
            weight_decay=weight_decay,
            mask=is_matrix,
        ),
    )


def muon(
    num_steps: int,
    *,
    learning_rate: float,
    warmup_steps: int,
    final_fraction: float = 0.02,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    decay: float = 0.95,
) -> optax.GradientTransformation:
    """Muon for parameters with two axes, Adam for all others, scheduled as `adamw` is.

    A matrix's momentum is brought near an orthogonal matrix before it is added
    (https://kellerjordan.github.io/posts/muon); steps are scaled to the size of
    AdamW's, so that learning rates carry over. A step costs more, fifteen products of
    matrices for each, so that it pays with large batches.

    Args:
      num_steps: length of the run; the schedule ends there.
      learning_rate: its peak.
      warmup_steps: steps of linear rise from 0.
      final_fraction: the last learning rate, as a fraction of the peak.
      weight_decay: decay of the parameters with two axes; others, such as experts that
        lie together, are left alone.
      clip_norm: largest global norm of a gradient.
      decay: decay of the momentum, and of Adam's running mean of squares.

    Returns:
      The optimizer.

    Raises:
      ValueError: naming the argument that is out of range.

    Exactness: neither.
    """
    schedule = _schedule(num_steps, learning_rate, warmup_steps, final_fraction)
    _check(weight_decay, clip_norm, decay=decay)
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.contrib.muon(
            schedule,
            beta=decay,
            weight_decay=weight_decay,
            adam_b2=decay,
            consistent_rms=_MUON_STEP_SIZE,
        ),
    )


def _check(weight_decay: float, clip_norm: float, **decays: float) -> None:
    _checks.check_number("weight_decay", weight_decay, 0.0, math.inf)
    if not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm!r}")
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def _schedule(
    num_steps: int, learning_rate: float, warmup_steps: int, final_fraction: float
) -> optax.Schedule:
    _checks.check_integer("num_steps", num_steps, 1)
    _checks.check_integer("warmup_steps", warmup_steps, 0, num_steps - 1)
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"learning_rate must be positive, got {learning_rate!r}")
    _checks.check_number("final_fraction", final_fraction, 0.0, 1.0)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=num_steps,
        end_value=learning_rate * final_fraction,
    )
