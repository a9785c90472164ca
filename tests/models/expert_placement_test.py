"""Where experts live: it may change the speed of a model, and no bit of its logits."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from random_experts import random_model

import strata_jax as strata
from strata_jax import experts, models, targets
from strata_jax.experts import (
    ColdExperts,
    ExpertFile,
    ExpertLayout,
    ExpertWeights,
    PackedExperts,
    uniform_layout,
)

# Wide enough that a batched product has other bits than that of one token.
CONFIG = models.MoeConfig(
    vocab_size=61,
    hidden_size=256,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    num_experts=6,
    num_experts_per_token=2,
    expert_size=256,
    max_position=128,
)
LAYOUT = ExpertLayout(gate="q4_1", up="q8_0", down="q4_0", is_folded=True, seed=5)
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# (rows, rows that are kept) of the windows that the text is read in.
WINDOWS = ((1, 1), (4, 4), (3, 1), (4, 2), (4, 4), (2, 2), (4, 3), (4, 3))
TEXT = np.random.default_rng(0).integers(0, 61, sum(kept for _, kept in WINDOWS))


@functools.cache
def packed_params():
    return models.pack_model_experts(random_model(CONFIG, 8), LAYOUT)


@pytest.fixture(scope="module")
def find_params(tmp_path_factory):
    path = tmp_path_factory.mktemp("placement") / "experts.safetensors"

    @functools.cache
    def find(tier):
        if tier == "host":
            return models.experts_on_host(packed_params())
        if tier == "disk":
            return models.experts_on_disk(packed_params(), path)[0]
        return packed_params()

    return find


@functools.cache
def make_window(num_cached_experts, expert_mode):
    target = targets.singleton(
        CONFIG,
        max_length=128,
        expert_mode=expert_mode,
        num_cached_experts=num_cached_experts,
    )

    def window(params, state, tokens, position, num_rows, num_kept):
        rows, state = target.score(params, state, tokens, position, num_rows)
        return rows, target.commit(state, position, num_kept)

    return target, jax.jit(window)


def read_text(params, windows, width, options):
    """The logits of the rows that are kept, and the state after each window."""
    target, window = make_window(*options)
    rng = np.random.default_rng(1)
    state, position, logits, states = target.init(params), 0, [], []
    for num_rows, num_kept in windows:
        # Other tokens than the text's, where rows are not kept.
        tokens = rng.integers(0, CONFIG.vocab_size, width)
        tokens[:num_kept] = TEXT[position : position + num_kept]
        numbers = (position, num_rows, num_kept)
        rows, state = window(
            params, state, jnp.asarray(tokens, jnp.int32), *map(jnp.int32, numbers)
        )
        assert int(rows.status) == strata.Status.OK
        logits.append(np.asarray(rows.logits[:num_kept]))
        states.append(jax.tree.map(np.asarray, state.replace(keys=(), values=())))
        position += num_kept
    return np.concatenate(logits), states


@functools.cache
def logits_alone():
    windows = [(1, 1)] * len(TEXT)
    return read_text(packed_params(), windows, 1, (0, "singleton"))[0]


@pytest.mark.parametrize(
    ("tier", "num_cached_experts", "expert_mode"),
    [
        ("disk", 2, "shared"),
        ("host", 2, "singleton"),
        pytest.param("device", 0, "shared", marks=pytest.mark.slow),
        pytest.param("device", 2, "singleton", marks=pytest.mark.slow),
        pytest.param("host", 0, "shared", marks=pytest.mark.slow),
        pytest.param("host", 6, "shared", marks=pytest.mark.slow),
        pytest.param("disk", 0, "singleton", marks=pytest.mark.slow),
        pytest.param("disk", 6, "singleton", marks=pytest.mark.slow),
    ],
)
def test_every_place_has_the_bits_of_one_resident_token(
    find_params, tier, num_cached_experts, expert_mode
):
    options = (num_cached_experts, expert_mode)
    logits, states = read_text(find_params(tier), WINDOWS, 4, options)
    np.testing.assert_array_equal(logits, logits_alone())
    held = {
        tuple(cache.expert.tolist())
        for state in states
        for cache in state.experts
        if cache is not None
    }
    has_cache = num_cached_experts and tier != "device"
    assert len(held) >= (3 if has_cache else 0)


def test_experts_that_change_places_are_seen(find_params):
    params = find_params("disk")
    first, second = params.layers
    first = first.replace(router=jnp.roll(first.router, 2, axis=0))
    params = params.replace(layers=(first, second))
    logits, _ = read_text(params, WINDOWS[:2], 4, (2, "shared"))
    assert (logits != logits_alone()[: len(logits)]).any(axis=1).all()


def test_a_window_reads_each_layers_missing_experts_at_once(find_params, monkeypatch):
    asked = []
    read = ExpertFile.read

    def count(self, layer, wanted, num_words):
        wanted = np.asarray(wanted)
        asked.append((layer, sorted(wanted[wanted >= 0].tolist())))
        return read(self, layer, wanted, num_words)

    monkeypatch.setattr(ExpertFile, "read", count)
    _, states = read_text(find_params("disk"), WINDOWS, 4, (2, "shared"))
    expected, before = [], [{-1}] * CONFIG.num_layers
    for (num_rows, _), state in zip(WINDOWS, states, strict=True):
        for layer, cache in enumerate(state.experts):
            held = set(cache.expert.tolist())
            used = set(state.routing[layer, :num_rows].reshape(-1).tolist())
            # One read if the cache changes, and one for what it does not hold.
            missing = (held - before[layer], used - held)
            expected += [(layer, sorted(wanted)) for wanted in missing if wanted]
            before[layer] = held
    assert sorted(asked) == sorted(expected)


def test_only_rows_that_are_kept_count_as_uses(find_params):
    target, window = make_window(2, "singleton")
    params, zero = find_params("host"), jnp.int32(0)

    def uses_after(tokens, num_kept):
        tokens = jnp.asarray(tokens, jnp.int32)
        _, state = window(
            params, target.init(params), tokens, zero, jnp.int32(4), jnp.int32(num_kept)
        )
        return np.stack([cache.uses for cache in state.experts])

    uses = uses_after([3, 17, 5, 9], 2)
    np.testing.assert_array_equal(uses.sum(axis=1), [4, 4])
    # Other drafts behind the rows that stay, with other experts.
    np.testing.assert_array_equal(uses_after([3, 17, 20, 30], 2), uses)
    assert (uses_after([3, 17, 20, 30], 4) != uses_after([3, 17, 5, 9], 4)).any()
    assert not uses_after([3, 17, 20, 30], 0).any()


def test_a_window_lowers_for_every_platform_unless_experts_are_cold(find_params):
    target, window = make_window(2, "singleton")

    def export(tier, platforms):
        params, number = find_params(tier), jnp.int32(1)
        return jax.export.export(window, platforms=platforms)(
            params, target.init(params), jnp.zeros(4, jnp.int32), *[number] * 3
        )

    for tier in ("device", "host"):
        exported = export(tier, PLATFORMS)
        assert exported.platforms == PLATFORMS
        assert "callback" not in exported.mlir_module()
    with pytest.raises(NotImplementedError, match="callback"):
        export("disk", ("cpu",)).serialize()


def layers_of(params):
    return [layer.experts for layer in params.layers]


SMALL = models.MoeConfig(
    vocab_size=11,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    num_experts=4,
    num_experts_per_token=2,
    expert_size=64,
    max_position=64,
)


@functools.cache
def small_params(with_mtp=True):
    return random_model(SMALL, 0, with_mtp=with_mtp)


@functools.cache
def small_packed(name="q8_0"):
    return models.pack_model_experts(small_params(), uniform_layout(name))


def check_same_arrays(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_packing_and_unpacking_float32_changes_nothing():
    packed = small_packed("float32")
    assert all(isinstance(bank, PackedExperts) for bank in layers_of(packed))
    assert isinstance(packed.mtp.layer.experts, PackedExperts)
    models.check_moe_params(SMALL, packed)
    unpacked = models.unpack_model_experts(packed)
    check_same_arrays(unpacked, small_params())
    # What is not packed stays as it is, and so does a head that is not there.
    check_same_arrays(models.unpack_model_experts(small_params()), small_params())
    headless = models.pack_model_experts(small_params(False), uniform_layout("q8_0"))
    assert headless.mtp is None


def test_unpacked_experts_are_what_the_format_holds():
    packed = small_packed("q4_1")
    unpacked = models.unpack_model_experts(packed)
    bank = packed.layers[1].experts
    sizes = bank.shape.layouts[0].num_words(32, 64)
    gate, up, down = np.split(np.asarray(bank.words[3]), np.cumsum(sizes)[:2])
    reference = experts.find_format("q4_1").reference
    found = unpacked.layers[1].experts
    np.testing.assert_array_equal(found.gate[3], reference(gate, 64, 32))
    np.testing.assert_array_equal(found.up[3], reference(up, 64, 32))
    np.testing.assert_array_equal(found.down[3], reference(down, 32, 64))
    # Lossy, but not much.
    wanted = small_params().layers[1].experts
    assert (found.gate != wanted.gate).any()
    np.testing.assert_allclose(found.gate, wanted.gate, atol=0.05)


def test_experts_of_the_host_can_be_unpacked():
    packed = small_packed("q4_1")
    on_host = models.experts_on_host(packed)
    for bank in layers_of(on_host):
        assert bank.is_on_host
        assert bank.words.sharding.memory_kind == "pinned_host"
    assert not on_host.mtp.layer.experts.is_on_host
    models.check_moe_params(SMALL, on_host)
    check_same_arrays(
        models.unpack_model_experts(on_host), models.unpack_model_experts(packed)
    )


def test_a_file_is_attached_again_by_its_fingerprint(tmp_path):
    path = tmp_path / "experts.safetensors"
    params, file = models.experts_on_disk(small_packed(), path)
    assert all(isinstance(bank, ColdExperts) for bank in layers_of(params))
    assert isinstance(params.mtp.layer.experts, PackedExperts)
    models.check_moe_params(SMALL, params)
    again = models.attach_expert_file(
        small_params(), ExpertFile(path, file.fingerprint)
    )
    for index, bank in enumerate(layers_of(again)):
        assert bank.file.path == path
        assert bank.layer == index
        words, status = bank.file.read(index, np.arange(4), bank.shape.num_words)
        assert int(status) == strata.Status.OK
        np.testing.assert_array_equal(words, small_packed().layers[index].experts.words)
    assert isinstance(again.mtp.layer.experts, ExpertWeights)


def test_experts_that_are_not_packed_are_refused(tmp_path):
    path = tmp_path / "experts.safetensors"
    with pytest.raises(ValueError, match="pack_model_experts"):
        models.experts_on_host(small_params())
    with pytest.raises(ValueError, match="pack_model_experts"):
        models.experts_on_disk(small_params(), path)
    with pytest.raises(ValueError, match="unpack_model_experts"):
        models.pack_model_experts(small_packed(), uniform_layout("q8_0"))
    assert list(tmp_path.iterdir()) == []
    cold, _ = models.experts_on_disk(small_packed(), path)
    with pytest.raises(ValueError, match="on disk"):
        models.unpack_model_experts(cold)
    with pytest.raises(ValueError, match="pack_model_experts"):
        models.experts_on_disk(cold, path)


def test_bad_layouts_are_refused():
    with pytest.raises(ValueError, match="layouts has 3 entries for 4 experts"):
        models.pack_model_experts(small_params(), [uniform_layout("q8_0")] * 3)
    with pytest.raises(ValueError, match="multiple of 128"):
        models.pack_model_experts(
            small_params(), uniform_layout("q8_0", is_folded=True)
        )


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        models.experts_on_disk(small_packed(), tmp_path / "nowhere" / "experts")


def test_the_file_of_another_shape_is_named(tmp_path):
    path = tmp_path / "experts.safetensors"
    _, file = models.experts_on_disk(small_packed(), path)
    few = small_params().replace(layers=small_params().layers[:1])
    with pytest.raises(ValueError, match=f"{path} holds 2 layers, the model has 1"):
        models.attach_expert_file(few, file)
    for change in (
        {"num_experts": 5},
        {"hidden_size": 64},
        {"expert_size": 32},
    ):
        config = dataclasses.replace(SMALL, **change)
        other = models.attach_expert_file(random_model(config, 1), file)
        target = targets.singleton(config, max_length=32)
        decoder = strata.ancestral_decoder(target)
        with pytest.raises(ValueError, match=rf"{path} have E, F, D = \(4, 64, 32\)"):
            decoder.init(other, [1, 2])


def test_packed_experts_of_another_shape_are_named():
    target = targets.singleton(
        dataclasses.replace(SMALL, expert_size=32), max_length=32
    )
    with pytest.raises(ValueError, match=r"layers\[0\].experts are packed for F, D"):
        strata.ancestral_decoder(target).init(small_packed(), [1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_mode": "batched"}, "not bitwise the singleton's.*targets.batched"),
        ({"expert_mode": "grouped"}, "expert_mode must be one of .*'grouped'"),
        ({"num_cached_experts": -1}, "num_cached_experts must be at least 0"),
        ({"num_cached_experts": 1.5}, "num_cached_experts must be an integer"),
        ({"num_cached_experts": True}, "num_cached_experts must be an integer"),
        ({"num_cached_experts": 5}, "num_cached_experts=5 exceeds the 4 experts"),
    ],
)
def test_bad_options_of_a_target_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        targets.singleton(SMALL, max_length=32, **options)


def test_nothing_is_cached_of_what_is_on_the_device():
    target = targets.singleton(SMALL, max_length=32, num_cached_experts=4)
    state = jax.eval_shape(target.init, models.experts_on_host(small_packed()))
    assert [cache.expert.shape for cache in state.experts] == [(4,), (4,)]
    assert target.init(small_packed()).experts == (None, None)


@pytest.mark.parametrize(
    "options", [{"num_cached_experts": 1}, {"expert_mode": "shared"}]
)
def test_a_llama_has_no_experts_to_place(options):
    config = models.LlamaConfig(8, 16, 1, 1, 1, 16, 16)
    with pytest.raises(ValueError, match="for models with experts"):
        targets.singleton(config, max_length=32, **options)


def test_weights_of_another_family_are_refused():
    config = models.LlamaConfig(8, 16, 1, 1, 1, 16, 16)
    llama = models.random_params(config, jax.random.key(0))
    with pytest.raises(ValueError, match=r"must be models\.MoeParams for a MoeConfig"):
        targets.singleton(SMALL, max_length=32).init(llama)
    with pytest.raises(ValueError, match=r"must be models\.LlamaParams for a Llama"):
        targets.singleton(config, max_length=32).init(small_packed())
