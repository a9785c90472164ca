"""One expert as it is multiplied by."""

from __future__ import annotations

import flax.struct
import jax


@flax.struct.dataclass
class ExpertMatrices:
    """One expert, a SwiGLU layer: `down @ (silu(gate @ x) * (up @ x))`."""

    gate: jax.Array  # [F, D]
    up: jax.Array  # [F, D]
    down: jax.Array  # [D, F]
