"""Pytrees and protocols that the parts of the library exchange; no logic.

Notation follows Leviathan et al.: p is the target row, q the draft row. K is the
number of draft rows, T = K + 1 the number of target rows, V the vocabulary size and
S the longest context of a decoder.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax


class RowKind(enum.IntEnum):
    """What a draft row of a proposal is."""

    ABSENT = 0
    """Never attempted: the token is an ordinary draw from the target."""
    OFFERED = 1
    """A token was drawn and admitted; the verifier accepts or rejects it."""
    NULL = 2
    """A token was drawn and not admitted; the verifier samples the residual."""


class Source(enum.IntEnum):
    """How a window ended, hence where its last token comes from."""

    BONUS = 0
    """Nothing was rejected: a draw from the target row."""
    REJECTION = 1
    """An offered draft was rejected."""
    NULL = 2
    """A NULL row was reached."""


class FinishReason(enum.IntEnum):
    """Why a request stopped."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    """The token budget or the context limit was reached."""
    FAILED = 3
    """A status bit is set, see `strata_jax.Status`."""


@flax.struct.dataclass
class Params:
    """Weights of a target and of a drafter that does not share them.

    Wherever a decoder takes `params`, either the target's own weights are given (a
    drafter then sees the same ones) or this pair.
    """

    target: Any
    drafter: Any


@flax.struct.dataclass
class Proposal:
    """The packet of one window: draft tokens and the measures they were drawn from.

    Kinds read OFFERED*, then at most one NULL, then ABSENT*.
    """

    tokens: jax.Array  # [K] int32, -1 where the row is not OFFERED
    measure: jax.Array  # [K, V] float, mu = q * admit; zero where ABSENT
    kind: jax.Array  # [K] int32, RowKind


@flax.struct.dataclass
class Draws:
    """The uniforms of one window, each in [0, 1)."""

    draft: jax.Array  # [K, 2] float32, (u_block, u_token) of each draft row
    gate: jax.Array  # [K] float32, the gate's coin; matters where 0 < admit < 1
    verifier: Any  # the verifier's own pytree


@flax.struct.dataclass
class Verdict:
    """What a verifier decided about one window."""

    tokens: jax.Array  # [K + 1] int32, emitted tokens, then -1
    num_accepted: jax.Array  # [] int32, drafts among the emitted tokens
    num_emitted: jax.Array  # [] int32, 0 for a finished request
    source: jax.Array  # [] int32, Source; of the whole window, also if EOS cut it
    status: jax.Array  # [] int32, Status bits
    kind: jax.Array  # [K] int32, RowKind, as proposed


@flax.struct.dataclass
class Window:
    """Everything that happened in one window; never read by the next step."""

    proposal: Proposal
    draft_tokens: jax.Array  # [K] int32, as drawn, NULL rows too; -1 where ABSENT
    draws: Draws
    verdict: Verdict
    target_probs: jax.Array  # [K + 1, V] float, p; zero in rows not computed


@flax.struct.dataclass
class Context:
    """The committed text of a request: prompt and emitted tokens, never drafts."""

    tokens: jax.Array  # [S] int32, entries from `length` on mean nothing
    length: jax.Array  # [] int32, number of committed tokens


@flax.struct.dataclass
class GateContext:
    """What a gate may look at beside its settings and the row q.

    There is no field for the token about to be drawn, so a gate cannot depend on it.
    """

    committed: Context
    row: jax.Array  # [] int32, index of this row in the window
    draft_tokens: jax.Array  # [K] int32, tokens of earlier rows, then -1
    draft_token_probs: jax.Array  # [K] float, q of those tokens, then 0
    state: Any  # the gate's own state, fixed during a window


@flax.struct.dataclass
class GateDecision:
    """A gate's answer for one row."""

    attempt: jax.Array  # [] bool, False makes the row ABSENT
    admit: jax.Array  # [V] float in [0, 1], g
    go_on: jax.Array  # [V] bool, drawn tokens after which the chain continues


class GateSetting(NamedTuple):
    """A traced number of a gate, checked on the host before a request starts."""

    default: float | None
    minimum: float
    maximum: float


class GateFn(Protocol):
    """Decides about one draft row without seeing the draw."""

    def __call__(
        self,
        settings: Mapping[str, jax.Array],
        context: GateContext,
        draft_probs: jax.Array,
    ) -> GateDecision:
        """Returns the decision for a row `draft_probs`, `[V]`."""
        ...


class Gate(NamedTuple):
    """A rule that admits draft tokens, blind to the draw (contract G1)."""

    decide: GateFn
    settings: Mapping[str, GateSetting]
    init: Callable[[], Any]
    """() -> state at the start of a request; `()` for a gate without state."""
    update: Callable[[Any, Proposal, Verdict], Any]
    """(state, proposal, verdict) -> state, called after every window."""


class DraftRow(NamedTuple):
    """One row that a drafter offers for drawing."""

    probs: jax.Array
    """[V] float, q, sums to 1 (a point mass is a one-hot row)."""
    is_available: jax.Array
    """[] bool, False if the drafter has nothing to say: the row is ABSENT."""
    also_admit: jax.Array | None = None
    """[V] bool, tokens admitted whatever the gate says, or None; like the gate's own
    decision a function of committed text and earlier rows, never of this row's draw."""


