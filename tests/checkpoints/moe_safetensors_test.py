"""Loading the Qwen3-MoE family and its draft heads; saving models of all families."""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny_checkpoints import TESTDATA, Checkpoint

from strata_jax import checkpoints, models

CASES = {
    case["id"]: case
    for case in json.loads((TESTDATA / "cases.json").read_text(encoding="utf-8"))
}
CONFIG = models.MoeConfig(
    vocab_size=97,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_token=3,
    expert_size=16,
    normalize_router=True,
    rope_theta=10_000.0,
    norm_epsilon=1e-5,
    max_position=128,
    tie_embeddings=False,
)
LAYER = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
}
QWEN3_NEXT = {
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "projection": "mtp.fc.weight",
    "final_norm": "mtp.norm.weight",
    "embedding": "mtp.embed_tokens.weight",
    "head": "mtp.lm_head.weight",
}
DEEPSEEK_V3 = {
    "embedding_norm": "model.layers.2.enorm.weight",
    "hidden_norm": "model.layers.2.hnorm.weight",
    "projection": "model.layers.2.eh_proj.weight",
    "final_norm": "model.layers.2.shared_head.norm.weight",
    "embedding": "model.layers.2.embed_tokens.weight",
    "head": "model.layers.2.shared_head.head.weight",
}
NUM_SHARED = 12


class MoeCheckpoint(Checkpoint):
    """One to which a test may add parts as well."""

    def __init__(self, folder: pathlib.Path, name: str):
        super().__init__(folder, name)
        self.random = np.random.default_rng(0)

    def add(self, name, *shape):
        self.tensors[name] = self.random.normal(size=shape).astype(np.float32)

    def add_shared_experts(self):
        self.config["shared_expert_intermediate_size"] = NUM_SHARED
        routers = [name for name in self.tensors if name.endswith(".mlp.gate.weight")]
        for router in routers:
            prefix = router.removesuffix("gate.weight")
            self.add(f"{prefix}shared_expert.gate_proj.weight", NUM_SHARED, 48)
            self.add(f"{prefix}shared_expert.up_proj.weight", NUM_SHARED, 48)
            self.add(f"{prefix}shared_expert.down_proj.weight", 48, NUM_SHARED)
            self.add(f"{prefix}shared_expert_gate.weight", 1, 48)

    def add_draft_head(self, prefix="mtp.layers.0.", names=QWEN3_NEXT, own_tables=()):
        self.config["num_nextn_predict_layers"] = 1
        like = "model.layers.1."
        layer = {name: t for name, t in self.tensors.items() if name.startswith(like)}
        for name, values in layer.items():
            self.add(prefix + name.removeprefix(like), *values.shape)
        self.add(names["projection"], 48, 96)
        for field in ("embedding_norm", "hidden_norm", "final_norm"):
            self.add(names[field], 48)
        for field in own_tables:
            self.add(names[field], 97, 48)


@pytest.fixture
def untied(tmp_path) -> MoeCheckpoint:
    return MoeCheckpoint(tmp_path, "qwen3_moe_tiny_untied")


@pytest.fixture
def tied(tmp_path) -> MoeCheckpoint:
    return MoeCheckpoint(tmp_path, "qwen3_moe_tiny_tied")


# What is where.


def check_layer(layer, stored, prefix):
    def is_here(found, values):
        np.testing.assert_array_equal(found, values, err_msg=prefix)

    for field, name in LAYER.items():
        is_here(getattr(layer, field), stored.pop(f"{prefix}{name}.weight").T)
    is_here(layer.router, stored.pop(f"{prefix}mlp.gate.weight"))
    for part in ("gate", "up", "down"):
        for expert in range(8):
            values = stored.pop(f"{prefix}mlp.experts.{expert}.{part}_proj.weight")
            is_here(getattr(layer.experts, part)[expert], values)
        if layer.shared_expert is not None:
            values = stored.pop(f"{prefix}mlp.shared_expert.{part}_proj.weight")
            is_here(getattr(layer.shared_expert, part), values.T)
    if layer.shared_expert is not None:
        (values,) = stored.pop(f"{prefix}mlp.shared_expert_gate.weight")
        is_here(layer.shared_expert.router, values)


