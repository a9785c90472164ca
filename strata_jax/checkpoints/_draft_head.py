"""Draft heads with a dense layer, apart from the target that they draft for."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from strata_jax.checkpoints._safetensors import (
    read_metadata,
    read_safetensors,
    save_safetensors,
)
from strata_jax.models import (
    LlamaConfig,
    TiledLlamaParams,
    TiledMtpParams,
    check_tiled_mtp_params,
    cut_packed_tiles,
    draft_from,
    read_matrix,
    with_shared_tables,
)

_FORMAT = "strata_jax draft head 1"
_VECTORS = (
    "embedding_norm",
    "hidden_norm",
    "attention_norm",
    "feed_forward_norm",
    "final_norm",
)
_MATRICES = ("projection", "query_key_value", "output", "gate_up", "down")


def save_draft_head(
    path: str | os.PathLike[str],
    mtp: TiledMtpParams,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a draft head whose matrices are in Q8_0, whole or not at all.

    Tables are not written: the head drafts with its target's.

    Args:
      path: a safetensors file; its folder must exist.
      mtp: the head, quantised (`models.tile_mtp`) and with a draft vocabulary.
      metadata: more text for the header, by name.

    Raises:
      FileNotFoundError: if the folder does not exist.
      ValueError: if the head is not tiled, a matrix is not in Q8_0, or there is no
        draft vocabulary.

    Exactness: `load_draft_head` gives the same weights bit for bit.
    """
    if not isinstance(mtp, TiledMtpParams):
        raise ValueError(
            f"mtp must be models.TiledMtpParams, got {type(mtp).__name__}: use "
            "models.tile_mtp"
        )
    if mtp.draft_tokens is None:
        raise ValueError("mtp has no draft vocabulary: use models.draft_from")
    tensors = {name: np.asarray(getattr(mtp, name)) for name in _VECTORS}
    tensors["draft_tokens"] = np.asarray(mtp.draft_tokens)
    for name in _MATRICES:
        values, scale = read_matrix(getattr(mtp, name))
        if scale is None:
            raise ValueError(
                f"mtp.{name} is not quantised: use models.tile_mtp(is_quantized=True)"
            )
        halves = scale.astype(np.float16)
        if (halves != scale).any():
            raise ValueError(
                f"mtp.{name} has scales that half precision does not hold: quantise it "
                "with models.tile_mtp(is_quantized=True)"
            )
        tensors[f"{name}.values"] = values
        tensors[f"{name}.scale"] = halves
    config = json.dumps(dataclasses.asdict(mtp.config))
    header = {"format": _FORMAT, "config": config}
    save_safetensors(path, tensors, {**(metadata or {}), **header})


def load_draft_head(
    path: str | os.PathLike[str], params: TiledLlamaParams
) -> TiledLlamaParams:
    """Gives a target the draft head of a file.

    Args:
      path: a file that `save_draft_head` wrote.
      params: the target's weights.

    Returns:
      The same weights with `mtp`; its head is made of the target's.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if `params` is not tiled; naming the file and the fault, if it is
        damaged, or of another target.

    Exactness: law-exact; the draft head's weights are the file's.
    """
    if not isinstance(params, TiledLlamaParams):
        raise ValueError(
            f"params must be models.TiledLlamaParams, got {type(params).__name__}: use "
            "checkpoints.load_gguf_tiled or models.tile_params"
        )
    path = pathlib.Path(path)
    header = read_metadata(path)
    if header.get("format") != _FORMAT:
        raise ValueError(f"{path}: not a draft head that save_draft_head wrote")
    tensors = read_safetensors(path)
    wanted = {*_VECTORS, "draft_tokens"}
    wanted |= {f"{name}.{part}" for name in _MATRICES for part in ("values", "scale")}
    if wanted != tensors.keys():
        names = ", ".join(sorted(wanted ^ tensors.keys()))
        raise ValueError(f"{path}: missing or unknown tensors: {names}")
    try:
        config = LlamaConfig(**json.loads(header["config"]))
        fields: dict[str, Any] = {
            name: cut_packed_tiles(
                [tensors[f"{name}.values"]], [tensors[f"{name}.scale"]]
            )
            for name in _MATRICES
        }
        fields |= {name: jnp.asarray(tensors[name]) for name in _VECTORS}
        mtp = TiledMtpParams(config=config, **fields)
        mtp = draft_from(mtp, params.head, tensors["draft_tokens"])
        params = dataclasses.replace(params, mtp=mtp)
        head = with_shared_tables(params)
        assert isinstance(head, TiledMtpParams)
        check_tiled_mtp_params(head)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: does not fit this target: {error}") from error
    return params
