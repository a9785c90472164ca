"""Configuration of the Qwen3-MoE family, and the weights of one of its layers."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax.experts import ExpertWeights
from strata_jax.models._family_checks import check_config


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Static shape of a decoder of the Qwen3-MoE family.

    Attributes:
      vocab_size: V, number of token ids.
      hidden_size: D, width of the residual stream.
      num_layers: number of decoder layers, each with experts.
      num_heads: number of query heads.
      num_kv_heads: number of key and value heads; divides `num_heads`.
      head_dim: width of one head; even, since rotary turns pairs.
      num_experts: E, routed experts of a layer.
      num_experts_per_token: k, how many of them a token goes through.
      expert_size: F, inner width of one expert.
      shared_expert_size: inner width of the expert that every token goes through; 0
        for none.
      normalize_router: whether the k router weights are divided by their sum.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: epsilon inside the root-mean-square norm.
      max_position: longest context the model was trained for, in tokens.
      tie_embeddings: whether the output head is the embedding table.

    Raises:
      ValueError: naming the field, if a size is not positive or does not fit.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_token: int
    expert_size: int
    shared_expert_size: int = 0
    normalize_router: bool = True
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    max_position: int = 2048
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = {f.name for f in dataclasses.fields(self) if f.type == "int"}
        check_config(self, sorted(sizes - {"shared_expert_size"}))
        _checks.check_integer("shared_expert_size", self.shared_expert_size, 0)
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token={self.num_experts_per_token} exceeds "
                f"num_experts={self.num_experts}: a token cannot visit an expert twice"
            )


@flax.struct.dataclass
class SharedExpert:
    """The expert of a layer that every token goes through."""

    gate: jax.Array  # [D, F_shared]
    up: jax.Array  # [D, F_shared]
    down: jax.Array  # [F_shared, D]
    router: jax.Array | None  # [D]; its output is scaled by sigmoid(router @ x)


@flax.struct.dataclass
class MoeLayer:
    """Weights of one decoder layer; attention products are `x @ weight`.

    Rotary pairs are (i, i + head_dim / 2), the Hugging Face order.
    """

    attention_norm: jax.Array  # [D]
    query: jax.Array  # [D, num_heads * head_dim]
    key: jax.Array  # [D, num_kv_heads * head_dim]
    value: jax.Array  # [D, num_kv_heads * head_dim]
    output: jax.Array  # [num_heads * head_dim, D]
    query_norm: jax.Array | None  # [head_dim]
    key_norm: jax.Array | None  # [head_dim]
    feed_forward_norm: jax.Array  # [D]
    router: jax.Array  # [E, D]
    experts: Any  # ExpertWeights, or one of the packed forms of strata_jax.experts
    shared_expert: SharedExpert | None


class DrawMatrix(Protocol):
    """Draws the next random matrix of some weights."""

    def __call__(self, *shape: int, fan_in: int, scale: float = 1.0) -> jax.Array:
        """Returns normal entries with variance scale ** 2 / fan_in."""
        ...


def matrix_source(
    config: MoeConfig, rng_key: jax.Array, dtype: jax.typing.DTypeLike
) -> DrawMatrix:
    """Returns what draws the matrices of a model one after another."""
    keys = iter(jax.random.split(rng_key, 16 * (config.num_layers + 2)))

    def draw(*shape: int, fan_in: int, scale: float = 1.0) -> jax.Array:
        values = jax.random.normal(next(keys), shape, dtype)
        return values * jnp.asarray(scale * fan_in**-0.5, dtype)

    return draw


def random_moe_layer(
    config: MoeConfig, draw: DrawMatrix, dtype: jax.typing.DTypeLike
) -> MoeLayer:
    """Returns random weights of a layer; those that write to the residual are small."""
    hidden = config.hidden_size
    depth = (2 * config.num_layers) ** -0.5
    queries = config.num_heads * config.head_dim
    heads = config.num_kv_heads * config.head_dim
    num, size = config.num_experts, config.expert_size

    def shared_expert() -> SharedExpert | None:
        if not (size := config.shared_expert_size):
            return None
        return SharedExpert(
            gate=draw(hidden, size, fan_in=hidden),
            up=draw(hidden, size, fan_in=hidden),
            down=draw(size, hidden, fan_in=size, scale=depth),
            router=draw(hidden, fan_in=hidden),
        )

    return MoeLayer(
        attention_norm=jnp.ones(hidden, dtype),
        query=draw(hidden, queries, fan_in=hidden),
        key=draw(hidden, heads, fan_in=hidden),
        value=draw(hidden, heads, fan_in=hidden),
        output=draw(queries, hidden, fan_in=queries, scale=depth),
        query_norm=jnp.ones(config.head_dim, dtype),
        key_norm=jnp.ones(config.head_dim, dtype),
        feed_forward_norm=jnp.ones(hidden, dtype),
        router=draw(num, hidden, fan_in=hidden),
        experts=ExpertWeights(
            gate=draw(num, size, hidden, fan_in=hidden),
            up=draw(num, size, hidden, fan_in=hidden),
            down=draw(num, hidden, size, fan_in=size, scale=depth),
        ),
        shared_expert=shared_expert(),
    )


def check_moe_layer(name: str, found: MoeLayer, expected: MoeLayer) -> None:
    """Raises ValueError unless a layer's arrays have the shapes of another's."""
    for field in dataclasses.fields(MoeLayer):
        array, wanted = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "experts":
            array.check(f"{name}.experts", wanted.gate.shape)
        elif field.name == "shared_expert":
            if (array is None) != (wanted is None):
                raise ValueError(
                    f"{name}.shared_expert must be "
                    f"{'None' if wanted is None else 'given'}: "
                    "config.shared_expert_size says so"
                )
            for part in ("gate", "up", "down") if wanted is not None else ():
                _checks.check_shape(
                    f"{name}.shared_expert.{part}",
                    getattr(array, part),
                    getattr(wanted, part).shape,
                )
            if wanted is not None and array.router is not None:
                _checks.check_shape(
                    f"{name}.shared_expert.router", array.router, wanted.router.shape
                )
        elif array is None:
            if field.name not in ("query_norm", "key_norm"):
                raise ValueError(f"{name}.{field.name} is missing")
        else:
            _checks.check_shape(f"{name}.{field.name}", array, wanted.shape)
