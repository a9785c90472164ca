"""Random experts and models for several test files, without compiling anything."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import experts, models


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


def random_model(config, seed, *, with_mtp=False):
    """Weights as of `models.random_moe_params`; norms are 1."""
    rng = np.random.default_rng(seed)
    make = functools.partial(
        models.random_moe_params, config, jax.random.key(0), with_mtp=with_mtp
    )

    def fill(array):
        if len(array.shape) == 1:
            return jnp.ones(array.shape, array.dtype)
        values = rng.normal(size=array.shape) * array.shape[-1] ** -0.5
        return jnp.asarray(values, array.dtype)

    return jax.tree.map(fill, jax.eval_shape(make))
