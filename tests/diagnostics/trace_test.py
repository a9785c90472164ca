"""Traces on disk and their replay, on the bundled model and on SmolLM2."""

import dataclasses
import functools
import zipfile

import jax
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import checkpoints, diagnostics, drafters, gates, targets, verifiers
from strata_jax._rng import (
    Stream,
    position_uniforms,
    request_key,
    window_uniforms,
)
from strata_jax.testing import oracle_position_uniforms, oracle_window_uniforms

NUM_TOKENS = 512


@functools.cache
def bundled_decoder(verifier):
    target, params = strata.load_bundled(max_length=640)
    decoder = strata.speculative_decoder(
        target,
        drafters.mtp(num_draft_tokens=3),
        gates.picked(0.3),
        getattr(verifiers, verifier)(),
    )
    return decoder, params


def start(decoder, params, **settings):
    prompt = checkpoints.ByteTokenizer().encode("ROMEO. Good ")
    return decoder.init(params, prompt, max_new_tokens=NUM_TOKENS, **settings)


@functools.cache
def bundled_trace(verifier):
    decoder, params = bundled_decoder(verifier)
    state = start(decoder, params, seed=3)
    state, trace = diagnostics.record_trace(
        decoder, params, state, NUM_TOKENS, files={"model.safetensors": "0" * 64}
    )
    return strata.output_tokens(state), trace


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.npz"
    diagnostics.save_trace(path, bundled_trace("token")[1])
    return path


@pytest.mark.parametrize(
    "verifier", ["token", pytest.param("exact_match", marks=pytest.mark.slow)]
)
def test_every_decision_of_512_tokens_is_reconstructed(verifier):
    tokens, trace = bundled_trace(verifier)
    result = diagnostics.replay(trace)
    print(f"\n{verifier}: {result}")
    assert result.difference is None
    assert result.num_rows == len(tokens) == NUM_TOKENS
    verdict = trace.windows.verdict
    assert result.num_windows == len(verdict.status) < NUM_TOKENS
    is_rejection = verdict.source == strata.Source.REJECTION
    expected = len(verdict.status) + verdict.num_accepted.sum()
    if verifier == "token":
        expected += is_rejection.sum()
    assert result.num_decisions == expected
    sources = np.bincount(verdict.source, minlength=3)
    assert sources.min() > 10  # bonus, rejection and NULL all occur


def test_windows_continue_the_text():
    tokens, trace = bundled_trace("token")
    found = trace.windows.verdict.tokens
    np.testing.assert_array_equal(found[found >= 0], tokens)
    assert trace.settings["gate.threshold"] == np.float32(0.3)
    assert trace.settings["max_new_tokens"] == NUM_TOKENS


