"""experiments/benchmark.py: a try, and the published run."""

import importlib
import json

import numpy as np
import pytest
from command_lines import ROOT, run

from strata_jax.diagnostics import cost

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


@pytest.fixture
def policies(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("_policies")


@pytest.mark.parametrize(
    ("is_matched", "seconds_per_window"),
    [
        ([False, False], 10.0),  # the head's window of one draft: 7 + 1 + 2
        ([True, True], 6.5),  # the lookup's own: 5 + 0.5 + 1
        ([True, False], 8.25),
    ],
)
def test_lookup_without_a_match_costs_what_the_head_does(
    policies, is_matched, seconds_per_window
):
    def costs(window, call, row):
        return cost.WindowCosts(4.0, window, call, (0.0, row, 2 * row), 0.0)

    rows = np.array([[True, matched] for matched in is_matched])
    one = np.ones(rows.shape)
    records = cost.DraftRecords(rows, one, one, 0 * one, one)
    by_drafter = {"mtp": costs(7.0, 1.0, 2.0), "both": costs(5.0, 0.5, 1.0)}
    policy = cost.Policy("always", None, 1)

    def seconds(name):
        found = policies.costs_at(by_drafter, name, records)
        return cost.predict(found, records, policy).seconds_per_window

    assert seconds("both") == pytest.approx(seconds_per_window)
    assert seconds("mtp") == 10.0


@pytest.mark.parametrize(
    ("predicted", "tried", "chosen"),
    [
        ({"mtp": 1.2, "both": 1.1}, {"mtp": 1.1, "both": 1.3}, "both"),
        ({"mtp": 1.2, "both": 1.1}, {"mtp": 1.2, "both": 1.1}, "mtp"),
        ({"mtp": 1.3, "both": 1.1}, {"mtp": 0.99, "both": 1.1}, "both"),
        ({"mtp": 0.99, "both": 1.04}, {"mtp": 1.5, "both": 1.05}, "plain"),
    ],
)
def test_prediction_and_trial_choose_together(monkeypatch, predicted, tried, chosen):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    benchmark = importlib.import_module("benchmark")
    gains = {"plain": 1.0} | predicted
    policies = {name: {"tokens_per_second": 50 * gains[name]} for name in gains}
    found = benchmark._choose(policies, {"plain": 1.0} | tried)
    assert [name for name, each in found.items() if each["is_chosen"]] == [chosen]
    assert found["mtp"]["predicted_gain"] == pytest.approx(predicted["mtp"])
