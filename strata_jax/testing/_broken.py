"""How a check says that a contract is broken."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class ConformanceError(AssertionError):
    """A part breaks a contract; the message names it."""


def as_int(value: int) -> jax.Array:
    """Returns a traced [] int32."""
    return jnp.asarray(value, jnp.int32)


def same_bits(first: Any, second: Any) -> bool:
    """Whether two pytrees hold the same values, NaN equal to NaN."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def require(condition: bool, message: str) -> None:
    """Raises ConformanceError with the message unless the condition holds."""
    if not condition:
        raise ConformanceError(message)
