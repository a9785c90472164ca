"""experiments/benchmark.py: a try, and the published run."""

import json

import pytest
from command_lines import ROOT, run

REPORT = ROOT / "docs" / "results" / "benchmark.json"


OWN = ("plain", "mtp", "suffix", "both")


def name_of(name, weights):
    return f"own, {name}, {weights}"


def cells_of(report):
    for name, part in report["parts"].items():
        if name.startswith("round"):
            for cell, systems in part.items():
                if isinstance(systems, dict):
                    yield cell, systems


@pytest.mark.slow
def test_smoke_run(tmp_path):
    result = run("benchmark.py", "--smoke", "--out", tmp_path, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert (tmp_path / "benchmark.png").stat().st_size > 5000
    found = dict(cells_of(report))
    assert set(found) == {"repetitive, 0", "repetitive, 1"}
    for systems in found.values():
        assert set(systems) == {name_of(name, "packed") for name in OWN}
    assert "(chosen)" in result.stdout


def test_published_greedy_texts_are_those_of_plain_decoding():
    report = json.loads(REPORT.read_text())
    assert not report["settings"]["smoke"]
    cells = list(cells_of(report))
    # Five rounds of three kinds of text at two temperatures.
    assert len(cells) >= 30

    def are_equal(systems, name, weights):
        found = [systems[name_of(n, weights)] for n in ("plain", name)]
        return found[0]["tokens_sha256"] == found[1]["tokens_sha256"]

    for weights in ("packed", "float32"):
        for cell, systems in cells:
            if cell.endswith(", 0"):
                assert all(are_equal(systems, name, weights) for name in OWN), cell
        # The control: at temperature 1 the token verifier draws other tokens.
        warm = [systems for cell, systems in cells if cell.endswith(", 1")]
        assert not all(are_equal(systems, "mtp", weights) for systems in warm)
