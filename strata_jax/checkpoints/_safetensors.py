"""Reads and writes safetensors files, and loads Hugging Face llamas from them."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from strata_jax.checkpoints._json import read_json_object
from strata_jax.checkpoints._llama_tensors import (
    TensorNames,
    build_params,
    check_dtype,
    check_tensors,
)
from strata_jax.models import LlamaConfig, LlamaParams

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
_WEIGHT_DTYPES = {_DTYPES[code] for code in ("F16", "BF16", "F32", "F64")}
_MAX_HEADER_BYTES = 100_000_000  # of the format
_METADATA = "__metadata__"
_CONFIG = "config.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer={
        "attention_norm": "model.layers.{layer}.input_layernorm.weight",
        "query": "model.layers.{layer}.self_attn.q_proj.weight",
        "key": "model.layers.{layer}.self_attn.k_proj.weight",
        "value": "model.layers.{layer}.self_attn.v_proj.weight",
        "output": "model.layers.{layer}.self_attn.o_proj.weight",
        "feed_forward_norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "gate": "model.layers.{layer}.mlp.gate_proj.weight",
        "up": "model.layers.{layer}.mlp.up_proj.weight",
        "down": "model.layers.{layer}.mlp.down_proj.weight",
    },
)
# Older exports hold the rotary frequencies, which follow from rope_theta.
_ROTARY_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# Settings that change the arithmetic, with the values that leave it as it is.
_INERT_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "num_nextn_predict_layers": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}


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
    return {name: view.copy() for name, view in _view(pathlib.Path(path)).items()}


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

    Exactness: neither; `read_safetensors` gives the same values bit for bit.
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
    # In the same folder, since a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode  # the package writes files only we can read
        safetensors.numpy.save_file(
            arrays, temporary, metadata=dict(metadata) if metadata else None
        )
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def load_safetensors(
    path: str | os.PathLike[str], *, dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[LlamaConfig, LlamaParams]:
    """Loads configuration and weights of a llama in the Hugging Face layout.

    `config.json` decides whether the head is tied, never the absence of a tensor.
    A tied checkpoint that stores `lm_head.weight` as well must store the embedding
    there, bit for bit; it is then dropped. The rotary frequencies that older exports
    store (`rotary_emb.inv_freq`) are not read: `rope_theta` decides.

    Args:
      path: a folder with `config.json` and either `model.safetensors` or
        `model.safetensors.index.json` with its shards (the single file wins); or
        one of these two files, with `config.json` beside it.
      dtype: floating type of the parameters.

    Returns:
      The configuration, and the parameters in `dtype` (shapes in `LlamaParams`).

    Raises:
      FileNotFoundError: naming every file that is missing.
      ValueError: naming the file and the fault, if a file is damaged, if the model
        is of another family or uses a feature that `LlamaConfig` cannot express, or
        if a tensor is missing, unknown or misshapen; every such tensor is listed.

    Exactness: neither; values are the file's rounded to `dtype`, bit for bit the
      same if it is the file's own type or a wider one.
    """
    dtype = check_dtype(dtype)
    path = pathlib.Path(path)
    if path.is_dir():
        single = path / _SINGLE
        path = single if single.exists() else path / _INDEX
        if not path.exists():
            raise FileNotFoundError(
                f"{path.parent}: has neither {_SINGLE} nor {_INDEX}"
            )
    config = _config(path.parent / _CONFIG)
    tensors = _view_shards(path) if path.suffix == ".json" else _view(path)
    check_tensors(
        path,
        config,
        _NAMES,
        {name: view.shape for name, view in tensors.items()},
        ignored=filter(_ROTARY_BUFFER.fullmatch, tensors),
    )
    unfit = [
        f"{name} ({view.dtype})"
        for name, view in tensors.items()
        if view.dtype not in _WEIGHT_DTYPES
    ]
    if unfit:
        raise ValueError(
            f"{path}: weights must be float16, bfloat16, float32 or float64: "
            + ", ".join(unfit)
        )
    head = tensors.get(_NAMES.head)
    if config.tie_embeddings and head is not None:
        embedding = tensors[_NAMES.embedding]
        same_type = head.dtype == embedding.dtype
        # As bytes, so that a NaN equals itself.
        if not same_type or np.any(head.view(np.uint8) != embedding.view(np.uint8)):
            raise ValueError(
                f"{path}: {_NAMES.head} differs from {_NAMES.embedding}, yet "
                f"{_CONFIG} ties them; set tie_word_embeddings to false there, or "
                "remove the tensor"
            )
    return config, build_params(config, _NAMES, tensors.__getitem__, dtype)


class _Entry(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def _view(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Read-only views of a file's tensors, after checking all of its header."""
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


