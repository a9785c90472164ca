"""Weights of mixture-of-experts decoders, with or without a draft head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks
from strata_jax.models._family_checks import check_form
from strata_jax.models._moe_layer_params import (
    MoeConfig,
    MoeLayer,
    check_moe_layer,
    matrix_source,
    random_moe_layer,
)
from strata_jax.models._mtp_params import MtpParams, check_mtp_params, random_moe_mtp

_OFFSETS = "; of a file's offsets d2t give i + d2t[i]"


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
    hidden = config.hidden_size
    draw = matrix_source(config, rng_key, dtype)
    mtp = random_moe_mtp(config, draw, dtype) if with_mtp else None
    return MoeParams(
        embedding=draw(config.vocab_size, hidden, fan_in=hidden),
        layers=tuple(
            random_moe_layer(config, draw, dtype) for _ in range(config.num_layers)
        ),
        final_norm=jnp.ones(hidden, dtype),
        head=None
        if config.tie_embeddings
        else draw(config.vocab_size, hidden, fan_in=hidden),
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
        check_moe_layer(f"params.layers[{index}]", found, wanted)
    if params.mtp is not None:
        check_mtp_params(params.mtp, "params.mtp")
        if params.mtp.config.hidden_size != config.hidden_size:
            raise ValueError(
                f"params.mtp is {params.mtp.config.hidden_size} wide, the model "
                f"{config.hidden_size}: a draft head reads the model's hidden states"
            )


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
