"""Models in the Hugging Face layout: a folder of `config.json` and safetensors."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from strata_jax._files import replaced_file
from strata_jax.checkpoints._hugging_face_config import describe_config, read_config
from strata_jax.checkpoints._json import read_json_object
from strata_jax.checkpoints._layout import read_layout, write_layout
from strata_jax.checkpoints._llama_tensors import (
    HUGGING_FACE,
    check_dtype,
    check_tensors,
    llama_layout,
)
from strata_jax.checkpoints._moe_tensors import (
    check_moe_tensors,
    moe_layout,
    mtp_layout,
)
from strata_jax.checkpoints._safetensors import (
    save_safetensors,
    view_safetensors,
)
from strata_jax.experts import ExpertWeights
from strata_jax.models import (
    LlamaConfig,
    LlamaParams,
    MoeConfig,
    MoeLayer,
    MoeParams,
    check_moe_params,
    check_params,
)

_CONFIG = "config.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHT_DTYPES = tuple(
    map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
)
_Params = TypeVar("_Params", LlamaParams, MoeParams)
# Older exports hold the rotary frequencies, which follow from rope_theta.
_ROTARY_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def load_safetensors(
    path: str | os.PathLike[str], *, dtype: jax.typing.DTypeLike = jnp.float32
) -> tuple[LlamaConfig, LlamaParams] | tuple[MoeConfig, MoeParams]:
    """Loads configuration and weights of a model in the Hugging Face layout.

    Families (`model_type`) are `llama` and `qwen3_moe`. Whatever `config.json` states
    holds: it decides whether the head is tied and whether there is a draft head, never
    the absence of a tensor. A tied checkpoint that stores `lm_head.weight` as well must
    store the embedding there, bit for bit; it is then dropped. The rotary frequencies
    that older exports store (`rotary_emb.inv_freq`) are not read: `rope_theta` decides.

    Beyond what `transformers` has in `qwen3_moe`, a checkpoint may have

    - in each layer a shared expert, if `shared_expert_intermediate_size` is positive:
      `mlp.shared_expert` and `mlp.shared_expert_gate`, as in Qwen2-MoE;
    - a draft head, if `num_nextn_predict_layers` is 1: under the names of Qwen3-Next
      (`mtp.fc`, `mtp.layers.0` and so on), or those of DeepSeek-V3 (a layer behind the
      last one, with `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`). An embedding
      (`mtp.embed_tokens`, `embed_tokens`) or output head (`mtp.lm_head`,
      `shared_head.head`) of its own is loaded if it is there, and shared with the model
      if it is not.

    All norms multiply by the weight as it is stored. Qwen3-Next itself stores the
    weights of its norms less 1, which is another `model_type` and is not loaded.

    Args:
      path: a folder with `config.json` and either `model.safetensors` or
        `model.safetensors.index.json` with its shards (the single file wins); or
        one of these two files, with `config.json` beside it.
      dtype: floating type of the parameters.

    Returns:
      The configuration, and the parameters in `dtype` (shapes in `LlamaParams` and
      `MoeParams`; experts as `ExpertWeights`).

    Raises:
      FileNotFoundError: naming every file that is missing.
      ValueError: naming the file and the fault, if a file is damaged, if the model
        is of another family or uses a feature that the configuration cannot express,
        or if a tensor is missing, unknown or misshapen; every such setting, and every
        such tensor, is listed.

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
    config, with_mtp = read_config(path.parent / _CONFIG)
    tensors = _view_shards(path) if path.suffix == ".json" else view_safetensors(path)
    shapes = {name: view.shape for name, view in tensors.items()}
    ignored = list(filter(_ROTARY_BUFFER.fullmatch, tensors))
    if isinstance(config, MoeConfig):
        layout = check_moe_tensors(path, config, with_mtp, shapes, ignored)
        return config, _read(path, layout, tensors, dtype)
    check_tensors(path, config, HUGGING_FACE, shapes, ignored)
    return config, _read(path, llama_layout(config, HUGGING_FACE), tensors, dtype)


