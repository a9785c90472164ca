"""Imports of the packages that only the `hf` extra installs."""

from __future__ import annotations

import importlib
from typing import Any


def import_hf(name: str) -> Any:
    """Imports a package of the `hf` extra.

    Args:
      name: the module's dotted name.

    Returns:
      The module.

    Raises:
      ImportError: naming the package and the command that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} is needed here and could not be imported ({error}): "
            "pip install strata-jax[hf]"
        ) from error
