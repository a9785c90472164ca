"""Reads the header of a GGUF file, trusting none of its counts.

Every count and length is held against the bytes that are left before anything
is allocated or looped over, so a damaged or hostile file costs no more time and
memory than its own size.
"""

from __future__ import annotations

import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4  # of the format
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# The least that one entry takes: name length, type, one byte of value; and
# name length, number of dimensions, type, offset.
_SMALLEST_PAIR, _SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


class GgufTensor(NamedTuple):
    """Where one tensor of a GGUF file lies.

    Attributes:
      shape: outermost dimension first, `[out, in]` for a matrix.
      type_id: the file's number for the storage type.
      offset: first byte, from the start of the file.
    """

    shape: tuple[int, ...]
    type_id: int
    offset: int


class GgufHeader(NamedTuple):
    """Contents of a GGUF file, without the tensors' data.

    Attributes:
      path: the file.
      data: the whole file, mapped read-only, uint8.
      metadata: int, float, bool, str, list of str, or 1-D array by key.
      tensors: where each tensor lies, by name.
    """

    path: pathlib.Path
    data: np.ndarray
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: pathlib.Path) -> GgufHeader:
    """Reads the metadata and the tensor table of a GGUF file.

    Args:
      path: a little-endian GGUF file, version 2 or 3.

    Returns:
      The header; the tensors' extents are not checked here, since they depend
      on the storage types.

    Raises:
      ValueError: naming the file and the fault, if it is not a whole GGUF header.
    """
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: not a GGUF file: it is empty")
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    cursor = _Cursor(path, data)
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise ValueError(f"{path}: not a GGUF file: it starts with {magic!r}")
    version = cursor.number(_U32, "the version")
    if version not in _VERSIONS:
        kind = "big-endian GGUF" if version & 0xFFFF == 0 else f"GGUF version {version}"
        raise ValueError(
            f"{path}: {kind} is not supported; little-endian versions "
            f"{_VERSIONS[0]} and {_VERSIONS[1]} are"
        )
    num_tensors = cursor.number(_U64, "the number of tensors")
    num_pairs = cursor.number(_U64, "the number of metadata entries")
    cursor.check(num_pairs * _SMALLEST_PAIR, f"{num_pairs} metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise ValueError(f"{path}: metadata key {key} appears twice")
        metadata[key] = _value(cursor, key)

    cursor.check(num_tensors * _SMALLEST_TENSOR, f"{num_tensors} tensor entries")
    relative: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.string("a tensor name")
        if name in relative:
            raise ValueError(f"{path}: tensor {name} appears twice")
        relative[name] = _tensor(cursor, name)

    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(
            f"{path}: general.alignment must be a power of two, got {alignment!r}"
        )
    start = -(-cursor.offset // alignment) * alignment
    tensors = {}
    for name, tensor in relative.items():
        if tensor.offset % alignment:
            raise ValueError(
                f"{path}: tensor {name} has offset {tensor.offset}, which is not a "
                f"multiple of the alignment {alignment}"
            )
        tensors[name] = tensor._replace(offset=start + tensor.offset)
    return GgufHeader(path, data, metadata, tensors)


class _Cursor:
    """A position in the file that never passes its end."""

    def __init__(self, path: pathlib.Path, data: np.ndarray):
        self.path = path
        self.offset = 0
        self._view = data.data

    def check(self, size: int, what: str) -> None:
        left = len(self._view) - self.offset
        if size > left:
            raise ValueError(
                f"{self.path}: truncated or damaged: {what} at byte {self.offset} "
                f"needs {size} bytes, {left} are left"
            )

    def take(self, size: int, what: str) -> bytes:
        self.check(size, what)
        start = self.offset
        self.offset += size
        return bytes(self._view[start : self.offset])

    def number(self, kind: struct.Struct, what: str) -> int:
        return kind.unpack(self.take(kind.size, what))[0]

    def string(self, what: str) -> str:
        raw = self.take(self.number(_U64, f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} is not UTF-8: {error}") from error


def _value(cursor: _Cursor, key: str) -> Any:
    what = f"the value of {key}"
    kind = cursor.number(_U32, f"the type of {key}")
    if kind == _STRING:
        return cursor.string(what)
    if kind in _SCALARS:
        return _numbers(cursor, kind, 1, what)[0].item()
    if kind != _ARRAY:
        raise ValueError(f"{cursor.path}: {key} has unknown type {kind}")
    item = cursor.number(_U32, f"the element type of {key}")
    length = cursor.number(_U64, f"the length of {key}")
    if item == _STRING:
        cursor.check(length * _U64.size, what)
        return [cursor.string(what) for _ in range(length)]
    if item in _SCALARS:
        return _numbers(cursor, item, length, what)
    # Nested arrays are in the specification, but no writer produces them.
    raise ValueError(f"{cursor.path}: {key} is an array of unsupported type {item}")


def _numbers(cursor: _Cursor, kind: int, length: int, what: str) -> np.ndarray:
    dtype = _SCALARS[kind]
    return np.frombuffer(cursor.take(length * dtype.itemsize, what), dtype)


def _tensor(cursor: _Cursor, name: str) -> GgufTensor:
    what = f"the entry of tensor {name}"
    num_dimensions = cursor.number(_U32, what)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(
            f"{cursor.path}: tensor {name} has {num_dimensions} dimensions, expected "
            f"1 to {_MAX_DIMENSIONS}"
        )
    sizes = [cursor.number(_U64, what) for _ in range(num_dimensions)]
    if 0 in sizes:
        raise ValueError(f"{cursor.path}: tensor {name} has a dimension of size 0")
    type_id = cursor.number(_U32, what)
    # The file lists the fastest dimension first.
    return GgufTensor(tuple(reversed(sizes)), type_id, cursor.number(_U64, what))