def save_model(
    folder: str | os.PathLike[str],
    config: LlamaConfig | MoeConfig,
    params: LlamaParams | MoeParams,
) -> None:
    """Writes a model in the Hugging Face layout: `config.json` and `model.safetensors`.

    Names are the published ones, a draft head's those of Qwen3-Next, so that
    `transformers` reads the model too; it has no shared experts in `qwen3_moe`, and no
    draft heads. Each file is replaced in one step, the configuration last.

    Args:
      folder: where to write; it is made if need be.
      config: the model's configuration.
      params: its parameters, all of one floating type; experts as `ExpertWeights`.

    Raises:
      ValueError: if the parameters do not belong to the configuration, or listing
        whatever this layout cannot hold; nothing is written then.

    Exactness: neither; `load_safetensors` with the type of the parameters gives the
      same configuration and the same values bit for bit.
    """
    if isinstance(config, MoeConfig) and isinstance(params, MoeParams):
        check_moe_params(config, params)
        _check_published(config, params)
        mtp = params.mtp and mtp_layout(
            config,
            with_embedding=params.mtp.embedding is not None,
            with_head=params.mtp.head is not None,
        )
        layout = moe_layout(config, mtp)
    elif isinstance(config, LlamaConfig) and isinstance(params, LlamaParams):
        mtp = None
        for index, layer in enumerate(params.layers):
            if layer.query_norm is not None or layer.key_norm is not None:
                raise ValueError(
                    f"params.layers[{index}] has norms of queries and keys, for which "
                    "a llama's file has no place"
                )
        check_params(config, params)
        layout = llama_layout(config, HUGGING_FACE)
    else:
        raise ValueError(
            "config and params must be of one family, got "
            f"{type(config).__name__} and {type(params).__name__}"
        )
    dtypes = {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(params)}
    if len(dtypes) != 1 or not dtypes <= set(_WEIGHT_DTYPES):
        raise ValueError(
            "params must be of one type, float16, bfloat16, float32 or float64; got "
            + ", ".join(sorted(map(str, dtypes)))
        )
    (dtype,) = dtypes
    stated = describe_config(config, with_mtp=mtp is not None, dtype=dtype)
    text = json.dumps(stated, indent=2, sort_keys=True)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replaced_file(folder / _CONFIG) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
        save_safetensors(
            folder / _SINGLE, write_layout(layout, params), {"format": "pt"}
        )


def _read(
    path: pathlib.Path,
    layout: _Params,
    tensors: Mapping[str, np.ndarray],
    dtype: np.dtype,
) -> _Params:
    """Parameters from tensors that have the layout's names and shapes."""
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
    head = tensors.get(HUGGING_FACE.head)
    if layout.head is None and head is not None:
        embedding = tensors[HUGGING_FACE.embedding]
        same_type = head.dtype == embedding.dtype
        # As bytes, so that a NaN equals itself.
        if not same_type or np.any(head.view(np.uint8) != embedding.view(np.uint8)):
            raise ValueError(
                f"{path}: {HUGGING_FACE.head} differs from {HUGGING_FACE.embedding}, "
                f"yet {_CONFIG} ties them; set tie_word_embeddings to false there, or "
                "remove the tensor"
            )
    return read_layout(layout, tensors.__getitem__, dtype)


def _check_published(config: MoeConfig, params: MoeParams) -> None:
    """Refuses what parameters may be and the published names have no place for."""
    faults = []
    layers = [(f"layers[{index}]", layer) for index, layer in enumerate(params.layers)]
    if (mtp := params.mtp) is not None:
        if not isinstance(mtp.layer, MoeLayer):
            raise ValueError("params.mtp has a dense layer: save the model without it")
        layers.append(("mtp.layer", mtp.layer))
        if mtp.config != config:
            faults.append("mtp.config is not the model's")
        if mtp.draft_tokens is not None:
            faults.append(
                "mtp.draft_tokens is a draft vocabulary; choose it after loading"
            )
    for name, layer in layers:
        if not isinstance(layer.experts, ExpertWeights):
            faults.append(f"{name}.experts is not ExpertWeights")
        for field in ("query_norm", "key_norm"):
            if getattr(layer, field) is None:
                faults.append(f"{name}.{field} is None")
        if layer.shared_expert is not None and layer.shared_expert.router is None:
            faults.append(f"{name}.shared_expert.router is None")
    if faults:
        raise ValueError("params cannot be saved in this layout: " + "; ".join(faults))


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
        views = view_safetensors(path.parent / shard)
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