def _view_shards(path: pathlib.Path) -> dict[str, np.ndarray]:
    weight_map = read_json_object(path, path.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map must be an object that is not empty")
    for name, shard in weight_map.items():
        # A plain name: an index must not reach outside its own folder.
        plain = isinstance(shard, str) and pathlib.PurePath(shard).name == shard
        if not plain or not shard:
            raise ValueError(
                f"{path}: tensor {name}: expected the name of a file, got {shard!r}"
            )
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not (path.parent / shard).is_file()]:
        raise FileNotFoundError(f"{path}: shards are missing: {', '.join(missing)}")
    tensors: dict[str, np.ndarray] = {}
    misplaced = []
    for shard in shards:
        views = _view(path.parent / shard)
        misplaced += [
            f"{name} (in {shard})" for name in views if weight_map.get(name) != shard
        ]
        tensors |= views
    if misplaced:
        raise ValueError(
            f"{path}: the index does not list these tensors where they are: "
            + ", ".join(misplaced)
        )
    return tensors


def _config(path: pathlib.Path) -> LlamaConfig:
    stated = read_json_object(path, path.read_bytes())
    if (family := stated.get("model_type")) != "llama":
        raise ValueError(
            f"{path}: model_type {family!r} is not supported; supported: llama"
        )
    for key, inert in _INERT_VALUES.items():
        value = stated.get(key, inert[0])
        if value not in inert:
            raise ValueError(
                f"{path}: {key} = {value!r} is not supported; supported: absent or "
                f"{inert[0]!r}"
            )
    # Newer files keep rope_theta inside rope_parameters.
    rotary = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = stated.get(key) or {}
        kind = (
            value.get("rope_type", value.get("type", "default"))
            if isinstance(value, dict)
            else value
        )
        if kind != "default":
            raise ValueError(
                f"{path}: {key} {value!r} is not supported; use a checkpoint without "
                "rotary scaling"
            )
        rotary |= value
    if rotary.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"{path}: partial_rotary_factor = {rotary['partial_rotary_factor']!r} is "
            "not supported; supported: absent or 1"
        )
    tied = stated.get("tie_word_embeddings", False)
    if type(tied) is not bool:
        raise ValueError(
            f"{path}: tie_word_embeddings must be true or false, got {tied!r}"
        )
    num_heads = _number(path, stated, "num_attention_heads", int)
    hidden_size = _number(path, stated, "hidden_size", int)
    if num_heads < 1:
        raise ValueError(f"{path}: num_attention_heads must be positive: {num_heads}")
    try:
        # Where a default is given, it is the family's own.
        return LlamaConfig(
            vocab_size=_number(path, stated, "vocab_size", int),
            hidden_size=hidden_size,
            num_layers=_number(path, stated, "num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=_number(path, stated, "num_key_value_heads", int, num_heads),
            head_dim=_number(path, stated, "head_dim", int, hidden_size // num_heads),
            intermediate_size=_number(path, stated, "intermediate_size", int),
            rope_theta=_number(path, stated | rotary, "rope_theta", float, 10_000.0),
            norm_epsilon=_number(path, stated, "rms_norm_eps", float, 1e-6),
            max_position=_number(path, stated, "max_position_embeddings", int, 2048),
            tie_embeddings=tied,
        )
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error


def _number(
    path: pathlib.Path,
    stated: Mapping[str, Any],
    key: str,
    kind: type,
    default: float | None = None,
) -> Any:
    value: Any = stated.get(key)
    if value is None:
        value = default
    accepted = (int,) if kind is int else (int, float)
    try:
        if type(value) in accepted and math.isfinite(value):
            return kind(value)
    except OverflowError:  # an integer beyond every float
        pass
    found = "but is missing" if value is None else f"got {value!r}"
    raise ValueError(f"{path}: {key} must be one finite {kind.__name__}, {found}")