def check_places(params, stored, prefix, names):
    stored = dict(stored)
    for name, found in (
        ("model.embed_tokens.weight", params.embedding),
        ("model.norm.weight", params.final_norm),
        ("lm_head.weight", params.head),
    ):
        np.testing.assert_array_equal(found, stored.pop(name))
    for index, layer in enumerate(params.layers):
        check_layer(layer, stored, f"model.layers.{index}.")
    if params.mtp is not None:
        check_layer(params.mtp.layer, stored, prefix)
        for field, name in names.items():
            found = getattr(params.mtp, field)
            if found is None:
                assert name not in stored
            else:
                np.testing.assert_array_equal(found, stored.pop(name).T.T)
    assert not stored


def test_every_weight_arrives_in_its_place(untied):
    config, params = untied.load()
    assert config == CONFIG
    assert params.mtp is None
    check_places(params, untied.tensors, "", {})
    models.check_moe_params(config, params)


@pytest.mark.parametrize("own_tables", [(), ("embedding",), ("embedding", "head")])
@pytest.mark.parametrize(
    ("prefix", "names"),
    [("mtp.layers.0.", QWEN3_NEXT), ("model.layers.2.", DEEPSEEK_V3)],
)
def test_draft_head_under_both_naming_schemes(untied, prefix, names, own_tables):
    untied.add_draft_head(prefix, names, own_tables)
    untied.add_shared_experts()
    config, params = untied.load()
    assert config == dataclasses.replace(CONFIG, shared_expert_size=NUM_SHARED)
    assert params.mtp.config == config
    stored = dict(untied.tensors)
    # Its rows are turned, as those of every matrix of a layer: [embedding, hidden].
    stored[names["projection"]] = stored[names["projection"]].T
    check_places(params, stored, prefix, names)
    for field in ("embedding", "head"):
        assert (getattr(params.mtp, field) is None) == (field not in own_tables)
    models.check_moe_params(config, params)


# Completeness.


@pytest.mark.parametrize("index", range(7))
def test_bug_059_completeness(tmp_path, index):
    case = CASES["bug-059"]["inputs"]["cases"][index]
    expected = CASES["bug-059"]["expected"]["result"][index]
    checkpoint = MoeCheckpoint(tmp_path, "qwen3_moe_tiny_untied")
    tensors, config = checkpoint.tensors, checkpoint.config
    if "tie_word_embeddings" in case:
        config["tie_word_embeddings"] = case["tie_word_embeddings"]
        if not case["has_lm_head"]:
            del tensors["lm_head.weight"]
    if "mtp_layers" in case:
        config["num_nextn_predict_layers"] = case["mtp_layers"]
        if case["mtp_tensors_present"]:
            assert not case["mtp_embed_present"]
            checkpoint.add_draft_head()
    if "extra_unknown_tensor" in case:
        tensors[case["extra_unknown_tensor"]] = np.zeros(1, np.float32)
    if "lm_head_shape" in case:
        assert case["lm_head_shape"] == "[V+1,d] vs config V"
        tensors["lm_head.weight"] = np.zeros((98, 48), np.float32)
    faults = {
        "error listing lm_head.weight": r"missing: lm_head\.weight$",
        "error, or speculation=mtp unavailable with a clear message": (
            r"num_nextn_predict_layers states a draft head, and there is none: neither "
            r"mtp\.fc\.weight nor model\.layers\.2\.eh_proj\.weight"
        ),
        "warning or error, documented": r"not part of this model: model\.foo$",
        "error naming both shapes": r"lm_head\.weight has \[98, 48\].*\[97, 48\]$",
    }
    if expected in faults:
        with pytest.raises(
            ValueError, match=rf"model\.safetensors.*{faults[expected]}"
        ):
            checkpoint.load()
        return
    loaded_config, params = checkpoint.load()
    assert loaded_config.tie_embeddings == config["tie_word_embeddings"]
    if expected == "lm_head is embed (same values)":
        assert params.head is None
    elif expected == "loaded as stored":
        np.testing.assert_array_equal(params.head, tensors["lm_head.weight"])
    else:
        assert expected == "shared with target embedding"
        assert params.mtp.embedding is None and params.mtp.head is None


