"""The file of cold experts: it is whole, or it is refused, or it stops the request."""

import contextlib
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from random_experts import random_model, random_packed

import strata_jax as strata
from strata_jax import drafters, experts, models, targets, verifiers
from strata_jax.experts import ExpertFile, uniform_layout

LAYOUTS = (uniform_layout("q8_0"), uniform_layout("q4_0"))
NUM_EXPERTS, WIDTH = 4, 64


def random_layers(seed):
    return [
        random_packed(LAYOUTS, NUM_EXPERTS, WIDTH, seed=2 * seed + layer)
        for layer in range(2)
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "experts.safetensors"


def read_all(file, layers):
    """What a file holds, by layer, and its Status."""
    words, status = zip(
        *(
            file.read(index, np.arange(NUM_EXPERTS), layer.shape.num_words)
            for index, layer in enumerate(layers)
        ),
        strict=True,
    )
    return words, strata.Status(int(np.bitwise_or.reduce(status)))


def check_holds(file, layers):
    words, status = read_all(file, layers)
    assert status == strata.Status.OK
    for found, layer in zip(words, layers, strict=True):
        np.testing.assert_array_equal(found, layer.words)


def test_a_file_holds_what_was_written(path):
    layers = random_layers(0)
    file = experts.write_expert_file(path, layers)
    check_holds(file, layers)
    assert file.num_layers == 2
    assert file.last_fault is None
    again = ExpertFile(path, file.fingerprint)
    check_holds(again, layers)
    for index, layer in enumerate(layers):
        bank = again.bank(index)
        assert bank.shape == layer.shape
        np.testing.assert_array_equal(bank.layout, layer.layout)
    with pytest.raises(AssertionError):
        check_holds(again, random_layers(1))


def test_only_what_is_asked_for_is_read(path):
    (layer, _) = layers = random_layers(0)
    file = experts.write_expert_file(path, layers)
    words, status = file.read(0, np.array([2, -1, 1], np.int32), layer.shape.num_words)
    assert int(status) == strata.Status.OK
    assert words.dtype == np.uint32
    np.testing.assert_array_equal(words[[0, 2]], layer.words[jnp.asarray([2, 1])])
    assert not words[1].any()


def test_experts_of_the_host_can_be_written(path):
    layers = random_layers(0)
    file = experts.write_expert_file(path, [experts.to_host(bank) for bank in layers])
    check_holds(file, layers)


def test_a_file_can_be_written_over_while_it_is_open(path):
    old, new = random_layers(0), random_layers(1)
    first = experts.write_expert_file(path, old)
    second = experts.write_expert_file(path, new)
    check_holds(second, new)
    # The old file lives on for those who have it open.
    check_holds(first, old)
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_write_that_is_cut_short_leaves_the_old_file(path, monkeypatch, function):
    layers = random_layers(0)
    fingerprint = experts.write_expert_file(path, layers).fingerprint
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, function, fail)
        with pytest.raises(KeyboardInterrupt):
            experts.write_expert_file(path, random_layers(1))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    check_holds(ExpertFile(path, fingerprint), layers)


