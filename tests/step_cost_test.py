"""experiments/step_cost.py: a try, and the published run."""

import json

import numpy as np
import pytest
from command_lines import ROOT, run

REPORT = ROOT / "docs" / "results" / "step_cost.json"


@pytest.mark.slow
def test_smoke_run(tmp_path):
    result = run("step_cost.py", "--smoke", "--rounds=2", "--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    parts = json.loads((tmp_path / "step_cost.json").read_text())["parts"]
    assert set(parts) == {"4096", "windows"}
    assert len(parts["4096"]["reading p and mu once"]) == 2
    assert "window of 7 drafts" in result.stdout


def test_published_costs_are_within_their_limits():
    report = json.loads(REPORT.read_text())
    assert not report["settings"]["smoke"]
    parts = report["parts"]
    large = {n: np.median(v) for n, v in parts["151936"].items() if isinstance(v, list)}
    chain = large["sampling chain on 15 rows"] / large["softmax of 15 rows"]
    assert 0 < chain <= 4
    verify = large["draws, verifier and commit"] / large["reading p and mu once"]
    assert 0 < verify <= 2
    windows = parts["windows"]
    plain = np.median(windows["window of 0 drafts"]) / 8
    assert 0 < plain <= 0.1 * np.median(windows["one step of the model, packed"])
