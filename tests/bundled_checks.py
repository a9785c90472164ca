"""What the tests of the bundled model share: its experts in every format and place."""

import dataclasses
import functools
import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import strata_jax as strata
from strata_jax import checkpoints, drafters, experts, gates, models, targets

MAX_LENGTH = 640
PROMPT = "ROMEO. Good morrow, good morrow, cousin. Good morr"
GATES = {
    "picked": lambda: gates.picked(0.3),
    "top": lambda: gates.top(0.3),
    "none": gates.always,
}
DRAFTERS = ("mtp", "suffix_root")
TIERS = ("resident", "host", "cold")
UNFOLDED = [experts.uniform_layout(name) for name in sorted(experts.FORMATS)]
FOLDED = [
    experts.uniform_layout(name, is_folded=True)
    for name in ("float32", "q4_1", "q8_0", "trellis2_mul1")
]
LAYOUTS = UNFOLDED + FOLDED
# One of each kind: a trellis of every size and code, and of both folded kinds one.
FEW_LAYOUTS = [
    experts.uniform_layout(name)
    for name in ("float32", "bfloat16", "q8_0", "q4_0", "q4_1")
]
FEW_LAYOUTS += [
    experts.uniform_layout(name)
    for name in ("trellis2_mul1", "trellis3_mcg", "trellis4_3inst")
]
FEW_LAYOUTS += [
    experts.uniform_layout(name, is_folded=True) for name in ("q8_0", "trellis2_mul1")
]


@functools.cache
def loaded():
    config, params = checkpoints.load_bundled_config()
    return config, models.unpack_model_experts(params)


def encode(layout, matrices):
    """Packs an expert; trellis words are random, since their encoder takes minutes.

    Any words are valid weights, and it is the arithmetic that is tested here.
    """
    pieces = []
    names = (layout.gate, layout.up, layout.down)
    for name, matrix in zip(names, matrices, strict=True):
        form = experts.find_format(name)
        if not name.startswith("trellis"):
            plain = dataclasses.replace(layout, gate=name, up=name, down=name)
            sizes = plain.num_words(matrices[0].shape[1], matrices[0].shape[0])
            index = len(pieces)
            start = sum(sizes[:index])
            words = plain.encode(*matrices)[start : start + sizes[index]]
        else:
            seed = hashlib.sha256(matrix.tobytes()).digest()[:4]
            random = np.random.default_rng(int.from_bytes(seed, "little"))
            words = random.integers(0, 2**32, form.num_words(*matrix.shape), np.uint32)
            words[:1] = np.float32([matrix.std()]).view(np.uint32)
        pieces.append(words)
    return np.concatenate(pieces)


def pack(weights, layouts):
    """Packs a layer's experts, one layout for each."""
    distinct = tuple(dict.fromkeys(layouts))
    num_experts, expert_size, hidden_size = weights.gate.shape
    shape = experts.PackedShape(distinct, hidden_size, expert_size)
    words = np.zeros((num_experts, shape.num_words), np.uint32)
    arrays = [np.asarray(array) for array in (weights.gate, weights.up, weights.down)]
    for index, layout in enumerate(layouts):
        encoded = encode(layout, [array[index] for array in arrays])
        words[index, : encoded.size] = encoded
    index = np.array([distinct.index(layout) for layout in layouts], np.int32)
    return experts.PackedExperts(jnp.asarray(words), jnp.asarray(index), shape)


def with_layouts(params, layouts):
    """Spreads the layouts over the layers; a layer's experts have its own in turn.

    Few layouts in a layer, since each of them is compiled there.
    """
    num_layers = len(params.layers)
    layers = []
    for index, layer in enumerate(params.layers):
        few = layouts[index::num_layers] if len(layouts) >= num_layers else layouts
        num_experts = layer.experts.gate.shape[0]
        own = [few[i % len(few)] for i in range(num_experts)]
        layers.append(dataclasses.replace(layer, experts=pack(layer.experts, own)))
    return dataclasses.replace(params, layers=tuple(layers))


def placed(params, tiers, folder: pathlib.Path):
    """Puts the packed experts of each layer on a tier."""
    banks = [layer.experts for layer in params.layers]
    file = experts.write_expert_file(folder / "experts.safetensors", banks)
    moved = {
        "resident": lambda index: banks[index],
        "host": lambda index: experts.to_host(banks[index]),
        "cold": file.bank,
    }
    layers = tuple(
        dataclasses.replace(layer, experts=moved[tier](index))
        for index, (layer, tier) in enumerate(zip(params.layers, tiers, strict=True))
    )
    return dataclasses.replace(params, layers=layers)


def make_decoder(gate, drafter, *, num_cached_experts=0, verifier=None, K=7):
    config, _ = loaded()
    target = targets.singleton(
        config, max_length=MAX_LENGTH, num_cached_experts=num_cached_experts
    )
    source = drafters.mtp(num_draft_tokens=K)
    if drafter == "suffix_root":
        source = drafters.suffix_root(source)
    # Drawn from q, so that point masses are the suffix rows.
    return strata.speculative_decoder(
        target, source, GATES[gate](), verifier, draft_rule="sample"
    )


def prompt_tokens():
    return checkpoints.ByteTokenizer().encode(PROMPT)


def emitted_rows(windows):
    """p of every row that an emitted token was chosen from, [n, V]."""
    num_emitted = np.asarray(windows.verdict.num_emitted)
    probs = np.asarray(windows.target_probs)
    return np.concatenate([probs[i, :n] for i, n in enumerate(num_emitted)])


def plain_run(params, num_tokens, seed):
    """Tokens and rows of plain decoding, experts resident."""
    config, _ = loaded()
    decoder = strata.ancestral_decoder(targets.singleton(config, max_length=MAX_LENGTH))
    state = decoder.init(params, prompt_tokens(), seed=seed, max_new_tokens=num_tokens)
    state, windows = strata.decode(decoder, params, state, num_tokens, trace=True)
    return strata.output_tokens(state), emitted_rows(windows)


def run(decoder, params, num_tokens, seed):
    """Tokens, rows and windows of a run."""
    state = decoder.init(params, prompt_tokens(), seed=seed, max_new_tokens=num_tokens)
    windows = []
    while int(state.finish_reason) == strata.FinishReason.RUNNING:
        state, piece = strata.decode(decoder, params, state, 64, trace=True)
        windows.append(piece)
    windows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *windows)
    return strata.output_tokens(state), emitted_rows(windows), windows
