"""Mixture-of-experts models with packed weights, in one safetensors file.

Tensors are called by their fields in `MoeParams`. Packed matrices are uint32 words; the
header says in which format, and how the experts are laid out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.checkpoints._safetensors import (
    read_metadata,
    read_safetensors,
    save_safetensors,
)
from strata_jax.experts import ExpertLayout, PackedExperts, PackedShape, find_format
from strata_jax.models import (
    MoeConfig,
    MoeLayer,
    MoeParams,
    check_moe_params,
    random_moe_params,
)

_FORMAT = "strata_jax packed model 1"


def save_packed_model(
    path: str | os.PathLike[str],
    config: MoeConfig,
    params: MoeParams,
    *,
    matrix_format: str = "float32",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a model with packed experts, whole or not at all.

    Args:
      path: the file; its folder must exist.
      config: the model's shape.
      params: its weights, experts packed (`models.pack_model_experts`) and in memory.
      matrix_format: the format of all other matrices but the routers, see
        `strata_jax.experts.FORMATS`; vectors stay float32.
      metadata: more text for the header, by name.

    Raises:
      FileNotFoundError: if the folder does not exist.
      ValueError: if experts are not packed, or a matrix does not fit the format.

    Exactness: lossy as `matrix_format` is; `load_packed_model` gives what it decodes.
    """
    check_moe_params(config, params)
    form = find_format(matrix_format)
    tensors: dict[str, np.ndarray] = {}
    formats: dict[str, str] = {}
    for name, leaf in _named_leaves(params).items():
        array = np.asarray(leaf)
        if _is_packable(name, array.shape):
            tensors[name] = form.encode(array.astype(np.float32))
            formats[name] = matrix_format
        else:
            tensors[name] = array
    banks = {name: bank.shape for name, bank in _banks(params).items()}
    header = {
        "format": _FORMAT,
        "config": json.dumps(dataclasses.asdict(config)),
        "draft_head": json.dumps(
            None if params.mtp is None else dataclasses.asdict(params.mtp.config)
        ),
        "matrix_formats": json.dumps(formats),
        "experts": json.dumps(
            {name: dataclasses.asdict(shape) for name, shape in banks.items()}
        ),
    }
    save_safetensors(path, tensors, {**(metadata or {}), **header})


def load_packed_model(path: str | os.PathLike[str]) -> tuple[MoeConfig, MoeParams]:
    """Loads a model that `save_packed_model` wrote.

    Args:
      path: the file.

    Returns:
      The configuration, and the weights: experts as packed, all else float32.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, and every tensor that is missing, unknown or
        misshapen.

    Exactness: packed experts are the file's bits; other matrices are decoded, bitwise
      as their format's reference does.
    """
    path = pathlib.Path(path)
    header = read_metadata(path)
    if header.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: not a packed model: use checkpoints.load_safetensors"
        )
    try:
        config = MoeConfig(**json.loads(header["config"]))
        draft = json.loads(header["draft_head"])
        draft_config = None if draft is None else MoeConfig(**draft)
        formats: dict[str, str] = json.loads(header["matrix_formats"])
        shapes = {
            name: PackedShape(
                tuple(ExpertLayout(**layout) for layout in stated["layouts"]),
                stated["hidden_size"],
                stated["expert_size"],
            )
            for name, stated in json.loads(header["experts"]).items()
        }
        skeleton = _skeleton(config, draft_config, shapes)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged header: {error}") from error
    tensors = read_safetensors(path)
    wanted = _named_leaves(skeleton)
    faults = [f"missing: {name}" for name in wanted if name not in tensors]
    faults += [
        f"not part of this model: {name}" for name in tensors if name not in wanted
    ]
    arrays = {}
    for name in wanted.keys() & tensors.keys():
        shape, stored = wanted[name].shape, tensors[name]
        if name in formats:
            try:
                arrays[name] = find_format(formats[name]).reference(stored, *shape)
            except ValueError as error:
                faults.append(f"{name}: {error}")
        elif stored.shape != shape or stored.dtype != wanted[name].dtype:
            faults.append(
                f"{name} is {stored.dtype} {list(stored.shape)}, expected "
                f"{wanted[name].dtype} {list(shape)}"
            )
        else:
            arrays[name] = stored
    if faults:
        raise ValueError(f"{path}: not a whole model: {'; '.join(sorted(faults))}")
    leaves = [jnp.asarray(arrays[name]) for name in wanted]
    return config, jax.tree.unflatten(jax.tree.structure(skeleton), leaves)


def _named_leaves(params: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def _is_packable(name: str, shape: tuple[int, ...]) -> bool:
    # A router decides between experts: it is small, and errors in it are not.
    return len(shape) == 2 and ".experts." not in name and not name.endswith("router")


def _banks(params: MoeParams) -> dict[str, PackedExperts]:
    banks = {
        f"layers.{index}": layer.experts for index, layer in enumerate(params.layers)
    }
    if params.mtp is not None:
        if not isinstance(params.mtp.layer, MoeLayer):
            raise ValueError("params.mtp has a dense layer: save the model without it")
        banks["mtp.layer"] = params.mtp.layer.experts
    for name, bank in banks.items():
        if not isinstance(bank, PackedExperts):
            raise ValueError(
                f"params: the experts of {name} are {type(bank).__name__}: use "
                "models.pack_model_experts"
            )
    return banks


def _skeleton(
    config: MoeConfig, draft_config: MoeConfig | None, shapes: Mapping[str, PackedShape]
) -> MoeParams:
    """The weights' tree with shapes for arrays."""

    def with_bank(layer: Any, name: str, num_experts: int) -> Any:
        shape = shapes[name]
        size = (num_experts, shape.num_words)
        bank = PackedExperts(
            words=jax.ShapeDtypeStruct(size, jnp.uint32),  # type: ignore[arg-type]
            layout=jax.ShapeDtypeStruct((num_experts,), jnp.int32),  # type: ignore[arg-type]
            shape=shape,
        )
        return dataclasses.replace(layer, experts=bank)

    def make(config: MoeConfig, with_mtp: bool) -> MoeParams:
        return jax.eval_shape(
            lambda: random_moe_params(config, jax.random.key(0), with_mtp=with_mtp)
        )

    params = make(config, False)
    layers = tuple(
        with_bank(layer, f"layers.{index}", config.num_experts)
        for index, layer in enumerate(params.layers)
    )
    mtp = None
    if draft_config is not None:
        mtp = make(draft_config, True).mtp
        assert mtp is not None
        layer = with_bank(mtp.layer, "mtp.layer", draft_config.num_experts)
        mtp = dataclasses.replace(mtp, layer=layer)
    return dataclasses.replace(params, layers=layers, mtp=mtp)
