"""The optimizers: schedule, decay, clipping, and what Muon does to a matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from strata_jax import training

OPTIMIZERS = {"adamw": training.adamw, "muon": training.muon}
by_name = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def step_sizes(make, shape):
    """What each step takes off a parameter of 1 whose gradient is 0."""
    optimizer = make(
        10, learning_rate=0.5, warmup_steps=2, final_fraction=0.2, weight_decay=0.1
    )
    params, zeros = jnp.ones(shape), jnp.zeros(shape)
    state = optimizer.init(params)
    sizes = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(11):
            updates, state = optimizer.update(zeros, state, params)
            sizes.append(-float(updates.ravel()[0]))
    return sizes


@by_name
def test_schedule_and_decay_of_matrices(make):
    # Linear to the peak, then a cosine of 8 steps to a fifth.
    turns = (1 + np.cos(np.pi * np.arange(9) / 8)) / 2
    expected = [0, 0.25, *(0.5 * (0.2 + 0.8 * turns))]
    np.testing.assert_allclose(
        step_sizes(make, (2, 2)), 0.1 * np.array(expected), rtol=1e-5
    )


@by_name
def test_vectors_do_not_decay(make):
    assert step_sizes(make, (2,)) == [0.0] * 11


@by_name
def test_clips_by_global_norm(make):
    def first_mean(gradient):
        optimizer = make(10, learning_rate=0.5, warmup_steps=2)
        state = optimizer.init(gradient)
        with jax.numpy_dtype_promotion("standard"):
            _, state = optimizer.update(gradient, state, gradient)
        # That of vectors: Muon's own has nothing in their place.
        found = [mean for _, mean in optax.tree.get_all_with_path(state, "mu")]
        return next(mean for mean in found if jax.tree.leaves(mean))

    # Norm 5, clipped to 1; a tenth enters the running mean.
    clipped = first_mean({"a": jnp.array([3.0]), "b": jnp.array([4.0])})
    np.testing.assert_allclose(clipped["a"], [0.06], rtol=1e-6)
    np.testing.assert_allclose(clipped["b"], [0.08], rtol=1e-6)
    small = first_mean({"a": jnp.array([0.3]), "b": jnp.array([0.4])})
    np.testing.assert_allclose(small["a"], [0.03], rtol=1e-6)


def test_a_step_of_muon_is_nearly_orthogonal():
    source = np.random.default_rng(0)
    # Singular values from 1 to a hundredth; in a gradient's own step they would stay.
    left = np.linalg.qr(source.standard_normal((24, 8)))[0]
    right = np.linalg.qr(source.standard_normal((8, 8)))[0]
    gradient = jnp.asarray(left @ np.diag(np.geomspace(1, 0.01, 8)) @ right)
    gradient = gradient.astype(jnp.float32)
    optimizer = training.muon(
        10, learning_rate=0.5, warmup_steps=0, weight_decay=0.0, clip_norm=100.0
    )
    state = optimizer.init(gradient)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(gradient, state, gradient)
    # As long as AdamW's step: 0.2 of the rate in every element.
    size = 0.2 * 0.5 * np.sqrt(24)
    values = np.linalg.svd(np.asarray(updates), compute_uv=False) / size
    assert 0.3 < values.min() and values.max() < 1.5
    values = np.linalg.svd(np.asarray(gradient), compute_uv=False)
    assert values.min() < 0.02 * values.max()


@by_name
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"warmup_steps": 10}, "warmup_steps must be at most 9"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive"),
        ({"final_fraction": 1.5}, "final_fraction must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
    ],
)
def test_refuses(make, arguments, match):
    defaults = {"num_steps": 10, "learning_rate": 0.1, "warmup_steps": 2}
    with pytest.raises(ValueError, match=match):
        make(**{**defaults, **arguments})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (training.adamw, "first_decay"),
        (training.adamw, "second_decay"),
        (training.muon, "decay"),
    ],
)
def test_refuses_decays_from_one_on(make, name):
    with pytest.raises(ValueError, match=rf"^{name} must be in \[0, 1\), got 1.0"):
        make(10, learning_rate=0.1, warmup_steps=2, **{name: 1.0})
