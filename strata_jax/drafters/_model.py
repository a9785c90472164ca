"""A drafter made of a smaller model, or of some of the target's own layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._types import (
    Committed,
    Context,
    Drafter,
    DraftRow,
    DraftStep,
    OfferFn,
    Proposal,
    TargetModel,
)
from strata_jax.models import LlamaConfig, LlamaParams, select_layers
from strata_jax.targets import singleton


@flax.struct.dataclass
class ModelDrafterState:
    """The draft model's cache."""

    target_state: Any  # the model's own state
    num_cached: jax.Array  # [] int32, committed tokens it has seen


def model(
    draft_model: TargetModel,
    *,
    num_draft_tokens: int,
    select_params: Callable[[Any], Any] = lambda params: params,
) -> Drafter:
    """Drafts with a model: any target adapter over the same vocabulary.

    Args:
      draft_model: the adapter of the draft model.
      num_draft_tokens: K.
      select_params: turns the drafter's params (`Params.drafter`, or the target's own)
        into those of `draft_model`.

    Returns:
      The drafter; q is the request's sampling chain on the draft model's logits, with
      the cut of that row.

    Raises:
      ValueError: if K is not positive.

    Exactness: law-exact with any weights; a bad draft model only costs speed.
    """
    num_draft_tokens = _checks.check_integer("num_draft_tokens", num_draft_tokens, 1)

    def init(params: Any, context: Context, features: Any) -> ModelDrafterState:
        del features
        params = select_params(params)
        num_cached = context.length - 1
        state, _ = draft_model.prefill(
            params,
            draft_model.init(params),
            context.tokens,
            jnp.zeros((), jnp.int32),
            num_cached,
        )
        return ModelDrafterState(target_state=state, num_cached=num_cached)

    def propose(
        params: Any, state: ModelDrafterState, context: Context, offer: OfferFn
    ) -> tuple[Proposal, ModelDrafterState]:
        params = select_params(params)

        def row(
            carry: ModelDrafterState, step: DraftStep
        ) -> tuple[ModelDrafterState, DraftRow]:
            # Besides the previous token, the last draft of a window that was accepted
            # in full has not been seen yet.
            stop = context.length + step.row

            def feed(
                position: jax.Array, loop: tuple[jax.Array, Any]
            ) -> tuple[jax.Array, Any]:
                _, cache = loop
                committed = context.tokens[jnp.minimum(position, context.length - 1)]
                is_last = position == stop - 1
                token = jnp.where(is_last, step.previous_token, committed)
                rows, cache = draft_model.score(
                    params, cache, token[None], position, jnp.ones((), jnp.int32)
                )
                return rows.logits[0], cache

            logits = jax.eval_shape(
                lambda: draft_model.score(
                    params,
                    carry.target_state,
                    jnp.zeros(1, jnp.int32),
                    jnp.zeros((), jnp.int32),
                    jnp.ones((), jnp.int32),
                )[0].logits[0]
            )
            logits, cache = lax.fori_loop(
                carry.num_cached,
                stop,
                feed,
                (jnp.zeros(logits.shape, logits.dtype), carry.target_state),
            )
            state = ModelDrafterState(target_state=cache, num_cached=stop)
            return state, step.to_row(logits)

        return offer(row, state)

    def commit(
        params: Any, state: ModelDrafterState, committed: Committed
    ) -> ModelDrafterState:
        del params
        # Rows of accepted drafts stay; the last committed token is never in the cache.
        num_cached = jnp.minimum(state.num_cached, committed.context.length - 1)
        cache = draft_model.commit(
            state.target_state, num_cached, jnp.zeros((), jnp.int32)
        )
        return ModelDrafterState(target_state=cache, num_cached=num_cached)

    return Drafter(
        init=init,
        propose=propose,
        commit=commit,
        num_draft_tokens=num_draft_tokens,
        vocab_size=draft_model.vocab_size,
        max_length=draft_model.max_length,
    )


def layer_skip(
    config: LlamaConfig,
    *,
    layers: Sequence[int],
    num_draft_tokens: int,
    max_length: int,
) -> Drafter:
    """Drafts with some of a llama target's own layers, norm and head.

    Args:
      config: the target's configuration.
      layers: which of its layers to run, in increasing order.
      num_draft_tokens: K.
      max_length: longest context, at least the target's.

    Returns:
      The drafter; it reads the target's params and adds no weights.

    Raises:
      ValueError: if `layers` is empty, not increasing or out of range.

    Exactness: law-exact, as `model` is.

    References:
      Zhang et al., `Draft & Verify: Lossless Large Language Model Acceleration via
      Self-Speculative Decoding <https://arxiv.org/abs/2309.08168>`_, 2023.
    """
    draft_config = select_layers(config, layers)

    def select_params(params: LlamaParams) -> LlamaParams:
        return select_layers(params, layers)

    return model(
        singleton(draft_config, max_length=max_length),
        num_draft_tokens=num_draft_tokens,
        select_params=select_params,
    )
