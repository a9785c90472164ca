"""What a llama checkpoint must hold, and how its tensors become parameters."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax.checkpoints._layout import Placement, check_layout, read_layout
from strata_jax.models import LlamaConfig, LlamaLayer, LlamaParams


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """How one file format calls the tensors of a llama.

    Attributes:
      embedding: name of the embedding table.
      final_norm: name of the norm before the head.
      head: name of the output head.
      layer: name of each `LlamaLayer` field, with `{layer}` for the layer's index.
    """

    embedding: str
    final_norm: str
    head: str
    layer: Mapping[str, str]


# Of a layer, behind the layer's own prefix.
HUGGING_FACE_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "feed_forward_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
HUGGING_FACE = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer={
        field: "model.layers.{layer}." + name
        for field, name in HUGGING_FACE_LAYER.items()
    },
)


def check_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Checks that parameters can be held in a type.

    Args:
      dtype: the type asked for.

    Returns:
      The NumPy type.

    Raises:
      ValueError: if it is not a floating type, or is one that jax would narrow.
    """
    checked = np.dtype(dtype)
    if not jnp.issubdtype(checked, jnp.floating):
        raise ValueError(f"dtype must be a floating type, got {checked}")
    if jax.dtypes.canonicalize_dtype(checked) != checked:
        raise ValueError(
            f"dtype {checked} needs jax.config.update('jax_enable_x64', True); "
            "or use float32"
        )
    return checked


def llama_layout(config: LlamaConfig, names: TensorNames) -> LlamaParams:
    """Says where a file keeps the arrays of a llama; matrices are `[out, in]` there.

    Args:
      config: the shapes; tied embeddings have no head.
      names: the format's names.

    Returns:
      The layout.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "query": (queries, hidden),
        "key": (keys, hidden),
        "value": (keys, hidden),
        "output": (hidden, queries),
        "feed_forward_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }

    # Any, since what stands in the fields here is not an array.
    def stored(name: str, shape: tuple[int, ...], is_turned: bool = False) -> Any:
        return Placement((name,), shape, "transposed" if is_turned else "same")

    table = (config.vocab_size, hidden)
    return LlamaParams(
        embedding=stored(names.embedding, table),
        layers=tuple(
            LlamaLayer(
                **{
                    field: stored(
                        name.format(layer=layer), shapes[field], len(shapes[field]) > 1
                    )
                    for field, name in names.layer.items()
                }
            )
            for layer in range(config.num_layers)
        ),
        final_norm=stored(names.final_norm, (hidden,)),
        head=None if config.tie_embeddings else stored(names.head, table),
    )


def check_tensors(
    path: str | os.PathLike[str],
    config: LlamaConfig,
    names: TensorNames,
    found: Mapping[str, tuple[int, ...]],
    ignored: Iterable[str] = (),
) -> None:
    """Checks that a checkpoint holds exactly the tensors of a llama.

    The head is required if the embedding is not tied, and allowed if it is.

    Args:
      path: the checkpoint, for the message.
      config: the shapes that the checkpoint states.
      names: the format's names.
      found: the shape of every tensor, `[out, in]` as the files have it.
      ignored: names that may be there and are not looked at.

    Raises:
      ValueError: listing every missing, unknown and misshapen tensor.
    """
    # Before anything is built from a count that only the file vouches for.
    if config.num_layers > len(found):
        raise ValueError(
            f"{path}: states {config.num_layers} layers but has only {len(found)} "
            "tensors: the checkpoint is incomplete"
        )
    check_layout(
        path,
        "llama",
        llama_layout(config, names),
        found,
        optional={names.head: (config.vocab_size, config.hidden_size)},
        ignored=ignored,
    )


def build_params(
    config: LlamaConfig,
    names: TensorNames,
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
) -> LlamaParams:
    """Reads every tensor once and arranges them as parameters.

    Args:
      config: the shapes; tied embeddings give no head.
      names: the format's names.
      read: returns a tensor by its name, `[out, in]` as the files have it.
      dtype: type of every parameter.

    Returns:
      The parameters; matrices of layers are `[in, out]`.
    """
    return read_layout(llama_layout(config, names), read, dtype)
