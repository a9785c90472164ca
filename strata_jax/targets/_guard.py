"""Keeps the singleton arithmetic from being batched or differentiated by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def guard(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `vmap` run the function request by request, and refuses gradients.

    `vmap` would turn the one-token products into batched ones and change their bits.

    Args:
      function: takes and returns pytrees of arrays.

    Returns:
      The guarded function. Differentiating it raises ValueError.

    Exactness: under `vmap`, bitwise what each request gives alone.
    """
    one_by_one = jax.custom_batching.sequential_vmap(function)

    @jax.custom_jvp
    def guarded(*args: Any) -> Any:
        return one_by_one(*args)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise ValueError(
            "the singleton path has no gradient: train with the batched "
            "strata_jax.models.forward, and decode with the weights that it made"
        )

    return guarded