def test_a_write_that_fails_leaves_no_file(path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        experts.write_expert_file(path, random_layers(0))
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_is_missing_is_named(tmp_path):
    path = tmp_path / "nowhere" / "experts.safetensors"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        experts.write_expert_file(path, random_layers(0))
    assert not path.parent.exists()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ExpertFile(path)


def named(path):
    """A pattern that an error matches if it begins with the file's name."""
    return f"^{path}: "


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_file_that_was_cut_is_refused(path, size):
    experts.write_expert_file(path, random_layers(0))
    os.truncate(path, path.stat().st_size + size if size < 0 else size)
    with pytest.raises(ValueError, match=named(path) + "truncated"):
        ExpertFile(path)


def test_other_files_are_refused(path):
    path.write_bytes(b"an expert is a man who has stopped thinking" * 100)
    with pytest.raises(ValueError, match=named(path) + "truncated, damaged, or no"):
        ExpertFile(path)
    safetensors.numpy.save_file({"weights": np.zeros(3, np.float32)}, path)
    with pytest.raises(ValueError, match=named(path) + "not an expert file"):
        ExpertFile(path)
    with pytest.raises(ValueError, match=named(path.parent)):
        ExpertFile(path.parent)


def test_the_file_of_another_model_is_refused(path):
    fingerprint = experts.write_expert_file(path, random_layers(0)).fingerprint
    experts.write_expert_file(path, random_layers(1))
    with pytest.raises(ValueError, match=named(path) + "holds other weights"):
        ExpertFile(path, fingerprint)


def test_two_layers_in_another_order_are_another_model(path):
    layers = random_layers(0)
    fingerprint = experts.write_expert_file(path, layers).fingerprint
    experts.write_expert_file(path, layers[::-1])
    with pytest.raises(ValueError, match="holds other weights"):
        ExpertFile(path, fingerprint)


def rewrite(path, change):
    """Saves a file again after `change(tensors, metadata)`."""
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    change(tensors, metadata)
    safetensors.numpy.save_file(tensors, path, metadata=metadata)


def change_layers(change):
    def apply(tensors, metadata):
        layers = json.loads(metadata["layers"])
        change(layers)
        metadata["layers"] = json.dumps(layers)

    return apply


NAME = "layers.1.experts.2"
FAULTS = {
    "format": (
        lambda tensors, metadata: metadata.update(format="strata_jax experts 0"),
        "not an expert file",
    ),
    "no layers": (
        lambda tensors, metadata: metadata.pop("layers"),
        "damaged header: KeyError.*layers",
    ),
    "no checksums": (
        lambda tensors, metadata: metadata.pop("checksums"),
        "damaged header: KeyError.*checksums",
    ),
    "layers are no JSON": (
        lambda tensors, metadata: metadata.update(layers="[{"),
        "damaged header",
    ),
    "layers are no list": (
        lambda tensors, metadata: metadata.update(layers="5"),
        "damaged header",
    ),
    "checksums are a number": (
        lambda tensors, metadata: metadata.update(checksums="5"),
        "damaged header",
    ),
    "checksums are a list": (
        lambda tensors, metadata: metadata.update(checksums="[]"),
        "no checksum",
    ),
    "unknown format of weights": (
        change_layers(lambda layers: layers[0]["layouts"][1].update(up="q4_9")),
        "damaged header: .*q4_9",
    ),
    "unknown field of a layout": (
        change_layers(lambda layers: layers[0]["layouts"][1].update(bits=3)),
        "damaged header: .*bits",
    ),
    "unknown layout": (
        change_layers(lambda layers: layers[1]["layout"].__setitem__(0, 2)),
        "damaged header: .*layouts that it does not have",
    ),
    "negative layout": (
        change_layers(lambda layers: layers[1]["layout"].__setitem__(0, -1)),
        "damaged header: .*layouts that it does not have",
    ),
    "other layout": (
        change_layers(lambda layers: layers[1].update(layout=[1, 0, 1, 0])),
        "layers.1.experts.0: ",
    ),
    "size that does not divide": (
        change_layers(lambda layers: layers[0].update(hidden_size=60)),
        "damaged header: .*blocks of 1 x 32",
    ),
    "other size": (
        change_layers(lambda layers: layers[0].update(hidden_size=32)),
        "layers.0.experts.0: ",
    ),
    "missing expert": (
        lambda tensors, metadata: tensors.pop(NAME),
        f"{NAME}: missing",
    ),
    "missing layer": (change_layers(lambda layers: layers.pop()), f"{NAME}: unknown"),
    "expert cut": (
        lambda tensors, metadata: tensors.update({NAME: tensors[NAME][:-1].copy()}),
        f"{NAME}: ",
    ),
    "expert of another type": (
        lambda tensors, metadata: tensors.update({NAME: tensors[NAME].view("f4")}),
        f"{NAME}: .*F32",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_header_is_refused(path, fault):
    change, message = FAULTS[fault]
    experts.write_expert_file(path, random_layers(0))
    rewrite(path, lambda tensors, metadata: None)
    ExpertFile(path)
    rewrite(path, change)
    with pytest.raises(ValueError, match=f"{named(path)}.*{message}"):
        ExpertFile(path)


@pytest.mark.parametrize("is_known", [True, False])
def test_no_byte_of_a_header_can_change_weights(path, is_known):
    layers = random_layers(0)
    fingerprint = experts.write_expert_file(path, layers).fingerprint
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    num_refused = 0
    for place in range(0, size, 2):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            file = ExpertFile(path, fingerprint if is_known else None)
        except ValueError as error:
            assert str(path) in str(error)
            num_refused += 1
        else:
            # The names of two experts may have changed places, or a checksum.
            words, status = read_all(file, layers)
            if status == strata.Status.OK:
                for found, layer in zip(words, layers, strict=True):
                    np.testing.assert_array_equal(found, layer.words)
    assert num_refused > 0.9 * len(range(0, size, 2))


def test_no_byte_of_an_expert_can_change(path):
    layers = random_layers(0)
    file = experts.write_expert_file(path, layers)
    whole = path.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")
    for place in np.random.default_rng(0).integers(first, len(whole), 50):
        write_in_place(path, whole[:place] + bytes([whole[place] ^ 1]), at=0)
        _, status = read_all(file, layers)
        assert status == strata.Status.EXPERT_FAULT
        write_in_place(path, whole)
    check_holds(file, layers)


def write_in_place(path, content, at=0):
    """Writes into a file that others have open, and does not replace it."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize("fault", ["cut", "grown", "overwritten", "swapped"])
def test_a_fault_is_told_and_gives_no_words(path, fault, caplog):
    layers = random_layers(0)
    file = experts.write_expert_file(path, layers)
    with fault_in(path, fault):
        words, status = file.read(1, np.array([1, 2]), layers[1].shape.num_words)
    assert int(status) == strata.Status.EXPERT_FAULT
    assert not words.any()
    assert file.last_fault is not None
    assert file.last_fault.startswith(f"{path}: ")
    if fault in ("overwritten", "swapped"):
        assert "layers.1.experts.1 does not have its checksum" in file.last_fault
    else:
        assert "bytes" in file.last_fault
    assert file.last_fault in caplog.text
    check_holds(file, layers)


def test_an_expert_that_does_not_exist_is_a_fault(path):
    layers = random_layers(0)
    file = experts.write_expert_file(path, layers)
    words, status = file.read(0, np.array([0, 4]), layers[0].shape.num_words)
    assert int(status) == strata.Status.EXPERT_FAULT
    assert not words.any()


def test_files_are_closed(path):
    def count_open():
        return len(os.listdir("/proc/self/fd"))

    experts.write_expert_file(path, random_layers(0))
    before = count_open()
    for _ in range(5):
        ExpertFile(path)
        with contextlib.suppress(ValueError):
            ExpertFile(path, "another")
    assert count_open() <= before


@contextlib.contextmanager
def fault_in(path, fault):
    """Damages a file that is open, and makes it whole again."""
    whole = path.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")
    if fault == "cut":
        os.truncate(path, first + (len(whole) - first) // 2)
    elif fault == "grown":
        write_in_place(path, b"\0", at=len(whole))
    elif fault == "overwritten":
        data = bytearray(whole[first:])
        data[::7] = bytes(byte ^ 1 for byte in data[::7])
        write_in_place(path, data, at=first)
    else:
        write_in_place(path, swapped(path, whole))
    try:
        yield
    finally:
        write_in_place(path, whole)
        os.truncate(path, len(whole))


def swapped(path, whole):
    """The bytes of a file in which experts of the same size have changed places."""
    size = int.from_bytes(whole[:8], "little")
    places = json.loads(whole[8 : 8 + size])
    del places["__metadata__"]
    spans = {
        name: slice(*(8 + size + offset for offset in place["data_offsets"]))
        for name, place in places.items()
    }
    result = bytearray(whole)
    for name, span in spans.items():
        layer, expert = name.rsplit(".", 1)
        # Layouts alternate.
        other = spans[f"{layer}.{(int(expert) + 2) % NUM_EXPERTS}"]
        result[span] = whole[other]
    assert len(result) == len(whole)
    return bytes(result)


CONFIG = models.MoeConfig(
    vocab_size=29,
    hidden_size=WIDTH,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_experts=NUM_EXPERTS,
    num_experts_per_token=2,
    expert_size=WIDTH,
    max_position=64,
)
PROMPT, DRAFT = [3, 14, 1], 7
# A draft that is often right.
SETTINGS = {"seed": 1, "logit_bias": {DRAFT: 4.0}}


def decode(decoder, params, state, **options):
    return strata.decode(decoder, params, state, 2, **options)


@pytest.fixture(
    scope="module",
    params=[
        (1, verifiers.token()),
        pytest.param((0, verifiers.exact_match()), marks=pytest.mark.slow),
    ],
    ids=["token, R=1", "exact_match, R=0"],
)
def running(request, tmp_path_factory):
    """(decoder, params, file) with experts on disk."""
    num_cached_experts, verifier = request.param
    params = models.pack_model_experts(random_model(CONFIG, 4), LAYOUTS[0])
    path = tmp_path_factory.mktemp("decode") / "experts.safetensors"
    params, file = models.experts_on_disk(params, path)
    script = np.zeros((32, CONFIG.vocab_size), np.float32)
    script[:, DRAFT] = 1
    target = targets.singleton(
        CONFIG, max_length=64, prefill_chunk=4, num_cached_experts=num_cached_experts
    )
    decoder = strata.speculative_decoder(
        target,
        drafters.scripted(script, num_draft_tokens=2),
        verifier=verifier,
    )
    return decoder, params, file


def start(running):
    decoder, params, _ = running
    return decoder.init(params, PROMPT, **SETTINGS)


def after_two_windows(running):
    decoder, params, _ = running
    return decode(decoder, params, start(running))[0]


@pytest.fixture
def good_tokens(running):
    """What is said in two windows, and in four."""
    decoder, params, file = running
    file.last_fault = None
    state = after_two_windows(running)
    first = strata.output_tokens(state)
    state, _ = decode(decoder, params, state)
    assert file.last_fault is None
    return first, strata.output_tokens(state)


def test_windows_without_a_fault_emit(good_tokens):
    first, both = good_tokens
    assert 2 < len(first) < len(both)
    assert set(both.tolist()) > {DRAFT}
    np.testing.assert_array_equal(both[: len(first)], first)


def test_a_loop_of_windows_reads_each_layer_once(running, monkeypatch):
    decoder, params, _ = running
    state = jax.block_until_ready(start(running))
    layers = []
    read = ExpertFile.read

    def count(self, layer, *args):
        layers.append(layer)
        return read(self, layer, *args)

    monkeypatch.setattr(ExpertFile, "read", count)
    state, _ = jax.block_until_ready(decode(decoder, params, state))
    # And once more where the cache changes.
    at_most = 2 if state.target_state.experts[0] is None else 4
    for layer in range(2):
        assert 2 <= layers.count(layer) <= at_most


@pytest.mark.parametrize("fault", ["cut", "overwritten", "swapped"])
def test_a_fault_stops_a_request_and_loses_no_token(running, good_tokens, fault):
    decoder, params, file = running
    states = [after_two_windows(running) for _ in range(2)]
    with fault_in(file.path, fault):
        with pytest.raises(strata.DecodingError, match="EXPERT_FAULT") as error:
            decode(decoder, params, states[0])
        state, verdicts = decode(decoder, params, states[1], throw=False)
        jax.block_until_ready(state)
    assert "last_fault" in str(error.value)
    assert error.value.status == strata.Status.EXPERT_FAULT
    np.testing.assert_array_equal(error.value.tokens, good_tokens[0])
    assert file.last_fault.startswith(f"{file.path}: ")
    if fault != "cut":
        assert re.search(r"layers\.\d\.experts\.\d does not", file.last_fault)
    # Nothing comes from the bad window, nor from one after it.
    assert verdicts.num_emitted.tolist() == [0, 0]
    assert (np.asarray(verdicts.tokens) == -1).all()
    assert int(verdicts.status[0]) == strata.Status.EXPERT_FAULT
    assert int(state.status) == strata.Status.EXPERT_FAULT
    assert int(state.finish_reason) == strata.FinishReason.FAILED
    # The file is whole again, but this request has ended.
    state, verdicts = decode(decoder, params, state, throw=False)
    assert verdicts.num_emitted.tolist() == [0, 0]
    np.testing.assert_array_equal(strata.output_tokens(state), good_tokens[0])


def test_a_fault_while_the_prompt_is_read_gives_no_token(running, good_tokens):
    decoder, params, file = running
    with fault_in(file.path, "overwritten"):
        state = jax.block_until_ready(start(running))
    with pytest.raises(strata.DecodingError, match="EXPERT_FAULT") as error:
        decode(decoder, params, state)
    assert error.value.tokens.tolist() == []
    # The next request finds a file that is whole.
    tokens = strata.output_tokens(after_two_windows(running))
    np.testing.assert_array_equal(tokens, good_tokens[0])


def test_a_finished_request_reads_nothing(running, monkeypatch):
    decoder, params, _ = running
    state = decoder.init(params, PROMPT, max_new_tokens=2, **SETTINGS)
    state, _ = decode(decoder, params, state)
    assert int(state.finish_reason) == strata.FinishReason.LENGTH
    # What the last window has used may still come into the cache.
    state = jax.block_until_ready(decode(decoder, params, state)[0])
    asked = []
    monkeypatch.setattr(ExpertFile, "read", lambda *args: asked.append(args))
    jax.block_until_ready(decode(decoder, params, state))
    assert asked == []


def test_a_router_of_nan_stops_the_request(running, good_tokens):
    decoder, params, _ = running
    first, second = params.layers
    second = second.replace(router=second.router.at[2, 5].set(jnp.nan))
    spoiled = params.replace(layers=(first, second))
    # A router that turns bad while a request runs.
    with pytest.raises(strata.DecodingError, match="NON_FINITE_LOGITS") as error:
        decode(decoder, spoiled, after_two_windows(running))
    np.testing.assert_array_equal(error.value.tokens, good_tokens[0])
    state = after_two_windows(running)
    state, verdicts = decode(decoder, spoiled, state, throw=False)
    assert int(state.status) == strata.Status.NON_FINITE_LOGITS
    assert verdicts.num_emitted.tolist() == [0, 0]