def test_all_faults_are_listed_at_once(untied):
    untied.add_draft_head()
    for name in (
        "model.norm.weight",
        "model.layers.1.mlp.experts.7.up_proj.weight",
        "mtp.norm.weight",
        "mtp.layers.0.mlp.experts.0.gate_proj.weight",
    ):
        del untied.tensors[name]
    untied.add("model.layers.0.self_attn.q_proj.bias", 64)
    untied.add("mtp.layers.1.input_layernorm.weight", 48)
    untied.add("model.layers.0.mlp.experts.8.up_proj.weight", 16, 48)
    untied.add("model.layers.0.mlp.experts.3.down_proj.weight", 16, 48)
    untied.add("mtp.fc.weight", 48, 48)
    with pytest.raises(ValueError) as caught:
        untied.load()
    for part in (
        "model.safetensors: not a complete qwen3_moe checkpoint",
        "missing: model.layers.1.mlp.experts.7.up_proj.weight, model.norm.weight, "
        "mtp.layers.0.mlp.experts.0.gate_proj.weight, mtp.norm.weight",
        "not part of this model: model.layers.0.mlp.experts.8.up_proj.weight, "
        "model.layers.0.self_attn.q_proj.bias, mtp.layers.1.input_layernorm.weight",
        "model.layers.0.mlp.experts.3.down_proj.weight has [16, 48], expected [48, 16]",
        "mtp.fc.weight has [48, 48], expected [48, 96]",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("stated", [0, None, "absent"])
@pytest.mark.parametrize(
    ("prefix", "names"),
    [("mtp.layers.0.", QWEN3_NEXT), ("model.layers.2.", DEEPSEEK_V3)],
)
def test_draft_head_that_is_not_stated_is_not_dropped(untied, stated, prefix, names):
    untied.add_draft_head(prefix, names)
    untied.config["num_nextn_predict_layers"] = stated
    if stated == "absent":
        del untied.config["num_nextn_predict_layers"]
    with pytest.raises(ValueError, match="num_nextn_predict_layers: 1 to load it"):
        untied.load()


def test_shared_expert_is_stated_or_absent(untied):
    untied.add_shared_experts()
    assert untied.load()[1].layers[1].shared_expert is not None
    untied.config["shared_expert_intermediate_size"] = 0
    with pytest.raises(ValueError, match=r"not part .*mlp\.shared_expert_gate\.weight"):
        untied.load()


def test_fused_experts_are_refused(untied):
    for part, shape in (("gate_up_proj", (8, 32, 48)), ("down_proj", (8, 48, 16))):
        for layer in range(2):
            untied.add(f"model.layers.{layer}.mlp.experts.{part}", *shape)
    with pytest.raises(ValueError, match="one by one") as caught:
        untied.load()
    assert str(caught.value).count("mlp.experts.gate_up_proj") == 2


def test_tied_head_that_is_stored_must_be_the_embedding(tied):
    assert tied.load()[1].head is None
    embedding = tied.tensors["model.embed_tokens.weight"]
    tied.tensors["lm_head.weight"] = embedding.copy()
    assert tied.load()[1].head is None
    tied.tensors["lm_head.weight"][96, 47] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight differs.*tie_word"):
        tied.load()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_local_experts", 10**9),
        ("num_hidden_layers", 10**9),
        ("num_experts", 10**9),
    ],
)
def test_stated_counts_are_not_believed(untied, key, value):
    if key == "num_experts":
        del untied.config["num_local_experts"]
    untied.config[key] = value
    with pytest.raises(ValueError, match=r"states .* experts, but has only 69 t"):
        untied.load()


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "vocab_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "num_attention_heads",
    ],
)
def test_stated_sizes_are_not_believed(untied, key):
    untied.config[key] = 10**15
    with pytest.raises(ValueError, match=r"expected \[|missing: "):
        untied.load()


