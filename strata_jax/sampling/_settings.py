"""A request's sampling settings: traced numbers, checked on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import _checks

MAX_EOS_IDS = 8

# Below the smallest normal float32 a temperature is flushed to zero inside XLA.
_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


@flax.struct.dataclass
class SamplingSettings:
    """The numbers of the sampling chain; one compilation serves all values."""

    temperature: jax.Array  # [] float, 0 is greedy
    top_k: jax.Array  # [] int32, V is off
    top_p: jax.Array  # [] float, 1 is off
    min_p: jax.Array  # [] float, 0 is off
    repetition_penalty: jax.Array  # [] float, 1 is off
    presence_penalty: jax.Array  # [] float, 0 is off
    frequency_penalty: jax.Array  # [] float, 0 is off
    logit_bias: jax.Array  # [V] float, added to the logits; -inf bans
    eos_ids: jax.Array  # [MAX_EOS_IDS] int32, unused entries are -1
    min_tokens: jax.Array  # [] int32, EOS is banned before so many output tokens


def sampling_settings(
    vocab_size: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    eos_ids: Sequence[int] = (),
    min_tokens: int = 0,
    max_candidates: int | None = None,
) -> SamplingSettings:
    """Checks a request's sampling settings and turns them into arrays.

    Args:
      vocab_size: V.
      temperature: divides the logits of the survivors; 0 is greedy.
      top_k: most survivors; 0, -1 and anything from V on is off.
      top_p: probability mass to keep, in [0, 1]; 1 is off, 0 keeps one token.
      min_p: least probability relative to the largest, in [0, 1]; 0 is off.
      repetition_penalty: positive; divides positive and multiplies negative logits of
        tokens in prompt and output; 1 is off.
      presence_penalty: subtracted from the logits of tokens in the output.
      frequency_penalty: subtracted once for every occurrence in the output.
      logit_bias: token id to what is added to its logit; -inf bans it.
      eos_ids: at most `MAX_EOS_IDS` token ids that end the text.
      min_tokens: EOS is banned until the output has so many tokens.
      max_candidates: the decoder's static limit on survivors, if it has one; `top_k`
        must then lie in [1, max_candidates].

    Returns:
      The settings; floats in JAX's default float dtype.

    Raises:
      ValueError: naming the argument and its value.

    Exactness: no value is clamped; top_k of 0, -1 and above V all mean "off".
    """
    number, integer = _checks.check_number, _checks.check_integer
    infinity = float("inf")
    largest = float(np.finfo(np.float32).max)
    temperature = number("temperature", temperature, 0.0, largest)
    if 0.0 < temperature < _SMALLEST_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 (greedy) or at least {_SMALLEST_TEMPERATURE:.3g}, "
            f"got {temperature!r}"
        )
    top_k = integer("top_k", top_k, -1)
    if top_k <= 0 or top_k > vocab_size:
        top_k = vocab_size
    if max_candidates is not None and top_k > max_candidates:
        raise ValueError(
            f"top_k must be in [1, {max_candidates}], since the decoder was built with "
            f"max_candidates={max_candidates}; got a request for {top_k} candidates"
        )
    smallest = float(np.finfo(np.float32).tiny)
    repetition_penalty = number(
        "repetition_penalty", repetition_penalty, smallest, largest
    )
    if logit_bias is not None and not isinstance(logit_bias, Mapping):
        raise ValueError(
            "logit_bias must map token ids to numbers, as in {5: -1.0}; got "
            f"{type(logit_bias).__name__}"
        )
    if isinstance(eos_ids, str) or not isinstance(eos_ids, Iterable):
        raise ValueError(f"eos_ids must be a sequence of token ids, got {eos_ids!r}")
    bias = np.zeros(vocab_size, np.float32)
    for token, value in (logit_bias or {}).items():
        token = integer("logit_bias token id", token, 0, vocab_size - 1)
        bias[token] = number(f"logit_bias[{token}]", value, -infinity, largest)
    min_tokens = integer("min_tokens", min_tokens, 0, 2**31 - 1)
    eos = [integer("eos_ids", token, 0, vocab_size - 1) for token in eos_ids]
    if len(eos) > MAX_EOS_IDS:
        raise ValueError(f"eos_ids holds {len(eos)} ids, at most {MAX_EOS_IDS} fit")
    eos += [-1] * (MAX_EOS_IDS - len(eos))
    scalars = {
        "temperature": temperature,
        "top_p": number("top_p", top_p, 0.0, 1.0),
        "min_p": number("min_p", min_p, 0.0, 1.0),
        "repetition_penalty": repetition_penalty,
        "presence_penalty": number(
            "presence_penalty", presence_penalty, -largest, largest
        ),
        "frequency_penalty": number(
            "frequency_penalty", frequency_penalty, -largest, largest
        ),
    }
    return SamplingSettings(
        top_k=jnp.asarray(top_k, jnp.int32),
        logit_bias=jnp.asarray(bias, float),
        eos_ids=jnp.asarray(eos, jnp.int32),
        min_tokens=jnp.asarray(min_tokens, jnp.int32),
        **{name: jnp.asarray(value, float) for name, value in scalars.items()},
    )
