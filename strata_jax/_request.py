"""A request: its settings and state, and the checks before it starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks
from strata_jax._rng import request_key
from strata_jax._types import Context, Gate
from strata_jax.sampling import SamplingSettings, TokenCounts, sampling_settings


@flax.struct.dataclass
class Settings:
    """A request's traced numbers, fixed when it starts."""

    sampling: SamplingSettings
    gate: Mapping[str, jax.Array]  # [] float each, by name
    max_new_tokens: jax.Array  # [] int32, the token budget


@flax.struct.dataclass
class DecoderState:
    """All that the next window depends on."""

    request_key: Any  # [] key; folded, never split
    window: jax.Array  # [] int32, windows so far
    context: Context  # the committed text; its last token is not yet in the cache
    counts: TokenCounts  # of the committed text
    finish_reason: jax.Array  # [] int32, FinishReason
    status: jax.Array  # [] int32, Status bits
    settings: Settings
    target_state: Any
    drafter_state: Any
    gate_state: Any


class Request(NamedTuple):
    """A checked request, as arrays."""

    key: jax.Array
    window: jax.Array
    """[] int32, windows before this one."""
    tokens: jax.Array
    """[S] int32, prompt and output so far, then zeros."""
    length: jax.Array
    """[] int32, how many of them are text."""
    prompt_length: jax.Array
    """[] int32, how many of these are the prompt."""
    settings: Settings


# What `init` takes by name beside the gate's settings.
_REQUEST_SETTINGS = frozenset(
    {
        # of generate
        "context",
        "prompt",
        "stop",
        "on_text",
        "progress",
        "windows_per_call",
        "throw",
        # of init
        "seed",
        "max_new_tokens",
        "prompt_length",
        "window",
        *inspect.signature(sampling_settings).parameters,
    }
) - {"vocab_size", "max_candidates"}


def check_request(
    context: Sequence[int] | np.ndarray | jax.Array,
    *,
    vocab_size: int,
    max_length: int,
    max_candidates: int | None,
    gate: Gate,
    seed: int,
    max_new_tokens: int | None,
    prompt_length: int | None,
    window: int,
    settings: Mapping[str, Any],
) -> Request:
    """Checks a request on the host, before any work.

    Args:
      context: prompt and output so far, token ids.
      vocab_size: V.
      max_length: S, the longest context.
      max_candidates: the decoder's static limit of the sampling chain, or None.
      gate: whose settings are taken by name.
      seed: in [0, 2**32).
      max_new_tokens: the token budget, output so far included; None is all that fits.
      prompt_length: how many tokens of `context` are the prompt; None is all.
      window: how many windows made the output so far.
      settings: the gate's and the sampling chain's.

    Returns:
      The request.

    Raises:
      ValueError: naming the argument and the remedy.

    Exactness: nothing is clamped or renormalised.
    """
    ids = _check_context(context, vocab_size, max_length)
    if prompt_length is None:
        prompt_length = len(ids)
    prompt_length = _checks.check_integer("prompt_length", prompt_length, 1, len(ids))
    budget = max_length if max_new_tokens is None else max_new_tokens
    budget = _checks.check_integer("max_new_tokens", budget, 0)
    sampling = dict(settings)
    gate_numbers = take_gate_numbers(gate, sampling)
    tokens = np.zeros(max_length, np.int32)
    tokens[: len(ids)] = ids
    seed = _checks.check_integer("seed", seed, 0, 2**32 - 1)
    window = _checks.check_integer("window", window, 0, 2**31 - 1)
    return Request(
        key=request_key(seed),
        window=jnp.asarray(window, jnp.int32),
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(len(ids), jnp.int32),
        prompt_length=jnp.asarray(prompt_length, jnp.int32),
        settings=Settings(
            sampling=sampling_settings(
                vocab_size, max_candidates=max_candidates, **sampling
            ),
            gate=gate_numbers,
            # A budget beyond the context is never reached, but must fit int32.
            max_new_tokens=jnp.asarray(min(budget, max_length), jnp.int32),
        ),
    )


def check_setting_names(gate: Gate) -> None:
    """Raises ValueError if a gate's setting has the name of a request's own."""
    taken = sorted(set(gate.settings) & _REQUEST_SETTINGS)
    if taken:
        raise ValueError(
            f"the gate's settings {taken} are names of the request's own: give others "
            "with setting="
        )


def _check_context(
    context: Sequence[int] | np.ndarray | jax.Array, vocab_size: int, max_length: int
) -> np.ndarray:
    try:
        ids = np.asarray(context)
    except ValueError as error:
        raise ValueError(
            f"context must be a one-dimensional sequence of token ids: {error}"
        ) from None
    if ids.size == 0:
        raise ValueError("context is empty: give at least one token, such as BOS")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            "context must be a one-dimensional sequence of token ids, got shape "
            f"{ids.shape} and dtype {ids.dtype}"
        )
    if len(ids) > max_length:
        raise ValueError(
            f"context has {len(ids)} tokens, more than max_length={max_length}: "
            "shorten the prompt or build the target with a longer context"
        )
    is_bad = (ids < 0) | (ids >= vocab_size)
    if is_bad.any():
        place = int(np.argmax(is_bad))
        raise ValueError(
            f"context[{place}]={int(ids[place])} is no token id of a vocabulary of "
            f"{vocab_size}"
        )
    return ids.astype(np.int32)


def take_gate_numbers(gate: Gate, settings: dict[str, Any]) -> dict[str, jax.Array]:
    """Takes the gate's settings out of `settings` and checks them."""
    numbers = {}
    for name, setting in gate.settings.items():
        value = settings.pop(name, setting.default)
        if value is None:
            raise ValueError(
                f"{name} has no default: give it to init, or to the gate when it is "
                "built"
            )
        value = _checks.check_number(name, value, setting.minimum, setting.maximum)
        numbers[name] = jnp.asarray(value, float)
    unknown = set(settings) - _REQUEST_SETTINGS
    if unknown:
        known = sorted(gate.settings) + sorted(_REQUEST_SETTINGS)
        raise ValueError(
            f"unknown settings {sorted(unknown)}: this decoder takes {known}"
        )
    return numbers
