"""How one expert is packed: a format for each matrix, and folded inputs or not."""

from __future__ import annotations

import dataclasses

import numpy as np

from strata_jax import _checks
from strata_jax.experts._formats import find_format
from strata_jax.experts._hadamard import fold_hadamard, hadamard_signs


@dataclasses.dataclass(frozen=True)
class ExpertLayout:
    """The layout of one job's weights: `[gate | up | down]` as uint32 words.

    Attributes:
      gate: name of the format of the gate matrix, see `strata_jax.experts.FORMATS`.
      up: of the up matrix.
      down: of the down matrix.
      is_folded: whether the matrices are stored as W diag(signs) H, so that their
        inputs go through signs and a Hadamard transform first.
      seed: of the signs.

    Raises:
      ValueError: if there is no such format.
    """

    gate: str
    up: str
    down: str
    is_folded: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (self.gate, self.up, self.down):
            find_format(name)
        seed = _checks.check_integer("seed", self.seed, 0, 2**63 - 1)
        object.__setattr__(self, "seed", seed)  # an int, so that JSON can hold it

    def num_words(self, hidden_size: int, expert_size: int) -> tuple[int, int, int]:
        """Returns the number of words of gate, up and down.

        Args:
          hidden_size: D.
          expert_size: F.

        Returns:
          Three counts.

        Raises:
          ValueError: if a size does not fit the formats' blocks.

        Exactness: not concerned.
        """
        return (
            find_format(self.gate).num_words(expert_size, hidden_size),
            find_format(self.up).num_words(expert_size, hidden_size),
            find_format(self.down).num_words(hidden_size, expert_size),
        )

    def signs(self, hidden_size: int, expert_size: int) -> tuple[np.ndarray, ...]:
        """Returns the signs of the inputs of gate and up, and of down; 1 if not folded.

        Args:
          hidden_size: D.
          expert_size: F.

        Returns:
          `[D]` and `[F]` float32.

        Exactness: integers only.
        """
        if not self.is_folded:
            return np.ones(hidden_size, np.float32), np.ones(expert_size, np.float32)
        return (
            hadamard_signs(hidden_size, self.seed),
            hadamard_signs(expert_size, self.seed + 1),
        )

    def encode(self, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        """Packs one expert.

        Args:
          gate: `[F, D]` float32.
          up: `[F, D]` float32.
          down: `[D, F]` float32.

        Returns:
          `[words]` uint32.

        Raises:
          ValueError: if a size does not fit the formats' blocks.

        Exactness: lossy as the formats are; decoding is exact.
        """
        if self.is_folded:
            inner, outer = self.signs(
                hidden_size=gate.shape[1], expert_size=gate.shape[0]
            )
            gate, up = fold_hadamard(gate, inner), fold_hadamard(up, inner)
            down = fold_hadamard(down, outer)
        pieces = ((self.gate, gate), (self.up, up), (self.down, down))
        return np.concatenate(
            [find_format(name).encode(matrix) for name, matrix in pieces]
        )


def uniform_layout(name: str, *, is_folded: bool = False) -> ExpertLayout:
    """Returns the layout with one format for all three matrices.

    Args:
      name: of the format.
      is_folded: whether inputs are Hadamard-folded.

    Returns:
      The layout.

    Raises:
      ValueError: if there is no such format.

    Exactness: not concerned.
    """
    return ExpertLayout(gate=name, up=name, down=name, is_folded=is_folded)
