"""Draft heads on tiled weights: the same head, its file, and what it drafts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import checkpoints, drafters, models, targets, testing
from strata_jax.models._tiles import take_column

CONFIG = models.LlamaConfig(
    vocab_size=64,
    hidden_size=256,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=320,
    max_position=128,
    tie_embeddings=True,
)
DRAFTED = np.array([0, 3, 4, 5, 9, 17, 40, 63], np.int32)
MAX_LENGTH = 64
PROMPT = [1, 2, 3, 1, 2]


@pytest.fixture(scope="module")
def params():
    params = models.random_params(CONFIG, jax.random.key(1))
    # Peaked rows: the greedy text is then a short one, over and over.
    return dataclasses.replace(params, embedding=params.embedding / 4)


@pytest.fixture(scope="module")
def head():
    return models.random_mtp_params(CONFIG, jax.random.key(2))


@pytest.fixture(scope="module")
def tiled(params, head):
    target = models.tile_params(CONFIG, params)
    return dataclasses.replace(target, mtp=models.tile_mtp(head))


def draft_rows(head, num_cells=70):
    """Chained states and draft logits of some cells."""
    source = np.random.default_rng(0)
    states = source.standard_normal((num_cells, CONFIG.hidden_size))
    tokens = source.integers(0, CONFIG.vocab_size, num_cells).astype(np.int32)

    @jax.jit
    def cell(head, cache, state, token, index):
        state, cache, status = models.run_cell(head, cache, state, token, index)
        return state, cache, status, models.draft_logits(head, state)

    cache, rows = models.empty_mtp_cache(head, 128), []
    for index in range(num_cells):
        state = jnp.asarray(states[index], jnp.float32)
        output, cache, status, logits = cell(
            head, cache, state, tokens[index], jnp.int32(index)
        )
        assert status == 0
        rows.append((np.asarray(output), np.asarray(logits)))
    return (np.stack(leaf) for leaf in zip(*rows, strict=True))


def test_it_is_the_head_that_it_was_made_of(params, head, tiled):
    plain = dataclasses.replace(head, embedding=params.embedding, head=params.embedding)
    outputs, logits = draft_rows(models.with_shared_tables(tiled))
    wanted_outputs, wanted_logits = draft_rows(plain)
    np.testing.assert_allclose(outputs, wanted_outputs, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, wanted_logits, rtol=0, atol=1e-4)
    assert np.abs(logits).max() > 0.1


def test_training_runs_the_same_cells(params, head, tiled):
    source = np.random.default_rng(4)
    tokens = source.integers(0, CONFIG.vocab_size, (1, 20)).astype(np.int32)
    hidden = source.standard_normal((1, 19, CONFIG.hidden_size)).astype(np.float32)
    forward = jax.jit(models.mtp_forward, static_argnums=4)
    (together,), balance = forward(params, head, hidden, tokens, 1)
    assert balance == 0
    alone = models.with_shared_tables(tiled)
    cache = models.empty_mtp_cache(alone, 128)
    run, logits_of = jax.jit(models.run_cell), jax.jit(models.draft_logits)
    for cell in range(19):
        state, cache, _ = run(
            alone, cache, hidden[0, cell], tokens[0, cell + 1], jnp.int32(cell)
        )
        logits = logits_of(alone, state)
        np.testing.assert_allclose(logits, together[0, cell], rtol=0, atol=1e-4)


# Pieces as after windows of so many rows, an empty one, and as of a prompt.
PIECES = [
    ([1, 0, 1], [1]),
    ([1, 2, 0, 2, 1], [2, 3, 4, 8, 40]),
    ([3, 1, 2, 0, 3], [3, 4]),
    ([1, 2, 3, 0, 4, 5, 6, 7, 8], [8, 40]),
    ([9, 31], [31, 40]),
]


@pytest.mark.parametrize(
    ("is_quantized", "pieces"), [(False, PIECES), (True, [([1, 2, 0, 2, 1], [2, 3])])]
)
def test_cells_together_have_the_bits_that_they_have_alone(
    tiled, head, is_quantized, pieces
):
    mtp = models.tile_mtp(head, is_quantized=is_quantized)
    head = models.with_shared_tables(dataclasses.replace(tiled, mtp=mtp))
    source = np.random.default_rng(5)
    hidden = source.standard_normal((40, CONFIG.hidden_size)).astype(np.float32)
    tokens = source.integers(0, CONFIG.vocab_size, 40).astype(np.int32)
    before = jnp.full(CONFIG.hidden_size, 7.0, jnp.float32)
    run, run_together = jax.jit(models.run_cell), jax.jit(models.run_cells)

    def alone(hidden):
        cache, states = models.empty_mtp_cache(head, 128), []
        for cell in range(40):
            state, cache, _ = run(
                head, cache, hidden[cell], tokens[cell], jnp.int32(cell)
            )
            states.append(np.asarray(state))
        return states

    wanted = alone(hidden)
    for sizes, widths in pieces:
        for width in widths:
            cache, cell = models.empty_mtp_cache(head, 128), 0
            for size in sizes:
                rows = slice(cell, cell + size)
                padding = ((0, width - size), (0, 0))
                last, cache = run_together(
                    head,
                    cache,
                    np.pad(hidden[rows], padding, constant_values=np.nan),
                    np.pad(tokens[rows], padding[0]),
                    jnp.int32(cell),
                    jnp.int32(size),
                    before,
                )
                cell += size
                expected = wanted[cell - 1] if size else before
                np.testing.assert_array_equal(last, expected)
    # The last bit of an early cell's input is seen in every state after it.
    nudged = hidden.copy()
    nudged[0] = np.nextafter(nudged[0], np.float32(9))
    assert (np.asarray(alone(nudged))[-1] != wanted[-1]).any()


def test_cells_that_do_not_fit_are_refused(tiled):
    head = models.with_shared_tables(tiled)
    cache, zero = models.empty_mtp_cache(head, 128), jnp.int32(0)
    rows = jnp.zeros((2, CONFIG.hidden_size))
    tokens = jnp.zeros(2, jnp.int32)
    for hidden, ids, message in (
        (rows[:, 1:], tokens, "hidden must have shape"),
        (rows, tokens[:1], "tokens must have shape"),
        (rows[:0], tokens[:0], "hidden must have at least one row"),
    ):
        with pytest.raises(ValueError, match=message):
            models.run_cells(head, cache, hidden, ids, zero, zero, rows[0])


def test_a_draft_vocabulary_takes_the_targets_rows(tiled):
    whole = models.with_shared_tables(tiled)
    part = models.draft_from(whole, tiled.head, DRAFTED)
    state = jnp.asarray(np.random.default_rng(3).standard_normal(256), jnp.float32)
    expected = np.full(CONFIG.vocab_size, -np.inf, np.float32)
    expected[DRAFTED] = np.asarray(models.draft_logits(whole, state))[DRAFTED]
    np.testing.assert_array_equal(models.draft_logits(part, state), expected)
    models.check_tiled_mtp_params(part)


def test_a_draft_vocabulary_keeps_packed_columns_packed(tiled):
    source = np.random.default_rng(8).standard_normal((256, 64)).astype(np.float32)
    values, scale = models.quantize(source)
    offset = np.linspace(-1, 1, scale.size, dtype=np.float32).reshape(scale.shape)
    table = models.cut_packed_tiles([values], [scale], [offset])
    part = models.draft_from(tiled.mtp, table, DRAFTED).head
    assert part.values.dtype == jnp.int8
    for place, token in enumerate(DRAFTED):
        found = take_column(part, 0, jnp.int32(place))
        np.testing.assert_array_equal(found, take_column(table, 0, jnp.int32(token)))


def test_a_file_gives_back_the_head(tmp_path, head, tiled):
    path = tmp_path / "head.safetensors"
    mtp = models.tile_mtp(head, is_quantized=True)
    mtp = models.draft_from(mtp, tiled.head, DRAFTED)
    checkpoints.save_draft_head(path, mtp, metadata={"target": "test"})
    loaded = checkpoints.load_draft_head(path, dataclasses.replace(tiled, mtp=None))
    found, wanted = jax.tree.leaves(loaded.mtp), jax.tree.leaves(mtp)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    values, scale = models.read_matrix(mtp.down)
    decoded = values * np.repeat(scale, 32, axis=0)
    np.testing.assert_allclose(decoded, head.layer.down, rtol=0, atol=2e-3)
    assert np.abs(values).max() == 127


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mtp: dataclasses.replace(mtp, draft_tokens=None), "no draft vocab"),
        (lambda mtp: mtp, r"mtp\.projection is not quantised"),
    ],
)
def test_heads_that_cannot_be_saved_are_refused(tmp_path, head, tiled, change, message):
    mtp = change(models.draft_from(models.tile_mtp(head), tiled.head, DRAFTED))
    with pytest.raises(ValueError, match=message):
        checkpoints.save_draft_head(tmp_path / "head.safetensors", mtp)
    assert not list(tmp_path.iterdir())


def test_a_head_of_another_target_is_refused(tmp_path, head, tiled):
    path = tmp_path / "head.safetensors"
    mtp = models.tile_mtp(head, is_quantized=True)
    mtp = models.draft_from(mtp, tiled.head, DRAFTED)
    checkpoints.save_draft_head(path, mtp)
    wide = dataclasses.replace(CONFIG, vocab_size=80)
    other = models.tile_params(wide, models.random_params(wide, jax.random.key(0)))
    with pytest.raises(ValueError, match="does not fit this target"):
        checkpoints.load_draft_head(path, other)
    checkpoints.save_safetensors(path, {"a": np.zeros(1)})
    with pytest.raises(ValueError, match="not a draft head"):
        checkpoints.load_draft_head(path, tiled)
    with pytest.raises(ValueError, match=r"params must be models\.TiledLlamaParams"):
        checkpoints.load_draft_head(path, None)
    with pytest.raises(ValueError, match=r"mtp must be models\.TiledMtpParams"):
        checkpoints.save_draft_head(path, head)


@pytest.mark.parametrize("draft_tokens", [[1, 1], [64], []])
def test_bad_draft_vocabularies_are_refused(tiled, draft_tokens):
    with pytest.raises(ValueError, match="draft_tokens"):
        models.draft_from(tiled.mtp, tiled.head, np.array(draft_tokens, np.int32))


def make_target():
    # In pieces of one token, which compile faster.
    return targets.singleton(CONFIG, max_length=MAX_LENGTH, prefill_chunk=1)


@pytest.mark.slow
def test_the_default_mode_emits_the_tokens_of_plain_decoding(tiled):
    target = make_target()
    tokens = []
    for drafter in (None, drafters.mtp(num_draft_tokens=1)):
        decoder = strata.speculative_decoder(target, drafter)
        state = decoder.init(tiled, PROMPT, seed=5, max_new_tokens=24)
        state, verdicts = strata.decode(decoder, tiled, state, 24)
        tokens.append(strata.output_tokens(state).tolist())
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 24
    assert (np.asarray(verdicts.kind) == strata.RowKind.OFFERED).any()


@pytest.mark.slow
def test_the_drafter_conforms(tiled):
    target = make_target()
    accepted = testing.check_drafter(
        drafters.mtp(num_draft_tokens=2),
        target,
        tiled,
        PROMPT,
        num_windows=4,
        poison=testing.poison_cache,
    )
    assert len(accepted) == 4
