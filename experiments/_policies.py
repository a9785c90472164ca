"""Decoders for the policies of `diagnostics.cost`, and drafters to choose from."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from _models import Model

import strata_jax as strata
from strata_jax import drafters, gates, targets, verifiers
from strata_jax.diagnostics import cost

# Most drafts in a window by drafter: a row of a lookup costs nothing to draft.
MOST_DRAFTS = {"mtp": 3, "suffix": 7, "both": 7, "long both": 7}
_SHORT_MATCH, _LONG_MATCH = 3, 8


def build_drafter(vocab_size: int, name: str, num_draft_tokens: int) -> strata.Drafter:
    """Returns a drafter.

    Args:
      vocab_size: of the model; for all but "suffix" it needs a draft head.
      name: "mtp", the draft head; "suffix", lookup in the text; "both", lookup where
        there is a match, and elsewhere one draft of the head; "long both", the same
        with matches of eight tokens or more.
      num_draft_tokens: K.
    """
    if name == "mtp":
        return drafters.mtp(num_draft_tokens=num_draft_tokens)
    if name == "suffix":
        return drafters.suffix(num_draft_tokens=num_draft_tokens, vocab_size=vocab_size)
    return drafters.suffix_first(
        drafters.mtp(num_draft_tokens=1),
        num_draft_tokens=num_draft_tokens,
        min_match=_LONG_MATCH if name == "long both" else _SHORT_MATCH,
    )


def build_decoder(
    model: Model,
    drafter: str,
    policy: cost.Policy,
    max_length: int,
) -> tuple[strata.SpeculativeDecoder, dict[str, float]]:
    """Returns the decoder of a policy, and the settings of its gate for requests.

    It verifies by the token rule.
    """
    decoder = _decoder(
        model.config, drafter, policy.gate, policy.num_draft_tokens, max_length
    )
    if policy.threshold is None:
        return decoder, {}
    return decoder, dict.fromkeys(decoder.gate_settings, policy.threshold)


@functools.cache
def _decoder(
    config: Any, drafter: str, gate: str, num_draft_tokens: int, max_length: int
) -> strata.SpeculativeDecoder:
    """One decoder for all thresholds, hence one program."""
    target = targets.singleton(config, max_length=max_length)
    if gate == "none":
        return strata.ancestral_decoder(target)
    return strata.speculative_decoder(
        target,
        build_drafter(config.vocab_size, drafter, num_draft_tokens),
        getattr(gates, gate)(),
        verifiers.token(),
    )


def costs_at(
    by_drafter: dict[str, cost.WindowCosts], name: str, records: cost.DraftRecords
) -> cost.WindowCosts:
    """Returns the costs of a drafter on the texts of the records.

    "both" is timed where the text goes on as before. Where it does not, the head drafts
    one row, hence no second one, and the window costs what the head's does.

    Args:
      by_drafter: measured costs; for "both" and "long both" those of "mtp" too.
      name: the drafter, as in `build_drafter`.
      records: its drafts; at least two rows a window.
    """
    found = by_drafter[name]
    if name not in ("both", "long both") or not len(records.is_drafted):
        return found
    share = 1 - float(records.is_drafted[:, 1].mean())
    more = _one_draft(by_drafter["mtp"]) - _one_draft(found)
    return dataclasses.replace(found, window=found.window + share * more)


def _one_draft(costs: cost.WindowCosts) -> float:
    # Whole windows: least squares may put the head's time into any of the three.
    return costs.window + costs.draft_call + costs.offered[1]


def describe(drafter: str, policy: cost.Policy) -> str:
    """Returns a policy in a few words."""
    if policy.gate == "none":
        return "plain"
    text = f"{drafter}, K {policy.num_draft_tokens}, {policy.gate}"
    return text if policy.threshold is None else f"{text} {policy.threshold:.2f}"


def as_json(drafter: str, found: cost.Prediction) -> dict[str, Any]:
    """Returns a prediction as it goes into a report."""
    policy = found.policy
    return {
        "drafter": drafter,
        "gate": policy.gate,
        "threshold": policy.threshold,
        "num_draft_tokens": policy.num_draft_tokens,
        "tokens_per_window": found.tokens_per_window,
        "seconds_per_window": found.seconds_per_window,
        "tokens_per_second": found.tokens_per_second,
    }
