"""Every gate, drafter, place and format of the bundled model's experts: hours.

A case that has passed is kept in `.cache/bundled_product` and not run again as long as
the library's sources are the same, so that a run that was stopped goes on:

  ./test.sh --slow tests/bundled_product_test.py -k q8_0
"""

import functools
import hashlib
import pathlib

import bundled_checks as checks
import numpy as np
import pytest

import strata_jax as strata

NUM_TOKENS = 64
SEED = 5
KEPT = pathlib.Path(__file__).parents[1] / ".cache" / "bundled_product"
# Where the experts are, and how many of each layer are kept on the device.
PLACES = {
    "resident": ("resident", 0),
    "host": ("host", 0),
    "host_cached": ("host", 3),
    "cold": ("cold", 0),
    "cold_cached": ("cold", 3),
}


def layout_name(layout):
    return layout.gate + ("_folded" if layout.is_folded else "")


LAYOUTS = {layout_name(layout): layout for layout in checks.LAYOUTS}


@functools.cache
def sources_hash():
    root = pathlib.Path(strata.__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.safetensors")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def plain(name):
    _, params = checks.loaded()
    packed = checks.with_layouts(params, [LAYOUTS[name]])
    return packed, *checks.plain_run(packed, NUM_TOKENS, SEED)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("drafter", checks.DRAFTERS)
@pytest.mark.parametrize("gate", checks.GATES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_those_of_plain_decoding(name, gate, drafter, place, tmp_path):
    record = KEPT / sources_hash() / f"{name}-{gate}-{drafter}-{place}"
    if record.exists():
        assert record.read_text() == f"{NUM_TOKENS} rows equal\n"
        return
    packed, tokens, rows = plain(name)
    tier, num_cached = PLACES[place]
    params = checks.placed(packed, [tier] * len(packed.layers), tmp_path)
    decoder = checks.make_decoder(gate, drafter, num_cached_experts=num_cached)
    ours, our_rows, _ = checks.run(decoder, params, NUM_TOKENS, SEED)
    np.testing.assert_array_equal(ours, tokens)
    np.testing.assert_array_equal(our_rows, rows)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(f"{len(our_rows)} rows equal\n")
