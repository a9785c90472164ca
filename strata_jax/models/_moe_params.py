"""Configuration and weights of mixture-of-experts models and of their draft heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks
from strata_jax.experts import ExpertWeights
from strata_jax.models._family_checks import check_config, check_form
from strata_jax.models._llama_params import (
    LlamaConfig,
    LlamaLayer,
    check_llama_layer,
    random_params,
)

_LARGEST = float(jnp.finfo(jnp.float32).max)
_OFFSETS = "; of a file's offsets d2t give i + d2t[i]"


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


@flax.struct.dataclass
class MtpParams:
    """A multi-token-prediction head: the DeepSeek-V3 and Qwen3-Next form.

    Cell c takes the target's hidden state at position c, after its last layer and
    *before* its final norm, and the embedding of the token at c + 1; each has its own
    norm; they are joined as [embedding, hidden] and projected to D; one decoder layer
    follows, and a norm before the head. The cell predicts the token at c + 2. For the
    next draft, cell c + 1 takes the layer's output of cell c (again before the norm) in
    place of the target's.
    """

    config: MoeConfig | LlamaConfig = flax.struct.field(
        pytree_node=False
    )  # its layer's
    embedding_norm: jax.Array  # [D]
    hidden_norm: jax.Array  # [D]
    projection: jax.Array  # [2 D, D], rows: embedding, then hidden
    layer: MoeLayer | LlamaLayer
    final_norm: jax.Array  # [D]
    embedding: jax.Array | None = None  # [V, D]; None: the target's
    head: jax.Array | None = None  # [V, D], or [n, D] with draft_tokens; None: shared
    draft_tokens: jax.Array | None = None  # [n] int32, the ids that it can draft


@flax.struct.dataclass
class MoeParams:
    """Weights of a mixture-of-experts decoder, and of its draft head if it has one."""

    embedding: jax.Array  # [V, D]
    layers: tuple[MoeLayer, ...]
    final_norm: jax.Array  # [D]
    head: jax.Array | None  # [V, D]; None if tied to `embedding`
    mtp: MtpParams | None = None


def random_moe_params(
    config: MoeConfig,
    rng_key: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    with_mtp: bool = True,
) -> MoeParams:
    """Returns random weights of a sensible scale, for tests and to train from.

    Args:
      config: the model's shape.
      rng_key: the key is consumed.
      dtype: of the weights.
      with_mtp: whether to make a draft head as well.

    Returns:
      The weights; norms are 1, matrices are normal with variance 1 / fan-in, those
      that write to the residual stream smaller with the depth.

    Exactness: not concerned.
    """
    keys = iter(jax.random.split(rng_key, 16 * (config.num_layers + 2)))
    hidden = config.hidden_size
    depth = (2 * config.num_layers) ** -0.5

    def matrix(*shape: int, fan_in: int, scale: float = 1.0) -> jax.Array:
        values = jax.random.normal(next(keys), shape, dtype)
        return values * jnp.asarray(scale * fan_in**-0.5, dtype)

    def shared_expert() -> SharedExpert | None:
        if not (size := config.shared_expert_size):
            return None
        return SharedExpert(
            gate=matrix(hidden, size, fan_in=hidden),
            up=matrix(hidden, size, fan_in=hidden),
            down=matrix(size, hidden, fan_in=size, scale=depth),
            router=matrix(hidden, fan_in=hidden),
        )

    def layer() -> MoeLayer:
        queries = config.num_heads * config.head_dim
        heads = config.num_kv_heads * config.head_dim
        num, size = config.num_experts, config.expert_size
        return MoeLayer(
            attention_norm=jnp.ones(hidden, dtype),
            query=matrix(hidden, queries, fan_in=hidden),
            key=matrix(hidden, heads, fan_in=hidden),
            value=matrix(hidden, heads, fan_in=hidden),
            output=matrix(queries, hidden, fan_in=queries, scale=depth),
            query_norm=jnp.ones(config.head_dim, dtype),
            key_norm=jnp.ones(config.head_dim, dtype),
            feed_forward_norm=jnp.ones(hidden, dtype),
            router=matrix(num, hidden, fan_in=hidden),
            experts=ExpertWeights(
                gate=matrix(num, size, hidden, fan_in=hidden),
                up=matrix(num, size, hidden, fan_in=hidden),
                down=matrix(num, hidden, size, fan_in=size, scale=depth),
            ),
            shared_expert=shared_expert(),
        )

    table = (config.vocab_size, hidden)
    mtp = None
    if with_mtp:
        mtp = MtpParams(
            config=config,
            embedding_norm=jnp.ones(hidden, dtype),
            hidden_norm=jnp.ones(hidden, dtype),
            projection=matrix(2 * hidden, hidden, fan_in=2 * hidden),
            layer=layer(),
            final_norm=jnp.ones(hidden, dtype),
        )
    return MoeParams(
        embedding=matrix(*table, fan_in=hidden),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=jnp.ones(hidden, dtype),
        head=None if config.tie_embeddings else matrix(*table, fan_in=hidden),
        mtp=mtp,
    )


def check_moe_params(config: MoeConfig, params: MoeParams) -> None:
    """Checks that weights have the shapes that a configuration states.

    Args:
      config: the configuration.
      params: the weights; experts may be in any form.

    Raises:
      ValueError: naming the first tensor that differs, and both shapes.

    Exactness: not concerned.
    """
    check_form(config, params, MoeParams)
    expected = jax.eval_shape(lambda: random_moe_params(config, jax.random.key(0)))
    for field in ("embedding", "final_norm", "head"):
        wanted = getattr(expected, field)
        if wanted is not None:
            _checks.check_shape(f"params.{field}", getattr(params, field), wanted.shape)
    for index, (found, wanted) in enumerate(
        zip(params.layers, expected.layers, strict=True)
    ):
        _check_layer(f"params.layers[{index}]", found, wanted)
    if params.mtp is not None:
        check_mtp_params(params.mtp, "params.mtp")
        if params.mtp.config.hidden_size != config.hidden_size:
            raise ValueError(
                f"params.mtp is {params.mtp.config.hidden_size} wide, the model "
                f"{config.hidden_size}: a draft head reads the model's hidden states"
            )


def check_mtp_params(mtp: MtpParams, name: str = "mtp") -> None:
    """Checks the shapes of a draft head, and its draft vocabulary.

    Args:
      mtp: the head.
      name: how messages call it.

    Raises:
      ValueError: naming the tensor and both shapes.

    Exactness: not concerned.
    """
    config = mtp.config
    expected = jax.eval_shape(lambda: _random_mtp(config))
    for field in ("embedding_norm", "hidden_norm", "projection", "final_norm"):
        _checks.check_shape(
            f"{name}.{field}", getattr(mtp, field), getattr(expected, field).shape
        )
    found, wanted = mtp.layer, expected.layer
    if isinstance(wanted, LlamaLayer):
        check_llama_layer(f"{name}.layer", found, wanted)
    elif isinstance(found, LlamaLayer):
        raise ValueError(
            f"{name}.layer is a models.LlamaLayer, {name}.config a models.MoeConfig: a "
            "dense layer needs a LlamaConfig"
        )
    else:
        _check_layer(f"{name}.layer", found, wanted)
    table = (config.vocab_size, config.hidden_size)
    if mtp.embedding is not None:
        _checks.check_shape(f"{name}.embedding", mtp.embedding, table)
    if mtp.draft_tokens is not None:
        _checks.check_shape(f"{name}.draft_tokens", mtp.draft_tokens, (None,))
        if mtp.head is None:
            raise ValueError(
                f"{name}.draft_tokens needs {name}.head, a row for each of its ids: "
                "use models.with_draft_vocabulary"
            )
        table = (mtp.draft_tokens.shape[0], config.hidden_size)
    if mtp.head is not None:
        _checks.check_shape(f"{name}.head", mtp.head, table)


def random_mtp_params(
    config: LlamaConfig, rng_key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32
) -> MtpParams:
    """Returns a draft head with one dense layer, to train for a llama.

    Args:
      config: of the head's layer; its sizes of vocabulary and hidden states are the
        target's.
      rng_key: the key is consumed.
      dtype: of the weights.

    Returns:
      The head, without tables of its own. Its layer is random; the projection passes
      the embedding and the hidden state through, each at half its size.

    Exactness: not concerned.
    """
    hidden = config.hidden_size
    shallow = dataclasses.replace(config, num_layers=1, tie_embeddings=True)
    layer = random_params(shallow, rng_key, dtype).layers[0]
    depth = 2**-0.5
    layer = dataclasses.replace(
        layer, output=layer.output * depth, down=layer.down * depth
    )
    same = jnp.eye(hidden, dtype=dtype) / 2
    return MtpParams(
        config=config,
        embedding_norm=jnp.ones(hidden, dtype),
        hidden_norm=jnp.ones(hidden, dtype),
        projection=jnp.concatenate([same, same]),
        layer=layer,
        final_norm=jnp.ones(hidden, dtype),
    )


def _random_mtp(config: MoeConfig | LlamaConfig) -> MtpParams:
    key = jax.random.key(0)
    if isinstance(config, LlamaConfig):
        return random_mtp_params(config, key)
    mtp = random_moe_params(config, key).mtp
    assert mtp is not None
    return mtp


def with_draft_vocabulary(params: MoeParams, draft_tokens: Sequence[int]) -> MoeParams:
    """Lets a model's draft head propose some tokens only, so that its head is cheaper.

    Args:
      params: weights with a draft head.
      draft_tokens: ids of the target, each at most once (not the offsets `d2t` of
        EAGLE-3 files: there the i-th id is `i + d2t[i]`).

    Returns:
      The weights; the draft head has rows of its own for these ids.

    Raises:
      ValueError: if there is no draft head, or an id is out of range or repeated.

    Exactness: law-exact; tokens that cannot be drafted come from the residual.
    """
    if params.mtp is None:
        raise ValueError("params has no draft head (params.mtp is None)")
    vocab_size = params.embedding.shape[0]
    tokens = np.asarray(draft_tokens)
    if (
        tokens.ndim != 1
        or not tokens.size
        or not np.issubdtype(tokens.dtype, np.integer)
    ):
        raise ValueError(
            "draft_tokens must be a list of token ids, at least one; got "
            f"{tokens.dtype} of shape {list(tokens.shape)}"
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise ValueError(
            f"draft_tokens has ids outside the vocabulary of {vocab_size}: "
            f"{outside[:5].tolist()}{_OFFSETS}"
        )
    values, counts = np.unique(tokens, return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"draft_tokens repeats ids, each needs one row: "
            f"{values[counts > 1][:5].tolist()}{_OFFSETS}"
        )
    mtp = params.mtp
    head = mtp.head if mtp.head is not None else params.head
    table = params.embedding if head is None else head
    if mtp.draft_tokens is not None:
        raise ValueError("params.mtp has a draft vocabulary already")
    index = jnp.asarray(tokens, jnp.int32)
    mtp = dataclasses.replace(mtp, head=table[index], draft_tokens=index)
    return dataclasses.replace(params, mtp=mtp)


def _check_layer(name: str, found: MoeLayer, expected: MoeLayer) -> None:
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
