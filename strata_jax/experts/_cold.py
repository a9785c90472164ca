"""Cold experts: in a file on disk, read when a job needs them.

The file is a safetensors file that is mapped into memory and never loaded whole. Every
expert has a checksum, which is compared on every read: a file that was cut, swapped or
changed under a running program stops the request, and gives no token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax import lax

from strata_jax._files import replaced_file
from strata_jax._status import Status
from strata_jax.experts._cache import ExpertCache, find_slot
from strata_jax.experts._jobs import Jobs, Prepared
from strata_jax.experts._layout import ExpertLayout
from strata_jax.experts._packed import PackedExperts, PackedShape, Stored

_FORMAT = "strata_jax experts 1"
_LOG = logging.getLogger("strata_jax")


class ExpertFile:
    """An open file of experts.

    Attributes:
      path: where it is.
      fingerprint: a hash of all checksums and layouts; it names the weights.
      last_fault: what went wrong in the last read that failed, or None.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str | None = None):
        """Opens a file and checks its header.

        Args:
          path: the file.
          fingerprint: of the weights that are expected, or None for any.

        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: naming the file, if it is damaged or holds other weights.
        """
        self.path = pathlib.Path(path)
        self.last_fault: str | None = None
        self._descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._size = os.fstat(self._descriptor).st_size
        try:
            self._file = safetensors.safe_open(str(self.path), framework="numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(
                f"{self.path}: truncated, damaged, or no expert file: {error}"
            ) from error
        header = dict(self._file.metadata() or {})
        if header.get("format") != _FORMAT:
            raise ValueError(
                f"{self.path}: not an expert file: write one with write_expert_file"
            )
        self.fingerprint = _fingerprint(header)
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise ValueError(
                f"{self.path}: holds other weights (fingerprint {self.fingerprint}, "
                f"expected {fingerprint}): it was swapped, or belongs to another model"
            )
        try:
            self._checksums: dict[str, int] = dict(json.loads(header["checksums"]))
            self._layers = [
                _parse_layer(layer) for layer in json.loads(header["layers"])
            ]
            sizes = self._tensor_sizes()
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: damaged header: {error!r}") from error
        self._check_tensors(sizes)

    @property
    def num_layers(self) -> int:
        """Number of layers in the file."""
        return len(self._layers)

    def bank(self, layer: int) -> ColdExperts:
        """Returns the experts of a layer.

        Args:
          layer: its index.

        Returns:
          The experts, to be put into a layer's weights.

        Exactness: nothing is computed.
        """
        shape, index = self._layers[layer]
        return ColdExperts(
            layout=jnp.asarray(index, jnp.int32), file=self, layer=layer, shape=shape
        )

    def read(
        self, layer: int, experts: np.ndarray, num_words: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reads some experts of a layer in one batch; called from jitted code.

        Args:
          layer: its index.
          experts: `[n]` int32, -1 for none.
          num_words: W.

        Returns:
          `[n, W]` uint32, zero where nothing was asked for; and Status bits, `[]`
          int32: a fault is logged and kept in `last_fault`.

        Exactness: words are read, not computed; each expert's checksum is compared.
        """
        experts = np.asarray(experts)
        words = np.zeros((experts.size, num_words), np.uint32)
        status = Status.OK
        try:
            # Pages beyond the end of a file that was cut would kill the process.
            size = os.fstat(self._descriptor).st_size
            if size != self._size:
                raise OSError(f"the file has {size} bytes, it had {self._size}")
            for row, expert in enumerate(experts.tolist()):
                if expert >= 0:
                    name = _name(layer, expert)
                    found = self._file.get_tensor(name)
                    if zlib.crc32(found.tobytes()) != self._checksums[name]:
                        raise OSError(f"{name} does not have its checksum")
                    words[row, : found.size] = found
        # Whatever it was, it must not pass for weights.
        except Exception as error:
            self.last_fault = f"{self.path}: {error}"
            _LOG.error("cold experts: %s", self.last_fault)
            words[:] = 0
            status = Status.EXPERT_FAULT
        return words, np.asarray(status.value, np.int32)

    def _tensor_sizes(self) -> dict[str, int]:
        result = {}
        for layer, (shape, index) in enumerate(self._layers):
            for expert, layout in enumerate(index):
                sizes = shape.layouts[layout].num_words(
                    shape.hidden_size, shape.expert_size
                )
                result[_name(layer, expert)] = sum(sizes)
        return result

    def _check_tensors(self, sizes: dict[str, int]) -> None:
        found = {}
        for name in self._file.keys():
            tensor = self._file.get_slice(name)
            found[name] = (tensor.get_dtype(), tuple(tensor.get_shape()))
        expected = {name: ("U32", (size,)) for name, size in sizes.items()}
        faults = [
            f"{name}: {found.get(name, 'missing')}, expected {shape}"
            for name, shape in expected.items()
            if found.get(name) != shape
        ]
        faults += [f"{name}: unknown" for name in found if name not in expected]
        faults += [
            f"{name}: no checksum" for name in expected.keys() - self._checksums.keys()
        ]
        if faults:
            raise ValueError(
                f"{self.path}: not a whole expert file: {'; '.join(faults)}"
            )


@flax.struct.dataclass
class ColdExperts:
    """All experts of a layer, on disk."""

    layout: jax.Array  # [E] int32, index into shape.layouts
    file: ExpertFile = flax.struct.field(pytree_node=False)
    layer: int = flax.struct.field(pytree_node=False)
    shape: PackedShape = flax.struct.field(pytree_node=False)

    def check(self, name: str, shape: tuple[int, int, int]) -> None:
        """Checks the shapes against `[E, F, D]`.

        Args:
          name: how messages call the experts.
          shape: E, F and D.

        Raises:
          ValueError: naming the file and both shapes.

        Exactness: not concerned.
        """
        found = (
            self.layout.shape[0],
            self.shape.expert_size,
            self.shape.hidden_size,
        )
        if found != shape:
            raise ValueError(
                f"{name} in {self.file.path} have E, F, D = {found}, the model has "
                f"{shape}"
            )

    def prepare(self, jobs: Jobs, cache: ExpertCache | None) -> Prepared:
        """Reads the distinct experts of a layer's jobs that are not at hand.

        Args:
          jobs: the layer's jobs.
          cache: experts that are kept on the device, or None.

        Returns:
          How to load them, and the status of the read.

        Exactness: words are read, not computed.
        """
        # No layer has more distinct experts than it has experts.
        capacity = min(jobs.expert.shape[0], self.layout.shape[0])
        experts = jobs.expert[:capacity]
        is_wanted = jnp.arange(capacity, dtype=jnp.int32) < jobs.num_jobs
        if cache is not None:
            is_cached = jnp.any(experts[:, None] == cache.expert[None], axis=1)
            is_wanted = is_wanted & ~is_cached
        wanted = jnp.where(is_wanted, experts, -1)
        nothing = (
            jnp.zeros((capacity, self.shape.num_words), jnp.uint32),
            jnp.zeros((), jnp.int32),
        )
        words, status = lax.cond(
            jnp.any(is_wanted), lambda: self.read(wanted), lambda: nothing
        )

        def load(job: jax.Array, expert: jax.Array) -> Stored:
            row = words[job]
            if cache is not None:
                slot, is_cached = find_slot(cache, expert)
                row = jnp.where(is_cached, cache.words[slot], row)
            return Stored(words=row, layout=self.layout[expert])

        return self.shape.prepared(load, status)

    def read(self, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reads some experts through a callback, in one batch.

        Args:
          experts: `[n]` int32, -1 for none.

        Returns:
          `[n, W]` uint32, and Status bits.

        Exactness: words are read, not computed.
        """
        num_words = self.shape.num_words

        def read(experts: Any) -> tuple[np.ndarray, np.ndarray]:
            return self.file.read(self.layer, experts, num_words)

        result = (
            jax.ShapeDtypeStruct((experts.shape[0], num_words), jnp.uint32),
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        return jax.pure_callback(read, result, experts, vmap_method="sequential")


def write_expert_file(
    path: str | os.PathLike[str], layers: Sequence[PackedExperts]
) -> ExpertFile:
    """Writes the experts of a model to a file, whole or not at all, and opens it.

    Args:
      path: the file; its folder must exist.
      layers: the packed experts of each layer.

    Returns:
      The open file; its `fingerprint` tells it from other weights.

    Raises:
      FileNotFoundError: if the folder does not exist.

    Exactness: words are written, not computed.
    """
    path = pathlib.Path(path)
    tensors: dict[str, np.ndarray] = {}
    described = []
    for layer, experts in enumerate(layers):
        shape = experts.shape
        words, index = np.asarray(experts.words), np.asarray(experts.layout)
        for expert, layout in enumerate(index.tolist()):
            sizes = shape.layouts[layout].num_words(
                shape.hidden_size, shape.expert_size
            )
            tensors[_name(layer, expert)] = np.ascontiguousarray(
                words[expert, : sum(sizes)]
            )
        described.append(
            {
                "layouts": [dataclasses.asdict(layout) for layout in shape.layouts],
                "hidden_size": shape.hidden_size,
                "expert_size": shape.expert_size,
                "layout": index.tolist(),
            }
        )
    checksums = {name: zlib.crc32(words.tobytes()) for name, words in tensors.items()}
    header = {
        "format": _FORMAT,
        "layers": json.dumps(described),
        "checksums": json.dumps(checksums),
    }
    with replaced_file(path) as temporary:
        mode = temporary.stat().st_mode  # the package writes files only we can read
        safetensors.numpy.save_file(tensors, temporary, metadata=header)
        temporary.chmod(mode)
    return ExpertFile(path)


def _name(layer: int, expert: int) -> str:
    return f"layers.{layer}.experts.{expert}"


def _fingerprint(header: dict[str, str]) -> str:
    text = json.dumps([header.get("layers"), header.get("checksums")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parse_layer(stated: Any) -> tuple[PackedShape, list[int]]:
    layouts = tuple(ExpertLayout(**layout) for layout in stated["layouts"])
    index = [int(layout) for layout in stated["layout"]]
    if not index or not all(0 <= layout < len(layouts) for layout in index):
        raise ValueError("a layer's experts name layouts that it does not have")
    shape = PackedShape(layouts, int(stated["hidden_size"]), int(stated["expert_size"]))
    return shape, index
