"""The request's uniforms from their counters, in NumPy."""

from __future__ import annotations

import numpy as np

from strata_jax import _checks

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def oracle_position_uniforms(
    key_data: np.ndarray, stream: int, position: int, width: int
) -> np.ndarray:
    """Returns the uniforms of a stream that is keyed by position alone.

    Args:
      key_data: `[2]` uint32, `jax.random.key_data` of the request's key.
      stream: number of the stream.
      position: 0-based index of the token being chosen.
      width: how many uniforms.

    Returns:
      `[width]` float32 in [0, 1), multiples of 2^-24.

    Raises:
      ValueError: if the key is no pair of uint32, or a number is out of range.

    Exactness: the bits of the library's own streams, with JAX's default of
      `jax_threefry_partitionable`, True.

    References:
      Salmon et al., `Parallel Random Numbers: As Easy as 1, 2, 3
      <https://doi.org/10.1145/2063384.2063405>`_, 2011 (Threefry-2x32, 20 rounds).
    """
    _check_counters(key_data, stream=stream, position=position, width=width)
    return _uniforms(_fold_in(key_data, stream), position, width)


def oracle_window_uniforms(
    key_data: np.ndarray, stream: int, window: int, position: int, width: int
) -> np.ndarray:
    """Returns the uniforms of a stream that is keyed by window and position.

    Args:
      key_data: `[2]` uint32, `jax.random.key_data` of the request's key.
      stream: number of the stream.
      window: number of windows before this one.
      position: 0-based index of the token being chosen.
      width: how many uniforms.

    Returns:
      `[width]` float32 in [0, 1), multiples of 2^-24.

    Raises:
      ValueError: if the key is no pair of uint32, or a number is out of range.

    Exactness: the bits of the library's own streams, with JAX's default of
      `jax_threefry_partitionable`, True.
    """
    _check_counters(
        key_data, stream=stream, window=window, position=position, width=width
    )
    key = _fold_in(_fold_in(key_data, stream), window)
    return _uniforms(key, position, width)


def _check_counters(key_data: np.ndarray, **numbers: int) -> None:
    if np.shape(key_data) != (2,) or np.asarray(key_data).dtype != np.uint32:
        raise ValueError(
            "key_data must be [2] uint32, as jax.random.key_data gives it, got "
            f"{np.shape(key_data)} {np.asarray(key_data).dtype}"
        )
    for name, value in numbers.items():
        _checks.check_integer(name, value, 0, 2**31 - 1)


def _uniforms(key: np.ndarray, position: int, width: int) -> np.ndarray:
    index = np.arange(width, dtype=np.uint32)
    high, low = _threefry(_fold_in(key, position), np.zeros_like(index), index)
    return ((high ^ low) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def _fold_in(key: np.ndarray, number: int) -> np.ndarray:
    counter = np.array([number], np.uint32)
    return np.concatenate(_threefry(key, np.zeros_like(counter), counter))


def _threefry(
    key: np.ndarray, first: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds, elementwise over counters."""
    keys = [np.uint32(key[0]), np.uint32(key[1])]
    keys.append(keys[0] ^ keys[1] ^ _PARITY)
    with np.errstate(over="ignore"):  # additions are modulo 2^32
        first, second = first + keys[0], second + keys[1]
        for group in range(5):
            for rotation in _ROTATIONS[group % 2]:
                first = first + second
                second = (second << np.uint32(rotation)) | (
                    second >> np.uint32(32 - rotation)
                )
                second = second ^ first
            first = first + keys[(group + 1) % 3]
            second = second + keys[(group + 2) % 3] + np.uint32(group + 1)
    return first, second
