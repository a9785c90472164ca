"""Reads and writes safetensors files."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from strata_jax._files import replaced_file
from strata_jax.checkpoints._json import read_json_object

_DTYPES = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_MAX_HEADER_BYTES = 100_000_000  # of the format
_METADATA = "__metadata__"


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads every tensor of a safetensors file.

    Args:
      path: the file.

    Returns:
      Arrays by name, in the file's shapes and types (bfloat16 and float8 by way of
      `ml_dtypes`), independent of the file.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, and the tensor where one is at fault, if the file
        is not valid: header, types, shapes, order and coverage of the bytes.

    Exactness: neither; nothing is computed, values are the file's bit for bit.
    """
    path = pathlib.Path(path)
    return {name: view.copy() for name, view in view_safetensors(path).items()}


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Reads the text that a safetensors file keeps in its header.

    Args:
      path: the file.

    Returns:
      Text by name.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, if it is not valid.

    Exactness: neither; nothing is computed.
    """
    path = pathlib.Path(path)
    view_safetensors(path)
    with safetensors.safe_open(str(path), framework="numpy") as file:
        return dict(file.metadata() or {})


def save_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, jax.typing.ArrayLike],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file in one step: the old file stays until it is whole.

    Args:
      path: the file; its folder must exist.
      tensors: arrays by name, of any shape and of a type that the format has.
      metadata: text by name, kept in the file's header.

    Raises:
      FileNotFoundError: if the folder does not exist.
      ValueError: naming the tensor or the metadata entry that cannot be stored;
        nothing is written then.

    Exactness: neither; `read_safetensors` gives the same values bit for bit, and the
      same content the same bytes.
    """
    path = pathlib.Path(path)
    arrays = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == _METADATA:
            raise ValueError(f"tensors: {name!r} cannot be a tensor's name")
        array = np.asarray(tensor, order="C")
        if array.dtype not in _DTYPES.values():
            raise ValueError(
                f"tensors: {name} has type {array.dtype}, which safetensors cannot "
                "hold; convert it first"
            )
        arrays[name] = array
    for key, value in (metadata or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"metadata must map str to str, got {key!r}: {value!r}")
    with replaced_file(path) as temporary:
        mode = temporary.stat().st_mode  # the package writes files only we can read
        safetensors.numpy.save_file(
            arrays, temporary, metadata=dict(metadata) if metadata else None
        )
        temporary.chmod(mode)
        _sort_header(temporary)


def _sort_header(path: pathlib.Path) -> None:
    # The package writes metadata in a random order; equal content shall be equal bytes.
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        if _METADATA in header:
            header[_METADATA] = dict(sorted(header[_METADATA].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        # The same pieces in another order; the format pads with blanks.
        assert len(text) <= length
        file.seek(8)
        file.write(text.ljust(length))


class _Entry(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def view_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns read-only views of a file's tensors, after checking all of its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(
                f"{path}: not a safetensors file: {size} bytes, at least 8 expected"
            )
        length = int.from_bytes(prefix, "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path}: truncated or damaged: states a header of {length} bytes, "
                f"{size - 8} are left"
            )
        header = read_json_object(f"{path}: header", file.read(length))
    header.pop(_METADATA, None)
    start = 8 + length
    entries = {name: _entry(path, name, entry) for name, entry in header.items()}
    position, previous = 0, None
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != position:
            fault = "overlaps" if entry.start < position else "leaves a gap after"
            raise ValueError(
                f"{path}: tensor {name} {fault} {previous or 'the header'}: starts at "
                f"byte {entry.start} of the data, expected {position}"
            )
        position, previous = entry.end, name
    if position != size - start:
        fault = "truncated" if position > size - start else "trailing bytes"
        raise ValueError(
            f"{path}: {fault}: tensor {previous} ends at byte {position} of the data, "
            f"the file holds {size - start}"
        )
    # The reference implementation has the last word on what is a valid file.
    try:
        with safetensors.safe_open(str(path), framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a valid safetensors file: {error}") from error
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))[start:]
    return {
        name: data[entry.start : entry.end].view(entry.dtype).reshape(entry.shape)
        for name, entry in entries.items()
    }


def _entry(path: pathlib.Path, name: str, entry: Any) -> _Entry:
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: tensor {name}: expected an object, got {entry!r}")
    code = entry.get("dtype")
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(
            f"{path}: tensor {name} has unsupported type {code!r}; supported: "
            f"{', '.join(_DTYPES)}"
        )
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _is_sizes(shape):
        raise ValueError(f"{path}: tensor {name} has an invalid shape {shape!r}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{path}: tensor {name} has invalid data_offsets {offsets!r}")
    needed = math.prod(shape) * _DTYPES[code].itemsize
    if needed != offsets[1] - offsets[0]:
        raise ValueError(
            f"{path}: tensor {name} of type {code} and shape {shape} needs {needed} "
            f"bytes, its data_offsets {offsets} hold {offsets[1] - offsets[0]}"
        )
    return _Entry(_DTYPES[code], tuple(shape), *offsets)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(size) is int and size >= 0 for size in value
    )
