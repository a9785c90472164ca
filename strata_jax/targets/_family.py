"""What an adapter needs of a model family, so that one adapter serves them all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from strata_jax import _checks
from strata_jax.experts import MODES
from strata_jax.models import (
    LlamaConfig,
    MoeCache,
    MoeConfig,
    MoeParams,
    TiledLlamaParams,
    adapt_experts,
    batched_moe_rows,
    batched_rows,
    check_moe_params,
    check_params,
    check_tiled_params,
    commit_experts,
    empty_cache,
    empty_moe_cache,
    empty_tiled_cache,
    score_moe_rows,
    score_rows,
    score_tiled_rows,
)

Config = LlamaConfig | MoeConfig


class Family(NamedTuple):
    """A model family's functions, its configuration bound."""

    init: Callable[[Any, int], Any]
    """(params, max_length) -> state; checks the weights."""
    begin: Callable[[Any, Any], Any]
    """(params, state) -> state, before a window."""
    score_rows: Callable[..., tuple[jax.Array, jax.Array, Any]]
    """(params, state, tokens, position, num_rows, first_logits_row) -> (logits,
    hidden, state), each row by itself."""
    batched_rows: Callable[..., tuple[jax.Array, jax.Array, Any]]
    """(params, state, tokens, position) -> (logits, hidden, state), rows together."""
    commit: Callable[[Any, jax.Array], Any]
    """(state, num_kept) -> state."""
    status: Callable[[Any], jax.Array | None]
    """(state) -> Status bits, or None."""


def find_family(
    config: Config, *, expert_mode: str, num_cached_experts: int, max_window: int
) -> Family:
    """Binds a configuration to its family's functions."""
    if expert_mode not in MODES:
        raise ValueError(f"expert_mode must be one of {MODES}, got {expert_mode!r}")
    _checks.check_integer("num_cached_experts", num_cached_experts, 0)
    if isinstance(config, LlamaConfig):
        if num_cached_experts or expert_mode == "shared":
            raise ValueError(
                "num_cached_experts and expert_mode are for models with experts: leave "
                "them out for a LlamaConfig"
            )
        return _llama(config)
    if isinstance(config, MoeConfig):
        if num_cached_experts > config.num_experts:
            raise ValueError(
                f"num_cached_experts={num_cached_experts} exceeds the "
                f"{config.num_experts} experts of a layer"
            )
        return _moe(config, expert_mode, num_cached_experts, max_window)
    raise ValueError(
        f"config must be a models.LlamaConfig or models.MoeConfig, got {config!r}; "
        "other models are wrapped as a TargetModel"
    )


def _llama(config: LlamaConfig) -> Family:
    def init(params: Any, max_length: int) -> Any:
        if isinstance(params, TiledLlamaParams):
            check_tiled_params(config, params)
            return empty_tiled_cache(config, max_length)
        check_params(config, params)
        return empty_cache(config, max_length, params.embedding.dtype)

    def score(params: Any, *rest: Any) -> Any:
        is_tiled = isinstance(params, TiledLlamaParams)
        return (score_tiled_rows if is_tiled else score_rows)(config, params, *rest)

    def score_together(params: Any, *rest: Any) -> Any:
        if isinstance(params, TiledLlamaParams):
            raise ValueError(
                "tiled weights have no batched path: give targets.batched the "
                "models.LlamaParams that they were made of"
            )
        return batched_rows(config, params, *rest)

    return Family(
        init=init,
        begin=lambda params, state: state,
        score_rows=score,
        batched_rows=score_together,
        commit=lambda state, num_kept: state,
        status=lambda state: None,
    )


def _moe(
    config: MoeConfig, expert_mode: str, num_cached_experts: int, max_window: int
) -> Family:
    def init(params: MoeParams, max_length: int) -> MoeCache:
        check_moe_params(config, params)
        return empty_moe_cache(
            config,
            params,
            max_length,
            num_cached_experts=num_cached_experts,
            max_window=max_window,
        )

    return Family(
        init=init,
        begin=adapt_experts,
        score_rows=functools.partial(score_moe_rows, config, mode=expert_mode),
        batched_rows=functools.partial(batched_moe_rows, config),
        commit=commit_experts,
        status=lambda state: state.status,
    )
