"""Checks that all model families share: sizes of a configuration, form of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from strata_jax import _checks
from strata_jax.models._attention import AttentionShape

_LARGEST = float(jnp.finfo(jnp.float32).max)


class FamilyShape(AttentionShape, Protocol):
    """What the families' configurations have in common."""

    @property
    def num_layers(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...


def check_config(config: FamilyShape, sizes: Sequence[str]) -> None:
    """Raises ValueError unless the named sizes are positive and heads and norms fit."""
    for name in sizes:
        _checks.check_integer(name, getattr(config, name), 1)
    for name in ("rope_theta", "norm_epsilon"):
        value = getattr(config, name)
        if not 0 < _checks.check_number(name, value, 0.0, _LARGEST):
            raise ValueError(f"{name} must be positive, got {value!r}")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_kv_heads ({config.num_kv_heads}) must divide num_heads "
            f"({config.num_heads})"
        )
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim must be even, since rotary turns pairs; got {config.head_dim}"
        )


def check_form(config: FamilyShape, params: Any, kind: type) -> None:
    """Raises ValueError unless weights are of a kind, depth and head that fit."""
    if not isinstance(params, kind):
        raise ValueError(
            f"params must be models.{kind.__name__} for a "
            f"{type(config).__name__}, got {type(params).__name__}"
        )
    num_layers = len(params.layers)
    if num_layers != config.num_layers:
        raise ValueError(
            f"params has {num_layers} layers, config {config.num_layers}: give the "
            "weights that belong to this configuration"
        )
    if (params.head is None) != config.tie_embeddings:
        raise ValueError(
            f"params.head is {'' if params.head is None else 'not '}None, and "
            f"config.tie_embeddings is {config.tie_embeddings}: they must agree"
        )
