"""What is known of the processor that runs the products."""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def has_wide_vectors() -> bool:
    """Returns whether it has vectors of 512 bits; False where NumPy cannot tell.

    Exactness: a question of speed alone; no bit may depend on the answer.
    """
    found = np.show_config(mode="dicts").get("SIMD Extensions", {}).get("found", [])
    # The name of one extension, or of a level that has it, by NumPy's version.
    return not {"AVX512F", "X86_V4"}.isdisjoint(found)
