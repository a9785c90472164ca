"""Loads a llama from a GGUF file without decoding its weights."""

from __future__ import annotations

import os

import jax.numpy as jnp
import numpy as np

from strata_jax.checkpoints._gguf import NAMES, LlamaFile, open_llama
from strata_jax.models import (
    LlamaConfig,
    TiledLlamaParams,
    Tiles,
    cut_packed_tiles,
    cut_tiles,
)

# Bytes before the values of a block of 32.
_HEADER_BYTES = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}
_Packed = tuple[np.ndarray, np.ndarray, np.ndarray]


def load_gguf_tiled(
    path: str | os.PathLike[str],
) -> tuple[LlamaConfig, TiledLlamaParams]:
    """Loads a llama from a GGUF file in tiles; quantised weights stay quantised.

    Matrices in Q8_0, Q4_0 or Q4_1 are kept as int8 with float32 scales of 32 entries;
    of other types, as float32.

    Args:
      path: a GGUF file of architecture `llama`.

    Returns:
      The configuration and the weights, which `targets.singleton` takes in place of
      `load_gguf`'s: faster, and of the same values.

    Raises:
      ImportError: if the `gguf` package is not installed.
      FileNotFoundError: if there is no such file.
      ValueError: as `load_gguf`.

    Exactness: the file's weights; products round otherwise than those of `load_gguf`'s.
    """
    file = open_llama(path)
    config = file.config
    layers = range(config.num_layers)

    def vectors(field: str) -> jnp.ndarray:
        names = [NAMES.layer[field].format(layer=layer) for layer in layers]
        return jnp.asarray(np.stack([file.read(name) for name in names]))

    def matrices(*fields: str) -> Tiles:
        return _tile(
            file,
            [[NAMES.layer[field].format(layer=i) for field in fields] for i in layers],
        )

    head = NAMES.embedding if config.tie_embeddings else NAMES.head
    return config, TiledLlamaParams(
        attention_norm=vectors("attention_norm"),
        query_key_value=matrices("query", "key", "value"),
        output=matrices("output"),
        feed_forward_norm=vectors("feed_forward_norm"),
        gate_up=matrices("gate", "up"),
        down=matrices("down"),
        final_norm=jnp.asarray(file.read(NAMES.final_norm)),
        embedding=None if config.tie_embeddings else _tile(file, [[NAMES.embedding]]),
        head=_tile(file, [[head]]),
    )


def _tile(file: LlamaFile, layers: list[list[str]]) -> Tiles:
    """Joins the named matrices of each layer side by side, and cuts them."""
    kinds = {file.stored[name][1].name for names in layers for name in names}
    rows = file.read(layers[0][0]).shape[1]
    if not kinds <= _HEADER_BYTES.keys() or rows % 32:
        return cut_tiles(
            [np.concatenate([file.read(name) for name in names]).T for names in layers]
        )
    joined = [
        [
            np.concatenate(parts).T
            for parts in zip(*(_unpack(file, name) for name in names), strict=True)
        ]
        for names in layers
    ]
    values, scale, offset = (list(parts) for parts in zip(*joined, strict=True))
    has_offset = kinds != {"Q8_0"}
    return cut_packed_tiles(values, scale, offset if has_offset else None)


def _unpack(file: LlamaFile, name: str) -> _Packed:
    """Returns int8 values `[N, K]`, scales and offsets `[N, K / 32]`."""
    stored, kind = file.stored[name]
    skipped = _HEADER_BYTES[kind.name]
    size = skipped + (32 if kind.name == "Q8_0" else 16)
    blocks = stored.reshape(stored.shape[0], -1, size)

    def half(start: int) -> np.ndarray:
        part = np.ascontiguousarray(blocks[..., start : start + 2])
        return part.view("<f2")[..., 0].astype(np.float32)

    scale = half(0)
    if kind.name == "Q8_0":
        values, offset = blocks[..., skipped:].view(np.int8), np.zeros_like(scale)
    else:
        # Low halves of the bytes come first.
        packed = blocks[..., skipped:]
        values = np.concatenate([packed & 15, packed >> 4], axis=-1).astype(np.int8)
        offset = half(2) if kind.name == "Q4_1" else -8 * scale
    values = values.reshape(stored.shape[0], -1)
    parts = (values, scale, offset)
    values, scale, offset = (file.split_pairs(name, part) for part in parts)
    return values, scale, offset
