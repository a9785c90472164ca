"""Packed experts that are in memory: on the device, or on the host beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from strata_jax import _checks
from strata_jax.experts._cache import ExpertCache, find_slot
from strata_jax.experts._formats import find_format
from strata_jax.experts._hadamard import hadamard_reference
from strata_jax.experts._jobs import Folding, Jobs, Prepared
from strata_jax.experts._layout import ExpertLayout
from strata_jax.experts._matrices import ExpertMatrices
from strata_jax.experts._weights import ExpertWeights


@flax.struct.dataclass
class Stored:
    """One expert as a job loads it."""

    words: jax.Array  # [W] uint32
    layout: jax.Array  # [] int32, index into the layer's layouts


@dataclasses.dataclass(frozen=True)
class PackedShape:
    """What is static about a layer's packed experts.

    Attributes:
      layouts: the distinct layouts in the layer.
      hidden_size: D.
      expert_size: F.
    """

    layouts: tuple[ExpertLayout, ...]
    hidden_size: int
    expert_size: int

    @property
    def num_words(self) -> int:
        """W: words of the largest expert; smaller ones are padded."""
        sizes = (self.hidden_size, self.expert_size)
        return max(sum(layout.num_words(*sizes)) for layout in self.layouts)

    def decode(self, stored: Stored) -> ExpertMatrices:
        """Decodes one expert, whatever its layout.

        Args:
          stored: the expert.

        Returns:
          Its matrices, float32.

        Exactness: bitwise the formats' NumPy reference.
        """

        def decode_as(layout: ExpertLayout):
            def decode(words: jax.Array) -> ExpertMatrices:
                hidden_size, expert_size = self.hidden_size, self.expert_size
                sizes = layout.num_words(hidden_size, expert_size)
                ends = np.cumsum(sizes).tolist()
                gate, up, down = (
                    lax.slice_in_dim(words, end - size, end)
                    for size, end in zip(sizes, ends, strict=True)
                )
                return ExpertMatrices(
                    gate=find_format(layout.gate).decode(
                        gate, expert_size, hidden_size
                    ),
                    up=find_format(layout.up).decode(up, expert_size, hidden_size),
                    down=find_format(layout.down).decode(
                        down, hidden_size, expert_size
                    ),
                )

            return decode

        branches = [decode_as(layout) for layout in self.layouts]
        if len(branches) == 1:
            return branches[0](stored.words)
        return lax.switch(stored.layout, branches, stored.words)

    def folding(self, stored: Stored) -> Folding | None:
        """Returns the signs of an expert's folded inputs.

        Args:
          stored: the expert.

        Returns:
          The signs, or None if no layout folds.

        Exactness: not concerned.
        """
        if not any(layout.is_folded for layout in self.layouts):
            return None
        signs = [
            layout.signs(self.hidden_size, self.expert_size) for layout in self.layouts
        ]
        inner, outer = (
            jnp.asarray(np.stack(rows)) for rows in zip(*signs, strict=True)
        )
        is_folded = jnp.asarray([layout.is_folded for layout in self.layouts])
        return Folding(
            is_folded=is_folded[stored.layout],
            inner_signs=inner[stored.layout],
            outer_signs=outer[stored.layout],
        )

    def prepared(
        self, load: Callable[[jax.Array, jax.Array], Stored], status: jax.Array
    ) -> Prepared:
        """Returns a layer's experts that are ready for its jobs.

        Args:
          load: (job, expert) -> the expert as it is stored.
          status: [] int32, Status bits.

        Returns:
          The experts.

        Exactness: not concerned.
        """
        names = {
            name
            for layout in self.layouts
            for name in (layout.gate, layout.up, layout.down)
        }
        return Prepared(
            load=load,
            decode=self.decode,
            folding=self.folding,
            status=status,
            is_shared_bitwise=all(find_format(n).is_shared_bitwise for n in names),
        )


@flax.struct.dataclass
class PackedExperts:
    """All experts of a layer as packed words, on the device or on the host.

    The host's are moved to the device one at a time, when a job needs them.
    """

    words: jax.Array  # [E, W] uint32
    layout: jax.Array  # [E] int32, index into shape.layouts
    shape: PackedShape = flax.struct.field(pytree_node=False)
    is_on_host: bool = flax.struct.field(pytree_node=False, default=False)

    def check(self, name: str, shape: tuple[int, int, int]) -> None:
        """Checks the shapes against `[E, F, D]`.

        Args:
          name: how messages call the experts.
          shape: E, F and D.

        Raises:
          ValueError: naming the array and both shapes.

        Exactness: not concerned.
        """
        num_experts, expert_size, hidden_size = shape
        found = (self.shape.expert_size, self.shape.hidden_size)
        if found != (expert_size, hidden_size):
            raise ValueError(
                f"{name} are packed for F, D = {found}, the model has "
                f"{(expert_size, hidden_size)}"
            )
        _checks.check_shape(
            f"{name}.words", self.words, (num_experts, self.shape.num_words)
        )
        _checks.check_shape(f"{name}.layout", self.layout, (num_experts,))

    def prepare(self, jobs: Jobs, cache: ExpertCache | None) -> Prepared:
        """Makes the experts ready: each is fetched when its job runs.

        Args:
          jobs: the layer's jobs.
          cache: experts of the host that are kept on the device, or None.

        Returns:
          How to load them.

        Exactness: words are moved, not computed.
        """
        del jobs

        def load(job: jax.Array, expert: jax.Array) -> Stored:
            del job
            if cache is None:
                return Stored(words=self._fetch(expert), layout=self.layout[expert])
            kept = cache.words
            slot, is_cached = find_slot(cache, expert)
            words = lax.cond(is_cached, lambda: kept[slot], lambda: self._fetch(expert))
            return Stored(words=words, layout=self.layout[expert])

        return self.shape.prepared(load, jnp.zeros((), jnp.int32))

    def read(self, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reads some experts, for a cache.

        Args:
          experts: `[n]` int32, -1 for none.

        Returns:
          `[n, W]` uint32, and Status bits.

        Exactness: words are moved, not computed.
        """

        def read_one(index: jax.Array, rows: jax.Array) -> jax.Array:
            words = self._fetch(jnp.maximum(experts[index], 0))
            return rows.at[index].set(words)

        rows = jnp.zeros((experts.shape[0], self.words.shape[1]), jnp.uint32)
        rows = lax.fori_loop(0, experts.shape[0], read_one, rows)
        return rows, jnp.zeros((), jnp.int32)

    def _fetch(self, expert: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(self.words, expert, keepdims=False)
        if self.is_on_host:
            row = jax.device_put(row, jax.memory.Space.Device)
        return row


def pack_experts(
    weights: ExpertWeights, layouts: ExpertLayout | Sequence[ExpertLayout]
) -> PackedExperts:
    """Packs the experts of a layer.

    Args:
      weights: the experts as arrays.
      layouts: one layout for all, or one for each expert.

    Returns:
      The packed experts, on the device.

    Raises:
      ValueError: if there is not one layout for each expert, or a size does not fit.

    Exactness: lossy as the formats are; what is packed is decoded exactly.
    """
    num_experts, expert_size, hidden_size = weights.gate.shape
    if isinstance(layouts, ExpertLayout):
        layouts = [layouts] * num_experts
    if not all(isinstance(layout, ExpertLayout) for layout in layouts):
        raise ValueError(
            f"layouts must be ExpertLayout, got {layouts!r}: make them with "
            "uniform_layout"
        )
    if len(layouts) != num_experts:
        raise ValueError(
            f"layouts has {len(layouts)} entries for {num_experts} experts: give one "
            "for each, or one for all"
        )
    distinct = tuple(dict.fromkeys(layouts))
    shape = PackedShape(distinct, hidden_size, expert_size)
    words = np.zeros((num_experts, shape.num_words), np.uint32)
    arrays = [
        np.asarray(array, np.float32)
        for array in (weights.gate, weights.up, weights.down)
    ]
    for expert, layout in enumerate(layouts):
        encoded = layout.encode(*(array[expert] for array in arrays))
        words[expert, : encoded.size] = encoded
    index = np.array([distinct.index(layout) for layout in layouts], np.int32)
    return PackedExperts(jnp.asarray(words), jnp.asarray(index), shape)


def unpack_experts(packed: PackedExperts) -> ExpertWeights:
    """Decodes all experts of a layer to arrays, in the model's own coordinates.

    Args:
      packed: the experts.

    Returns:
      Float32 arrays; folded matrices are unfolded.

    Exactness: bitwise the stored weights, unless folded: then rounded once more.
    """
    shape = packed.shape
    matrices = []
    for expert in range(packed.words.shape[0]):
        layout = shape.layouts[int(packed.layout[expert])]
        stored = Stored(packed.words[expert], packed.layout[expert])
        decoded = shape.decode(stored)
        arrays = [
            np.asarray(array) for array in (decoded.gate, decoded.up, decoded.down)
        ]
        if layout.is_folded:
            inner, outer = layout.signs(shape.hidden_size, shape.expert_size)
            signs = (inner, inner, outer)
            arrays = [
                hadamard_reference(array) * sign
                for array, sign in zip(arrays, signs, strict=True)
            ]
        matrices.append(arrays)
    gate, up, down = (np.stack(arrays) for arrays in zip(*matrices, strict=True))
    return ExpertWeights(jnp.asarray(gate), jnp.asarray(up), jnp.asarray(down))


def to_host(packed: PackedExperts) -> PackedExperts:
    """Moves packed experts to the host's memory.

    Args:
      packed: the experts.

    Returns:
      The same experts there.

    Exactness: words are moved, not computed.
    """
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    words = jax.device_put(packed.words, sharding)
    return dataclasses.replace(packed, words=words, is_on_host=True)
