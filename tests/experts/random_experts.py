"""Layers of random packed experts of any layout, for several test files."""

import jax.numpy as jnp
import numpy as np

from strata_jax import experts


def random_packed(layouts, num_experts, width, seed):
    """Packs square experts; expert e has layout e modulo their number."""
    rng = np.random.default_rng(seed)
    shape = experts.PackedShape(layouts, width, width)
    index = np.arange(num_experts, dtype=np.int32) % len(layouts)
    words = np.zeros((num_experts, shape.num_words), np.uint32)
    for expert, layout in enumerate(index):
        own = _random_words(layouts[layout], width, rng)
        words[expert, : own.size] = own
    return experts.PackedExperts(jnp.asarray(words), jnp.asarray(index), shape)


def _random_words(layout, width, rng):
    pieces = []
    names = (layout.gate, layout.up, layout.down)
    for name, size in zip(names, layout.num_words(width, width), strict=True):
        if name.startswith("trellis"):
            # All words mean something, and encoding takes long.
            words = rng.integers(0, 2**32, size, np.uint32)
            words[0] = np.float32(1 / 16).view(np.uint32)
        else:
            matrix = rng.normal(size=(width, width)) * width**-0.5
            words = experts.find_format(name).encode(matrix.astype(np.float32))
        pieces.append(words)
    return np.concatenate(pieces)
