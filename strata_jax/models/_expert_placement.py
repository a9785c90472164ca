"""Where a model's experts live, and how they are packed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from strata_jax.experts import (
    ExpertFile,
    ExpertLayout,
    ExpertWeights,
    PackedExperts,
    pack_experts,
    to_host,
    unpack_experts,
    write_expert_file,
)
from strata_jax.models._llama_params import LlamaLayer
from strata_jax.models._moe_params import MoeParams


def pack_model_experts(
    params: MoeParams, layouts: ExpertLayout | Sequence[ExpertLayout]
) -> MoeParams:
    """Packs the experts of every layer and of the draft head.

    Args:
      params: weights with experts as arrays.
      layouts: one layout for all experts, or one for each expert of a layer.

    Returns:
      The weights with packed experts, on the device.

    Raises:
      ValueError: if experts are packed already, there is not one layout for each
        expert, or a size does not fit a format's blocks.

    Exactness: lossy as the formats are.
    """

    def pack(experts: Any) -> PackedExperts:
        if not isinstance(experts, ExpertWeights):
            raise ValueError(
                "params has packed experts: unpack_model_experts them first"
            )
        return pack_experts(experts, layouts)

    params = _replace_experts(params, [pack(layer.experts) for layer in params.layers])
    return _replace_draft_experts(params, pack)


def unpack_model_experts(params: MoeParams) -> MoeParams:
    """Decodes packed experts to arrays, to train on or to look at.

    Args:
      params: weights with packed experts, on the device or the host.

    Returns:
      The weights with experts as float32 arrays.

    Raises:
      ValueError: if the experts are on disk.

    Exactness: bitwise the stored weights, unless folded: then rounded once more.
    """

    def unpack(experts: Any) -> ExpertWeights:
        if isinstance(experts, ExpertWeights):
            return experts
        if not isinstance(experts, PackedExperts):
            raise ValueError("params has experts on disk: unpack them before that")
        return unpack_experts(experts)

    params = _replace_experts(
        params, [unpack(layer.experts) for layer in params.layers]
    )
    return _replace_draft_experts(params, unpack)


def experts_on_host(params: MoeParams) -> MoeParams:
    """Moves the packed experts of every layer to the host's memory.

    The draft head's stay where they are: every draft needs them.

    Args:
      params: weights with packed experts.

    Returns:
      The weights; `targets.singleton(..., num_cached_experts=R)` keeps the R most used
      of each layer on the device.

    Raises:
      ValueError: if the experts are not packed.

    Exactness: logits are bitwise the same wherever the experts are.
    """
    return _replace_experts(params, [to_host(bank) for bank in _packed(params)])


def experts_on_disk(
    params: MoeParams, path: str | os.PathLike[str]
) -> tuple[MoeParams, ExpertFile]:
    """Writes the packed experts of every layer to a file, and reads them from there.

    The draft head's stay where they are.

    Args:
      params: weights with packed experts.
      path: the file to write; its folder must exist.

    Returns:
      The weights without the experts, and the open file; keep its `fingerprint` to
      open it again with `attach_expert_file`.

    Raises:
      ValueError: if the experts are not packed.
      FileNotFoundError: if the folder does not exist.

    Exactness: logits are bitwise the same wherever the experts are.
    """
    file = write_expert_file(path, _packed(params))
    return attach_expert_file(params, file), file


def attach_expert_file(params: MoeParams, file: ExpertFile) -> MoeParams:
    """Makes the layers of a model read their experts from a file.

    Args:
      params: the weights; their own experts, whatever they are, are let go.
      file: an open file of this model's experts.

    Returns:
      The weights.

    Raises:
      ValueError: naming the file, if it has another number of layers.

    Exactness: logits are bitwise the same wherever the experts are.
    """
    if file.num_layers != len(params.layers):
        raise ValueError(
            f"{file.path} holds {file.num_layers} layers, the model has "
            f"{len(params.layers)}"
        )
    return _replace_experts(params, [file.bank(i) for i in range(file.num_layers)])


def _packed(params: MoeParams) -> list[PackedExperts]:
    banks = [layer.experts for layer in params.layers]
    if not all(isinstance(bank, PackedExperts) for bank in banks):
        raise ValueError("params must have packed experts: use pack_model_experts")
    return banks


def _replace_experts(params: MoeParams, banks: Sequence[Any]) -> MoeParams:
    layers = tuple(
        dataclasses.replace(layer, experts=bank)
        for layer, bank in zip(params.layers, banks, strict=True)
    )
    return dataclasses.replace(params, layers=layers)


def _replace_draft_experts(
    params: MoeParams, change: Callable[[Any], Any]
) -> MoeParams:
    if params.mtp is None:
        return params
    layer = params.mtp.layer
    if isinstance(layer, LlamaLayer):
        return params
    layer = dataclasses.replace(layer, experts=change(layer.experts))
    return dataclasses.replace(params, mtp=dataclasses.replace(params.mtp, layer=layer))
