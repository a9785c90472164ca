"""Loads a llama from a GGUF file without decoding its weights."""

from __future__ import annotations

import os

import jax.numpy as jnp
import numpy as np

from strata_jax.checkpoints._gguf import NAMES, LlamaFile, open_llama
from strata_jax.experts import read_blocks
from strata_jax.models import (
    LlamaConfig,
    TiledLlamaParams,
    Tiles,
    cut_packed_tiles,
    cut_tiles,
)

# GGUF's types that stay packed, and what `strata_jax.experts` calls them.
_PACKED = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}


def load_gguf_tiled(
    path: str | os.PathLike[str],
) -> tuple[LlamaConfig, TiledLlamaParams]:
    """Loads a llama from a GGUF file in tiles; quantised weights stay quantised.

    Matrices in Q8_0, Q4_0 or Q4_1 are kept as int8 with scales of 32 entries in half
    precision, as in the file (or float32, if that does not hold them); of other types,
    as float32.

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
    if not kinds <= _PACKED.keys():
        return cut_tiles(
            [np.concatenate([file.read(name) for name in names]).T for names in layers]
        )
    has_offset = "Q4_1" in kinds
    joined = [
        [
            np.concatenate(parts).T
            for parts in zip(
                *(_unpack(file, name, has_offset) for name in names), strict=True
            )
        ]
        for names in layers
    ]
    values, scale, *offset = (list(parts) for parts in zip(*joined, strict=True))
    return cut_packed_tiles(values, scale, *offset)


def _unpack(file: LlamaFile, name: str, has_offset: bool) -> tuple[np.ndarray, ...]:
    """Returns codes `[N, K]`, scales `[N, K / 32]`, and offsets if they are wanted."""
    stored, kind = file.stored[name]
    num_rows, row_bytes = stored.shape
    block, block_bytes = file.gguf.GGML_QUANT_SIZES[kind]
    num_inputs = row_bytes // block_bytes * block
    values, scale, offset = read_blocks(
        _PACKED[kind.name], stored, num_rows, num_inputs
    )
    parts = [values, scale]
    if has_offset:
        parts.append(np.zeros_like(scale) if offset is None else offset)
    return tuple(file.split_pairs(name, part) for part in parts)
