"""The block formats of GGUF files: 32 weights of a row share half-precision scales.

    q8_0   d (half), 32 int8 codes                                  d * code
    q4_0   d (half), 16 bytes of two 4-bit codes                    d * (code - 8)
    q4_1   d (half), m (half), 16 bytes of two 4-bit codes          d * code + m

The low halves of the 16 bytes are the first 16 codes. A half times a code of 8 bits is
exact in float32, so q4_1's sum is the only rounding, contracted or not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_SIZE = 32
# What a block holds, and what is taken from its codes.
_KINDS = {
    "q8_0": (np.dtype([("scale", "<f2"), ("codes", "i1", 32)]), np.int8(0)),
    "q4_0": (np.dtype([("scale", "<f2"), ("codes", "u1", 16)]), np.int8(8)),
    "q4_1": (
        np.dtype([("scale", "<f2"), ("least", "<f2"), ("codes", "u1", 16)]),
        np.int8(0),
    ),
}


def encode_q8_0(weights: np.ndarray) -> np.ndarray:
    """`[O, I]` float32 -> `[blocks, 34]` uint8; the largest magnitude becomes 127."""
    blocks = weights.reshape(-1, BLOCK_SIZE)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    # Ties away from zero.
    whole = np.trunc(scaled)
    codes = whole + np.trunc(2 * (scaled - whole))
    return np.concatenate(
        [_half_bytes("q8_0", scale), codes.astype(np.int8).view(np.uint8)], axis=1
    )


def encode_q4_0(weights: np.ndarray) -> np.ndarray:
    """`[O, I]` float32 -> `[blocks, 18]` uint8; the largest magnitude becomes -8."""
    blocks = weights.reshape(-1, BLOCK_SIZE)
    largest = np.abs(blocks).argmax(axis=1)[:, None]
    scale = np.take_along_axis(blocks, largest, axis=1) / np.float32(-8)
    codes = blocks * _inverse(scale) + np.float32(8.5)
    return np.concatenate([_half_bytes("q4_0", scale), _pack_nibbles(codes)], axis=1)


def encode_q4_1(weights: np.ndarray) -> np.ndarray:
    """`[O, I]` float32 -> `[blocks, 20]` uint8; the least weight becomes 0."""
    blocks = weights.reshape(-1, BLOCK_SIZE)
    least = blocks.min(axis=1, keepdims=True)
    minimum = _half_bytes("q4_1", least)
    with np.errstate(over="ignore"):
        scale = (blocks.max(axis=1, keepdims=True) - least) / np.float32(15)
    scale_bytes = _half_bytes("q4_1", scale)
    codes = (blocks - least) * _inverse(scale) + np.float32(0.5)
    return np.concatenate([scale_bytes, minimum, _pack_nibbles(codes)], axis=1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale; 0 where that is infinite, as such a scale is 0 in half precision."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = 1 / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _half_bytes(name: str, values: np.ndarray) -> np.ndarray:
    """`[blocks, 1]` float32 -> `[blocks, 2]` uint8."""
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.all(np.isfinite(halves)):
        raise ValueError(
            f"weights must not exceed the half-precision scales of {name}; store them "
            "as bfloat16 or float32"
        )
    return halves.view(np.uint8)


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """`[blocks, 32]` float32 in [0, 17) -> `[blocks, 16]` uint8."""
    whole = np.minimum(codes.astype(np.uint8), 15)
    return whole[:, :16] | whole[:, 16:] << 4


def decode_q8_0(words: jax.Array, num_outputs: int, num_inputs: int) -> jax.Array:
    """As `Format.decode`."""
    stored = _stored_blocks(words, num_outputs * num_inputs, 34)
    codes = jax.lax.bitcast_convert_type(stored[:, 2:], jnp.int8).astype(jnp.float32)
    return (_halves(stored[:, :2]) * codes).reshape(num_outputs, num_inputs)


def decode_q4_0(words: jax.Array, num_outputs: int, num_inputs: int) -> jax.Array:
    """As `Format.decode`."""
    stored = _stored_blocks(words, num_outputs * num_inputs, 18)
    codes = _nibbles(stored[:, 2:]) - 8
    return (_halves(stored[:, :2]) * codes).reshape(num_outputs, num_inputs)


def decode_q4_1(words: jax.Array, num_outputs: int, num_inputs: int) -> jax.Array:
    """As `Format.decode`."""
    stored = _stored_blocks(words, num_outputs * num_inputs, 20)
    values = _halves(stored[:, :2]) * _nibbles(stored[:, 4:]) + _halves(stored[:, 2:4])
    return values.reshape(num_outputs, num_inputs)


def _stored_blocks(words: jax.Array, num_weights: int, block_bytes: int) -> jax.Array:
    num_blocks = num_weights // BLOCK_SIZE
    stored = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)
    return stored[: num_blocks * block_bytes].reshape(num_blocks, block_bytes)


def _halves(stored: jax.Array) -> jax.Array:
    """`[blocks, 2]` uint8 -> `[blocks, 32]` float32, every one the same."""
    halves = jax.lax.bitcast_convert_type(stored, jnp.float16).astype(jnp.float32)
    return jnp.broadcast_to(halves[:, None], (halves.shape[0], BLOCK_SIZE))


def _nibbles(stored: jax.Array) -> jax.Array:
    """`[blocks, 16]` uint8 -> `[blocks, 32]` float32."""
    return jnp.concatenate([stored & 15, stored >> 4], axis=1).astype(jnp.float32)


def read_blocks(
    name: str, stored: np.ndarray, num_outputs: int, num_inputs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Takes the blocks of a matrix apart, on the host.

    Args:
      name: "q8_0", "q4_0" or "q4_1".
      stored: the matrix's bytes, uint8 in any shape; what follows them is not read.
      num_outputs: O.
      num_inputs: I, a multiple of 32.

    Returns:
      Codes `[O, I]` int8; scales `[O, I / 32]` float32; offsets of the same shape, or
      None. A weight is its code times the scale, plus the offset.

    Raises:
      ValueError: if there is no such block format, or bytes are missing.

    Exactness: nothing is rounded.
    """
    if name not in _KINDS:
        raise ValueError(f"name must be one of {', '.join(_KINDS)}, got {name!r}")
    kind, shift = _KINDS[name]
    if num_inputs % BLOCK_SIZE:
        raise ValueError(
            f"num_inputs must be a multiple of {BLOCK_SIZE}, got {num_inputs}"
        )
    shape = (num_outputs, num_inputs // BLOCK_SIZE)
    size = shape[0] * shape[1] * kind.itemsize
    flat = np.ascontiguousarray(stored).reshape(-1)
    if flat.dtype != np.uint8 or flat.size < size:
        raise ValueError(
            f"stored must hold {size} bytes as uint8, got {flat.size} of {flat.dtype}"
        )
    blocks = flat[:size].view(kind)
    codes = blocks["codes"]
    if codes.dtype == np.uint8:
        # The low halves of the bytes are the first codes.
        codes = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.int8)
        codes = codes - shift
    offset = None
    if "least" in (kind.names or ()):
        offset = blocks["least"].astype(np.float32).reshape(shape)
    scale = blocks["scale"].astype(np.float32).reshape(shape)
    return codes.reshape(num_outputs, num_inputs), scale, offset


def reference(
    name: str, words: np.ndarray, num_outputs: int, num_inputs: int
) -> np.ndarray:
    """As `Format.reference`, of the format with that name."""
    stored = words.astype("<u4").view(np.uint8)
    codes, scale, offset = read_blocks(name, stored, num_outputs, num_inputs)
    values = np.repeat(scale, BLOCK_SIZE, axis=1) * codes.astype(np.float32)
    if offset is not None:
        values = values + np.repeat(offset, BLOCK_SIZE, axis=1)
    return values
