"""The router: which experts a token goes to, and with which weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from strata_jax._precision import at_least_float32
from strata_jax.models._moe_layer_params import MoeConfig


def route(
    config: MoeConfig, router: jax.Array, states: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses the experts of some tokens.

    Args:
      config: the model's shape.
      router: `[E, D]`.
      states: `[..., D]`, normed.

    Returns:
      Experts `[..., k]` int32 from the most probable on, ties to the lower id; their
      weights `[..., k]`; the router's probabilities `[..., E]`.

    Exactness: a function of one token if called on one token.
    """
    wide = at_least_float32(states.dtype)
    probs = jax.nn.softmax((states @ router.T).astype(wide), axis=-1)
    weights, experts = lax.top_k(probs, config.num_experts_per_token)
    if config.normalize_router:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts.astype(jnp.int32), weights.astype(states.dtype), probs
