"""experiments/window_cost.py: a try, and the published run."""

import json

import pytest
from command_lines import ROOT, run

REPORT = ROOT / "docs" / "results" / "window_cost.json"


@pytest.mark.slow
def test_smoke_run(tmp_path):
    result = run(
        "window_cost.py", "--smoke", "--rounds=2", "--calls=1", "--out", tmp_path
    )
    assert result.returncode == 0, result.stdout + result.stderr
    systems = json.loads((tmp_path / "window_cost.json").read_text())["parts"]
    systems = systems["windows"]["systems"]
    assert set(systems["tiled, float32"]["widths"]) == {"1", "2", "4", "8"}
    assert "to batched" in result.stdout


def test_published_rows_are_those_of_one_row_and_the_controls_are_not():
    report = json.loads(REPORT.read_text())
    assert not report["settings"]["smoke"]
    part = report["parts"]["windows"]
    for name, system in part["systems"].items():
        equal = [width["first_row_equal"] for width in system["widths"].values()]
        assert all(equal) == (name != "batched, float32")
        assert all(len(w["seconds"]) >= 5 for w in system["widths"].values())
