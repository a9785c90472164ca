"""Mixture-of-experts models for tests, without much compiling."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

from strata_jax import models


@contextlib.contextmanager
def quick_compilation():
    """Compiles in a hurry, for tests that are not about bits.

    JAX's own programs, such as those of random numbers, stay compiled like that for the
    shapes met here: bits must not be compared with those of another process.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def moe_weights(config, seed=0, *, with_mtp=True):
    """Random weights; norms are not 1, so that a test sees them."""
    shapes = jax.eval_shape(
        lambda: models.random_moe_params(config, jax.random.key(0), with_mtp=with_mtp)
    )
    random = np.random.default_rng(seed)

    def fill(path, leaf):
        if "norm" in jax.tree_util.keystr(path):
            values = random.uniform(0.5, 1.5, leaf.shape)
        else:
            values = random.normal(size=leaf.shape) * config.hidden_size**-0.5
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)
