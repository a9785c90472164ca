"""What a Hugging Face checkpoint of the Qwen3-MoE family must hold, and where."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from strata_jax.checkpoints._layout import Placement, check_layout
from strata_jax.checkpoints._llama_tensors import HUGGING_FACE, HUGGING_FACE_LAYER
from strata_jax.experts import ExpertWeights
from strata_jax.models import MoeConfig, MoeLayer, MoeParams, MtpParams, SharedExpert

_LAYER = "model.layers.{layer}."
# Names of the `MtpParams` fields; of `layer`, the prefix.
_QWEN3_NEXT = {
    "layer": "mtp.layers.0.",
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "projection": "mtp.fc.weight",
    "final_norm": "mtp.norm.weight",
    "embedding": "mtp.embed_tokens.weight",
    "head": "mtp.lm_head.weight",
}
# Here the draft head is one more layer of the model.
_DEEPSEEK_V3 = {
    "layer": _LAYER,
    "embedding_norm": _LAYER + "enorm.weight",
    "hidden_norm": _LAYER + "hnorm.weight",
    "projection": _LAYER + "eh_proj.weight",
    "final_norm": _LAYER + "shared_head.norm.weight",
    "embedding": _LAYER + "embed_tokens.weight",
    "head": _LAYER + "shared_head.head.weight",
}
_FUSED_EXPERTS = re.compile(r".*\.mlp\.experts\.(gate_up_proj|down_proj)(\.weight)?")


def moe_layout(config: MoeConfig, mtp: MtpParams | None) -> MoeParams:
    """Says where a file keeps the arrays of a model; matrices are `[out, in]` there.

    Args:
      config: the shapes; tied embeddings have no head.
      mtp: the layout of its draft head, if it has one.

    Returns:
      The layout.
    """
    table = (config.vocab_size, config.hidden_size)
    return MoeParams(
        embedding=_stored(HUGGING_FACE.embedding, table),
        layers=tuple(
            _layer(config, _LAYER.format(layer=layer))
            for layer in range(config.num_layers)
        ),
        final_norm=_stored(HUGGING_FACE.final_norm, (config.hidden_size,)),
        head=None if config.tie_embeddings else _stored(HUGGING_FACE.head, table),
        mtp=mtp,
    )


def mtp_layout(
    config: MoeConfig,
    *,
    with_embedding: bool,
    with_head: bool,
    names: Mapping[str, str] = _QWEN3_NEXT,
) -> MtpParams:
    """Says where a file keeps the arrays of a draft head.

    Args:
      config: the shapes of its layer.
      with_embedding: whether it has an embedding table of its own.
      with_head: whether it has an output head of its own.
      names: of the fields of `MtpParams`; of `layer`, the prefix.

    Returns:
      The layout.
    """
    hidden = config.hidden_size
    table = (config.vocab_size, hidden)
    return MtpParams(
        config=config,
        embedding_norm=_stored(names["embedding_norm"], (hidden,)),
        hidden_norm=_stored(names["hidden_norm"], (hidden,)),
        projection=_stored(names["projection"], (hidden, 2 * hidden), "transposed"),
        layer=_layer(config, names["layer"]),
        final_norm=_stored(names["final_norm"], (hidden,)),
        embedding=_stored(names["embedding"], table) if with_embedding else None,
        head=_stored(names["head"], table) if with_head else None,
    )


def check_moe_tensors(
    path: str | os.PathLike[str],
    config: MoeConfig,
    with_mtp: bool,
    found: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str] = (),
) -> MoeParams:
    """Checks that a checkpoint holds exactly the tensors of a model of this family.

    The head is required if the embedding is not tied, and allowed if it is. The draft
    head may be under the names of Qwen3-Next or of DeepSeek-V3, with or without an
    embedding and an output head of its own.

    Args:
      path: the checkpoint, for the message.
      config: the shapes that the checkpoint states.
      with_mtp: whether it states a draft head.
      found: the shape of every tensor, `[out, in]` as the files have it.
      ignored: names that may be there and are not looked at.

    Returns:
      The layout.

    Raises:
      ValueError: listing every missing, unknown and misshapen tensor.
    """
    if fused := sorted(filter(_FUSED_EXPERTS.fullmatch, found)):
        raise ValueError(
            f"{path}: experts must be stored one by one (mlp.experts.0.up_proj.weight "
            "and so on), as save_pretrained of transformers 5 writes them; these are "
            "fused: " + ", ".join(fused)
        )
    # Before anything is built from counts that only the file vouches for.
    if config.num_layers * config.num_experts > len(found):
        raise ValueError(
            f"{path}: states {config.num_layers} layers of {config.num_experts} experts"
            f", but has only {len(found)} tensors: the checkpoint is incomplete"
        )
    schemes = [
        {field: name.format(layer=config.num_layers) for field, name in scheme.items()}
        for scheme in (_QWEN3_NEXT, _DEEPSEEK_V3)
    ]
    present = [
        names for names in schemes if not found.keys().isdisjoint(names.values())
    ]
    mtp, faults = None, []
    if with_mtp and present:
        mtp = mtp_layout(
            config,
            with_embedding=present[0]["embedding"] in found,
            with_head=present[0]["head"] in found,
            names=present[0],
        )
    elif with_mtp:
        absent = " nor ".join(names["projection"] for names in schemes)
        faults.append(
            "num_nextn_predict_layers states a draft head, and there is none: neither "
            f"{absent}; state 0 to load the model without one"
        )
    elif present:
        faults.append(
            f"has a draft head ({present[0]['projection']}); state "
            "num_nextn_predict_layers: 1 to load it"
        )
    layout = moe_layout(config, mtp)
    check_layout(
        path,
        "qwen3_moe",
        layout,
        found,
        optional={HUGGING_FACE.head: (config.vocab_size, config.hidden_size)},
        ignored=ignored,
        faults=faults,
    )
    return layout


def _layer(config: MoeConfig, prefix: str) -> MoeLayer:
    hidden, inner = config.hidden_size, config.expert_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim

    def matrix(name: str, *shape: int) -> Any:
        return _stored(prefix + name, shape, "transposed")

    def norm(name: str, size: int) -> Any:
        return _stored(prefix + name, (size,))

    def experts(part: str, *shape: int) -> Any:
        names = tuple(
            f"{prefix}mlp.experts.{expert}.{part}_proj.weight"
            for expert in range(config.num_experts)
        )
        return Placement(names, shape, "stacked")

    shared = None
    if size := config.shared_expert_size:
        shared = SharedExpert(
            gate=matrix("mlp.shared_expert.gate_proj.weight", size, hidden),
            up=matrix("mlp.shared_expert.up_proj.weight", size, hidden),
            down=matrix("mlp.shared_expert.down_proj.weight", hidden, size),
            router=_stored(
                prefix + "mlp.shared_expert_gate.weight", (1, hidden), "row"
            ),
        )
    return MoeLayer(
        attention_norm=norm(HUGGING_FACE_LAYER["attention_norm"], hidden),
        query=matrix(HUGGING_FACE_LAYER["query"], queries, hidden),
        key=matrix(HUGGING_FACE_LAYER["key"], keys, hidden),
        value=matrix(HUGGING_FACE_LAYER["value"], keys, hidden),
        output=matrix(HUGGING_FACE_LAYER["output"], hidden, queries),
        query_norm=norm("self_attn.q_norm.weight", config.head_dim),
        key_norm=norm("self_attn.k_norm.weight", config.head_dim),
        feed_forward_norm=norm(HUGGING_FACE_LAYER["feed_forward_norm"], hidden),
        router=_stored(prefix + "mlp.gate.weight", (config.num_experts, hidden)),
        experts=ExpertWeights(
            gate=experts("gate", inner, hidden),
            up=experts("up", inner, hidden),
            down=experts("down", hidden, inner),
        ),
        shared_expert=shared,
    )


# Any, since what stands in the parameters' fields here is not an array.
def _stored(
    name: str,
    shape: tuple[int, ...],
    form: Literal["same", "transposed", "row"] = "same",
) -> Any:
    return Placement((name,), shape, form)
