import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import checkpoints, models, targets, testing

TESTDATA = pathlib.Path(__file__).parents[1] / "testdata"
CONFIG = models.LlamaConfig(
    vocab_size=211,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
)


@pytest.fixture(scope="module")
def params():
    return models.random_params(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def text():
    # Longer than one cache block, so that the running softmax takes several.
    return np.random.default_rng(0).integers(0, 200, 150).astype(np.int32)


def all_rows(target, params, text, width=8):
    score = jax.jit(target.score)
    state, rows = target.init(params), []
    for position in range(0, len(text), width):
        piece = np.zeros(width, np.int32)
        part = text[position : position + width]
        piece[: len(part)] = part
        row, state = score(
            params, state, piece, jnp.int32(position), jnp.int32(len(part))
        )
        rows.append(np.asarray(row.logits[: len(part)]))
    return np.concatenate(rows)


@pytest.mark.parametrize("folder", ["llama_tiny_tied", "llama_tiny_untied"])
def test_logits_agree_with_transformers(folder):
    config, params = checkpoints.load_safetensors(TESTDATA / folder)
    golden = np.load(TESTDATA / folder / "golden.npz")
    prompt = golden["prompt_ids"].astype(np.int32)
    target = targets.singleton(config, max_length=32)
    rows = all_rows(target, params, prompt, width=4)
    np.testing.assert_allclose(rows, golden["logits"], atol=1e-5)
    batched = jax.jit(models.forward, static_argnums=0)(config, params, prompt)
    np.testing.assert_allclose(batched, golden["logits"], atol=1e-5)


def test_rows_are_the_singletons_bit_for_bit(params, text):
    target = targets.singleton(CONFIG, max_length=256)
    counts = testing.check_target(target, params, text, poison=testing.poison_cache)
    assert counts["widths"] == 8 * 150
    assert counts["rejections"] == 3 * 150


def test_batched_control_fails_the_same_check(params, text):
    target = targets.batched(CONFIG, max_length=256)
    with pytest.raises(testing.ConformanceError, match="logits differ"):
        testing.check_target(target, params, text)


def test_a_target_that_forgets_to_mask_dead_rows_fails_the_check(params, text):
    target = targets.singleton(CONFIG, max_length=256)

    def leaky_score(params, cache, tokens, position, num_rows):
        rows, cache = target.score(params, cache, tokens, position, num_rows)
        dead = jnp.sum(cache.keys[0][:, 200])
        return rows._replace(logits=rows.logits + 0 * dead), cache

    leaky = target._replace(score=leaky_score)
    with pytest.raises(testing.ConformanceError, match="T1"):
        testing.check_target(leaky, params, text, poison=testing.poison_cache)


def test_bits_do_not_depend_on_the_capacity_of_the_cache(params, text):
    small = all_rows(targets.singleton(CONFIG, max_length=160), params, text)
    large = all_rows(targets.singleton(CONFIG, max_length=1024), params, text)
    np.testing.assert_array_equal(small, large)


@pytest.mark.parametrize("chunk", [1, 7, 32, 200])
def test_prefill_gives_the_same_cache_for_every_chunk(params, text, chunk):
    target = targets.singleton(CONFIG, max_length=256, prefill_chunk=chunk)
    reference = targets.singleton(CONFIG, max_length=256)
    stop = jnp.int32(len(text))
    caches = [
        jax.jit(each.prefill)(params, each.init(params), text, jnp.int32(0), stop)
        for each in (target, reference)
    ]
    for ours, theirs in zip(*map(jax.tree.leaves, caches), strict=True):
        np.testing.assert_array_equal(ours[:, : len(text)], theirs[:, : len(text)])


def test_forward_is_the_same_model_but_not_the_same_bits(params, text):
    rows = all_rows(targets.singleton(CONFIG, max_length=256), params, text)
    forward = jax.jit(models.forward, static_argnums=0)(CONFIG, params, text)
    np.testing.assert_allclose(forward, rows, atol=2e-4)
    assert (np.asarray(forward) != rows).any()


def test_the_training_path_has_a_gradient(params, text):
    def loss(params):
        logits = models.forward(CONFIG, params, text[:16])
        return -jax.nn.log_softmax(logits)[jnp.arange(15), text[1:16]].mean()

    gradients = jax.jit(jax.grad(loss))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert float(jnp.abs(gradients.layers[0].query).max()) > 0


def test_the_singleton_path_refuses_a_gradient(params, text):
    target = targets.singleton(CONFIG, max_length=256)

    def loss(params):
        rows, _ = target.score(
            params, target.init(params), text[:2], jnp.int32(0), jnp.int32(2)
        )
        return rows.logits.sum()

    with pytest.raises(ValueError, match=r"models\.forward"):
        jax.grad(loss)(params)


def test_select_layers():
    params = models.random_params(CONFIG, jax.random.key(1))
    short = models.select_layers(params, [1])
    assert len(short.layers) == 1
    assert short.layers[0].query is params.layers[1].query
    assert models.select_layers(CONFIG, [1]).num_layers == 1


def test_bfloat16_weights_know_their_positions():
    config = models.LlamaConfig(**{**vars(CONFIG), "rope_theta": 100_000.0})
    params = models.random_params(config, jax.random.key(2))
    # The same values in both dtypes.
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    text = np.random.default_rng(1).integers(0, 200, 600).astype(np.int32)
    target = targets.singleton(config, max_length=640)
    rows = [all_rows(target, each, text).astype(np.float32) for each in (wide, narrow)]
    gap = np.abs(rows[0] - rows[1]).max(axis=1)
    # Rounding of 8 bits, and no more at position 599 than at the start.
    assert gap[-100:].mean() < 2 * gap[:100].mean()
    assert gap.max() < 0.3


def test_params_of_another_shape_are_refused():
    target = targets.singleton(CONFIG, max_length=64)
    params = models.random_params(CONFIG, jax.random.key(1))
    with pytest.raises(ValueError, match="1 layers, config 2"):
        target.init(models.select_layers(params, [1]))
    other = models.LlamaConfig(**{**vars(CONFIG), "intermediate_size": 256})
    with pytest.raises(ValueError, match=r"params\.layers\[0\]\.gate must have shape"):
        target.init(models.random_params(other, jax.random.key(1)))
    tied = models.LlamaConfig(**{**vars(CONFIG), "tie_embeddings": True})
    with pytest.raises(ValueError, match="tie_embeddings"):
        target.init(models.random_params(tied, jax.random.key(1)))


@pytest.mark.parametrize("layers", [[], [1, 0], [0, 0], [-1], [2]])
def test_select_layers_refuses(layers):
    with pytest.raises(ValueError, match="layers must be increasing"):
        models.select_layers(CONFIG, layers)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"norm_epsilon": -1.0}, "norm_epsilon"),
    ],
)
def test_config_refuses(change, match):
    fields = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 2,
        "intermediate_size": 8,
    }
    with pytest.raises(ValueError, match=match):
        models.LlamaConfig(**{**fields, **change})


@pytest.mark.parametrize("make", [targets.singleton, targets.batched])
@pytest.mark.parametrize("max_length", [0, 2049])
def test_targets_refuse_a_length_that_the_model_does_not_have(make, max_length):
    with pytest.raises(ValueError, match="max_length"):
        make(CONFIG, max_length=max_length)
