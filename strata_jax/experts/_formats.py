"""Storage formats of a weight matrix: their names, and the checks they share.

A matrix is [outputs, inputs], so that a product is `weights @ x`. Packed, it is a
vector of uint32 words, little-endian bytes padded with zeros to a whole word.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from strata_jax import _checks
from strata_jax.experts import _block_formats, _codebooks, _trellis


class Format(NamedTuple):
    """How a weight matrix is stored.

    No product in a decoder is rounded, so that a matrix has the same bits whether it is
    decoded for many tokens, for each one, together with what follows, or in NumPy.
    """

    name: str
    # (num_outputs, num_inputs) -> uint32 words of a packed matrix
    num_words: Callable[[int, int], int]
    # [O, I] float32 -> [num_words] uint32, on the host
    encode: Callable[[np.ndarray], np.ndarray]
    # ([num_words] uint32, O, I) -> [O, I] float32, under jit as well
    decode: Callable[[jax.Array, int, int], jax.Array]
    # the same, in NumPy and with the same bits
    reference: Callable[[np.ndarray, int, int], np.ndarray]
    # whether decoding once for several tokens gives the singleton's bits
    is_shared_bitwise: bool


def find_format(name: str) -> Format:
    """Returns the format of that name.

    Args:
      name: a key of `FORMATS`, such as "q8_0" or "trellis2_mul1".

    Returns:
      The format.

    Raises:
      ValueError: listing the names, if there is no such format.

    Exactness: a lookup.
    """
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def _checked(
    name: str,
    block: tuple[int, int],
    num_bytes: Callable[[int], int],
    encode: Callable[[np.ndarray], np.ndarray],
    decode: Callable[[jax.Array, int, int], jax.Array],
    reference: Callable[[np.ndarray, int, int], np.ndarray],
) -> Format:
    """Wraps a format in the checks that all of them share.

    Args:
      name: its name.
      block: sizes of which num_outputs and num_inputs must be multiples.
      num_bytes: number of weights -> number of bytes.
      encode: [O, I] float32 -> bytes as an array of any shape and dtype.
      decode: as in `Format`.
      reference: as in `Format`.
    """

    def num_words(num_outputs: int, num_inputs: int) -> int:
        num_outputs = _checks.check_integer("num_outputs", num_outputs, 1)
        num_inputs = _checks.check_integer("num_inputs", num_inputs, 1)
        if num_outputs % block[0] or num_inputs % block[1]:
            raise ValueError(
                f"{name} stores blocks of {block[0]} x {block[1]} weights, into which "
                f"{num_outputs} x {num_inputs} (outputs x inputs) does not divide; "
                "choose another format or pad the matrix"
            )
        return -(-num_bytes(num_outputs * num_inputs) // 4)

    def check_words(
        words: jax.Array | np.ndarray, num_outputs: int, num_inputs: int
    ) -> None:
        wanted = num_words(num_outputs, num_inputs)
        if words.dtype != jnp.uint32 or words.shape != (wanted,):
            raise ValueError(
                f"words of a {num_outputs} x {num_inputs} {name} matrix must be "
                f"[{wanted}] uint32, got {list(words.shape)} {words.dtype}"
            )

    def checked_encode(weights: np.ndarray) -> np.ndarray:
        weights = np.asarray(weights)
        if weights.dtype != np.float32 or weights.ndim != 2:
            raise ValueError(
                "weights must be float32 [outputs, inputs], got "
                f"{weights.dtype} {list(weights.shape)}"
            )
        size = num_words(*weights.shape)
        if not np.all(np.isfinite(weights)):
            raise ValueError(f"weights must be finite to be stored as {name}")
        stored = np.ascontiguousarray(encode(weights)).reshape(-1).view(np.uint8)
        padded = np.pad(stored, (0, 4 * size - stored.size))
        return padded.view("<u4").astype(np.uint32)

    def checked_decode(
        words: jax.Array, num_outputs: int, num_inputs: int
    ) -> jax.Array:
        words = jnp.asarray(words)
        check_words(words, num_outputs, num_inputs)
        return decode(words, num_outputs, num_inputs)

    def checked_reference(
        words: np.ndarray, num_outputs: int, num_inputs: int
    ) -> np.ndarray:
        words = np.asarray(words)
        check_words(words, num_outputs, num_inputs)
        # Scales that no encoder writes, such as inf, are not worth a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            return reference(words, num_outputs, num_inputs)

    return Format(
        name=name,
        num_words=num_words,
        encode=checked_encode,
        decode=checked_decode,
        reference=checked_reference,
        is_shared_bitwise=True,
    )


def _decode_float32(words: jax.Array, num_outputs: int, num_inputs: int) -> jax.Array:
    values = jax.lax.bitcast_convert_type(words, jnp.float32)
    return values.reshape(num_outputs, num_inputs)


def _decode_bfloat16(words: jax.Array, num_outputs: int, num_inputs: int) -> jax.Array:
    # A bfloat16 is the upper half of a float32.
    halves = jnp.stack([words << 16, words & jnp.uint32(0xFFFF0000)], axis=-1)
    values = jax.lax.bitcast_convert_type(halves, jnp.float32).reshape(-1)
    return values[: num_outputs * num_inputs].reshape(num_outputs, num_inputs)


def _reference_bfloat16(
    words: np.ndarray, num_outputs: int, num_inputs: int
) -> np.ndarray:
    values = words.astype("<u4").view(ml_dtypes.bfloat16)[: num_outputs * num_inputs]
    return values.astype(np.float32).reshape(num_outputs, num_inputs)


def _encode_bfloat16(weights: np.ndarray) -> np.ndarray:
    stored = weights.astype(ml_dtypes.bfloat16)
    if not np.all(np.isfinite(stored)):
        raise ValueError("weights must not exceed bfloat16's range; store as float32")
    return stored


def _block(name: str, block_bytes: int, encode, decode) -> Format:
    size = _block_formats.BLOCK_SIZE
    reference = functools.partial(_block_formats.reference, name)
    return _checked(
        name, (1, size), lambda n: n // size * block_bytes, encode, decode, reference
    )


def _trellis_format(num_bits: int, codebook: _codebooks.Codebook) -> Format:
    return _checked(
        f"trellis{num_bits}_{codebook.name}",
        (_trellis.TILE_SIZE, _trellis.TILE_SIZE),
        # One word holds the scale.
        lambda n: 4 + n // 8 * num_bits,
        lambda weights: _trellis.encode(weights, num_bits, codebook),
        lambda words, o, i: _trellis.decode(words, o, i, num_bits, codebook),
        lambda words, o, i: _trellis.reference(words, o, i, num_bits, codebook),
    )


FORMATS: Mapping[str, Format] = types.MappingProxyType(
    {
        each.name: each
        for each in (
            _checked(
                "float32",
                (1, 1),
                lambda n: 4 * n,
                lambda weights: weights,
                _decode_float32,
                lambda words, o, i: words.view(np.float32).reshape(o, i),
            ),
            _checked(
                "bfloat16",
                (1, 1),
                lambda n: 2 * n,
                _encode_bfloat16,
                _decode_bfloat16,
                _reference_bfloat16,
            ),
            _block(
                "q8_0",
                34,
                _block_formats.encode_q8_0,
                _block_formats.decode_q8_0,
            ),
            _block(
                "q4_0",
                18,
                _block_formats.encode_q4_0,
                _block_formats.decode_q4_0,
            ),
            _block(
                "q4_1",
                20,
                _block_formats.encode_q4_1,
                _block_formats.decode_q4_1,
            ),
            *(
                _trellis_format(num_bits, codebook)
                for num_bits in (2, 3, 4)
                for codebook in _codebooks.CODEBOOKS
            ),
        )
    }
)
