"""Reading, writing and refusing safetensors files; loading Hugging Face llamas."""

import json
import math
import os
import pathlib
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny_checkpoints import TESTDATA, Checkpoint

from strata_jax import checkpoints
from strata_jax.models import LlamaConfig

CASES = {
    case["id"]: case
    for case in json.loads((TESTDATA / "cases.json").read_text(encoding="utf-8"))
}
FILES = CASES["bug-058"]["inputs"]["files_hex"]
EXPECTED = CASES["bug-058"]["expected"]
# The tensor at fault, where the header can be read at all.
BLAMED = {
    "shape_larger_than_bytes": "t",
    "offset_past_end": "t",
    "reversed_offsets": "t",
    "overlapping": "v",
    "gap_trailing": "t",
    "unknown_dtype": "t",
    "negative_shape": "t",
}


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "model.safetensors"


def write_raw(path, header, data=b"") -> pathlib.Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_valid_bfloat16_file(path):
    path.write_bytes(bytes.fromhex(FILES["valid_bf16_4"]))
    (values,) = checkpoints.read_safetensors(path).values()
    assert values.dtype == ml_dtypes.bfloat16
    expected = [math.nan if v == "nan" else v for v in EXPECTED["valid_bf16_4"]]
    np.testing.assert_array_equal(values.astype(np.float32), expected)


def test_valid_scalar_and_empty_file(path):
    path.write_bytes(bytes.fromhex(FILES["valid_scalar_and_empty"]))
    tensors = checkpoints.read_safetensors(path)
    expected = EXPECTED["valid_scalar_and_empty"]
    assert tensors["s"].shape == ()
    assert tensors["s"] == expected["s"]
    assert list(tensors["e"].shape) == expected["e_shape"]


@pytest.mark.parametrize("name", [n for n in FILES if not n.startswith("valid")])
def test_invalid_file_is_refused_by_name(path, name):
    path.write_bytes(bytes.fromhex(FILES[name]))
    with pytest.raises(ValueError) as caught:
        checkpoints.read_safetensors(path)
    assert str(path) in str(caught.value)
    if name in BLAMED:
        assert f"tensor {BLAMED[name]} " in str(caught.value)


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        (b"", b"", "not valid JSON"),
        (b"[]", b"", "must be a JSON object"),
        (b"[" * 200_000, b"", "not valid JSON"),
        (b'{"t": \xff}', b"", "not valid JSON"),
        (b'{"t":{"shape":[' + b"9" * 5_000 + b"]}}", b"", "not valid JSON"),
        (b'{"t":{"shape":[],"shape":[]}}', b"", "'shape' appears twice"),
        ({"t": 3}, b"", "tensor t"),
        ({"t": {}}, b"", "tensor t"),
        ({"t": entry([True], 0, 4)}, bytes(4), "tensor t has an invalid shape"),
        ({"t": entry(4, 0, 4)}, bytes(4), "tensor t has an invalid shape"),
        ({"t": entry([2**62, 2**62], 0, 4)}, bytes(4), "tensor t .* needs"),
        ({"t": entry([1], -4, 0)}, bytes(4), "tensor t has invalid data_offsets"),
        ({"t": entry([1], 0, 4) | {"data_offsets": [0]}}, bytes(4), "data_offsets"),
        ({"t": entry([1], 4, 8)}, bytes(8), "tensor t leaves a gap"),
        ({"t": entry([1], 0, 4, dtype="F4")}, bytes(4), "tensor t .*'F4'"),
        ({"t": entry([1], 0, 4, dtype=["F32"])}, bytes(4), "tensor t .*type"),
    ],
)
def test_hostile_header_is_refused(path, header, data, reason):
    write_raw(path, header, data)
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{reason}"):
        checkpoints.read_safetensors(path)


def test_header_longer_than_the_file_is_not_read(path):
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"states a header of 9223372036854775808"):
        checkpoints.read_safetensors(path)


def make_arrays() -> dict[str, np.ndarray]:
    return {
        "float": np.arange(6, dtype=np.float32).reshape(2, 3),
        "transposed": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float16),
        "flags": np.array([True, False, True]),
        "bfloat16": np.array([1.5, -2, np.nan], ml_dtypes.bfloat16),
        "float8": np.array([1.5, -2], ml_dtypes.float8_e4m3fn),
        "bytes": np.arange(256, dtype=np.uint8),
    }


def test_saved_arrays_come_back_the_same(path):
    arrays = make_arrays()
    checkpoints.save_safetensors(path, arrays, {"step": "12"})
    found = checkpoints.read_safetensors(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"step": "12"}


def test_jax_arrays_are_saved_and_results_outlive_the_file(path):
    checkpoints.save_safetensors(path, {"a": jnp.arange(3.0)})
    found = checkpoints.read_safetensors(path)
    path.unlink()
    found["a"][0] = 5  # not a view of the file
    np.testing.assert_array_equal(found["a"], [5, 1, 2])


