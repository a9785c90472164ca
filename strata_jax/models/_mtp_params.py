"""Weights of multi-token-prediction heads, with experts or with a dense layer."""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from strata_jax import _checks
from strata_jax.models._llama_params import (
    LlamaConfig,
    LlamaLayer,
    check_llama_layer,
    random_params,
)
from strata_jax.models._moe_layer_params import (
    DrawMatrix,
    MoeConfig,
    MoeLayer,
    check_moe_layer,
    matrix_source,
    random_moe_layer,
)


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


def random_moe_mtp(
    config: MoeConfig, draw: DrawMatrix, dtype: jax.typing.DTypeLike
) -> MtpParams:
    """Returns random weights of a draft head with experts."""
    hidden = config.hidden_size
    return MtpParams(
        config=config,
        embedding_norm=jnp.ones(hidden, dtype),
        hidden_norm=jnp.ones(hidden, dtype),
        projection=draw(2 * hidden, hidden, fan_in=2 * hidden),
        layer=random_moe_layer(config, draw, dtype),
        final_norm=jnp.ones(hidden, dtype),
    )


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
    expected = jax.eval_shape(lambda: _random_head(config))
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
        check_moe_layer(f"{name}.layer", found, wanted)
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


def _random_head(config: MoeConfig | LlamaConfig) -> MtpParams:
    key = jax.random.key(0)
    if isinstance(config, LlamaConfig):
        return random_mtp_params(config, key)
    return random_moe_mtp(config, matrix_source(config, key, jnp.float32), jnp.float32)