@pytest.mark.slow  # decode_test.py has the same on a small model
def test_traced_and_untraced_programs_emit_the_same_tokens_and_bits():
    decoder, params = bundled_decoder("token")
    tokens, trace = bundled_trace("token")
    num_windows = len(trace.windows.verdict.status)
    # 16 windows a call, as the trace, so that the states compare like with like.
    state = start(decoder, params, seed=3)
    traced = start(decoder, params, seed=3)
    for _ in range(-(-num_windows // 16)):
        state, verdicts = strata.decode(decoder, params, state, 16)
        traced, windows = strata.decode(decoder, params, traced, 16, trace=True)
        for ours, theirs in zip(
            jax.tree.leaves(verdicts), jax.tree.leaves(windows.verdict), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(strata.output_tokens(state), tokens)
    # Caches, hidden states and counts of all 512 tokens.
    plain, other = (
        jax.tree.leaves(dataclasses.replace(each, request_key=None))
        for each in (state, traced)
    )
    for ours, theirs in zip(plain, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_saved_trace_is_read_back_as_it_was(saved):
    _, trace = bundled_trace("token")
    loaded = diagnostics.load_trace(saved)
    for ours, theirs in zip(
        jax.tree.leaves(trace.windows), jax.tree.leaves(loaded.windows), strict=True
    ):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert loaded.settings.keys() == trace.settings.keys()
    for name, value in trace.settings.items():
        np.testing.assert_array_equal(loaded.settings[name], value)
    for name in ("verifier", "window", "num_output", "versions", "files"):
        assert getattr(loaded, name) == getattr(trace, name)
    assert diagnostics.replay(loaded).difference is None


def flipped(array, *index):
    """The array with the lowest bit of one entry changed."""
    array = np.array(array)
    entry = np.atleast_1d(array[index]).copy()
    entry.view(np.uint8)[0] ^= np.uint8(1)
    array[index] = entry.reshape(np.shape(array[index]))
    return array


def edited(path, new_path, name, edit):
    """Writes the file again with one of its arrays changed."""
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays[name] = edit(arrays[name])
    np.savez_compressed(new_path, **arrays)
    return new_path


FLIPS = [
    ("windows/target_probs/12/0", (65,), "window 12, row 0, target_probs"),
    ("windows/measure/6/0", (65,), "window 6, row 0, measure"),
    ("windows/kind", (5, 1), "window 5, row 1, kind"),
    ("windows/draft_uniforms", (5, 2, 1), "window 5, row 2, draft_uniforms"),
    ("windows/accept_uniforms", (5, 0), "window 5, row 0, accept_uniforms"),
    ("windows/residual_uniforms", (5, 0), "window 5, residual_uniforms"),
    ("windows/num_emitted", (5,), "window 5, num_emitted"),
    ("settings/sampling.temperature", (), "settings/sampling.temperature"),
    ("context", (2,), "context"),
    ("key_data", (1,), "key_data"),
]


@pytest.mark.parametrize(("name", "index", "place"), FLIPS)
def test_one_flipped_bit_is_refused_and_its_place_named(
    saved, tmp_path, name, index, place
):
    path = edited(
        saved, tmp_path / "changed.npz", name, lambda array: flipped(array, *index)
    )
    with pytest.raises(ValueError, match=rf"was changed: {place} is not"):
        diagnostics.load_trace(path)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("windows/target_probs/12/0", "window 12, row 0, target_probs"),
        ("windows/measure/6/0", "window 6, row 0, measure"),
        ("windows/kind", "kind"),
    ],
)
def test_a_bit_flipped_on_disk_is_refused(saved, tmp_path, name, place):
    content = bytearray(saved.read_bytes())
    with zipfile.ZipFile(saved) as archive:
        member = archive.getinfo(f"{name}.npy")
    content[member.header_offset + 30 + len(member.filename) + 60] ^= 1
    path = tmp_path / "damaged.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"is damaged at {place}"):
        diagnostics.load_trace(path)


def replaced(trace, **fields):
    windows = trace.windows
    if "target_probs" in fields:
        windows = dataclasses.replace(windows, target_probs=fields["target_probs"])
    if "draws" in fields:
        windows = dataclasses.replace(windows, draws=fields["draws"])
    if "verdict" in fields:
        verdict = dataclasses.replace(windows.verdict, **fields["verdict"])
        windows = dataclasses.replace(windows, verdict=verdict)
    return dataclasses.replace(trace, windows=windows)


def test_replay_names_the_first_decision_that_differs():
    _, trace = bundled_trace("token")
    verdict = trace.windows.verdict
    # A final token that another draw would have given.
    for source, stream in ((0, "PICK"), (1, "RESIDUAL"), (2, "RESIDUAL")):
        window = int(np.flatnonzero(verdict.source == source)[3])
        row = int(verdict.num_accepted[window])
        tokens = verdict.tokens.copy()
        tokens[window, row] ^= 1
        found = diagnostics.replay(replaced(trace, verdict={"tokens": tokens}))
        assert found.difference is not None
        assert (found.difference.window, found.difference.row) == (window, row)
        assert found.difference.stream == stream
        assert found.difference.recorded == tokens[window, row]
        assert f"window {window}, row {row}, stream {stream}" in str(found.difference)
        assert found.num_windows == window


def test_replay_sees_a_changed_p():
    _, trace = bundled_trace("token")
    verdict = trace.windows.verdict
    window = int(np.flatnonzero(verdict.num_accepted > 0)[0])
    token = trace.windows.proposal.tokens[window, 0]
    probs = trace.windows.target_probs.copy()
    probs[window, 0, token] = 0
    difference = diagnostics.replay(replaced(trace, target_probs=probs)).difference
    assert difference is not None
    assert (difference.window, difference.row) == (window, 0)
    assert difference.stream == "ACCEPT"
    assert (difference.recorded, difference.recomputed) == ("accepted", "rejected")


@pytest.mark.parametrize("stream", ["DRAFT", "GATE", "ACCEPT", "RESIDUAL", "PICK"])
def test_replay_sees_a_draw_that_is_not_of_its_counter(stream):
    _, trace = bundled_trace("token")
    window, row = 9, 0 if stream == "RESIDUAL" else 2

    def changed(array):
        array = np.array(array)
        place = (window, 0) if stream == "RESIDUAL" else (window, row)
        array[place] = np.float32(1) - array[place] - np.float32(2**-24)
        return array

    draws = trace.windows.draws
    field = {"DRAFT": "draft", "GATE": "gate"}.get(stream)
    if field:
        draws = dataclasses.replace(draws, **{field: changed(getattr(draws, field))})
    else:
        field = stream.lower()
        verifier = dataclasses.replace(
            draws.verifier, **{field: changed(getattr(draws.verifier, field))}
        )
        draws = dataclasses.replace(draws, verifier=verifier)
    difference = diagnostics.replay(replaced(trace, draws=draws)).difference
    assert difference is not None
    assert (difference.window, difference.row, difference.stream) == (
        *(window, row, stream),
    )


def test_another_key_or_window_counter_is_seen():
    _, trace = bundled_trace("token")
    for change in ({"key_data": trace.key_data + np.uint32(1)}, {"window": 1}):
        difference = diagnostics.replay(dataclasses.replace(trace, **change)).difference
        assert difference is not None and difference.window == 0


def tiny_trace(**settings):
    target = targets.tabular(6, max_length=64)
    logits = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    decoder = strata.speculative_decoder(
        target, drafters.suffix(num_draft_tokens=2, vocab_size=6, min_match=1)
    )
    params = targets.TabularParams(jax.numpy.asarray(logits))
    state = decoder.init(params, [0, 1], seed=1, **settings)
    return diagnostics.record_trace(decoder, params, state, 40)


def test_eos_ends_a_replayed_window():
    state, trace = tiny_trace(eos_ids=[3])
    assert int(state.finish_reason) == strata.FinishReason.EOS
    result = diagnostics.replay(trace)
    assert result.difference is None
    assert result.num_rows == len(strata.output_tokens(state))


def test_no_windows(tmp_path):
    _, trace = tiny_trace(max_new_tokens=0)
    diagnostics.save_trace(tmp_path / "empty.npz", trace)
    loaded = diagnostics.load_trace(tmp_path / "empty.npz")
    assert diagnostics.replay(loaded) == diagnostics.Replay(0, 0, 0, 0, None)


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "x.npz"
    with pytest.raises(ValueError, match=r"must end in \.npz"):
        diagnostics.load_trace(tmp_path / "x.json")
    with pytest.raises(FileNotFoundError):
        diagnostics.load_trace(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no trace"):
        diagnostics.load_trace(path)
    np.savez(path, a=np.zeros(3))
    with pytest.raises(ValueError, match="is no trace: it has no header"):
        diagnostics.load_trace(path)


def test_another_version_is_refused(saved, tmp_path):
    def edit(header):
        return np.frombuffer(
            header.tobytes().replace(b'"version": 1', b'"version": 9'), np.uint8
        )

    path = edited(saved, tmp_path / "later.npz", "header", edit)
    with pytest.raises(ValueError, match="has version 9 of the trace format"):
        diagnostics.load_trace(path)


def test_other_verifiers_are_refused():
    decoder, params = bundled_decoder("token")
    state = start(decoder, params)
    with pytest.raises(ValueError, match="traces are kept of"):
        diagnostics.record_trace(
            decoder._replace(verifier_name="mine"), params, state, 4
        )


def test_windows_of_another_decoder_are_refused():
    decoder, params = bundled_decoder("token")
    other, _ = bundled_decoder("exact_match")
    state = start(decoder, params)
    trace = diagnostics.begin_trace(decoder, state)
    _, windows = jax.eval_shape(other.step, params, start(other, params))
    windows = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), windows)
    with pytest.raises(ValueError, match="not of the verifier 'token'"):
        diagnostics.extend_trace(trace, windows)
    _, tiny = tiny_trace()
    with pytest.raises(ValueError, match=r"target_probs of shape \[windows, 3, 6\]"):
        diagnostics.extend_trace(tiny, windows)
    with pytest.raises(ValueError, match="can be decided again"):
        diagnostics.replay(dataclasses.replace(tiny, verifier="mine"))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((np.zeros(3, np.uint32), 0, 0, 1), "key_data must be"),
        ((np.zeros(2, np.int32), 0, 0, 1), "key_data must be"),
        ((np.zeros(2, np.uint32), 0, -1, 1), "position"),
        ((np.zeros(2, np.uint32), 0, 2**31, 1), "position"),
    ],
)
def test_counters_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        oracle_position_uniforms(*arguments)
    key_data, stream, position, width = arguments
    with pytest.raises(ValueError, match=match):
        oracle_window_uniforms(key_data, stream, 0, position, width)