@pytest.mark.parametrize(
    ("tensors", "metadata", "reason"),
    [
        ({"a": np.array([object()])}, None, "a has type object"),
        ({"a": np.array([1j])}, None, "a has type complex128"),
        ({"__metadata__": np.zeros(1)}, None, "__metadata__"),
        ({3: np.zeros(1)}, None, "3 cannot be"),
        ({"a": np.zeros(1)}, {"step": 3}, "metadata"),
    ],
)
def test_refused_save_leaves_the_old_file(path, tensors, metadata, reason):
    checkpoints.save_safetensors(path, {"old": np.ones(2)})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=reason):
        checkpoints.save_safetensors(path, tensors, metadata)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_interrupted_save_leaves_the_old_file_and_no_other(path, monkeypatch):
    checkpoints.save_safetensors(path, {"old": np.ones(2)})
    before = path.read_bytes()

    def fail(tensors, filename, metadata):
        pathlib.Path(filename).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save_safetensors(path, {"new": np.ones(3)})
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_saved_file_has_ordinary_permissions(path):
    checkpoints.save_safetensors(path, {"a": np.ones(2)})
    ordinary = path.with_name("ordinary")
    ordinary.touch()
    assert path.stat().st_mode == ordinary.stat().st_mode


@pytest.fixture
def untied(tmp_path) -> Checkpoint:
    return Checkpoint(tmp_path, "llama_tiny_untied")


@pytest.fixture
def tied(tmp_path) -> Checkpoint:
    return Checkpoint(tmp_path, "llama_tiny_tied")


def test_every_weight_arrives_in_its_place():
    folder = TESTDATA / "llama_tiny_untied"
    config, params = checkpoints.load_safetensors(folder)
    assert config == LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        rope_theta=10_000.0,
        norm_epsilon=1e-5,
        max_position=128,
        tie_embeddings=False,
    )
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(
        params.embedding, stored.pop("model.embed_tokens.weight")
    )
    np.testing.assert_array_equal(params.final_norm, stored.pop("model.norm.weight"))
    np.testing.assert_array_equal(params.head, stored.pop("lm_head.weight"))
    fields = {
        "attention_norm": "input_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    for layer, weights in enumerate(params.layers):
        for field, name in fields.items():
            values = stored.pop(f"model.layers.{layer}.{name}.weight")
            np.testing.assert_array_equal(
                getattr(weights, field), values.T, err_msg=f"{layer} {field}"
            )
    assert not stored


def bug_059_cases():
    inputs = CASES["bug-059"]["inputs"]["cases"]
    results = CASES["bug-059"]["expected"]["result"]
    return list(zip(inputs, results, strict=True))


@pytest.mark.parametrize(("case", "expected"), bug_059_cases())
def test_completeness(tmp_path, case, expected):
    checkpoint = Checkpoint(tmp_path, "llama_tiny_untied")
    tensors, config = checkpoint.tensors, checkpoint.config
    if "tie_word_embeddings" in case:
        config["tie_word_embeddings"] = case["tie_word_embeddings"]
        if not case["has_lm_head"]:
            del tensors["lm_head.weight"]
    if "extra_unknown_tensor" in case:
        tensors[case["extra_unknown_tensor"]] = np.zeros(1, np.float32)
    if "lm_head_shape" in case:
        tensors["lm_head.weight"] = np.zeros((98, 64), np.float32)
    if "mtp_layers" in case:
        # A llama has no such heads here: they are refused, never left out silently.
        config["num_nextn_predict_layers"] = case["mtp_layers"]
        with pytest.raises(ValueError, match="num_nextn_predict_layers = 1"):
            checkpoint.load()
    elif expected == "lm_head is embed (same values)":
        loaded_config, params = checkpoint.load()
        assert loaded_config.tie_embeddings
        assert params.head is None
    elif expected == "loaded as stored":
        loaded_config, params = checkpoint.load()
        assert not loaded_config.tie_embeddings
        np.testing.assert_array_equal(params.head, tensors["lm_head.weight"])
    else:
        reason = {
            "error listing lm_head.weight": r"missing: lm_head\.weight",
            "warning or error, documented": r"not part of this model: model\.foo",
            "error naming both shapes": r"lm_head\.weight has \[98, 64\].*\[97, 64\]",
        }[expected]
        with pytest.raises(ValueError, match=rf"model\.safetensors.*{reason}"):
            checkpoint.load()


def test_all_faults_are_listed_at_once(untied):
    del untied.tensors["model.norm.weight"]
    del untied.tensors["model.layers.1.mlp.up_proj.weight"]
    untied.tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    untied.tensors["model.embed_tokens.weight"] = np.zeros((97, 32), np.float32)
    with pytest.raises(ValueError) as caught:
        untied.load()
    for part in (
        "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "not part of this model: model.layers.0.self_attn.q_proj.bias",
        "model.embed_tokens.weight has [97, 32], expected [97, 64]",
    ):
        assert part in str(caught.value)


def test_tied_head_that_is_stored_must_be_the_embedding(tied):
    embedding = tied.tensors["model.embed_tokens.weight"]
    tied.tensors["lm_head.weight"] = embedding.copy()
    config, params = tied.load()
    assert config.tie_embeddings
    assert params.head is None
    tied.tensors["lm_head.weight"][96, 63] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight differs.*tie_word"):
        tied.load()


def test_rotary_buffers_of_older_exports_are_not_read(untied):
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    untied.tensors[name] = np.zeros(8, np.float32)
    config, _ = untied.load()
    assert config.rope_theta == 10_000.0


def test_older_configuration_keys_and_defaults(untied):
    del untied.config["rope_parameters"], untied.config["head_dim"]
    untied.config |= {"rope_theta": 500_000, "rope_scaling": None}
    untied.config.pop("tie_word_embeddings")
    config, _ = untied.load()
    assert config.rope_theta == 500_000.0
    assert config.head_dim == 16
    assert not config.tie_embeddings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "qwen3"),
        ("model_type", None),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("tie_word_embeddings", "yes"),
        ("hidden_size", 64.5),
        ("hidden_size", True),
        ("num_hidden_layers", None),
        ("num_hidden_layers", 2**60),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", math.inf),
        ("rms_norm_eps", 10**400),
    ],
)
def test_configuration_that_cannot_be_honoured_is_refused(untied, key, value):
    untied.config[key] = value
    with pytest.raises(ValueError, match=str(untied.folder)):
        untied.load()


