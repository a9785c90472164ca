"""Strict settings for every test: what is implicit in JAX is an error here."""

import pathlib

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)
# Several tests compile the same program, in several processes.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

# The longest files first, so that two processes end at about the same time.
LONGEST = (
    "bundled_test.py",
    "smollm2_test.py",
    "law_test.py",
    "float64_test.py",
    "cases_test.py",
    "experiments_test.py",
    "conformance_test.py",
)


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.fixture
def rng_key():
    return jax.random.key(20240229)
