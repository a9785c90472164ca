"""Products as they are made for each kind of processor, whichever runs the tests."""

import jax
import pytest

from strata_jax.models import _tiled_product

PROCESSORS = ("narrow", "wide")


@pytest.fixture
def set_processor(monkeypatch):
    """Chooses a processor; what was traced for another is forgotten."""

    def choose(processor):
        is_wide = {"narrow": False, "wide": True}[processor]
        monkeypatch.setattr(_tiled_product, "has_wide_vectors", lambda: is_wide)
        jax.clear_caches()

    yield choose
    jax.clear_caches()


@pytest.fixture(params=PROCESSORS)
def processor(request, set_processor):
    set_processor(request.param)
    return request.param
