"""Configuration and weights of the llama family: data only, no arithmetic."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax.models._family_checks import check_config, check_form


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Static shape of a llama-family decoder.

    Attributes:
      vocab_size: V, number of token ids.
      hidden_size: D, width of the residual stream.
      num_layers: number of decoder layers.
      num_heads: number of query heads.
      num_kv_heads: number of key and value heads; divides `num_heads`.
      head_dim: width of one head; even, since rotary turns pairs.
      intermediate_size: F, width of the feed-forward layer.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: epsilon inside the root-mean-square norm.
      max_position: longest context the model was trained for, in tokens.
      tie_embeddings: whether the output head is the embedding table.

    Raises:
      ValueError: naming the field, if a size is not positive or does not divide.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    max_position: int = 2048
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_position",
        )
        check_config(self, sizes)


@flax.struct.dataclass
class LlamaLayer:
    """Weights of one decoder layer; products are `x @ weight`.

    Rotary pairs are (i, i + head_dim / 2), the Hugging Face order; loaders of
    files with interleaved pairs permute `query` and `key`.
    """

    attention_norm: jax.Array  # [D]
    query: jax.Array  # [D, num_heads * head_dim]
    key: jax.Array  # [D, num_kv_heads * head_dim]
    value: jax.Array  # [D, num_kv_heads * head_dim]
    output: jax.Array  # [num_heads * head_dim, D]
    feed_forward_norm: jax.Array  # [D]
    gate: jax.Array  # [D, F]
    up: jax.Array  # [D, F]
    down: jax.Array  # [F, D]
    query_norm: jax.Array | None = None  # [head_dim]; no llama has one
    key_norm: jax.Array | None = None  # [head_dim]


@flax.struct.dataclass
class LlamaParams:
    """Weights of a llama-family decoder, one array per layer and matrix.

    Layers are a tuple, never stacked: slicing a stacked array inside a loop
    copies the slice on a CPU.
    """

    embedding: jax.Array  # [V, D]
    layers: tuple[LlamaLayer, ...]
    final_norm: jax.Array  # [D]
    head: jax.Array | None  # [V, D]; None if tied to `embedding`


def check_params(config: LlamaConfig, params: LlamaParams) -> None:
    """Checks that weights have the shapes that a configuration states.

    Args:
      config: the configuration.
      params: the weights.

    Raises:
      ValueError: naming the first tensor that differs, and both shapes.

    Exactness: not concerned.
    """
    check_form(config, params, LlamaParams)
    expected = jax.eval_shape(lambda: random_params(config, jax.random.key(0)))
    wanted = jax.tree.leaves_with_path(expected)
    found = jax.tree.leaves_with_path(params)
    for (path, shape), (_, array) in zip(wanted, found, strict=True):
        _checks.check_shape(f"params{jax.tree_util.keystr(path)}", array, shape.shape)


def check_llama_layer(name: str, layer: object, expected: LlamaLayer) -> None:
    """Raises ValueError unless a layer's arrays have the shapes of another's."""
    if not isinstance(layer, LlamaLayer):
        raise ValueError(
            f"{name} must be models.LlamaLayer, got {type(layer).__name__}"
        )
    for field in dataclasses.fields(LlamaLayer):
        wanted = getattr(expected, field.name)
        if wanted is not None:
            found = getattr(layer, field.name)
            _checks.check_shape(f"{name}.{field.name}", found, wanted.shape)


def random_params(
    config: LlamaConfig, rng_key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> LlamaParams:
    """Returns random weights of a sensible scale, for tests and training.

    Args:
      config: the model's shape.
      rng_key: the key is consumed.
      dtype: of the weights.

    Returns:
      The weights; norms are 1, matrices are normal with variance 1 / fan-in.

    Exactness: not concerned.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    query_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim

    def matrix(*path: int, shape: tuple[int, int], fan_in: int) -> jax.Array:
        key = rng_key
        for number in path:
            key = jax.random.fold_in(key, number)
        return jax.random.normal(key, shape, dtype) * fan_in**-0.5

    def layer(index: int) -> LlamaLayer:
        shapes = {
            "query": (hidden, query_width),
            "key": (hidden, kv_width),
            "value": (hidden, kv_width),
            "output": (query_width, hidden),
            "gate": (hidden, inner),
            "up": (hidden, inner),
            "down": (inner, hidden),
        }
        return LlamaLayer(
            attention_norm=jnp.ones(hidden, dtype),
            feed_forward_norm=jnp.ones(hidden, dtype),
            **{
                name: matrix(index + 1, number, shape=shape, fan_in=shape[0])
                for number, (name, shape) in enumerate(shapes.items())
            },
        )

    table = (config.vocab_size, hidden)
    return LlamaParams(
        embedding=matrix(0, 0, shape=table, fan_in=1),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=jnp.ones(hidden, dtype),
        head=None
        if config.tie_embeddings
        else matrix(0, 1, shape=table, fan_in=hidden),
    )
