"""What a llama checkpoint must hold, and how its tensors become parameters."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

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
    expected = _shapes(config, names)
    required = set(expected)
    if config.tie_embeddings:
        required.remove(names.head)
    faults = []
    if missing := sorted(required - set(found)):
        faults.append("missing: " + ", ".join(missing))
    if extra := sorted(set(found) - set(expected) - set(ignored)):
        faults.append("not part of this model: " + ", ".join(extra))
    misshapen = [
        f"{name} has {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if misshapen:
        faults.append("wrong shape: " + ", ".join(misshapen))
    if faults:
        raise ValueError(
            f"{path}: not a complete llama checkpoint of the stated configuration; "
            + "; ".join(faults)
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

    def load(name: str, transpose: bool = False) -> jax.Array:
        values = read(name)
        # Always a copy: `values` may be a view of the file's pages.
        return jnp.asarray(
            np.array(values.T if transpose else values, dtype=dtype, order="C")
        )

    return LlamaParams(
        embedding=load(names.embedding),
        layers=tuple(
            LlamaLayer(
                **{
                    field: load(name.format(layer=layer), transpose=True)
                    for field, name in names.layer.items()
                }
            )
            for layer in range(config.num_layers)
        ),
        final_norm=load(names.final_norm),
        head=None if config.tie_embeddings else load(names.head),
    )


def _shapes(config: LlamaConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    layer_shapes = {
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
    shapes: dict[str, tuple[int, ...]] = {
        names.embedding: (config.vocab_size, hidden),
        names.final_norm: (hidden,),
        names.head: (config.vocab_size, hidden),
    }
    for layer in range(config.num_layers):
        for field, name in names.layer.items():
            shapes[name.format(layer=layer)] = layer_shapes[field]
    return shapes
