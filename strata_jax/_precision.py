"""The dtype in which things are computed that narrow dtypes cannot hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def at_least_float32(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Returns float64 for float64, else float32.

    Exactness: probabilities are cast once, before the draw and the ratio part ways.
    """
    is_double = jnp.dtype(dtype) == jnp.float64
    return jnp.dtype(jnp.float64 if is_double else jnp.float32)
