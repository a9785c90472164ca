"""Every public step lowers for cpu, cuda, rocm and tpu, where none of them need be.

Programs are made from shapes alone, those of the bundled model and of SmolLM2, so no
weights are computed and nothing is compiled. A program is portable if it lowers for
all platforms in one module, can be written to bytes, calls nothing of one platform and
holds no 64-bit numbers.
"""

import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import checkpoints, drafters, experts, gates, models, targets, verifiers
from strata_jax.checkpoints._gguf import _config
from strata_jax.checkpoints._gguf_header import read_gguf_header

ROOT = pathlib.Path(__file__).parents[1]
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# Where a value lies, not what is computed.
PORTABLE_CALLS = {"annotate_device_placement"}
NUM_DRAFT_TOKENS, NUM_WINDOWS, MAX_LENGTH = 3, 4, 256
PROMPT = [1, 2, 3]
VOCABULARIES = (256, 49_152)


def shape(*sizes, dtype=jnp.float32, memory=None):
    sharding = memory and jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind=memory
    )
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def export(function, *args):
    """Lowers a function for all platforms at once."""
    # A module is written with its pytrees, of which only plain ones can be.
    leaves, tree = jax.tree.flatten(args)

    def on_leaves(*leaves):
        return jax.tree.leaves(function(*tree.unflatten(leaves)))

    return jax.export.export(jax.jit(on_leaves), platforms=PLATFORMS)(*leaves)


def check_portable(exported):
    assert exported.platforms == PLATFORMS
    assert len(exported.serialize()) > 0
    text = exported.mlir_module()
    assert "callback" not in text
    assert set(re.findall(r"custom_call @(\w+)", text)) <= PORTABLE_CALLS
    assert "f64" not in text
    # Attributes apart, and the counters of JAX's random bits, which are unsigned.
    values = re.sub(r"dense<[^>]*> : tensor<[\dx]*i64>", "", text)
    assert not re.search(r"tensor<(\d+x)*i64>", values)


def check_float32(text):
    """Checks that float64 is only in literals, on their way to another type."""
    assert "f32" in text
    for line in text.splitlines():
        if "f64" in line:
            assert not re.search(r"tensor<\d[\dx]*xf64>", line), line
            assert not re.search(r"stablehlo\.(?!constant|convert)", line), line


@functools.cache
def load_shapes(name):
    """The model's configuration, and the shapes of its weights."""
    if name == "bundled":
        config, params = checkpoints.load_bundled_config()
        return config, jax.eval_shape(lambda: params)
    config = _config(read_gguf_header(checkpoints.find_smollm2()))
    assert (config.vocab_size, config.num_layers) == (49_152, 30)
    make = functools.partial(models.random_params, config, jax.random.key(0))
    return config, jax.eval_shape(make)


def make_drafter(name, config):
    if name == "mtp":
        return drafters.mtp(num_draft_tokens=NUM_DRAFT_TOKENS)
    if name == "suffix":
        return drafters.suffix(
            num_draft_tokens=NUM_DRAFT_TOKENS, vocab_size=config.vocab_size
        )
    if name == "suffix_first":
        base = drafters.mtp(num_draft_tokens=1)
        return drafters.suffix_first(base, num_draft_tokens=NUM_DRAFT_TOKENS)
    if name == "suffix_root":
        base = "mtp" if isinstance(config, models.MoeConfig) else "layer_skip"
        return drafters.suffix_root(make_drafter(base, config))
    options = {"num_draft_tokens": NUM_DRAFT_TOKENS}
    if name == "layer_skip":
        return drafters.layer_skip(
            config, layers=[0, 29], max_length=MAX_LENGTH, **options
        )
    small = dataclasses.replace(config, num_layers=2)
    return drafters.model(
        targets.singleton(small, max_length=MAX_LENGTH),
        select_params=lambda params: params.replace(layers=params.layers[:2]),
        **options,
    )


@functools.cache
def make_decoder(name, verifier):
    config, _ = load_shapes(name)
    drafter = make_drafter("mtp" if name == "bundled" else "layer_skip", config)
    target = targets.singleton(config, max_length=MAX_LENGTH)
    return strata.speculative_decoder(target, drafter, gates.picked(0.3), verifier())


@functools.cache
def start_shapes(name):
    # It knows nothing of the verifier.
    decoder = make_decoder(name, verifiers.token)
    params = load_shapes(name)[1]
    return jax.eval_shape(lambda params: decoder.init(params, PROMPT), params)


@pytest.mark.parametrize("name", ["bundled", "smollm2"])
def test_step_lowers(name):
    decoder = make_decoder(name, verifiers.token)
    check_portable(export(decoder.step, load_shapes(name)[1], start_shapes(name)))


