"""A run's state in one safetensors file."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import checkpoints
from strata_jax.training._loop import History, TrainingState

_CONFIGURATION = "configuration"
_STATE, _HISTORY = "state", "history/"
_PARAMS = _STATE + ".params"


def save_training(
    path: str | os.PathLike[str],
    state: TrainingState,
    history: History,
    configuration: Mapping[str, Any],
) -> None:
    """Writes all that a run needs to go on; the old file stays until it is whole.

    Args:
      path: a safetensors file; its folder must exist.
      state: the run's state.
      history: metrics by name.
      configuration: what makes this run and no other: sizes, seeds, hashes; made of
        what JSON has.

    Raises:
      FileNotFoundError: if the folder does not exist.
      ValueError: naming the tensor that cannot be stored; nothing is written then.

    Exactness: neither; `load_training` gives the same values bit for bit.
    """
    text = json.dumps(configuration, sort_keys=True).encode()
    tensors = {_CONFIGURATION: np.frombuffer(text, np.uint8)}
    tensors |= {_HISTORY + name: values for name, values in history.items()}
    tensors |= {name: np.asarray(leaf) for name, leaf in _leaves(state, _STATE).items()}
    checkpoints.save_safetensors(path, tensors)


def load_training(
    path: str | os.PathLike[str],
    like: TrainingState,
    configuration: Mapping[str, Any],
) -> tuple[TrainingState, dict[str, np.ndarray]]:
    """Reads what `save_training` wrote.

    Args:
      path: the file.
      like: a state of the same run, for its structure, shapes and types.
      configuration: the run's; the file must have the same.

    Returns:
      The state and the history.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file and the fault, if it is damaged, or was written by
        a run of another configuration.

    Exactness: neither; values are those saved, bit for bit.
    """
    path = pathlib.Path(path)
    tensors = checkpoints.read_safetensors(path)
    if _CONFIGURATION not in tensors:
        raise ValueError(f"{path}: not a checkpoint of a training run")
    stored = _flatten(json.loads(tensors.pop(_CONFIGURATION).tobytes()))
    # Through JSON, so that a tuple equals the list that was stored.
    expected = _flatten(json.loads(json.dumps(configuration)))
    differing = [
        f"{key}: {stored.get(key)!r} there, {expected.get(key)!r} here"
        for key in sorted(stored.keys() | expected.keys())
        if stored.get(key) != expected.get(key)
    ]
    if differing:
        raise ValueError(
            f"{path}: written by a run of another configuration; "
            + "; ".join(differing)
            + ". Give the same settings, or another folder"
        )
    history = {
        name.removeprefix(_HISTORY): tensors.pop(name)
        for name in sorted(tensors)
        if name.startswith(_HISTORY)
    }
    return _restore(path, tensors, like, _STATE), history


def load_trained_params(path: str | os.PathLike[str], like: Any) -> Any:
    """Reads the parameters of a run, of whatever configuration, to start another.

    Args:
      path: a file that `save_training` wrote.
      like: parameters of the same structure, shapes and types.

    Returns:
      The parameters.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: naming the file and the fault.

    Exactness: neither; values are those saved, bit for bit.
    """
    path = pathlib.Path(path)
    tensors = checkpoints.read_safetensors(path)
    if _CONFIGURATION not in tensors:
        raise ValueError(f"{path}: not a checkpoint of a training run")
    tensors = {name: t for name, t in tensors.items() if name.startswith(_PARAMS)}
    return _restore(path, tensors, like, _PARAMS)


def _restore(
    path: pathlib.Path, tensors: Mapping[str, np.ndarray], like: Any, prefix: str
) -> Any:
    leaves = _leaves(like, prefix)
    found = {name: _describe(leaf) for name, leaf in tensors.items()}
    wanted = {name: _describe(leaf) for name, leaf in leaves.items()}
    faults = [
        f"{name} is {found.get(name, 'missing')}, "
        f"expected {wanted.get(name, 'no such tensor')}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
    if faults:
        raise ValueError(f"{path}: not this model's state; " + "; ".join(faults))
    structure = jax.tree.structure(like)
    return jax.tree.unflatten(
        structure, [jnp.asarray(tensors[name]) for name in leaves]
    )


def _flatten(configuration: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Lays nested settings side by side, `{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat = {}
    for key, value in configuration.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _leaves(tree: Any, prefix: str) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _describe(leaf: Any) -> str:
    return f"{list(leaf.shape)} {leaf.dtype}"
