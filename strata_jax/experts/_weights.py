"""Experts as plain arrays: what training moves, and what the packed formats hold."""

from __future__ import annotations

import flax.struct
import jax

from strata_jax import _checks


@flax.struct.dataclass
class ExpertMatrices:
    """One expert, a SwiGLU layer: `down @ (silu(gate @ x) * (up @ x))`."""

    gate: jax.Array  # [F, D]
    up: jax.Array  # [F, D]
    down: jax.Array  # [D, F]


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