def export_packed_window():
    config, params = checkpoints.load_gguf_tiled(checkpoints.find_smollm2())
    params = jax.eval_shape(lambda: params)
    target = targets.singleton(config, max_length=MAX_LENGTH)
    number = shape(dtype=jnp.int32)
    tokens = shape(NUM_DRAFT_TOKENS + 1, dtype=jnp.int32)
    with jax.enable_x64(False):
        state = jax.eval_shape(target.init, params)
    return export(target.score, params, state, tokens, number, number)


def test_a_window_on_packed_weights_lowers():
    check_portable(export_packed_window())


@pytest.mark.parametrize("name", ["bundled", "smollm2"])
def test_decode_lowers(name):
    decoder = make_decoder(name, verifiers.exact_match)

    def decode(params, state):
        return strata.decode(decoder, params, state, NUM_WINDOWS, throw=False)

    exported = export(decode, load_shapes(name)[1], start_shapes(name))
    check_portable(exported)
    assert any(aval.shape[:1] == (NUM_WINDOWS,) for aval in exported.out_avals)


@pytest.mark.parametrize("name", ["bundled", "smollm2"])
def test_reading_a_prompt_lowers(name):
    decoder = make_decoder(name, verifiers.token)
    params = load_shapes(name)[1]
    check_portable(export(lambda params: decoder.init(params, PROMPT), params))


def without_layers(target, hidden_size):
    """The target with rows of zeros, so that a drafter's programs are alone."""

    def prefill(params, state, tokens, start, stop):
        return state, jnp.zeros((tokens.shape[0], hidden_size), jnp.float32)

    def score(params, state, tokens, position, num_rows):
        num_tokens = tokens.shape[0]
        rows = strata.TargetRows(
            logits=jnp.zeros((num_tokens, target.vocab_size), jnp.float32),
            features=jnp.zeros((num_tokens, hidden_size), jnp.float32),
        )
        return rows, state

    return target._replace(prefill=prefill, score=score)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("bundled", "mtp"),
        ("bundled", "suffix_root"),
        ("bundled", "suffix_first"),
        ("bundled", "model"),
        ("smollm2", "suffix"),
        ("smollm2", "suffix_root"),
        ("smollm2", "layer_skip"),
        ("smollm2", "model"),
    ],
)
def test_drafters_lower(name, drafter):
    config, params = load_shapes(name)
    target = targets.singleton(config, max_length=MAX_LENGTH)
    decoder = strata.speculative_decoder(
        without_layers(target, config.hidden_size),
        make_drafter(drafter, config),
        draft_rule="sample",
    )

    def start_and_step(params):
        return decoder.step(params, decoder.init(params, PROMPT))

    check_portable(export(start_and_step, params))


def export_verifier(verifier, vocab_size):
    number, rows = shape(dtype=jnp.int32), NUM_DRAFT_TOKENS

    def decide(seed, position, window, target_probs, proposal):
        key = strata._rng.request_key(seed)
        draws = verifier.draw(key, position, window, rows)
        return verifier.verify(draws, target_probs, proposal)

    proposal = strata.Proposal(
        tokens=shape(rows, dtype=jnp.int32),
        measure=shape(rows, vocab_size),
        kind=shape(rows, dtype=jnp.int32),
    )
    seed, probs = shape(dtype=jnp.uint32), shape(rows + 1, vocab_size)
    return export(decide, seed, number, number, probs, proposal)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("verifier", [verifiers.exact_match, verifiers.token])
def test_verifiers_lower(verifier, vocab_size):
    check_portable(export_verifier(verifier(), vocab_size))


GATES = {
    "always": gates.always(),
    "picked": gates.picked(),
    "top": gates.top(),
    "entropy": gates.entropy(),
    "include_then_stop": gates.include_then_stop(),
    "soft": gates.soft(lambda settings, context, draft_probs: jnp.sqrt(draft_probs)),
    "all_of": gates.all_of(gates.picked(), gates.entropy()),
}


def export_gates(vocab_size):
    rows, integers = NUM_DRAFT_TOKENS, functools.partial(shape, dtype=jnp.int32)
    context = strata.GateContext(
        committed=strata.Context(tokens=integers(MAX_LENGTH), length=integers()),
        row=integers(),
        draft_tokens=integers(rows),
        draft_token_probs=shape(rows),
        state=None,
    )
    settings = {"threshold": shape(), "max_entropy": shape()}

    def decide(settings, context, draft_probs):
        return {
            name: gate.decide(settings, context.replace(state=gate.init()), draft_probs)
            for name, gate in GATES.items()
        }

    return export(decide, settings, context, shape(vocab_size))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_gates_lower(vocab_size):
    exported = export_gates(vocab_size)
    check_portable(exported)
    assert len(exported.out_avals) == 3 * len(GATES)


