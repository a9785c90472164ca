"""Logits of the Qwen3-MoE family against those of `transformers`."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import checkpoints, models, targets

TESTDATA = pathlib.Path(__file__).parents[1] / "testdata"
FOLDERS = ("qwen3_moe_tiny_tied", "qwen3_moe_tiny_untied")


def batched_logits(config, params, prompt):
    forward = jax.jit(models.moe_forward, static_argnums=0)
    return forward(config, params, prompt[None]).logits[0]


def singleton_logits(config, params, prompt, width=8):
    target = targets.singleton(config, max_length=32)
    score = jax.jit(target.score)
    state, rows = target.init(params), []
    for position in range(0, len(prompt), width):
        piece = prompt[position : position + width]
        start, count = jnp.int32(position), jnp.int32(len(piece))
        row, state = score(params, state, piece, start, count)
        state = target.commit(state, start, count)
        rows.append(row.logits)
    return np.concatenate(rows)


# Every way to compute the logits [L, V] of a prompt [L].
PATHS = (batched_logits, singleton_logits)


def load(folder):
    config, params = checkpoints.load_safetensors(TESTDATA / folder)
    golden = np.load(TESTDATA / folder / "golden.npz")
    return config, params, golden["prompt_ids"], golden["logits"]


def check(found, logits):
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("path", PATHS)
def test_logits_agree_with_transformers(path, folder):
    config, params, prompt, logits = load(folder)
    check(path(config, params, prompt), logits)


def test_the_two_models_are_of_different_kinds():
    tied, untied = (load(folder)[0] for folder in FOLDERS)
    assert tied.tie_embeddings and not untied.tie_embeddings
    assert untied.normalize_router and not tied.normalize_router
    assert untied.num_heads > untied.num_kv_heads


def with_experts(params, change):
    layers = tuple(
        layer.replace(experts=jax.tree.map(change, layer.experts))
        for layer in params.layers
    )
    return params.replace(layers=layers)


def swap_two(array):
    order = np.arange(array.shape[0])
    order[[0, 1]] = order[[1, 0]]
    return array[order]


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fault",
    [
        "normalization",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("experts", "key_norm")
        ),
    ],
)
def test_another_model_is_seen(path, folder, fault):
    config, params, prompt, logits = load(folder)
    if fault == "normalization":
        normalize = not config.normalize_router
        config = dataclasses.replace(config, normalize_router=normalize)
    elif fault == "experts":
        params = with_experts(params, swap_two)
    else:
        layers = tuple(
            layer.replace(key_norm=layer.query_norm) for layer in params.layers
        )
        params = params.replace(layers=layers)
    with pytest.raises(AssertionError):
        check(path(config, params, prompt), logits)
