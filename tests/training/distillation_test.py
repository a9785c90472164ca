"""The objective of a draft head towards a fixed target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import models, training

CONFIG = models.LlamaConfig(
    vocab_size=24,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=32,
    tie_embeddings=True,
)
DRAFTED = np.array([0, 2, 3, 7, 11, 23], np.int32)


@pytest.fixture(scope="module")
def parts():
    """Tables, a head, and what a target would have made of two texts."""
    source = np.random.default_rng(0)
    table = source.standard_normal((24, 32)).astype(np.float32)
    norm = np.ones(32, np.float32)
    tables = training.DraftTables(
        embedding=jnp.asarray(table),
        final_norm=jnp.asarray(norm),
        head=jnp.asarray(table[DRAFTED]),
    )
    hidden = source.standard_normal((2, 12, 32)).astype(np.float32)
    logits = rms_norm(hidden) @ table.T
    normalizer = np.log(np.exp(logits).sum(-1)).astype(np.float32)
    tokens = source.integers(0, 24, (2, 12)).astype(np.int32)
    states = training.TargetStates(tokens, hidden, normalizer)
    head = models.random_mtp_params(CONFIG, jax.random.key(1))
    return tables, head, states, logits


def rms_norm(hidden):
    square = (hidden.astype(np.float64) ** 2).mean(-1, keepdims=True)
    return hidden / np.sqrt(square + CONFIG.norm_epsilon)


def test_overlaps_are_those_of_the_whole_vocabulary(parts):
    tables, head, states, logits = parts
    loss, metrics = training.distillation_loss(tables, head, states)
    drafts, _ = models.mtp_forward(
        tables, head, jnp.asarray(states.hidden[:, :-1]), jnp.asarray(states.tokens), 3
    )
    target = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    total = 0.0
    for step, (draft, weight) in enumerate(zip(drafts, (1.0, 0.8, 0.6), strict=True)):
        q = np.zeros((2, 11, 24))
        q[..., DRAFTED] = jax.nn.softmax(draft)
        overlap = np.minimum(q, target[:, 1:]).sum(-1)[:, step:].mean()
        np.testing.assert_allclose(metrics[f"overlap_{step + 1}"], overlap, rtol=1e-4)
        total -= weight * overlap
    np.testing.assert_allclose(loss, total, rtol=1e-4)


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(name, marks=[] if name == "overlap" else pytest.mark.slow)
        for name in training.OBJECTIVES
    ],
)
def test_every_objective_raises_the_overlap(parts, objective):
    tables, head, states, _ = parts

    def loss_fn(head, states):
        return training.distillation_loss(tables, head, states, objective=objective)

    optimizer = training.adamw(40, learning_rate=1e-2, warmup_steps=2)
    run = training.trainer(loss_fn, optimizer)
    state, history = training.train(run, run.init(head), lambda step: states, 40)
    assert int(state.step) == 40
    for name in ("overlap_1", "overlap_2", "overlap_3"):
        assert history[name][-1] > history[name][0] + 0.02


def test_rounded_products_give_nearly_the_same_gradient(parts):
    tables, head, states, _ = parts

    def loss_fn(head, is_rounded):
        return training.distillation_loss(
            tables, head, states, objective="cross_entropy", is_rounded=is_rounded
        )[0]

    compute = jax.value_and_grad(loss_fn)
    loss, gradient = compute(head, False)
    rounded_loss, rounded = compute(head, True)
    np.testing.assert_allclose(rounded_loss, loss, rtol=1e-2)
    assert rounded_loss != loss  # or nothing would have been rounded
    for (path, whole), leaf in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves(rounded), strict=True
    ):
        assert leaf.dtype == jnp.float32
        scale = jnp.sqrt(jnp.mean(whole**2))
        error = jnp.sqrt(jnp.mean((leaf - whole) ** 2))
        assert error < 0.03 * scale, jax.tree_util.keystr(path)
        assert error > 0


def test_bad_arguments_are_refused(parts):
    tables, head, states, _ = parts
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), head)
    with pytest.raises(ValueError, match="is_rounded needs float32, got states"):
        training.distillation_loss(tables, narrow, states, is_rounded=True)
    with pytest.raises(ValueError, match="objective must be one of"):
        training.distillation_loss(tables, head, states, objective="best")
    whole = dataclasses.replace(head, head=tables.head)
    with pytest.raises(ValueError, match="mtp has tables of its own"):
        training.distillation_loss(tables, whole, states)
    short = training.TargetStates(
        states.tokens[:, :4], states.hidden[:, :4], states.log_normalizer[:, :4]
    )
    with pytest.raises(ValueError, match="at least 5 tokens, got 4"):
        training.distillation_loss(tables, head, short)
