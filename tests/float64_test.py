"""The law tests once more in float64, and with every NaN an error.

Both are settings of the whole process, hence the subprocesses. The short test chooses a
part of the tests by name and asks for both at once; the slow ones run more.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# All measures of one row, V = 2 and 3; every gate and kind of row at V = 2, K = 1, for
# the token verifier, with joint laws and borders; one control.
IN_FLOAT64 = (
    "(measure_instances and not 4) or 2-1-token "
    "or precision or unaccounted_gate or markov_law or compare_laws"
)
# Masked arithmetic hides NaNs of its own; here they would stop the program.
WITH_DEBUG_NANS = "gated_instances or top_instances or 2-2-token"


def run_tests(names: str, *, marks: str = "not slow", **environment: str) -> int:
    """Runs the named tests and returns how many passed; fails if any did not."""
    tests = ("law_test.py", "suffix_root_law_test.py", "suffix_first_test.py", "audit")
    command = [sys.executable, "-m", "pytest", *(f"tests/{name}" for name in tests)]
    command += ["-q", "-p", "no:cacheprovider", "-k", names, "-m", marks]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    summary = result.stdout.strip().splitlines()[-1]
    assert not re.search("failed|error|skipped|xfailed", summary), summary
    passed = re.search(r"(\d+) passed", summary)
    assert passed, summary
    print(f"\n{environment}: {summary}")
    return int(passed[1])


def test_laws_in_float64():
    # There, the tolerance is 1e-12: `test_precision_is_what_the_environment_asks_for`.
    # The short form of both tests: a NaN is an error here as well.
    assert run_tests(IN_FLOAT64, JAX_ENABLE_X64="1", JAX_DEBUG_NANS="1") >= 13


@pytest.mark.slow
def test_all_laws_in_float64():
    assert run_tests("", marks="not device", JAX_ENABLE_X64="1") >= 110


@pytest.mark.slow
def test_laws_without_a_nan():
    assert run_tests(WITH_DEBUG_NANS, JAX_DEBUG_NANS="1") >= 8
