"""The sampling chain: logits of one row to its distribution, p or q."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from strata_jax import _checks
from strata_jax._largest import first_largest
from strata_jax._precision import at_least_float32
from strata_jax._status import Status
from strata_jax._sums import doubling_sum, halving_sum
from strata_jax.sampling._settings import SamplingSettings

# A cut usually lies among this many candidates; a full sort is the fallback.
_NUM_CANDIDATES = 1024


@flax.struct.dataclass
class TokenCounts:
    """What the penalties look at: the text before a row."""

    in_prompt: jax.Array  # [V] bool
    in_output: jax.Array  # [V] int32, occurrences
    num_output: jax.Array  # [] int32, tokens of output


def count_tokens(
    tokens: jax.Array, prompt_length: jax.Array, length: jax.Array, vocab_size: int
) -> TokenCounts:
    """Counts the tokens of a committed text.

    Args:
      tokens: `[S]` int32; entries from `length` on are ignored.
      prompt_length: [] int32, how many of them are the prompt.
      length: [] int32, how many are text.
      vocab_size: V.

    Returns:
      The counts.

    Exactness: integers only.
    """
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    prompt = jnp.where(index < prompt_length, tokens, vocab_size)
    is_output = (index >= prompt_length) & (index < length)
    output = jnp.where(is_output, tokens, vocab_size)
    return TokenCounts(
        in_prompt=jnp.zeros(vocab_size, bool).at[prompt].set(True, mode="drop"),
        in_output=jnp.zeros(vocab_size, jnp.int32).at[output].add(1, mode="drop"),
        num_output=jnp.asarray(length - prompt_length, jnp.int32),
    )


def chain_probs(
    settings: SamplingSettings,
    logits: jax.Array,
    counts: TokenCounts,
    drafts: jax.Array | None = None,
    *,
    max_candidates: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Turns the logits of one row into its distribution.

    Order: logit bias and the ban of EOS, penalties, top_k, top_p, min_p, temperature.
    Each filter measures the renormalised survivors of the one before, at temperature 1.
    Ties go to the lower id.

    Args:
      settings: the request's settings.
      logits: `[V]` float; dtypes below 32 bits are cast to float32 first.
      counts: the text before this row, or before the drafts.
      drafts: `[n]` int32, output that stands between, -1 where there is none. It is
        counted only where a penalty asks for it.
      max_candidates: static; if given, no row is ever sorted beyond so many
        candidates. Requests must be checked against it by `sampling_settings`.

    Returns:
      `[V]` probabilities (all zero if the row is bad), and [] int32 `Status` bits:
      NON_FINITE_LOGITS for NaN or +inf, EMPTY_SUPPORT if every logit is -inf.

    Raises:
      ValueError: at trace time, if shapes differ.

    Exactness: a function of one row; sums have a fixed order, so the bits do not
      depend on how many rows share a window.
    """
    _checks.check_shape("logits", logits, settings.logit_bias.shape)
    if drafts is None:
        drafts = jnp.zeros(0, jnp.int32)
    _checks.check_shape("drafts", drafts, (None,))
    _checks.check_integer_dtype("drafts", drafts)
    return _run_chain(settings, logits, counts, drafts, max_candidates)


# A program of its own for the tracer: draft and target rows then share it.
@functools.partial(jax.jit, static_argnames="max_candidates")
def _run_chain(
    settings: SamplingSettings,
    logits: jax.Array,
    counts: TokenCounts,
    drafts: jax.Array,
    max_candidates: int | None,
) -> tuple[jax.Array, jax.Array]:
    logits = logits.astype(at_least_float32(logits.dtype))
    vocab_size, dtype = logits.shape[0], logits.dtype
    logits = _mark_faults(logits + settings.logit_bias.astype(dtype))
    num_output = counts.num_output + jnp.sum(drafts >= 0).astype(jnp.int32)
    ban_eos = num_output < settings.min_tokens
    has_penalty = (
        (settings.repetition_penalty != 1)
        | (settings.frequency_penalty != 0)
        | (settings.presence_penalty != 0)
    )

    def edit(index: jax.Array, logits: jax.Array) -> jax.Array:
        # What does not depend on the index may be moved out, and run in any case.
        text, following, _ = lax.optimization_barrier((counts, drafts, index))
        eos_ids = jnp.where(settings.eos_ids < 0, vocab_size, settings.eos_ids)
        is_eos = jnp.zeros(vocab_size, bool).at[eos_ids].set(True, mode="drop")
        edited = jnp.where(is_eos & ban_eos, -jnp.inf, logits)
        edited = _penalise(settings, edited, text, following)
        # A fault stays one, whatever is banned or penalised; a penalty can make one.
        return jnp.where(logits == jnp.inf, jnp.inf, _mark_faults(edited))

    # No trip rather than a branch: a branch would copy the row.
    is_edited = (ban_eos | has_penalty).astype(jnp.int32)
    logits = lax.fori_loop(0, is_edited, edit, logits)

    largest = jnp.max(logits)
    status = jnp.where(
        largest == jnp.inf,
        Status.NON_FINITE_LOGITS.value,
        jnp.where(largest == -jnp.inf, Status.EMPTY_SUPPORT.value, 0),
    ).astype(jnp.int32)
    is_good = status == 0
    keep = _survivors(settings, logits, largest, max_candidates)
    probs = _tempered(settings.temperature.astype(dtype), logits, largest, keep)
    # What a bad row came to is left behind here.
    return jnp.where(is_good, probs, jnp.zeros_like(probs)), status


