"""Strict settings for every test: what is implicit in JAX is an error here."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture
def rng_key():
    return jax.random.key(20240229)
