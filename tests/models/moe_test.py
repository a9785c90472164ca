"""Mixture-of-experts targets: bits of a row, and agreement with the training path."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_weights import moe_weights, quick_compilation

from strata_jax import TargetRows, models, targets, testing

CONFIG = models.MoeConfig(
    vocab_size=211,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_experts=4,
    num_experts_per_token=2,
    expert_size=128,
    shared_expert_size=64,
)
SHALLOW = dataclasses.replace(CONFIG, num_layers=1)
SMALL = dataclasses.replace(
    SHALLOW, vocab_size=11, hidden_size=32, head_dim=8, expert_size=16
)
# Shared expert, head norms, tied, normalised; the last two differ in all of them.
VARIANTS = [
    *(
        pytest.param(options, marks=pytest.mark.slow)
        for options in itertools.product([True, False], repeat=4)
        if options not in [(True, True, False, True), (False, False, True, False)]
    ),
    (True, True, False, True),
    (False, False, True, False),
]


def variant(config, has_shared_expert, has_head_norms, is_tied, is_normalized):
    """A configuration and weights of it."""
    config = dataclasses.replace(
        config,
        shared_expert_size=48 if has_shared_expert else 0,
        tie_embeddings=is_tied,
        normalize_router=is_normalized,
    )
    params = moe_weights(config, with_mtp=False)
    if not has_head_norms:
        layers = tuple(
            layer.replace(query_norm=None, key_norm=None) for layer in params.layers
        )
        params = params.replace(layers=layers)
    return config, params


def text_of(length, vocab_size=200):
    random = np.random.default_rng(length)
    return random.integers(0, vocab_size, length).astype(np.int32)


def rows_of(target, params, text, width=8):
    """Logits and features of a text, window by window."""
    score = jax.jit(target.score)
    state, rows = target.init(params), []
    for position in range(0, len(text), width):
        part = text[position : position + width]
        piece = np.zeros(width, np.int32)
        piece[: len(part)] = part
        start, count = jnp.int32(position), jnp.int32(len(part))
        row, state = score(params, state, piece, start, count)
        state = target.commit(state, start, count)
        rows.append((row.logits[: len(part)], row.features[: len(part)]))
    return [np.concatenate(parts) for parts in zip(*rows, strict=True)]


# Longer than one cache block of 128, so that the running softmax takes several.
@pytest.mark.parametrize(
    "options",
    [
        (True, True, False, True),
        pytest.param((False, False, True, False), marks=pytest.mark.slow),
    ],
)
def test_rows_are_the_singletons_bit_for_bit(options, length=134):
    config, params = variant(CONFIG, *options)
    target = targets.singleton(config, max_length=256)
    counts = testing.check_target(
        target, params, text_of(length), poison=testing.poison_cache
    )
    assert counts["widths"] == 8 * length
    assert counts["rejections"] == 3 * length


def test_the_batched_control_fails_the_same_check():
    config, params = variant(SHALLOW, True, True, False, True)
    target = targets.batched(config, max_length=256)
    with pytest.raises(testing.ConformanceError, match="logits differ"):
        testing.check_target(target, params, text_of(16))


def test_experts_batched_inside_windows_fail_the_same_check():
    config, params = variant(SHALLOW, True, True, False, True)
    single = targets.singleton(config, max_length=64)

    def score(params, state, tokens, position, num_rows):
        if tokens.shape[0] == 1:
            return single.score(params, state, tokens, position, num_rows)
        # All but the experts' products is the singleton's.
        logits, hidden, state = models.score_moe_rows(
            config,
            params,
            state,
            tokens,
            position,
            num_rows,
            jnp.zeros((), jnp.int32),
            mode="batched",
        )
        return TargetRows(logits, hidden, state.status), state

    with pytest.raises(testing.ConformanceError, match="T1: window"):
        testing.check_target(single._replace(score=score), params, text_of(16))


def test_poison_fills_dead_slots_alone():
    config, params = variant(SMALL, True, True, False, True)
    cache = targets.singleton(config, max_length=16).init(params)
    cache = dataclasses.replace(cache, status=jnp.int32(4))
    poisoned = testing.poison_cache(cache, jnp.int32(5))
    for rows in (*poisoned.keys, *poisoned.values):
        assert np.isnan(rows[:, 5:]).all()
        np.testing.assert_array_equal(rows[:, :5], 0.0)
    assert len(poisoned.keys) == len(poisoned.values) == 1
    assert int(poisoned.status) == 4
    with pytest.raises(ValueError, match="cache is a dict"):
        testing.poison_cache({"keys": cache.keys}, jnp.int32(5))


@pytest.mark.parametrize("options", VARIANTS)
def test_all_paths_compute_one_model(options):
    with quick_compilation():
        check_all_paths(*variant(SMALL, *options))


def check_all_paths(config, params):
    text = text_of(21, config.vocab_size)
    forward_all = jax.jit(models.moe_forward, static_argnums=0)
    forward = forward_all(config, params, text[None])
    for make in (targets.singleton, targets.batched):
        logits, features = rows_of(make(config, max_length=32), params, text)
        np.testing.assert_allclose(logits, forward.logits[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(features, forward.hidden[0], rtol=0, atol=1e-5)
    # With its experts in another order it is another model.
    (layer,) = params.layers
    experts = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), layer.experts)
    other = params.replace(layers=(layer.replace(experts=experts),))
    other = forward_all(config, other, text[None])
    assert np.abs(other.logits[0] - logits).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["singleton", "shared"])
@pytest.mark.parametrize(("chunk", "max_length"), [(1, 256), (7, 160), (200, 1024)])
def test_prefill_gives_the_same_cache_whatever_its_pieces(chunk, max_length, mode):
    config, params = variant(CONFIG, True, True, False, True)
    text = text_of(134)
    stop = jnp.int32(len(text))
    results = [
        jax.jit(each.prefill)(params, each.init(params), text, jnp.int32(0), stop)
        for each in (
            targets.singleton(
                config, max_length=max_length, prefill_chunk=chunk, expert_mode=mode
            ),
            targets.singleton(config, max_length=256),
        )
    ]
    (ours, our_features), (theirs, their_features) = results
    np.testing.assert_array_equal(our_features, their_features)
    for one, other in zip(
        (*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True
    ):
        np.testing.assert_array_equal(one[:, : len(text)], other[:, : len(text)])


def test_the_singleton_path_refuses_a_gradient():
    config, params = variant(SMALL, False, False, True, True)
    target = targets.singleton(config, max_length=16)

    def loss(params):
        zero, two = jnp.int32(0), jnp.int32(2)
        tokens = jnp.asarray([1, 2], jnp.int32)
        rows, _ = target.score(params, target.init(params), tokens, zero, two)
        return rows.logits.sum()

    with pytest.raises(ValueError, match="no gradient"):
        jax.grad(loss)(params)


def full_params(config):
    """Weights that have every tensor there is."""
    params = moe_weights(config)
    params = models.with_draft_vocabulary(params, [3, 1, 4])
    mtp = dataclasses.replace(params.mtp, embedding=params.embedding)
    return dataclasses.replace(params, mtp=mtp)


def test_params_of_another_shape_are_refused_by_name():
    config, params = SMALL, full_params(SMALL)
    models.check_moe_params(config, params)
    names = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    ]
    assert ".layers[0].shared_expert.router" in names
    assert ".mtp.layer.experts.down" in names
    for name in names:

        def cut(path, leaf, name=name):
            is_it = jax.tree_util.keystr(path) == name
            return leaf[:-1] if is_it else leaf

        wrong = jax.tree_util.tree_map_with_path(cut, params)
        # One id less is told by the head, which has a row for each.
        shown = ".mtp.head" if name == ".mtp.draft_tokens" else name
        with pytest.raises(ValueError) as error:
            models.check_moe_params(config, wrong)
        assert str(error.value).startswith(f"params{shown} must have shape"), name


def replace_layer(params, **changes):
    (layer,) = params.layers
    return params.replace(layers=(layer.replace(**changes),))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda params: params.replace(layers=()), "0 layers, config 1"),
        (lambda params: params.replace(head=None), "tie_embeddings is False"),
        (
            lambda params: replace_layer(params, shared_expert=None),
            r"params\.layers\[0\]\.shared_expert must be given",
        ),
        (
            lambda params: replace_layer(params, query=None),
            r"params\.layers\[0\]\.query is missing",
        ),
        (
            lambda params: params.replace(mtp=params.mtp.replace(head=None)),
            "with_draft_vocabulary",
        ),
        (
            lambda params: params.replace(
                mtp=moe_weights(dataclasses.replace(SMALL, hidden_size=16)).mtp
            ),
            "params.mtp is 16 wide, the model 32",
        ),
    ],
)
def test_params_of_another_model_are_refused(change, match):
    target = targets.singleton(SMALL, max_length=16)
    with pytest.raises(ValueError, match=match):
        target.init(change(full_params(SMALL)))


def test_a_shared_expert_too_many_is_refused():
    config = dataclasses.replace(SMALL, shared_expert_size=0)
    params = moe_weights(SMALL, with_mtp=False)
    with pytest.raises(ValueError, match="shared_expert must be None"):
        models.check_moe_params(config, params)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_experts_per_token": 5}, "exceeds num_experts=4"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"expert_size": 0}, "expert_size"),
        ({"shared_expert_size": -1}, "shared_expert_size"),
        ({"norm_epsilon": 0.0}, "norm_epsilon"),
        ({"rope_theta": float("nan")}, "rope_theta"),
    ],
)
def test_config_refuses(change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CONFIG, **change)


def test_targets_refuse_batched_experts_under_a_bit_exact_name():
    with pytest.raises(ValueError, match=r"targets\.batched"):
        targets.singleton(CONFIG, max_length=16, expert_mode="batched")
    with pytest.raises(ValueError, match="expert_mode must be one of"):
        targets.singleton(CONFIG, max_length=16, expert_mode="fast")
