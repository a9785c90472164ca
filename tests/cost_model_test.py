"""experiments/cost_model.py: a try, and the published run."""

import json

import numpy as np
import pytest
from command_lines import ROOT, run

REPORT = ROOT / "docs" / "results" / "cost_model.json"


@pytest.mark.slow
def test_smoke_run(tmp_path):
    result = run(
        "cost_model.py", "--smoke", "--rounds=1", "--out", tmp_path, timeout=900
    )
    assert result.returncode == 0, result.stdout + result.stderr
    parts = json.loads((tmp_path / "cost_model.json").read_text())["parts"]
    predicted = parts["prediction"]["predicted"]
    assert "mtp, K 3, picked 0.30" in predicted and "plain" in predicted
    assert set(predicted) <= set(parts["measurement"])
    # What a gate drops is not computed, and what is not drafted is not dropped.
    always, picked = (
        predicted[f"mtp, K 3, {gate}"]["tokens_per_window"]
        for gate in ("always", "picked 0.30")
    )
    assert always >= picked >= 1


def test_published_predictions_are_close():
    report = json.loads(REPORT.read_text())
    assert not report["settings"]["smoke"] and report["settings"]["rounds"] >= 5
    parts = report["parts"]
    errors = [
        found["tokens_per_second"] / np.median(parts["measurement"][name]) - 1
        for name, found in parts["prediction"]["predicted"].items()
    ]
    assert sum(abs(error) <= 0.15 for error in errors) >= 6
    # The control: without costs of drafts and rows, predictions are far off.
    plain = parts["prediction"]["predicted"]["plain"]["tokens_per_second"]
    found = parts["prediction"]["predicted"]["mtp, K 3, always"]
    free = plain * found["tokens_per_window"]
    assert free / np.median(parts["measurement"]["mtp, K 3, always"]) - 1 > 0.15
