"""The router: weights and ties. Bits of a whole layer are tested in moe_test.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import models
from strata_jax.models._router import route


def config(num_experts, per_token, *, normalize=True):
    return models.MoeConfig(
        vocab_size=8,
        hidden_size=num_experts,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        num_experts=num_experts,
        num_experts_per_token=per_token,
        expert_size=2,
        normalize_router=normalize,
    )


def route_logits(logits, per_token, **options):
    """Routes tokens whose router logits are these, `[..., E]`."""
    logits = jnp.asarray(logits, jnp.float32)
    size = logits.shape[-1]
    router = jnp.eye(size, dtype=jnp.float32)
    experts, weights, probs = route(config(size, per_token, **options), router, logits)
    assert experts.dtype == jnp.int32
    return np.asarray(experts), np.asarray(weights), np.asarray(probs)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("per_token", [1, 3, 6])
def test_weights_against_numpy(per_token, normalize):
    logits = np.random.default_rng(per_token).normal(size=(7, 6)) * 2
    wide = np.exp(logits.astype(np.float32).astype(np.float64))
    wanted = wide / wide.sum(axis=1, keepdims=True)
    order = np.argsort(-wanted, axis=1)[:, :per_token]
    kept = np.take_along_axis(wanted, order, axis=1)
    if normalize:
        kept = kept / kept.sum(axis=1, keepdims=True)
    experts, weights, probs = route_logits(logits, per_token, normalize=normalize)
    np.testing.assert_array_equal(experts, order)
    np.testing.assert_allclose(weights, kept, rtol=0, atol=1e-6)
    np.testing.assert_allclose(probs, wanted, rtol=0, atol=1e-6)
    # A softmax over the chosen logits is the normalised form, whatever was asked for.
    chosen = np.exp(np.take_along_axis(logits, order, axis=1))
    always = chosen / chosen.sum(axis=1, keepdims=True)
    is_same = normalize or per_token == 6
    assert np.allclose(weights, always, rtol=0, atol=1e-6) == is_same


@pytest.mark.parametrize(
    ("logits", "experts"),
    [
        ([1, 1, 1, 0], [0, 1]),
        ([0, 1, 1, 1], [1, 2]),
        ([0, 2, 1, 1], [1, 2]),
        ([3, 0, 3, 3], [0, 2]),
        ([0, 0, 0, 0], [0, 1]),
        # Too small to tell apart as probabilities: a tie again.
        ([-300, -200, -400, 0], [3, 0]),
    ],
)
def test_ties_go_to_the_lower_expert(logits, experts):
    found, weights, _ = route_logits(logits, 2)
    assert found.tolist() == experts
    assert weights[0] >= weights[1]
    # The same beside other tokens.
    beside, *_ = route_logits([logits, [9, 8, 7, 6], logits], 2)
    assert beside.tolist() == [experts, [0, 1], experts]


def test_one_expert_has_weight_one():
    _, weights, _ = route_logits([[3, 1, 2], [0.1, 0.2, 0.3]], 1)
    np.testing.assert_array_equal(weights, 1.0)


def test_narrow_states_have_wide_probabilities():
    states = jax.random.normal(jax.random.key(0), (5, 4), jnp.bfloat16)
    router = jnp.eye(4, dtype=jnp.bfloat16)
    _, weights, probs = route(config(4, 2), router, states)
    assert weights.dtype == jnp.bfloat16
    assert probs.dtype == jnp.float32
    np.testing.assert_allclose(probs.sum(axis=1), 1.0, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("per_token", "match"),
    [
        (5, "num_experts_per_token=5 exceeds num_experts=4"),
        (0, "num_experts_per_token"),
    ],
)
def test_a_token_cannot_visit_more_experts_than_there_are(per_token, match):
    with pytest.raises(ValueError, match=match):
        config(4, per_token)
