"""Run-time trouble as bits of an integer, raised as an error on the host."""

from __future__ import annotations

import enum

import jax
import numpy as np


class Status(enum.IntFlag):
    """Bits of `Verdict.status`; a request with any bit set has stopped."""

    OK = 0
    NON_FINITE_LOGITS = 1
    """A target row held NaN or +inf."""
    EMPTY_SUPPORT = 2
    """Every token of a target row was banned (all logits -inf)."""
    CACHE_FULL = 4
    """The window did not fit into the context."""
    UNNORMALIZED_DRAFT = 8
    """A draft row was not finite, was negative, or did not sum to 1."""
    ZERO_MEASURE_OFFERED = 16
    """A drafter offered a token of measure 0."""
    INVALID_GATE = 32
    """A gate's admission left [0, 1]."""
    EXPERT_FAULT = 64
    """An expert's weights could not be read, or were not those that were written."""


_REMEDIES = {
    Status.NON_FINITE_LOGITS: "the target's logits held NaN or +inf: check the "
    "weights, and penalties that are extreme",
    Status.EMPTY_SUPPORT: "every token was banned: check logit_bias and min_tokens",
    Status.CACHE_FULL: "the window did not fit: give the target a longer context",
    Status.UNNORMALIZED_DRAFT: "a draft row was no distribution: check the drafter",
    Status.ZERO_MEASURE_OFFERED: "a drafter offered a token that its own measure gives "
    "no mass: propose through the packet builder",
    Status.INVALID_GATE: "a gate's admit left [0, 1]: check the gate",
    Status.EXPERT_FAULT: "cold experts could not be read, or their file has changed: "
    "see the log of strata_jax and `ExpertFile.last_fault`",
}


class DecodingError(RuntimeError):
    """A request stopped with a status bit set.

    Attributes:
      status: the bits.
      tokens: what was emitted before the fault, `[n]` int32, or None if unknown.
    """

    def __init__(self, status: Status, tokens: np.ndarray | None = None):
        names = [bit.name or "" for bit in Status if bit and bit in status]
        reasons = "; ".join(text for bit, text in _REMEDIES.items() if bit in status)
        super().__init__(f"status {'|'.join(names)}: {reasons}")
        self.status = status
        self.tokens = tokens


def raise_if_failed(status: jax.Array | int, tokens: np.ndarray | None = None) -> None:
    """Raises on the host if any status bit is set.

    Args:
      status: integer array of any shape, `Status` bits.
      tokens: emitted tokens to attach to the error.

    Raises:
      DecodingError: naming the bits and the remedy.

    Exactness: neither law nor bits are concerned.
    """
    bits = Status(int(np.bitwise_or.reduce(np.ravel(np.asarray(status)), initial=0)))
    if bits:
        raise DecodingError(bits, tokens)
