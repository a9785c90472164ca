"""What is minimised: next token and drafts together, or drafts of a fixed target."""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from strata_jax.models import (
    MoeConfig,
    MoeParams,
    MtpParams,
    moe_forward,
    mtp_forward,
)
from strata_jax.models._attention import rms_norm


def joint_loss(
    config: MoeConfig,
    params: MoeParams,
    tokens: jax.Array,
    *,
    num_drafts: int = 2,
    draft_weight: float = 0.3,
    balance_weight: float = 0.01,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of some texts: next token, chained drafts, expert balance.

    A draft is trained towards the target's own distribution, which is what it must
    overlap with; no gradient goes through that distribution.

    Args:
      config: the model's shape.
      params: its weights, with a draft head unless `num_drafts` is 0.
      tokens: `[B, L]` int32, L at least `num_drafts + 2`.
      num_drafts: how many drafts to chain.
      draft_weight: weight of each draft's loss.
      balance_weight: weight of the router's load-balancing loss.

    Returns:
      The loss, and by name: `next_token` (mean negative log-likelihood in nats),
      `overlap_1`, ... (mean sum of min(p, q) of each draft), `balance` (1 if even).

    Raises:
      ValueError: if texts are too short, or there is no draft head, or one with a draft
        vocabulary.

    Exactness: not concerned; what is trained only changes the speed.
    """
    if tokens.shape[1] < num_drafts + 2:
        raise ValueError(
            f"tokens must have at least num_drafts + 2 = {num_drafts + 2} columns, got "
            f"{tokens.shape[1]}"
        )
    if num_drafts and params.mtp is None:
        raise ValueError(
            "params has no draft head: give num_drafts=0, or make them with "
            "random_moe_params(..., with_mtp=True)"
        )
    if params.mtp is not None and params.mtp.draft_tokens is not None:
        raise ValueError(
            "params.mtp has a draft vocabulary: train with the whole, and reduce it "
            "afterwards with models.with_draft_vocabulary"
        )
    outputs = moe_forward(config, params, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        outputs.logits, tokens[:, 1:]
    )
    next_token = jnp.mean(losses)
    balance = outputs.balance
    num_balanced = config.num_layers
    metrics = {"next_token": next_token}
    loss = next_token
    if num_drafts and params.mtp is not None:
        # Cell c pairs hidden c with token c + 1 and drafts what row c + 1 is about.
        drafts, mtp_balance = mtp_forward(
            params, params.mtp, outputs.hidden[:, :-1], tokens[:, :-1], num_drafts
        )
        balance = balance + mtp_balance
        num_balanced += num_drafts
        target = jax.lax.stop_gradient(jax.nn.softmax(outputs.logits[:, 1:], axis=-1))
        for step, logits in enumerate(drafts):
            draft, wanted = logits[:, step:], target[:, step:]
            draft_loss = jnp.mean(optax.softmax_cross_entropy(draft, wanted))
            loss = loss + draft_weight * draft_loss
            overlap = jnp.minimum(jax.nn.softmax(draft, axis=-1), wanted)
            metrics[f"overlap_{step + 1}"] = jnp.mean(jnp.sum(overlap, axis=-1))
    metrics["balance"] = balance / num_balanced
    return loss + balance_weight * balance, metrics


OBJECTIVES = ("overlap", "cross_entropy", "log_overlap")


class TargetStates(NamedTuple):
    """What a fixed target made of some texts."""

    tokens: jax.Array | np.ndarray
    """[B, L] int32."""
    hidden: jax.Array | np.ndarray
    """[B, L, D] float, after the last layer and before the final norm."""
    log_normalizer: jax.Array | np.ndarray
    """[B, L] float32, log of the sum of the exponentials of a row's logits."""


@flax.struct.dataclass
class DraftTables:
    """The tables that a draft head shares with its target, and does not train."""

    embedding: jax.Array  # [V, D], the target's
    final_norm: jax.Array  # [D], the target's
    head: jax.Array  # [n, D], rows of the target's head for the draft vocabulary


def distillation_loss(
    tables: DraftTables,
    mtp: MtpParams,
    states: TargetStates,
    *,
    objective: str = "overlap",
    draft_weights: tuple[float, ...] = (1.0, 0.8, 0.6),
    is_rounded: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the loss of a draft head towards a fixed target's own distributions.

    Drafts are chained as they are when drafting: draft i runs on the head's own states
    of the drafts before it, and is compared with the target behind the true tokens, as
    after i - 1 accepted drafts.

    Args:
      tables: the target's.
      mtp: the head, without tables of its own.
      states: the target's texts.
      objective: "overlap" is minus sum min(p, q), which is the acceptance itself;
        "log_overlap" its logarithm; "cross_entropy" that of q under p.
      draft_weights: weight of each draft's loss; as many drafts are chained.
      is_rounded: whether the head's products round their factors to bfloat16, in its
        gradient too; sums, weights and all between products stay float32.

    Returns:
      The loss, and by name `overlap_1`, ...: mean sum min(p, q) of each draft over the
      whole vocabulary, at temperature 1.

    Raises:
      ValueError: if the objective is unknown, the head has tables, or texts are too
        short.

    Exactness: not concerned; what is trained only changes the speed.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {OBJECTIVES}, got {objective!r}")
    if mtp.embedding is not None or mtp.head is not None:
        raise ValueError(
            "mtp has tables of its own: a head that is distilled uses those of `tables`"
        )
    num_drafts = len(draft_weights)
    if states.tokens.shape[1] < num_drafts + 2:
        raise ValueError(
            f"texts must have at least {num_drafts + 2} tokens, got "
            f"{states.tokens.shape[1]}"
        )
    tokens = jnp.asarray(states.tokens)
    hidden = jnp.asarray(states.hidden).astype(jnp.float32)
    drafts, _ = mtp_forward(
        tables, mtp, hidden[:, :-1], tokens, num_drafts, is_rounded=is_rounded
    )
    normed = rms_norm(hidden[:, 1:], tables.final_norm, mtp.config.norm_epsilon)
    # Of the whole vocabulary's distribution; what cannot be drafted is left out.
    normalizer = jnp.asarray(states.log_normalizer)[:, 1:, None]
    target = jnp.exp(normed @ tables.head.T - normalizer)
    loss = jnp.zeros((), jnp.float32)
    metrics = {}
    for step, (logits, weight) in enumerate(zip(drafts, draft_weights, strict=True)):
        draft = jax.nn.log_softmax(logits[:, step:], axis=-1)
        wanted = target[:, step:]
        overlap = jnp.sum(jnp.minimum(jnp.exp(draft), wanted), axis=-1)
        metrics[f"overlap_{step + 1}"] = jnp.mean(overlap)
        if objective == "cross_entropy":
            draft_loss = -jnp.sum(wanted * draft, axis=-1)
        elif objective == "log_overlap":
            draft_loss = -jnp.log(overlap)
        else:
            draft_loss = -overlap
        loss = loss + weight * jnp.mean(draft_loss)
    return loss, metrics
