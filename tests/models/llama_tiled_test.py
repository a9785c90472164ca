"""The llama on tiled weights: the same model, and one token's bits at every width."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import models, targets, testing
from strata_jax.models import _llama_tiled, _tiled_layer

CONFIG = models.LlamaConfig(
    vocab_size=300,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=320,
    max_position=256,
    tie_embeddings=True,
)
TEXT = np.random.default_rng(5).integers(0, 300, 134).astype(np.int32)


def slow(*values):
    return [
        pytest.param(*np.atleast_1d(value).tolist(), marks=pytest.mark.slow)
        for value in values
    ]


@pytest.fixture(scope="module")
def params():
    return models.random_params(CONFIG, jax.random.key(3))


@pytest.fixture(scope="module")
def tiled(params):
    return models.tile_params(CONFIG, params)


def all_rows(params, text, max_length=256, width=1):
    target = targets.singleton(CONFIG, max_length=max_length)
    score = jax.jit(target.score)
    state, rows = target.init(params), []
    for start in range(0, len(text), width):
        piece = np.zeros(width, np.int32)
        part = text[start : start + width]
        piece[: len(part)] = part
        row, state = score(params, state, piece, jnp.int32(start), jnp.int32(len(part)))
        rows.append(np.asarray(row.logits[: len(part)]))
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("width", "length", "chunk"), [(2, 40, 12), *slow((4, 40, 7), (8, 134, 11))]
)
def test_rows_are_those_of_one_token_bit_for_bit(tiled, width, length, chunk):
    text = TEXT[:length]
    target = targets.singleton(CONFIG, max_length=256, prefill_chunk=chunk)
    counts = testing.check_target(
        target, tiled, text, max_width=width, poison=testing.poison_cache
    )
    assert counts["widths"] == width * length
    assert counts["rejections"] >= length


@pytest.fixture(scope="module")
def alone(tiled):
    return all_rows(tiled, TEXT)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("width", [3, *slow(2, 5, 8)])
def test_windows_across_blocks_of_attention_have_the_bits_of_one_token(
    tiled, alone, width
):
    np.testing.assert_array_equal(all_rows(tiled, TEXT, width=width), alone)


@pytest.fixture(scope="module")
def packed(tiled):
    """Weights with scales and offsets, about as large as those that they replace."""
    source = np.random.default_rng(8)

    def pack(tiles):
        num_layers, size = tiles.values.shape[0], (tiles.num_rows, tiles.num_columns)
        blocks = (tiles.num_rows // 32, tiles.num_columns)
        values = [source.integers(0, 16, size, np.int8) for _ in range(num_layers)]
        scale = [source.uniform(0.1, 0.3, blocks) / tiles.num_rows**0.5 for _ in values]
        offset = [-7.5 * block for block in scale]
        return models.cut_packed_tiles(values, scale, offset)

    fields = ("query_key_value", "output", "gate_up", "down", "head")
    return dataclasses.replace(
        tiled, **{field: pack(getattr(tiled, field)) for field in fields}
    )


@pytest.fixture(scope="module")
def packed_alone(packed):
    return all_rows(packed, TEXT)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("width", [3, *slow(2, 4, 5, 6, 7, 8)])
def test_windows_on_packed_weights_have_the_bits_of_one_token(
    packed, packed_alone, width
):
    assert np.isfinite(packed_alone).all()
    assert np.abs(packed_alone).max() > 0.1
    np.testing.assert_array_equal(all_rows(packed, TEXT, width=width), packed_alone)


@pytest.fixture
def no_traces():
    """A shape is traced once: a fault must be seen, and then forgotten."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("no_traces")
def test_bits_do_not_depend_on_what_buffers_hold(tiled, alone, monkeypatch):
    empty, given = _llama_tiled.empty_buffers, []

    def poisoned(*arguments):
        given.append(jax.tree.map(lambda leaf: leaf + jnp.nan, empty(*arguments)))
        return given[-1]

    monkeypatch.setattr(_llama_tiled, "empty_buffers", poisoned)
    # The last window has one row of three.
    np.testing.assert_array_equal(all_rows(tiled, TEXT[:40], width=3), alone[:40])
    assert len(given) == 3


@pytest.mark.usefixtures("no_traces")
def test_products_of_several_rows_fail_the_same_check(tiled, monkeypatch):
    exact = _tiled_layer.multiply

    def multiply(rows, tiles, layer):
        # XLA's own product of a window's rows, where there are several.
        if rows.states.shape[1] == 1:
            return exact(rows, tiles, layer)
        states = jnp.swapaxes(rows.states, 0, 1).reshape(rows.states.shape[1], -1)
        cut = jnp.swapaxes(tiles.values[layer], 1, 2)
        matrix = cut.reshape(states.shape[1], -1)
        return (states @ matrix)[:, : tiles.num_columns]

    monkeypatch.setattr(_tiled_layer, "multiply", multiply)
    target = targets.singleton(CONFIG, max_length=256)
    with pytest.raises(testing.ConformanceError, match="T1"):
        testing.check_target(target, tiled, TEXT[:24])


def test_it_is_the_model_that_it_was_made_of(params, alone):
    expected = all_rows(params, TEXT)
    np.testing.assert_allclose(alone, expected, rtol=0, atol=2e-4)
    # Another order of additions, hence other bits: never mix the two in one run.
    assert (alone != expected).any()


def test_an_untied_head_is_used(params):
    config = dataclasses.replace(CONFIG, tie_embeddings=False)
    head = jax.random.normal(jax.random.key(9), params.embedding.shape) / 16
    untied = dataclasses.replace(params, head=head)
    target = targets.singleton(config, max_length=64)
    score = jax.jit(target.score)
    rows = []
    for weights in (untied, models.tile_params(config, untied)):
        state = target.init(weights)
        row, _ = score(weights, state, TEXT[:1], jnp.int32(0), jnp.int32(1))
        rows.append(np.asarray(row.logits))
    np.testing.assert_allclose(rows[1], rows[0], rtol=0, atol=2e-4)


def test_bits_do_not_depend_on_the_capacity_of_the_cache(tiled, alone):
    np.testing.assert_array_equal(all_rows(tiled, TEXT, max_length=140), alone)


def test_weights_that_do_not_fit_are_refused(params, tiled):
    wide = dataclasses.replace(params, final_norm=np.ones(256, np.float64))
    with pytest.raises(ValueError, match="params must be float32 or narrower"):
        models.tile_params(CONFIG, wide)
    other = dataclasses.replace(CONFIG, intermediate_size=256)
    with pytest.raises(ValueError, match=r"params.gate_up must hold matrices"):
        models.check_tiled_params(other, tiled)
    with pytest.raises(ValueError, match=r"must be models\.TiledLlamaParams"):
        models.check_tiled_params(CONFIG, params)
    untied = dataclasses.replace(CONFIG, tie_embeddings=False)
    with pytest.raises(ValueError, match=r"params\.embedding is None"):
        models.check_tiled_params(untied, tiled)
    target = targets.batched(CONFIG, max_length=64)
    with pytest.raises(ValueError, match="tiled weights have no batched path"):
        target.score(tiled, target.init(tiled), TEXT[:2], jnp.int32(0), jnp.int32(2))