# The configuration.


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("decoder_sparse_step", 2),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("first_k_dense_replace", 1),
        ("head_dim", 15),
        ("hidden_act", "gelu"),
        ("mlp_only_layers", [0]),
        ("moe_intermediate_size", None),
        ("n_shared_experts", 1),
        ("norm_topk_prob", 1),
        ("num_experts", 4),
        ("num_experts_per_tok", 0),
        ("num_experts_per_tok", 9),
        ("num_nextn_predict_layers", -1),
        ("num_nextn_predict_layers", 2),
        ("num_nextn_predict_layers", "1"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("routed_scaling_factor", 2.5),
        ("scoring_func", "sigmoid"),
        ("shared_expert_intermediate_size", -1),
        ("use_sliding_window", True),
    ],
)
def test_configuration_that_cannot_be_honoured_is_refused(untied, key, value):
    untied.config[key] = value
    with pytest.raises(ValueError, match=rf"config\.json: .*{key}"):
        untied.load()


def test_all_settings_at_fault_are_listed_at_once(untied):
    untied.config |= {"attention_bias": True, "mlp_only_layers": [1]}
    untied.config |= {"rope_scaling": {"rope_type": "yarn"}, "rms_norm_eps": "small"}
    del untied.config["hidden_size"]
    with pytest.raises(ValueError) as caught:
        untied.load()
    for part in (
        "attention_bias = True is not supported; supported: absent or False",
        "mlp_only_layers = [1] is not supported; supported: absent or []",
        "rope_scaling = {'rope_type': 'yarn'} is not supported",
        "rms_norm_eps must be a positive, finite number, got 'small'",
        "hidden_size must be an integer of at least 1, but is missing",
    ):
        assert part in str(caught.value)


def test_published_configuration_keys_and_defaults(untied):
    # As published before transformers 5.
    untied.config["num_experts"] = untied.config.pop("num_local_experts")
    untied.config |= {"rope_theta": 1_000_000, "rope_scaling": None}
    untied.config |= {"sliding_window": 4096, "use_sliding_window": False}
    for key in ("rope_parameters", "norm_topk_prob", "tie_word_embeddings"):
        del untied.config[key]
    config, _ = untied.load()
    assert config == dataclasses.replace(
        CONFIG, rope_theta=1_000_000.0, normalize_router=False
    )


def test_dtype_converts_from_the_stored_type(untied):
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    stored = untied.tensors[name]
    _, params = untied.load(dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.bfloat16.dtype}
    np.testing.assert_array_equal(
        params.layers[0].experts.up[5], stored.astype(ml_dtypes.bfloat16)
    )


# Saving.


def random_model(kind, dtype):
    """A model of some kind; in every array there is a NaN and a negative zero."""
    if kind == "llama":
        config = models.LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=24,
            rope_theta=12345.678,
        )
        make = models.random_params
        options = {}
    else:
        tied, num_shared, with_mtp = {
            "plain": (False, 0, False),
            "tied": (True, 0, True),
            "shared expert": (False, NUM_SHARED, True),
            "own tables": (True, 0, True),
        }[kind]
        config = dataclasses.replace(
            CONFIG,
            num_experts=3,
            shared_expert_size=num_shared,
            rope_theta=12345.678,
            tie_embeddings=tied,
        )
        make = models.random_moe_params
        options = {"with_mtp": with_mtp}
    shapes = jax.eval_shape(lambda: make(config, jax.random.key(0), **options))
    random = np.random.default_rng(0)

    def fill(leaf):
        values = random.normal(size=leaf.shape).astype(dtype)
        values.flat[:2] = np.nan, -0.0
        return jnp.asarray(values)

    params = jax.tree.map(fill, shapes)
    if kind == "own tables":
        tables = {name: fill(params.embedding) for name in ("embedding", "head")}
        params = params.replace(mtp=params.mtp.replace(**tables))
    return config, params


