"""The joint objective: the next token, and the drafts after it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from strata_jax.models import MoeConfig, MoeParams, moe_forward, mtp_forward


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
