"""Draft heads: cells one by one, whole texts at once, and draft vocabularies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_weights import moe_weights, quick_compilation

from strata_jax import models, testing

SMALL = models.MoeConfig(
    vocab_size=11,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_token=2,
    expert_size=16,
    shared_expert_size=16,
)
# Wide enough for rounding to depend on the program.
WIDE = dataclasses.replace(
    SMALL, hidden_size=256, head_dim=64, expert_size=64, shared_expert_size=0
)


@functools.cache
def cell_and_logits():
    @jax.jit
    def run(mtp, cache, hidden, token, cell):
        state, cache, status = models.run_cell(mtp, cache, hidden, token, cell)
        return state, cache, models.draft_logits(mtp, state), status

    return run


def chain_by_cells(mtp, hidden, tokens, num_steps):
    """Logits `[num_steps][L, V]` of one text, each draft chained from its cell."""
    run = cell_and_logits()
    length = hidden.shape[0]
    logits = np.full((num_steps, length, SMALL.vocab_size), np.nan)
    cache = models.empty_mtp_cache(mtp, length)
    for first in range(length):
        # What the text has committed up to here ...
        state, cache, row, _ = run(
            mtp, cache, hidden[first], tokens[first + 1], jnp.int32(first)
        )
        logits[0, first] = row
        # ... and the drafts after it, whose cells are overwritten by the text.
        for step in range(1, min(num_steps, length - first)):
            cell = first + step
            state, cache, row, _ = run(
                mtp, cache, state, tokens[cell + 1], jnp.int32(cell)
            )
            logits[step, cell] = row
    return logits


def test_whole_texts_are_the_chain_of_cells():
    params = moe_weights(SMALL)
    random = np.random.default_rng(0)
    tokens = random.integers(0, SMALL.vocab_size, (2, 8)).astype(np.int32)
    hidden = random.normal(size=(2, 7, 32)).astype(np.float32)
    forward = jax.jit(models.mtp_forward, static_argnums=4)
    with quick_compilation():
        found, _ = forward(params, params.mtp, hidden, tokens, 3)
    mtp = models.with_shared_tables(params)
    for text in range(2):
        wanted = chain_by_cells(mtp, hidden[text], tokens[text], 3)
        for step in range(3):
            rows = found[step][text, step:]
            np.testing.assert_allclose(rows, wanted[step, step:], rtol=0, atol=1e-5)
            if step:
                # A step that runs on the target's states is another function.
                gap = np.abs(rows - wanted[0, step:]).max(axis=1)
                assert gap.min() > 1e-3


def test_a_cell_is_a_function_of_the_cells_before_it():
    mtp = models.with_shared_tables(moe_weights(WIDE))
    random = np.random.default_rng(1)
    hidden = random.normal(size=(6, 256)).astype(np.float32)
    run = cell_and_logits()

    def outputs(spoil, hidden):
        cache, states = models.empty_mtp_cache(mtp, 6), []
        for cell in range(6):
            cache = spoil(cache, jnp.int32(cell))
            state, cache, _, status = run(
                mtp, cache, hidden[cell], jnp.int32(cell % 5), jnp.int32(cell)
            )
            assert int(status) == 0
            states.append(state)
        return np.stack(states)

    plain = outputs(lambda cache, cell: cache, hidden)
    np.testing.assert_array_equal(outputs(testing.poison_cache, hidden), plain)
    # Cells before it are read: a later one depends on an earlier state.
    other = hidden.copy()
    other[2] += 1
    changed = (outputs(lambda cache, cell: cache, other) != plain).any(axis=1)
    assert changed.tolist() == [False, False, True, True, True, True]


def test_bits_do_not_depend_on_the_capacity_of_the_cache():
    mtp = models.with_shared_tables(moe_weights(WIDE))
    hidden = np.random.default_rng(2).normal(size=(3, 256)).astype(np.float32)
    states = []
    for max_length in (100, 300):
        cache = models.empty_mtp_cache(mtp, max_length)
        assert cache.keys.shape == (2, -(-max_length // 128) * 128, 64)
        for cell in range(3):
            state, cache, *_ = cell_and_logits()(
                mtp, cache, hidden[cell], jnp.int32(cell), jnp.int32(cell)
            )
        states.append(state)
    np.testing.assert_array_equal(*states)


def test_a_draft_vocabulary_leaves_the_other_tokens_without_mass():
    params = moe_weights(SMALL)
    ids = [7, 0, 3]
    reduced = models.with_draft_vocabulary(params, ids)
    assert reduced.mtp.head.shape == (3, 32)
    assert reduced.mtp.draft_tokens.tolist() == ids
    np.testing.assert_array_equal(reduced.mtp.head, params.head[jnp.asarray(ids)])
    state = np.random.default_rng(5).normal(size=32).astype(np.float32)
    full, some = (
        np.asarray(models.draft_logits(models.with_shared_tables(each), state))
        for each in (params, reduced)
    )
    assert np.flatnonzero(some > -np.inf).tolist() == sorted(ids)
    np.testing.assert_allclose(some[ids], full[ids], rtol=0, atol=1e-6)
    # Left in the draft's own order they would be the rows of other tokens.
    assert np.abs(some[ids] - full[:3]).min() > 1e-3
    # A tied model's table, and a head's own, are cut likewise.
    tied = models.with_draft_vocabulary(dataclasses.replace(params, head=None), ids)
    np.testing.assert_array_equal(tied.mtp.head, params.embedding[jnp.asarray(ids)])
    own = dataclasses.replace(params.mtp, head=2 * params.head)
    own = models.with_draft_vocabulary(dataclasses.replace(params, mtp=own), ids)
    np.testing.assert_array_equal(own.mtp.head, 2 * params.head[jnp.asarray(ids)])


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([3, 11], r"outside the vocabulary of 11: \[11\]"),
        ([3, -1], r"outside the vocabulary of 11: \[-1\].*d2t.*i \+ d2t\[i\]"),
        ([4, 2, 4, 2, 1], r"repeats ids.*\[2, 4\].*i \+ d2t\[i\]"),
        ([], "at least one"),
        ([0.0, 1.0], "token ids, at least one; got float64"),
        ([[0, 1]], r"shape \[1, 2\]"),
    ],
)
def test_draft_vocabularies_that_are_refused(ids, match):
    with pytest.raises(ValueError, match=f"draft_tokens.*{match}"):
        models.with_draft_vocabulary(moe_weights(SMALL), ids)


def test_a_draft_vocabulary_needs_a_head_without_one():
    params = moe_weights(SMALL)
    with pytest.raises(ValueError, match="no draft head"):
        models.with_draft_vocabulary(dataclasses.replace(params, mtp=None), [1])
    reduced = models.with_draft_vocabulary(params, [1, 2])
    with pytest.raises(ValueError, match="has a draft vocabulary already"):
        models.with_draft_vocabulary(reduced, [1])


def test_shared_tables():
    params = moe_weights(SMALL)
    mtp = models.with_shared_tables(params)
    assert mtp.embedding is params.embedding and mtp.head is params.head
    assert models.with_shared_tables(mtp) is mtp
    tied = models.with_shared_tables(dataclasses.replace(params, head=None))
    assert tied.head is params.embedding
    own = dataclasses.replace(params.mtp, embedding=2 * params.embedding)
    own = dataclasses.replace(params, mtp=own)
    assert models.with_shared_tables(own).embedding is own.mtp.embedding
    with pytest.raises(ValueError, match="needs its embedding and head"):
        models.with_shared_tables(params.mtp)
    with pytest.raises(ValueError, match=r"params\.mtp is None"):
        models.with_shared_tables(dataclasses.replace(params, mtp=None))
    llama = models.LlamaParams(jnp.zeros((8, 8)), (), jnp.ones(8), None)
    with pytest.raises(ValueError, match="or another drafter"):
        models.with_shared_tables(llama)