def check_same(found, expected):
    assert found[0] == expected[0]
    assert jax.tree.structure(found[1]) == jax.tree.structure(expected[1])
    leaves = (jax.tree.leaves(params) for _, params in (found, expected))
    for one, other in zip(*leaves, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


KINDS = ("llama", "plain", "tied", "shared expert", "own tables")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_saved_model_comes_back_the_same(tmp_path, kind, dtype):
    config, params = random_model(kind, dtype)
    folder = tmp_path / "new" / "model"
    checkpoints.save_model(folder, config, params)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    found = checkpoints.load_safetensors(folder, dtype=dtype)
    check_same(found, (config, params))
    # Every single tensor counts.
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    for name in (min(tensors), max(tensors)):
        changed = dict(tensors)
        changed[name] = tensors[name].copy()
        changed[name].view(np.uint8).flat[-1] ^= 1
        checkpoints.save_safetensors(path, changed)
        with pytest.raises(AssertionError):
            check_same(
                checkpoints.load_safetensors(folder, dtype=dtype), (config, params)
            )


@pytest.mark.parametrize("name", ["qwen3_moe_tiny_untied", "qwen3_moe_tiny_tied"])
def test_saved_files_are_those_of_transformers(tmp_path, name):
    source = TESTDATA / name
    checkpoints.save_model(tmp_path, *checkpoints.load_safetensors(source))
    ours = checkpoints.read_safetensors(tmp_path / "model.safetensors")
    theirs = checkpoints.read_safetensors(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, values in theirs.items():
        np.testing.assert_array_equal(ours[key], values)
    stated = json.loads((tmp_path / "config.json").read_text())
    wanted = json.loads((source / "config.json").read_text())
    assert stated.pop("num_experts") == wanted.pop("num_local_experts")
    # As published models have it, and for older readers.
    assert stated.pop("rope_theta") == wanted["rope_parameters"]["rope_theta"]
    assert stated.pop("shared_expert_intermediate_size") == 0
    for key, value in stated.items():
        assert wanted[key] == value, key


def test_saved_draft_head_has_the_names_of_qwen3_next(tmp_path, untied):
    untied.add_draft_head(own_tables=("embedding", "head"))
    config, params = untied.load()
    checkpoints.save_model(tmp_path / "again", config, params)
    saved = checkpoints.read_safetensors(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == untied.tensors.keys()
    for name, values in untied.tensors.items():
        np.testing.assert_array_equal(saved[name], values)


class OtherExperts:
    """Experts in a form that safetensors of this family do not have."""

    def check(self, name, shape):
        pass


def test_what_cannot_be_saved_is_refused(tmp_path):
    config, params = random_model("tied", np.float32)
    first = params.layers[0]

    def with_first(**change):
        layers = (first.replace(**change), *params.layers[1:])
        return params.replace(layers=layers)

    other = dataclasses.replace(config, num_experts_per_token=2)
    drafting = models.with_draft_vocabulary(params, [1, 2])
    llama_config, llama = random_model("llama", np.float32)
    normed = llama.layers[1].replace(query_norm=first.query_norm)
    llama_normed = llama.replace(layers=(llama.layers[0], normed))
    half = jnp.zeros(48, jnp.float16)
    for each_config, each, reason in (
        (config, llama, "one family, got MoeConfig and LlamaParams"),
        (llama_config, params, "one family, got LlamaConfig and MoeParams"),
        (config, with_first(router=jnp.zeros((2, 48))), r"layers\[0\]\.router"),
        (config, with_first(query_norm=None), r"layers\[0\]\.query_norm is None"),
        (config, with_first(experts=OtherExperts()), "experts is not ExpertWeights"),
        (config, params.replace(mtp=params.mtp.replace(config=other)), r"mtp\.config"),
        (config, drafting, "draft vocabulary"),
        (config, params.replace(final_norm=half), "one type.*float16, float32"),
        (llama_config, llama_normed, r"layers\[1\] has norms of queries"),
    ):
        with pytest.raises(ValueError, match=reason):
            checkpoints.save_model(tmp_path / "model", each_config, each)
    assert not os.listdir(tmp_path)


def test_everything_that_cannot_be_saved_is_listed(tmp_path):
    config, params = random_model("shared expert", np.float32)
    shared = params.mtp.layer.shared_expert.replace(router=None)
    layer = params.mtp.layer.replace(key_norm=None, shared_expert=shared)
    params = params.replace(mtp=params.mtp.replace(layer=layer))
    with pytest.raises(ValueError) as caught:
        checkpoints.save_model(tmp_path, config, params)
    assert str(caught.value).endswith(
        "mtp.layer.key_norm is None; mtp.layer.shared_expert.router is None"
    )


def test_interrupted_save_leaves_the_old_model(tmp_path, monkeypatch):
    old = random_model("plain", np.float32)
    checkpoints.save_model(tmp_path, *old)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(tensors, filename, metadata):
        pathlib.Path(filename).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save_model(tmp_path, *random_model("tied", np.float32))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    check_same(checkpoints.load_safetensors(tmp_path), old)
