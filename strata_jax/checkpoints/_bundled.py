"""The model that comes with the library: the default of every script and notebook."""

from __future__ import annotations

import pathlib

from strata_jax._types import TargetModel
from strata_jax.checkpoints._packed_model import load_packed_model
from strata_jax.models import MoeConfig, MoeParams
from strata_jax.targets import singleton


def bundled_path() -> pathlib.Path:
    """Returns where the bundled model's file is; its model card lies beside it.

    Returns:
      The path.

    Raises:
      FileNotFoundError: if the installation lacks it.

    Exactness: not concerned.
    """
    return bundled_file("model.safetensors", "train_bundled.py")


def bundled_file(name: str, script: str) -> pathlib.Path:
    """Returns the path of a file of weights that comes with the library.

    Raises:
      FileNotFoundError: if it is missing; names the script that trains it.
    """
    path = pathlib.Path(__file__).parents[1] / "bundled" / name
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing from this installation: install strata-jax again, or "
            f"train it with experiments/{script}"
        )
    return path


def load_bundled_config() -> tuple[MoeConfig, MoeParams]:
    """Loads the bundled model's configuration and weights.

    Returns:
      The configuration, and the weights with their draft head; experts are packed.

    Raises:
      FileNotFoundError: if the installation lacks the file.
      ValueError: if it is damaged.

    Exactness: the bits of the file.
    """
    return load_packed_model(bundled_path())


def load_bundled(
    *, max_length: int | None = None, num_cached_experts: int = 0
) -> tuple[TargetModel, MoeParams]:
    """Loads the bundled model: a byte-level mixture of experts with an MTP head.

    Its tokens are bytes, see `checkpoints.ByteTokenizer`; `drafters.mtp` drafts with
    its head.

    Args:
      max_length: S, the longest context in bytes; None for the model's own limit.
      num_cached_experts: see `targets.singleton`; matters once the experts were moved
        to the host or to disk.

    Returns:
      The target in singleton arithmetic, and its weights.

    Raises:
      FileNotFoundError: if the installation lacks the file.
      ValueError: if the file is damaged, or a number is out of range.

    Exactness: bit-exact to the T = 1 program.
    """
    config, params = load_bundled_config()
    target = singleton(
        config,
        max_length=config.max_position if max_length is None else max_length,
        num_cached_experts=num_cached_experts,
    )
    return target, params
