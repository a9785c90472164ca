"""What NumPy says of the processor, read for one question."""

import numpy as np
import pytest

from strata_jax.models import _processor


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"SIMD Extensions": {"found": ["X86_V3", "X86_V4"]}}, True),
        ({"SIMD Extensions": {"found": ["SSE3", "AVX2", "AVX512F"]}}, True),
        ({"SIMD Extensions": {"found": ["X86_V3"], "not found": ["X86_V4"]}}, False),
        ({"SIMD Extensions": {"baseline": ["NEON"]}}, False),
        ({}, False),
    ],
)
def test_wide_vectors_are_seen_by_either_name(config, expected, monkeypatch):
    monkeypatch.setattr(np, "show_config", lambda mode: config)
    assert _processor.has_wide_vectors.__wrapped__() is expected


def test_numpy_answers_in_this_form():
    extensions = np.show_config(mode="dicts")["SIMD Extensions"]
    names = [name for group in extensions.values() for name in group]
    assert names
    assert all(isinstance(name, str) for name in names)
