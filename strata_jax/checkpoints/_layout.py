"""Where a file keeps the arrays of parameters: one description to read and write by.

A layout is a tree of the parameters' own structure whose leaves are `Placement`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_Params = TypeVar("_Params")


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a file keeps one array.

    Attributes:
      names: of the file's tensors: one, or with `stacked` one for each index.
      shape: of each of them, as the file has it.
      form: how the array differs: `transposed`; `row`, `[1, D]` in the file and `[D]`
        here; `stacked`, several tensors in one array.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    form: Literal["same", "transposed", "row", "stacked"] = "same"

    def read(self, read: Callable[[str], np.ndarray], dtype: np.dtype) -> jax.Array:
        """Returns the array, a copy: what `read` returns may be a file's pages."""
        if self.form == "stacked":
            values = np.empty((len(self.names), *self.shape), dtype)
            for index, name in enumerate(self.names):
                values[index] = read(name)
            return jnp.asarray(values)
        values = read(self.names[0])
        if self.form == "transposed":
            values = values.T
        elif self.form == "row":
            values = values[0]
        return jnp.asarray(np.array(values, dtype=dtype, order="C"))

    def write(self, array: jax.Array) -> dict[str, np.ndarray]:
        """Returns the file's tensors that hold the array."""
        values = np.asarray(array)
        if self.form == "stacked":
            return dict(zip(self.names, values, strict=True))
        if self.form == "transposed":
            values = values.T
        elif self.form == "row":
            values = values[None]
        return {self.names[0]: values}


def check_layout(
    path: str | os.PathLike[str],
    family: str,
    layout: Any,
    found: Mapping[str, tuple[int, ...]],
    *,
    optional: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str] = (),
    faults: Iterable[str] = (),
) -> None:
    """Checks that a checkpoint holds exactly the tensors of a layout.

    Args:
      path: the checkpoint, for the message.
      family: the model's, for the message.
      layout: where the arrays should be.
      found: the shape of every tensor in the checkpoint.
      optional: shapes of tensors that may be there as well.
      ignored: names that may be there and are not looked at.
      faults: what else is wrong, for the same message.

    Raises:
      ValueError: listing every fault: what is missing, unknown and misshapen.
    """
    required = {
        name: placement.shape
        for placement in jax.tree.leaves(layout)
        for name in placement.names
    }
    expected = required | dict(optional)
    listed = list(faults)
    if missing := sorted(required.keys() - found.keys()):
        listed.append("missing: " + ", ".join(missing))
    if extra := sorted(found.keys() - expected.keys() - set(ignored)):
        listed.append("not part of this model: " + ", ".join(extra))
    misshapen = [
        f"{name} has {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if misshapen:
        listed.append("wrong shape: " + ", ".join(misshapen))
    if listed:
        raise ValueError(
            f"{path}: not a complete {family} checkpoint of the stated configuration; "
            + "; ".join(listed)
        )


def read_layout(
    layout: _Params, read: Callable[[str], np.ndarray], dtype: np.dtype
) -> _Params:
    """Reads every tensor of a layout once.

    Args:
      layout: where the arrays are.
      read: returns a tensor by its name, as the file has it.
      dtype: type of every parameter.

    Returns:
      The parameters, in the layout's structure.
    """
    return jax.tree.map(lambda placement: placement.read(read, dtype), layout)


def write_layout(layout: Any, params: Any) -> dict[str, np.ndarray]:
    """Returns the tensors of a file that holds parameters in a layout.

    Args:
      layout: where the arrays shall be.
      params: parameters of the same structure.

    Returns:
      Tensors by name.
    """
    tensors: dict[str, np.ndarray] = {}
    for placement, array in zip(
        jax.tree.leaves(layout), jax.tree.leaves(params), strict=True
    ):
        tensors |= placement.write(array)
    return tensors
