"""One row's mathematics: the retained measure and its residual."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax._sums import halving_sum


def retain(draft_probs: jax.Array, admit: jax.Array) -> jax.Array:
    r"""Restricts a draft distribution to what a gate admits, without renormalising.

    The result is the measure :math:`\mu(x) = q(x) g(x)`; the missing mass
    :math:`1 - \mu(V)` is the probability of a NULL row.

    Args:
      draft_probs: `[..., V]` float, q, sums to 1 (probabilities, not logits).
      admit: `[..., V]` float in [0, 1] or bool, g. Must not depend on the drawn token.

    Returns:
      `[..., V]` float, mu with 0 <= mu <= q, in the dtype of `draft_probs`.

    Raises:
      ValueError: at trace time, if the shapes differ.

    Exactness: law-exact for any g fixed before the draw; elementwise, so bitwise
      independent of leading axes.

    Example:
      >>> import jax.numpy as jnp
      >>> retain(jnp.array([0.875, 0.125]), jnp.array([True, False])).tolist()
      [0.875, 0.0]

    References:
      Leviathan et al., `Fast Inference from Transformers via Speculative Decoding
      <https://arxiv.org/abs/2211.17192>`_, 2023, Algorithm 1 (the case g = 1).
    """
    _checks.check_floating("draft_probs", draft_probs)
    _checks.check_shape("admit", admit, jnp.shape(draft_probs))
    return draft_probs * jnp.asarray(admit).astype(draft_probs.dtype)


def null_mass(measure: jax.Array) -> jax.Array:
    r"""Returns the probability of a NULL row, :math:`1 - \mu(V)`.

    Args:
      measure: `[..., V]` float, mu.

    Returns:
      `[...]` float; may miss 0 by the rounding of the sum, since nothing is clamped.

    Exactness: a diagnostic; no rule of the library reads it.
    """
    _checks.check_floating("measure", measure)
    return 1 - halving_sum(measure)


def overlap(target_probs: jax.Array, measure: jax.Array) -> jax.Array:
    r"""Returns the probability that a row is accepted, :math:`\sum \min(p, \mu)`.

    Args:
      target_probs: `[..., V]` float, p.
      measure: `[..., V]` float, mu.

    Returns:
      `[...]` float.

    Raises:
      ValueError: at trace time, if the shapes differ.

    Exactness: a diagnostic; no rule of the library reads it.
    """
    _check_pair(target_probs, measure)
    return halving_sum(jnp.minimum(target_probs, measure))


def acceptance(target_probs: jax.Array, measure: jax.Array) -> jax.Array:
    r"""Returns the acceptance probability of each token, :math:`\min(1, p / \mu)`.

    Args:
      target_probs: `[..., V]` float, p.
      measure: `[..., V]` float, mu.

    Returns:
      `[..., V]` float, 0 where mu is 0, since such a token cannot be offered.

    Raises:
      ValueError: at trace time, if the shapes differ.

    Exactness: for reading; verifiers compare `u * mu < p` and never divide.
    """
    _check_pair(target_probs, measure)
    is_offered = measure > 0
    ratio = target_probs / jnp.where(is_offered, measure, jnp.ones_like(measure))
    return jnp.where(is_offered, jnp.minimum(ratio, 1), 0)


def residual_weights(target_probs: jax.Array, measure: jax.Array) -> jax.Array:
    r"""Returns the row to draw from after a rejection or a NULL, not normalised.

    That is :math:`(p - \mu)_+`, or p where this is zero everywhere.

    Args:
      target_probs: `[..., V]` float, p.
      measure: `[..., V]` float, mu.

    Returns:
      `[..., V]` float, not negative.

    Raises:
      ValueError: at trace time, if the shapes differ.

    Exactness: law-exact; no epsilon, and exactly 0 where p <= mu; elementwise.
    """
    _check_pair(target_probs, measure)
    positive = jnp.maximum(target_probs - measure, 0)
    has_mass = jnp.any(positive > 0, axis=-1, keepdims=True)
    return jnp.where(has_mass, positive, target_probs)


def residual(target_probs: jax.Array, measure: jax.Array) -> jax.Array:
    r"""Returns the residual distribution, the normalised :math:`(p - \mu)_+`.

    Args:
      target_probs: `[..., V]` float, p.
      measure: `[..., V]` float, mu.

    Returns:
      `[..., V]` float, sums to 1; p where :math:`(p - \mu)_+` is zero everywhere.

    Raises:
      ValueError: at trace time, if the shapes differ.

    Exactness: law-exact up to one rounding; verifiers draw from `residual_weights`.

    Example:
      >>> import jax.numpy as jnp
      >>> residual(jnp.array([0.5, 0.5]), jnp.array([0.875, 0.0])).tolist()
      [0.0, 1.0]
    """
    weights = residual_weights(target_probs, measure)
    return weights / halving_sum(weights)[..., None]


def _check_pair(target_probs: jax.Array, measure: jax.Array) -> None:
    _checks.check_floating("target_probs", target_probs)
    _checks.check_floating("measure", measure)
    _checks.check_shape("measure", measure, jnp.shape(target_probs))
