"""Experts as plain arrays: what training moves, and what the packed formats hold."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax.experts._jobs import Jobs, Prepared
from strata_jax.experts._matrices import ExpertMatrices


@flax.struct.dataclass
class ExpertWeights:
    """All experts of a layer as arrays, resident on the device; products `weight @ x`.

    Stacked, since an expert is picked by a traced index.
    """

    gate: jax.Array  # [E, F, D]
    up: jax.Array  # [E, F, D]
    down: jax.Array  # [E, D, F]

    def check(self, name: str, shape: tuple[int, int, int]) -> None:
        """Checks the shapes against `[E, F, D]`.

        Args:
          name: how messages call the experts.
          shape: E, F and D.

        Raises:
          ValueError: naming the array and both shapes.

        Exactness: not concerned.
        """
        num_experts, expert_size, hidden_size = shape
        inward = (num_experts, expert_size, hidden_size)
        _checks.check_shape(f"{name}.gate", self.gate, inward)
        _checks.check_shape(f"{name}.up", self.up, inward)
        outward = (num_experts, hidden_size, expert_size)
        _checks.check_shape(f"{name}.down", self.down, outward)

    def prepare(self, jobs: Jobs, cache: Any) -> Prepared:
        """Makes the experts ready: they are.

        Args:
          jobs: the layer's jobs.
          cache: None.

        Returns:
          How to load them.

        Exactness: nothing is computed.
        """
        del jobs, cache

        def load(job: jax.Array, expert: jax.Array) -> ExpertMatrices:
            del job
            return ExpertMatrices(
                gate=self.gate[expert], up=self.up[expert], down=self.down[expert]
            )

        return Prepared(
            load=load,
            decode=lambda stored: stored,
            folding=lambda stored: None,
            status=jnp.zeros((), jnp.int32),
        )
