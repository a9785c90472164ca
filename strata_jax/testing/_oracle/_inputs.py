"""Checks of what the oracle is given."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def as_vector(name: str, value: ArrayLike, size: int | None = None) -> np.ndarray:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim != 1 or (size is not None and array.shape[0] != size):
        want = "[V]" if size is None else f"[{size}]"
        raise ValueError(f"{name} must have shape {want}, got {list(array.shape)}")
    return array


def as_rows(name: str, value: ArrayLike, ndim: int) -> np.ndarray:
    rows = np.asarray(value)
    if rows.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got {list(rows.shape)}")
    if rows.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(f"{name} must be float32 or float64, got {rows.dtype}")
    if not np.all(np.isfinite(rows) & (rows >= 0)):
        raise ValueError(f"{name} must be finite and non-negative")
    return rows


def as_uniform(name: str, value: float, dtype: np.dtype) -> np.floating:
    uniform = dtype.type(value)
    if not 0 <= uniform < 1:
        raise ValueError(f"{name} must be in [0, 1) as {dtype}, got {value!r}")
    return uniform
