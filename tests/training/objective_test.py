"""The joint objective against a plain NumPy model, and where its gradient goes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from moe_weights import moe_weights, quick_compilation

from strata_jax import models, training

CONFIG = models.MoeConfig(
    vocab_size=13,
    hidden_size=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_experts=3,
    num_experts_per_token=2,
    expert_size=8,
    shared_expert_size=8,
)
NUM_DRAFTS, DRAFT_WEIGHT, BALANCE_WEIGHT = 2, 0.3, 0.01


@functools.cache
def params():
    """A draft head with an output head of its own."""
    made = moe_weights(CONFIG)
    head = moe_weights(CONFIG, 1).head
    return made.replace(mtp=made.mtp.replace(head=head))


def texts():
    random = np.random.default_rng(0)
    return random.integers(0, CONFIG.vocab_size, (3, 9)).astype(np.int32)


# One token after the other in float64, straight from the definition.


def softmax(values):
    values = np.exp(values - values.max())
    return values / values.sum()


def norm(state, scale):
    return state / np.sqrt(np.mean(state**2) + CONFIG.norm_epsilon) * scale


def swiglu(state, gate, up, down):
    inner = state @ gate
    return (inner / (1 + np.exp(-inner)) * (state @ up)) @ down


def turn(head, position):
    half = CONFIG.head_dim // 2
    angle = position / CONFIG.rope_theta ** (np.arange(half) / half)
    pairs = (head[:half] + 1j * head[half:]) * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag])


class NumpyLayer:
    """A layer with its cache; `routing` holds what the balance loss needs."""

    def __init__(self, layer):
        self.layer = layer
        self.cache = {}
        self.routing = []

    def __call__(self, state, position):
        layer, groups = self.layer, CONFIG.num_heads // CONFIG.num_kv_heads
        normed = norm(state, layer.attention_norm)

        def heads(weight, scale=None):
            parts = (normed @ weight).reshape(-1, CONFIG.head_dim)
            if scale is None:
                return parts
            return [turn(norm(head, scale), position) for head in parts]

        keys, values = heads(layer.key, layer.key_norm), heads(layer.value)
        self.cache[position] = keys, values
        mixed = []
        for head, query in enumerate(heads(layer.query, layer.query_norm)):
            rows = [self.cache[place] for place in range(position + 1)]
            scores = np.array([query @ row[0][head // groups] for row in rows])
            weights = softmax(scores / np.sqrt(CONFIG.head_dim))
            mixed.append(weights @ np.array([row[1][head // groups] for row in rows]))
        state = state + np.concatenate(mixed) @ layer.output
        normed = norm(state, layer.feed_forward_norm)
        probs = softmax(layer.router @ normed)
        chosen = np.argsort(-probs)[: CONFIG.num_experts_per_token]
        self.routing.append((probs, chosen))
        for expert in chosen:
            output = swiglu(
                normed,
                layer.experts.gate[expert].T,
                layer.experts.up[expert].T,
                layer.experts.down[expert].T,
            )
            state = state + probs[expert] / probs[chosen].sum() * output
        shared = layer.shared_expert
        weight = 1 / (1 + np.exp(-(shared.router @ normed)))
        return state + weight * swiglu(normed, shared.gate, shared.up, shared.down)


def balance_of(routing):
    """E * sum over experts of (share of tokens) * (mean probability), by k."""
    probs = np.mean([probs for probs, _ in routing], axis=0)
    sent = np.concatenate([chosen for _, chosen in routing])
    share = np.bincount(sent, minlength=CONFIG.num_experts) / len(routing)
    return CONFIG.num_experts * share @ probs / CONFIG.num_experts_per_token


def reference(params, texts, num_drafts):
    """What `joint_loss` returns, as its docstring says it."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    mtp, num_layers = params.mtp, CONFIG.num_layers
    routing = [[] for _ in range(num_layers + num_drafts)]
    losses = []
    crosses, overlaps = ([[] for _ in range(num_drafts)] for _ in range(2))
    for text in texts:
        layers = [NumpyLayer(layer) for layer in params.layers]
        hidden, logits = [], []
        for position, token in enumerate(text[:-1]):
            state = params.embedding[token]
            for layer in layers:
                state = layer(state, position)
            hidden.append(state)
            logits.append(params.head @ norm(state, params.final_norm))
        for index, layer in enumerate(layers):
            routing[index] += layer.routing
        losses += [
            -np.log(softmax(row)[following])
            for row, following in zip(logits, text[1:], strict=True)
        ]

        def cell(layer, state, place, text=text):
            embedded = norm(params.embedding[text[place + 1]], mtp.embedding_norm)
            normed = norm(state, mtp.hidden_norm)
            return layer(np.concatenate([embedded, normed]) @ mtp.projection, place)

        # Every place in turn is the last committed cell; the drafts are chained on.
        layer, num_cells = NumpyLayer(mtp.layer), len(text) - 2
        for place in range(num_cells):
            state = hidden[place]
            for step in range(min(num_drafts, num_cells - place)):
                state = cell(layer, state, place + step)
                draft = softmax(mtp.head @ norm(state, mtp.final_norm))
                wanted = softmax(logits[place + step + 1])
                crosses[step].append(-wanted @ np.log(draft))
                overlaps[step].append(np.minimum(draft, wanted).sum())
                routing[num_layers + step].append(layer.routing[-1])
        if num_drafts == 2:
            # The second step's cell 0 drafts nothing, but its experts are counted: it
            # sees itself alone, and the state that is left over, the last.
            layer = NumpyLayer(mtp.layer)
            cell(layer, state, 0)
            routing[num_layers + 1] += layer.routing
    balance = [balance_of(part) for part in routing]
    metrics = {"next_token": np.mean(losses), "balance": np.mean(balance)}
    for step, overlap in enumerate(overlaps):
        metrics[f"overlap_{step + 1}"] = np.mean(overlap)
    loss = metrics["next_token"] + DRAFT_WEIGHT * sum(map(np.mean, crosses))
    return loss + BALANCE_WEIGHT * sum(balance), metrics