FOLDED = ("q4_1", "trellis2_mul1")
LAYOUTS = (
    *map(experts.uniform_layout, experts.FORMATS),
    *(experts.uniform_layout(name, is_folded=True) for name in FOLDED),
)
WIDTH, NUM_SLOTS, PER_TOKEN = 256, 2, 2


def run_window(bank, cache, states, routing, num_rows, num_kept, *, mode):
    """What a model does with a layer's experts in a window."""
    cache, status = experts.adapt(bank, cache)
    outputs, fault = experts.run_jobs(bank, cache, states, routing, num_rows, mode=mode)
    return outputs, experts.count_uses(cache, routing, num_kept), status | fault


def export_window(bank, mode):
    num_experts, num_words = bank.layout.shape[0], bank.shape.num_words
    cache = jax.eval_shape(
        lambda: experts.empty_expert_cache(NUM_SLOTS, num_words, num_experts)
    )
    rows, number = NUM_DRAFT_TOKENS + 1, shape(dtype=jnp.int32)
    routing = shape(rows, PER_TOKEN, dtype=jnp.int32)
    run = functools.partial(run_window, mode=mode)
    return export(run, bank, cache, shape(rows, WIDTH), routing, number, number)


def every_format(is_on_host):
    packed = experts.PackedShape(LAYOUTS, WIDTH, WIDTH)
    memory = "pinned_host" if is_on_host else None
    words = shape(len(LAYOUTS), packed.num_words, dtype=jnp.uint32, memory=memory)
    layout = shape(len(LAYOUTS), dtype=jnp.int32)
    return experts.PackedExperts(words, layout, packed, is_on_host)


@pytest.mark.parametrize("mode", ["singleton", "shared"])
@pytest.mark.parametrize("tier", ["resident", "host"])
def test_experts_of_every_format_lower(tier, mode):
    assert {layout.gate for layout in LAYOUTS} == set(experts.FORMATS)
    is_on_host = tier == "host"
    exported = export_window(every_format(is_on_host), mode)
    check_portable(exported)
    # Moving to the device is part of the program.
    assert ("annotate_device_placement" in exported.mlir_module()) == is_on_host


def test_cold_experts_hold_a_callback(tmp_path):
    packed = experts.PackedShape((experts.uniform_layout("q8_0"),), WIDTH, WIDTH)
    bank = experts.PackedExperts(
        words=np.zeros((2, packed.num_words), np.uint32),
        layout=np.zeros(2, np.int32),
        shape=packed,
    )
    file = experts.write_expert_file(tmp_path / "experts.safetensors", [bank])
    with pytest.raises(NotImplementedError, match="callback"):
        check_portable(export_window(file.bank(0), "singleton"))


def export_step():
    # The state of a process without x64: its numbers are float32.
    with jax.enable_x64(False):
        state = start_shapes("bundled")
    decoder = make_decoder("bundled", verifiers.token)
    return export(decoder.step, load_shapes("bundled")[1], state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: export_gates(256),
        lambda: export_verifier(verifiers.token(), 256),
        lambda: export_verifier(verifiers.exact_match(), 256),
        export_step,
        lambda: export_window(every_format(False), "shared"),
        export_packed_window,
    ],
    ids=["gates", "token", "exact_match", "step", "experts", "packed"],
)
def test_x64_widens_no_array(make):
    with jax.enable_x64(True):
        check_float32(make().mlir_module())


# What the checks above can see.


def test_a_callback_is_not_portable():
    def ask_the_host(x):
        return jax.pure_callback(np.sin, shape(3), x, vmap_method="sequential")

    with pytest.raises(NotImplementedError, match="callback"):
        check_portable(export(ask_the_host, shape(3)))


def test_what_one_platform_has_alone_is_refused():
    with pytest.raises(NotImplementedError, match=r"cuda|rocm|tpu"):
        export(jax.scipy.linalg.schur, shape(3, 3))


def test_wide_numbers_are_seen():
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.int64):
            exported = export(lambda x: x + x, shape(3, dtype=dtype))
            with pytest.raises(AssertionError):
                check_portable(exported)
        wide = export(lambda x, y: (x + x, y), shape(dtype=jnp.float64), shape())
    with pytest.raises(AssertionError, match="f64"):
        check_float32(wide.mlir_module())


@pytest.mark.slow
def test_the_check_for_a_device_runs(tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, ROOT / "experiments" / "backend_check.py"),
            *("--smoke", "--platform=cpu", f"--out={tmp_path}"),
            f"--compilation_cache={ROOT / '.cache' / 'jax'}",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"jax {jax.__version__}, flax ")
    report = json.loads((tmp_path / "backend_check_cpu.json").read_text())
    assert report["settings"]["platform"] == "cpu"
    widths = report["parts"]["widths, default"]
    for num_equal, num_rows in widths["singleton"].values():
        assert num_equal == num_rows > 0
    assert any(
        num_equal < num_rows for num_equal, num_rows in widths["batched"].values()
    )
