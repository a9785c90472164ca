"""The `config.json` of Hugging Face checkpoints, read and written."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from strata_jax.checkpoints._json import read_json_object
from strata_jax.models import LlamaConfig, MoeConfig

# Keys of the configurations' fields; heads come before what follows from them.
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "num_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_expert_size": "shared_expert_intermediate_size",
    "normalize_router": "norm_topk_prob",
    "rope_theta": "rope_theta",
    "norm_epsilon": "rms_norm_eps",
    "max_position": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
_NUM_EXPERTS_OF_TRANSFORMERS_5 = "num_local_experts"
_MTP = "num_nextn_predict_layers"
# Settings that change the arithmetic, with the values that leave it as it is.
_INERT_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}


@dataclasses.dataclass(frozen=True)
class _Family:
    """What tells one `model_type` from another.

    Attributes:
      config: its configuration.
      architecture: its class in `transformers`.
      defaults: by key, the family's own, of keys that may be absent.
      inert_values: of settings that change the arithmetic.
    """

    config: type[LlamaConfig] | type[MoeConfig]
    architecture: str
    defaults: Mapping[str, Any]
    inert_values: Mapping[str, tuple[Any, ...]]


_FAMILIES = {
    "llama": _Family(
        config=LlamaConfig,
        architecture="LlamaForCausalLM",
        defaults={
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        inert_values=_INERT_VALUES | {_MTP: (0, None)},
    ),
    "qwen3_moe": _Family(
        config=MoeConfig,
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "shared_expert_intermediate_size": 0,
            "norm_topk_prob": False,
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
        inert_values=_INERT_VALUES
        | {
            "decoder_sparse_step": (1,),
            "dual_chunk_attention_config": (None,),
            "first_k_dense_replace": (0, None),
            "mlp_only_layers": ([], None),
            "n_group": (1, None),
            "n_shared_experts": (0, None),
            "routed_scaling_factor": (1, None),
            "scoring_func": ("softmax", None),
            "use_sliding_window": (False, None),
            # Drafts are chained through one layer; 1 is read by itself.
            _MTP: (0, 1, None),
        },
    ),
}


def read_config(path: pathlib.Path) -> tuple[LlamaConfig | MoeConfig, bool]:
    """Reads a configuration.

    Args:
      path: a `config.json`.

    Returns:
      The configuration, and whether the model has a draft head.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file, if it is damaged, or of another family; or listing
        every setting that is missing, wrong or not supported.
    """
    stated = read_json_object(path, path.read_bytes())
    model_type = stated.get("model_type")
    # The type first: the entry may be a list, which has no hash.
    if type(model_type) is not str or model_type not in _FAMILIES:
        raise ValueError(
            f"{path}: model_type {model_type!r} is not supported; supported: "
            + ", ".join(_FAMILIES)
        )
    family = _FAMILIES[model_type]
    faults = [
        f"{key} = {stated[key]!r} is not supported; supported: absent"
        + "".join(f" or {value!r}" for value in inert if value is not None)
        for key, inert in family.inert_values.items()
        if key in stated and stated[key] not in inert
    ]
    stated = _with_rotary_base(stated, faults)
    if (number := stated.get(_NUM_EXPERTS_OF_TRANSFORMERS_5)) is not None:
        other = stated.get("num_experts")
        if other is not None and other != number:
            faults.append(
                f"num_experts = {other!r} and {_NUM_EXPERTS_OF_TRANSFORMERS_5} = "
                f"{number!r} differ; state one of them"
            )
        stated["num_experts"] = number
    values: dict[str, Any] = {}
    for name, kind in _fields(family.config).items():
        key = _KEYS[name]
        default = family.defaults.get(key)
        if name == "num_kv_heads":
            default = values.get("num_heads", 1)
        elif name == "head_dim":
            default = values.get("hidden_size", 1) // values.get("num_heads", 1)
        value: Any = default if stated.get(key) is None else stated[key]
        least = 0 if name == "shared_expert_size" else 1
        if _is_valid(value, kind, least):
            values[name] = float(value) if kind == "float" else value
        else:
            wanted = {
                "int": f"an integer of at least {least}",
                "float": "a positive, finite number",
                "bool": "true or false",
            }[kind]
            found = "but is missing" if value is None else f"got {value!r}"
            faults.append(f"{key} must be {wanted}, {found}")
    if faults:
        raise ValueError(f"{path}: " + "; ".join(faults))
    try:
        return family.config(**values), bool(stated.get(_MTP))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def describe_config(
    config: LlamaConfig | MoeConfig, *, with_mtp: bool, dtype: np.dtype
) -> dict[str, Any]:
    """Returns what a `config.json` states of a model.

    Args:
      config: the configuration.
      with_mtp: whether the model has a draft head.
      dtype: of its weights.

    Returns:
      The JSON object, from which `read_config` gives the same configuration.
    """
    ((model_type, family),) = [
        item for item in _FAMILIES.items() if item[1].config is type(config)
    ]
    stated = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "dtype": dtype.name,
        "hidden_act": "silu",
        # Else `transformers` takes the ids of the family's first tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    plain = {"int": int, "float": float, "bool": bool}
    for name, kind in _fields(family.config).items():
        stated[_KEYS[name]] = plain[kind](getattr(config, name))
    # Where newer versions of `transformers` look.
    stated["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": stated["rope_theta"],
    }
    if with_mtp:
        stated[_MTP] = 1
    return stated


def _fields(config: type[LlamaConfig] | type[MoeConfig]) -> dict[str, str]:
    """Names of a configuration's fields and of their types, in the order of `_KEYS`."""
    kinds = {field.name: field.type for field in dataclasses.fields(config)}
    return {name: str(kinds[name]) for name in _KEYS if name in kinds}


def _with_rotary_base(stated: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    """The settings with `rope_theta` at the top: newer files have it further down."""
    found = dict(stated)
    for key in ("rope_scaling", "rope_parameters"):
        rotary = stated.get(key) or {}
        if not (
            isinstance(rotary, dict)
            and rotary.get("rope_type", rotary.get("type", "default")) == "default"
            and rotary.get("partial_rotary_factor", 1) == 1
        ):
            faults.append(
                f"{key} = {rotary!r} is not supported; use a checkpoint without rotary "
                "scaling"
            )
        elif "rope_theta" in rotary:
            found["rope_theta"] = rotary["rope_theta"]
    return found


def _is_valid(value: Any, kind: str, least: int) -> bool:
    if kind == "float":
        try:
            return type(value) in (int, float) and 0 < value and math.isfinite(value)
        except OverflowError:  # an integer beyond every float
            return False
    if kind == "bool":
        return type(value) is bool
    return type(value) is int and value >= least