class DraftStep(NamedTuple):
    """What a drafter knows when it makes one row."""

    row: jax.Array
    """[] int32, index of the row in the window."""
    previous_token: jax.Array
    """[] int32, the token before the one to be drafted."""
    to_row: Callable[[jax.Array], DraftRow]
    """logits [V] -> the row that the request's sampling chain makes of them here; not
    available if the request bans all that the drafter would draw."""


class RowFn(Protocol):
    """Makes the rows of a window one by one, the carry threaded through."""

    def __call__(self, carry: Any, step: DraftStep) -> tuple[Any, DraftRow]:
        """Returns (carry, row)."""
        ...


class OfferFn(Protocol):
    """The packet builder as a drafter sees it."""

    def __call__(self, row_fn: RowFn, carry: Any) -> tuple[Proposal, Any]:
        """Returns (proposal, carry) after as many rows as the window takes."""
        ...


@flax.struct.dataclass
class Committed:
    """What a drafter is told after a window."""

    context: Context  # the committed text after the window
    features: Any  # the target's features, one per window row, leading axis K + 1
    num_kept: jax.Array  # [] int32, window rows that stay: accepted drafts and one


class Drafter(NamedTuple):
    """A source of proposals."""

    init: Callable[[Any, Context, Any], Any]
    """(params, context, features) -> drafter state; `features` is what the target's
    prefill gave for the positions 0 .. length - 2, leading axis S, or None."""
    propose: Callable[[Any, Any, Context, OfferFn], tuple[Proposal, Any]]
    """(params, state, context, offer) -> (proposal, state)."""
    commit: Callable[[Any, Any, Committed], Any]
    """(params, state, committed) -> state."""
    num_draft_tokens: int
    """K."""
    vocab_size: int | None
    """V, or None if any vocabulary will do."""
    max_length: int | None
    """Longest context it can draft for, or None if any."""


class TargetRows(NamedTuple):
    """What a target computes for the rows of a window."""

    logits: jax.Array
    """[T, V] float; rows that were not asked for are zero."""
    features: Any
    """Whatever a drafter of this target reads, leading axis T; or None."""
    status: jax.Array | None = None
    """[] int32, Status bits of a fault while computing, or None if there is no such
    fault; a request with one stops."""


class TargetModel(NamedTuple):
    """An adapter around a model; `state` holds its cache.

    A state at position n has seen the tokens 0 .. n - 1.
    """

    init: Callable[[Any], Any]
    """(params) -> state at position 0."""
    prefill: Callable[[Any, Any, jax.Array, jax.Array, jax.Array], tuple[Any, Any]]
    """(params, state, tokens [n], start, stop) -> (state at position `stop`, features).

    Features are those of `score`, by position: row i belongs to `tokens[i]`, leading
    axis n; rows outside start .. stop - 1 are zero. None for a target without any.
    """
    score: Callable[..., tuple[TargetRows, Any]]
    """(params, state, tokens [T], position, num_rows) -> (rows, state).

    `tokens` stand at `position`, `position + 1`, ...; row i holds the logits of the
    token after `tokens[i]`. Only the first `num_rows` are computed.
    """
    commit: Callable[[Any, jax.Array, jax.Array], Any]
    """(state, position, num_kept) -> state at `position + num_kept`."""
    vocab_size: int
    max_length: int
    """S, the longest context."""
    is_bit_exact: bool
    """Whether row i of `score` equals the singleton's bit for bit (contract T1)."""
    name: str
    max_window: int | None = None
    """The largest T that `score` takes, or None if any."""


class Verifier(NamedTuple):
    """A rule that turns target rows and a proposal into emitted tokens."""

    draw: Callable[[jax.Array, jax.Array, jax.Array, int], Any]
    """(request_key, position, window, num_draft_tokens) -> its draws."""
    verify: Callable[[Any, jax.Array, Proposal], Verdict]
    """(draws, target_probs, proposal) -> verdict; deterministic."""
    draft_rule: str
    """How drafts are picked from q by default: "sample" or "argmax"."""
    draft_rules: tuple[str, ...]
    """The rules with which the verifier is exact."""
    name: str


class SpeculativeDecoder(NamedTuple):
    """A decoding loop's two functions, as `speculative_decoder` builds them."""

    init: Callable[..., Any]
    """(params, context, *, seed, **settings) -> state; on the host, checks input."""
    step: Callable[..., tuple[Any, Window]]
    """(params, state, draws=None) -> (state, window); pure, to be jitted.

    Under `vmap` it runs request by request, so that each has the bits it has alone.
    """
    unguarded_step: Callable[..., tuple[Any, Window]]
    """(params, state, draws) -> (state, window): the same function, which `vmap` may
    batch: law-exact then, but not bit-exact. For enumeration."""
    num_draft_tokens: int
    vocab_size: int
    max_length: int
    gate_settings: tuple[str, ...]
    """Names of the gate's settings, which `init` takes."""
    verifier_name: str
    """Name of the rule that decides."""
