"""The optimisation loop, and resuming it from a checkpoint, bit for bit."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from strata_jax import training

ROOT = pathlib.Path(__file__).parents[2]
NUM_STEPS, KILLED_AFTER = 20, 13
CONFIGURATION = {"model": {"sizes": (256, 16), "depth": 1}, "seed": 5}
CORPUS = training.join_documents([bytes(range(1, 256)) * 4])


def toy_loss(params, tokens):
    """A byte's embedding predicts the next byte."""
    hidden = jax.nn.gelu(params["embedding"][tokens[:, :-1]] @ params["matrix"])
    logits = (hidden * params["scale"][None, None]) @ params["embedding"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), {"largest": losses.max()}


def toy_params():
    # By NumPy: a process that ran other tests may have compiled JAX's program for such
    # numbers in a hurry, with other last bits.
    source = np.random.default_rng(3)
    return {
        "embedding": jnp.asarray(source.standard_normal((256, 16)), jnp.float32),
        "matrix": jnp.asarray(source.standard_normal((16, 16)), jnp.float32),
        "scale": jnp.ones(16),
    }


TRAINER = training.trainer(
    toy_loss, training.adamw(NUM_STEPS, learning_rate=0.01, warmup_steps=4)
)


def batches(seed=5):
    return training.sample_batches(CORPUS, batch_size=4, length=32, seed=seed)


def run(state=None, history=None, num_steps=NUM_STEPS, seed=5):
    state = TRAINER.init(toy_params()) if state is None else state
    return training.train(TRAINER, state, batches(seed), num_steps, history=history)


def same_bits(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.fixture(scope="module")
def straight():
    return run()


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.safetensors"
    state, history = run(num_steps=3)
    training.save_training(path, state, history, CONFIGURATION)
    return path


def load(path, configuration=None, params=None):
    like = TRAINER.init(toy_params() if params is None else params)
    return training.load_training(path, like, configuration or CONFIGURATION)


def train_until_killed(path):
    """Runs in a process of its own, which dies between two checkpoints."""
    state, history = TRAINER.init(toy_params()), {}
    for step in range(5, NUM_STEPS, 5):

        def die(step, metrics):
            if step == KILLED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)

        state, history = training.train(
            TRAINER, state, batches(), step, history=history, on_step=die
        )
        training.save_training(path, state, history, CONFIGURATION)


def test_loss_falls(straight):
    state, history = straight
    assert int(state.step) == NUM_STEPS
    assert {len(values) for values in history.values()} == {NUM_STEPS}
    assert set(history) == {"loss", "gradient_norm", "largest"}
    assert history["loss"][-5:].mean() < history["loss"][:5].mean() - 0.3


def test_killed_process_resumes_bitwise(tmp_path, straight):
    path = tmp_path / "run.safetensors"
    result = subprocess.run(
        [sys.executable, __file__, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    state, history = load(path)
    assert int(state.step) == 10  # the last checkpoint before the kill
    resumed = run(state, history)
    assert same_bits(resumed, straight)

    other = run(*load(path), seed=6)
    assert not same_bits(other, straight)


def test_write_that_fails_leaves_the_old_checkpoint(saved, monkeypatch):
    before = saved.read_bytes()
    state, history = run(num_steps=5)

    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        training.save_training(saved, state, history, CONFIGURATION)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_params_start_another_run(saved):
    (state, _), like = load(saved), toy_params()
    params = training.load_trained_params(saved, like)
    same = jax.tree.map(np.array_equal, params, state.params)
    assert all(jax.tree.leaves(same))
    # The control: they are not what the run began with.
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, params, like)))
    with pytest.raises(ValueError, match="not this model's state"):
        training.load_trained_params(saved, {"other": np.zeros(3)})


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_truncated_checkpoint(saved, kept):
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"run\.safetensors: (truncated|not a safet)"):
        load(saved)


def test_checkpoint_of_another_configuration(saved):
    with pytest.raises(ValueError, match="configuration; seed: 5 there, 6 here"):
        load(saved, {**CONFIGURATION, "seed": 6})
    with pytest.raises(ValueError, match=r"model.sizes: \[256, 16\] there, None here"):
        load(saved, {"seed": 5})


def test_checkpoint_of_another_model(saved):
    params = {**toy_params(), "scale": jnp.ones(8)}
    params["more"] = params.pop("matrix")
    with pytest.raises(ValueError, match="not this model's state") as caught:
        load(saved, params=params)
    assert "state.params['scale'] is [16] float32, expected [8] float32" in str(
        caught.value
    )
    assert "state.params['more'] is missing" in str(caught.value)
    assert "['matrix'] is [16, 16] float32, expected no such" in str(caught.value)


def test_file_that_is_no_checkpoint(tmp_path):
    from strata_jax import checkpoints

    path = tmp_path / "weights.safetensors"
    checkpoints.save_safetensors(path, {"a": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="not a checkpoint of a training run"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.safetensors")


def test_init_copies_the_parameters():
    params = toy_params()
    state = TRAINER.init(params)
    TRAINER.step(state, batches()(0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_loss_that_is_not_finite():
    params = {**toy_params(), "scale": jnp.full(16, jnp.nan)}
    with pytest.raises(FloatingPointError, match="step 1 is nan; use a lower"):
        run(TRAINER.init(params))


class TestEvaluate:
    def test_weights_a_short_last_batch(self):
        def loss_fn(params, tokens):
            means = jnp.mean(tokens.astype(jnp.float32))
            return means, {"twice": 2 * means}

        windows = np.arange(10, dtype=np.int32).reshape(5, 2)
        found = training.evaluate(loss_fn, None, windows, batch_size=2)
        assert found == {"loss": 4.5, "twice": 9.0}

    def test_compiles_once(self):
        count = 0

        def loss_fn(params, tokens):
            nonlocal count
            count += 1
            return toy_loss(params, tokens)

        windows = batches()(0)
        for _ in range(2):
            training.evaluate(loss_fn, toy_params(), windows, batch_size=2)
        assert count == 1

    def test_refuses(self):
        windows = np.zeros((0, 4), np.int32)
        with pytest.raises(ValueError, match="windows must not be empty"):
            training.evaluate(toy_loss, toy_params(), windows, batch_size=2)
        with pytest.raises(ValueError, match="batch_size must be at least 1"):
            training.evaluate(toy_loss, toy_params(), windows, batch_size=0)


if __name__ == "__main__":
    train_until_killed(sys.argv[1])