def test_uniforms_in_numpy_are_those_of_jax():
    key = request_key(123456789)
    data = np.asarray(jax.random.key_data(key))
    positions = np.array([0, 1, 77, 2**31 - 1], np.int32)
    for stream in Stream:
        for width in (1, 2, 5):
            plain = position_uniforms(key, stream, jax.numpy.asarray(positions), width)
            windowed = window_uniforms(
                key, stream, jax.numpy.int32(9), jax.numpy.asarray(positions), width
            )
            for row, position in enumerate(positions.tolist()):
                np.testing.assert_array_equal(
                    plain[row], oracle_position_uniforms(data, stream, position, width)
                )
                np.testing.assert_array_equal(
                    windowed[row],
                    oracle_window_uniforms(data, stream, 9, position, width),
                )


def test_windows_of_an_own_loop_make_the_same_trace():
    decoder, params = bundled_decoder("token")
    _, trace = bundled_trace("token")
    state = start(decoder, params, seed=3)
    own = diagnostics.begin_trace(decoder, state)
    for _ in range(3):
        state, windows = strata.decode(decoder, params, state, 16, trace=True)
        own = diagnostics.extend_trace(own, windows)
    for ours, theirs in zip(
        jax.tree.leaves(own.windows), jax.tree.leaves(trace.windows), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs[:48])
    assert diagnostics.replay(own).num_windows == 48
    assert diagnostics.replay(own).difference is None


