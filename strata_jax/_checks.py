"""Static checks of shapes, dtypes and ranges: a ValueError that names the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def check_shape(
    name: str, array: jax.typing.ArrayLike, shape: Sequence[int | None]
) -> None:
    """Raises ValueError unless `array` has `shape` (None stands for any size)."""
    found = jnp.shape(array)
    if len(found) != len(shape) or any(
        wanted is not None and wanted != size
        for wanted, size in zip(shape, found, strict=True)
    ):
        wanted = tuple("any" if size is None else size for size in shape)
        raise ValueError(f"{name} must have shape {wanted}, got {found}")


def check_floating(name: str, array: jax.Array) -> None:
    """Raises ValueError unless `array` has a floating dtype of at least 32 bits."""
    dtype = jnp.result_type(array)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 32:
        raise ValueError(f"{name} must be float32 or float64, got {dtype}")


def check_integer_dtype(name: str, array: jax.Array) -> None:
    """Raises ValueError unless `array` has an integer dtype."""
    dtype = jnp.result_type(array)
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name} must be an integer array, got {dtype}")


def check_number(name: str, value: Any, minimum: float, maximum: float) -> float:
    """Returns `value` as a float; ValueError unless it lies in [minimum, maximum]."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if math.isnan(number) or not minimum <= number <= maximum:
        raise ValueError(f"{name} must be in [{minimum:g}, {maximum:g}], got {value!r}")
    return number


def check_integer(
    name: str, value: Any, minimum: int, maximum: int | None = None
) -> int:
    """Returns `value` as an int; ValueError unless it is one and in range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value!r}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value!r}")
    return number