def _mark_faults(logits: jax.Array) -> jax.Array:
    """Makes NaN infinite, so that the largest tells; -inf is legal: a banned token."""
    # Minus zero and zero are one value, but not to a sort.
    logits = jnp.where(logits == 0, jnp.zeros_like(logits), logits)
    return jnp.where(jnp.isnan(logits), jnp.inf, logits)


def _penalise(
    settings: SamplingSettings,
    logits: jax.Array,
    counts: TokenCounts,
    drafts: jax.Array,
) -> jax.Array:
    dtype = logits.dtype
    places = jnp.where(drafts < 0, logits.shape[0], drafts)
    in_output = counts.in_output.at[places].add(1, mode="drop")
    repetition = settings.repetition_penalty.astype(dtype)
    seen = counts.in_prompt | (in_output > 0)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    penalised = jnp.where(seen, repeated, logits)
    occurrences = in_output.astype(dtype)
    frequency = settings.frequency_penalty.astype(dtype) * occurrences
    # The maximum keeps XLA from joining product and difference to one fused operation
    # in some programs and not in others: their roundings differ in the last bit.
    frequency = jnp.maximum(frequency, jnp.finfo(dtype).min)
    presence = jnp.where(in_output > 0, settings.presence_penalty.astype(dtype), 0)
    penalised = penalised - frequency - presence
    return jnp.where(logits == -jnp.inf, -jnp.inf, penalised)


def _survivors(
    settings: SamplingSettings,
    logits: jax.Array,
    largest: jax.Array,
    max_candidates: int | None,
) -> jax.Array:
    """Returns the [V] bool mask of tokens that pass the three filters."""
    vocab_size = logits.shape[0]
    dtype = logits.dtype
    top_p = settings.top_p.astype(dtype)
    min_p = settings.min_p.astype(dtype)
    is_off = (settings.top_k >= vocab_size) & (top_p >= 1) & (min_p <= 0)

    def keep_all(_: None) -> jax.Array:
        return jnp.full(vocab_size, True)

    def cut(num_sorted: int) -> tuple[jax.Array, jax.Array]:
        """Finds the cut among the first candidates; False if it lies beyond them."""
        values, ids = lax.top_k(logits, num_sorted)
        weights = jnp.exp(values - largest)
        rank = jnp.arange(num_sorted, dtype=jnp.int32)
        in_top_k = rank < settings.top_k
        running = doubling_sum(jnp.where(in_top_k, weights, 0))
        before = jnp.pad(running[:-1], (1, 0))
        # With top_k off (or beyond the candidates) the mass is that of all tokens.
        is_prefix = settings.top_k <= num_sorted
        total = lax.cond(
            is_prefix,
            lambda: running[-1],
            lambda: halving_sum(jnp.exp(logits - largest)),
        )
        # "before < top_p" is monotone in exact arithmetic; the first failure decides.
        fails = ~in_top_k | ((before >= top_p * total) & (top_p < 1))
        fails = fails | (weights < min_p)
        fails = fails.at[0].set(False)
        first = jnp.argmax(fails).astype(jnp.int32)
        num_kept = jnp.where(jnp.any(fails), first, num_sorted)
        is_top_k_off = settings.top_k >= vocab_size
        is_inside = is_prefix | (is_top_k_off & jnp.any(fails))
        last = num_kept - 1
        keep = (logits > values[last]) | (
            (logits == values[last])
            & (jnp.arange(vocab_size, dtype=ids.dtype) <= ids[last])
        )
        return keep, is_inside

    def cut_by_filters(_: None) -> jax.Array:
        if max_candidates is not None:
            return cut(min(max_candidates, vocab_size))[0]
        if vocab_size <= _NUM_CANDIDATES:
            return cut(vocab_size)[0]
        keep, is_inside = cut(_NUM_CANDIDATES)
        return lax.cond(is_inside, lambda: keep, lambda: cut(vocab_size)[0])

    return lax.cond(is_off, keep_all, cut_by_filters, None)


def _tempered(
    temperature: jax.Array, logits: jax.Array, largest: jax.Array, keep: jax.Array
) -> jax.Array:
    is_greedy = temperature == 0
    divisor = jnp.where(is_greedy, jnp.ones_like(temperature), temperature)
    weights = jnp.where(keep, jnp.exp((logits - largest) / divisor), 0)
    probs = weights / halving_sum(weights)
    # A pass of its own, for greedy requests alone.
    best = lax.cond(
        is_greedy, lambda: first_largest(logits, largest), lambda: jnp.int32(-1)
    )
    greedy = jnp.arange(logits.shape[0], dtype=jnp.int32) == best
    return jnp.where(is_greedy, greedy.astype(probs.dtype), probs)