def loss(params, num_drafts=NUM_DRAFTS):
    return training.joint_loss(
        CONFIG,
        params,
        texts(),
        num_drafts=num_drafts,
        draft_weight=DRAFT_WEIGHT,
        balance_weight=BALANCE_WEIGHT,
    )


@functools.cache
def value_and_gradient(num_drafts):
    function = functools.partial(loss, num_drafts=num_drafts)
    with quick_compilation():
        (value, metrics), gradient = jax.jit(
            jax.value_and_grad(function, has_aux=True)
        )(params())
    return value, metrics, jax.tree.map(np.asarray, gradient)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_values_against_numpy(num_drafts):
    value, metrics, _ = value_and_gradient(num_drafts)
    wanted, wanted_metrics = reference(params(), texts(), num_drafts)
    assert set(metrics) == set(wanted_metrics)
    np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5)
    for name, number in wanted_metrics.items():
        np.testing.assert_allclose(metrics[name], number, rtol=0, atol=1e-5)
    # Joined in the other order it is another loss.
    projection = np.roll(params().mtp.projection, CONFIG.hidden_size, axis=0)
    swapped = params().replace(mtp=params().mtp.replace(projection=projection))
    other, _ = reference(swapped, texts(), num_drafts)
    assert (abs(other - wanted) > 1e-4) == (num_drafts > 0)


def test_the_gradient_is_finite_and_reaches_every_tensor():
    *_, gradient = value_and_gradient(NUM_DRAFTS)
    leaves, _ = jax.tree_util.tree_flatten_with_path(gradient)
    assert len(leaves) == len(jax.tree.leaves(params()))
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        assert np.isfinite(leaf).all(), name
        # Each expert has one of its own.
        parts = leaf if ".experts." in name else leaf[None]
        assert all(np.abs(part).max() > 1e-6 for part in parts), name


def test_no_gradient_goes_through_the_targets_distribution(monkeypatch):
    # With a draft head of its own, the target's makes that distribution and p alone.
    *_, without_drafts = value_and_gradient(0)
    wanted = without_drafts.head
    *_, gradient = value_and_gradient(NUM_DRAFTS)
    np.testing.assert_allclose(gradient.head, wanted, rtol=0, atol=1e-6)
    # The states that both heads read do get one.
    gap = gradient.layers[0].query - without_drafts.layers[0].query
    assert np.abs(gap).max() > 1e-4

    def slope():
        """The loss along one direction of the target's head."""

        def moved(step):
            return loss(params().replace(head=params().head + step * direction))[0]

        with quick_compilation():
            return jax.jit(lambda: jax.jvp(moved, (0.0,), (1.0,)))()[1]

    direction = np.random.default_rng(1).normal(size=wanted.shape).astype(np.float32)
    monkeypatch.setattr(jax.lax, "stop_gradient", lambda values: values)
    # With a gradient through it, the comparison fails.
    assert abs(slope() - (wanted * direction).sum()) > 1e-3


def test_without_drafts_no_head_is_needed():
    bare = dataclasses.replace(params(), mtp=None)
    value, metrics = jax.eval_shape(
        lambda: training.joint_loss(CONFIG, bare, texts(), num_drafts=0)
    )
    assert value.shape == () and set(metrics) == {"next_token", "balance"}
    *_, gradient = value_and_gradient(0)
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient.mtp))
    with pytest.raises(ValueError, match=r"num_drafts=0.*with_mtp=True"):
        jax.eval_shape(lambda: training.joint_loss(CONFIG, bare, texts()))