def test_rope_theta_inside_rope_parameters(untied):
    untied.config["rope_parameters"]["rope_theta"] = 250_000.0
    config, _ = untied.load()
    assert config.rope_theta == 250_000.0


def test_rope_scaling_of_type_default_is_none(untied):
    untied.config["rope_scaling"] = {"rope_type": "default"}
    config, _ = untied.load()
    assert config.rope_theta == 10_000.0


def test_dtype_converts_from_the_stored_type(untied):
    stored = untied.tensors["lm_head.weight"]
    untied.tensors = {
        name: values.astype(ml_dtypes.bfloat16)
        for name, values in untied.tensors.items()
    }
    _, params = untied.load(dtype=jnp.float32)
    assert params.head is not None and params.head.dtype == jnp.float32
    expected = stored.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(params.head, expected)


def test_integer_weights_are_refused(untied):
    norm = untied.tensors["model.norm.weight"]
    untied.tensors["model.norm.weight"] = norm.astype(np.int32)
    with pytest.raises(ValueError, match=r"model\.norm\.weight \(int32\)"):
        untied.load()


@pytest.fixture
def sharded(untied) -> Checkpoint:
    """The same llama in two shards; `index` and files are on disk."""
    names = sorted(untied.tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        weight_map |= dict.fromkeys(part, shard)
        safetensors.numpy.save_file(
            {name: untied.tensors[name] for name in part}, untied.folder / shard
        )
    (untied.folder / "config.json").write_text(json.dumps(untied.config))
    index = untied.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return untied


def edit_index(checkpoint, change):
    index = checkpoint.folder / "model.safetensors.index.json"
    stated = json.loads(index.read_text())
    change(stated["weight_map"])
    index.write_text(json.dumps(stated))


def test_shards_give_the_same_parameters(sharded):
    _, params = checkpoints.load_safetensors(sharded.folder)
    np.testing.assert_array_equal(params.head, sharded.tensors["lm_head.weight"])
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        np.testing.assert_array_equal(
            params.layers[layer].down, sharded.tensors[name].T
        )


def test_index_file_may_be_named(sharded):
    index = sharded.folder / "model.safetensors.index.json"
    _, params = checkpoints.load_safetensors(index)
    np.testing.assert_array_equal(params.head, sharded.tensors["lm_head.weight"])


def test_missing_shards_are_all_listed(sharded):
    for shard in sharded.folder.glob("model-*.safetensors"):
        shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"00001-of.*00002-of"):
        checkpoints.load_safetensors(sharded.folder)


def test_index_must_agree_with_the_shards(sharded):
    edit_index(sharded, lambda weight_map: weight_map.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"index\.json.*lm_head\.weight"):
        checkpoints.load_safetensors(sharded.folder)


def test_tensor_that_no_shard_holds_is_missing(sharded):
    shard = sharded.folder / "model-00001-of-00002.safetensors"
    tensors = safetensors.numpy.load_file(shard)
    del tensors["lm_head.weight"]
    safetensors.numpy.save_file(tensors, shard)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        checkpoints.load_safetensors(sharded.folder)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "", 3])
def test_index_must_not_leave_its_folder(sharded, shard):
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": shard}))
    with pytest.raises(ValueError, match=r"lm_head\.weight: expected the name of a"):
        checkpoints.load_safetensors(sharded.folder)


def test_absent_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        checkpoints.load_safetensors(tmp_path)
    source = TESTDATA / "llama_tiny_tied" / "model.safetensors"
    shutil.copy(source, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        checkpoints.load_safetensors(tmp_path)