@pytest.mark.slow
def test_512_tokens_of_smollm2_are_reconstructed(tmp_path):
    path = checkpoints.find_smollm2()
    config, params = checkpoints.load_gguf(path)
    tokenizer = checkpoints.load_gguf_tokenizer(path)
    decoder = strata.speculative_decoder(
        targets.singleton(config, max_length=640),
        drafters.suffix(num_draft_tokens=3, vocab_size=config.vocab_size),
        gates.picked(0.3),
        verifiers.token(),
    )
    prompt = tokenizer.encode("One, two, three, four, five. One, two, three,")
    state = decoder.init(
        params, prompt, seed=0, temperature=0.7, max_new_tokens=NUM_TOKENS
    )
    state, trace = diagnostics.record_trace(decoder, params, state, NUM_TOKENS)
    diagnostics.save_trace(tmp_path / "run.npz", trace)
    loaded = diagnostics.load_trace(tmp_path / "run.npz")
    result = diagnostics.replay(loaded)
    print(f"\nSmolLM2: {result}")
    assert result.difference is None
    assert result.num_rows == NUM_TOKENS
    edit = edited(
        tmp_path / "run.npz",
        tmp_path / "changed.npz",
        "windows/target_probs/30/0",
        lambda row: flipped(row, int(np.argmax(row))),
    )
    with pytest.raises(ValueError, match="window 30, row 0, target_probs"):
        diagnostics.load_trace(edit)
