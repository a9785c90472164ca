"""Model drafters: after every window their cache is that of a fresh prefill."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import Params, RowKind
from strata_jax.drafters import ModelDrafterState
from strata_jax.models import LlamaConfig, random_params, select_layers
from strata_jax.targets import TabularParams

_VOCAB, _SIZE = 4, 24


def table(seed, order, scale=1.5):
    rng = np.random.default_rng(seed)
    return TabularParams(
        logits=jnp.asarray(
            rng.normal(size=(_VOCAB,) * (order + 1)) * scale, jnp.float32
        )
    )


def make_decoder(drafter, verifier):
    return strata.speculative_decoder(
        strata.targets.tabular(_VOCAB, max_length=_SIZE, order=2),
        drafter,
        strata.gates.picked(0.15),
        verifier,
        draft_rule="sample",
    )


def order_two(num_draft_tokens=3):
    return strata.drafters.model(
        strata.targets.tabular(_VOCAB, max_length=_SIZE, order=2),
        num_draft_tokens=num_draft_tokens,
    )


def compare_with_fresh(decoder, drafter, params):
    """Compiles a window together with one whose drafter has just read the text."""

    @jax.jit
    def both(state):
        fresh = drafter.init(params.drafter, state.context, None)
        next_state, window = decoder.step(params, state)
        _, again = decoder.step(
            params, state.replace(drafter_state=fresh), draws=window.draws
        )
        return next_state, window, again

    return both


def proposals(decoder, both, params, seed):
    """Yields, window by window, the proposal and the one of a fresh prefill."""
    state = decoder.init(params, [1, 2, 3], seed=seed)
    while int(state.finish_reason) == 0:
        state, window, again = both(state)
        yield window, again


def is_same(window, again):
    leaves = zip(
        jax.tree.leaves(window.proposal), jax.tree.leaves(again.proposal), strict=True
    )
    return all(np.array_equal(one, other) for one, other in leaves)


@pytest.mark.parametrize("verifier", ["token", "exact_match"])
def test_cache_after_every_window_equals_a_fresh_prefill(verifier):
    drafter = order_two()
    decoder = make_decoder(drafter, getattr(strata.verifiers, verifier)())
    ended = set()
    params = Params(target=table(0, 2), drafter=table(1, 2))
    both = compare_with_fresh(decoder, drafter, params)
    for seed in range(20):
        for window, again in proposals(decoder, both, params, seed):
            assert is_same(window, again)
            kinds = window.proposal.kind.tolist()
            ended.add((int(window.verdict.num_accepted), kinds.count(RowKind.OFFERED)))
    # Windows that ended in every way: nothing, some and all of the drafts accepted.
    assert {(0, 3), (1, 3), (2, 3), (3, 3), (0, 0), (0, 1), (1, 1)} <= ended


def test_a_drafter_that_keeps_rejected_rows_is_seen():
    drafter = order_two()

    def keep(params, state, committed):
        return ModelDrafterState(
            target_state=state.target_state,
            # Not cut back to the committed text.
            num_cached=jnp.minimum(state.num_cached, committed.context.length + 5),
        )

    broken = drafter._replace(commit=keep)
    decoder = make_decoder(broken, strata.verifiers.token())
    params = Params(target=table(0, 2), drafter=table(1, 2))
    both = compare_with_fresh(decoder, drafter, params)
    pairs = [
        is_same(*pair)
        for seed in range(8)
        for pair in proposals(decoder, both, params, seed)
    ]
    assert not all(pairs)


def test_q_is_the_requests_chain_on_the_draft_logits():
    decoder = strata.speculative_decoder(
        strata.targets.tabular(_VOCAB, max_length=_SIZE, order=1),
        strata.drafters.model(
            strata.targets.tabular(_VOCAB, max_length=_SIZE, order=1),
            num_draft_tokens=2,
        ),
        verifier=strata.verifiers.token(),
    )
    params = Params(target=table(0, 1), drafter=table(1, 1))
    state = decoder.init(params, [3], seed=1, temperature=0.5, top_k=2)
    _, window = jax.jit(decoder.step)(params, state)
    logits = np.asarray(params.drafter.logits, np.float64)
    previous = 3
    for row in range(2):
        kept = np.argsort(-logits[previous])[:2]
        wanted = np.zeros(_VOCAB)
        wanted[kept] = np.exp(2 * logits[previous][kept])
        np.testing.assert_allclose(
            window.proposal.measure[row], wanted / wanted.sum(), atol=1e-6
        )
        previous = int(window.draft_tokens[row])


def test_bad_draft_logits_are_no_fault_of_the_target():
    bad = TabularParams(logits=jnp.full((_VOCAB,) * 3, jnp.nan))
    decoder = make_decoder(order_two(), strata.verifiers.token())
    params = Params(target=table(0, 2), drafter=bad)
    state = decoder.init(params, [1, 2, 3])
    _, window = jax.jit(decoder.step)(params, state)
    assert window.proposal.kind.tolist() == [int(RowKind.ABSENT)] * 3
    assert int(window.verdict.status) == strata.Status.UNNORMALIZED_DRAFT
    # The target's own row is good.
    assert int(window.verdict.num_emitted) == 1


_CONFIG = LlamaConfig(
    vocab_size=11,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    max_position=32,
)


@pytest.mark.slow
def test_layer_skip_drafts_with_the_selected_layers_of_the_target():
    params = random_params(_CONFIG, jax.random.key(0))
    skip = strata.drafters.layer_skip(
        _CONFIG, layers=[1], num_draft_tokens=2, max_length=24
    )
    other = strata.drafters.model(
        strata.targets.singleton(
            dataclasses.replace(_CONFIG, num_layers=1), max_length=24
        ),
        num_draft_tokens=2,
    )
    selected = select_layers(params, [1])
    assert selected.layers == (params.layers[1],)  # shared, not copied
    target = strata.targets.singleton(_CONFIG, max_length=24)
    runs = []
    for drafter, weights in (
        (skip, params),
        (other, Params(target=params, drafter=selected)),
    ):
        decoder = strata.speculative_decoder(
            target, drafter, verifier=strata.verifiers.token()
        )
        state = decoder.init(weights, [1, 2, 3], seed=0, temperature=2.0)
        runs.append(strata.decode(decoder, weights, state, 5, trace=True)[1])
    for one, two in zip(
        jax.tree.leaves(runs[0]), jax.tree.leaves(runs[1]), strict=True
    ):
        np.testing.assert_array_equal(one, two)
    # Some layers are not all layers.
    measure, target_probs = runs[0].proposal.measure, runs[0].target_probs
    assert np.any(np.asarray(measure) != np.asarray(target_probs[:, :2]))


def test_what_the_factories_refuse():
    target = strata.targets.tabular(_VOCAB, max_length=8)
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match="num_draft_tokens"):
            strata.drafters.model(target, num_draft_tokens=wrong)
    for layers in ([], [1, 0], [0, 0], [2], [-1]):
        with pytest.raises(ValueError, match="layers must be increasing"):
            strata.drafters.layer_skip(
                _CONFIG, layers=layers, num_draft_tokens=1, max_length=8
            )
