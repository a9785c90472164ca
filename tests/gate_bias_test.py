"""The gate bias script: its report, small runs, faults and refusals."""

import functools
import json
import pathlib

import command_lines
import pytest

ROOT = pathlib.Path(__file__).parents[1]
REPORT = ROOT / "docs" / "results" / "gate_bias.json"
SOURCES = ("synthetic", "bundled", "smollm2")


gate_bias = functools.partial(command_lines.run, "gate_bias.py")


def read(out):
    return json.loads((out / "gate_bias.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run on synthetic rows: its folder, report and output."""
    out = tmp_path_factory.mktemp("bias") / "out"
    result = gate_bias("--smoke", "--sources", "synthetic", "--out", out)
    assert result.returncode == 0, result.stderr + result.stdout
    return out, read(out), result


def check_bias(part, is_control_biased):
    assert len(part["predicted"]) == part["num_rows"]
    assert len(part["enumerated"]) == len(part["repaired"]) == part["num_enumerated"]
    for row, enumerated, repaired in zip(
        part["enumerated_rows"], part["enumerated"], part["repaired"], strict=True
    ):
        assert enumerated == pytest.approx(part["predicted"][row], abs=1e-5)
        assert repaired < 1e-5
    assert part["largest_gap"] < 1e-5
    assert (max(part["predicted"]) > 0.01) == is_control_biased


@pytest.mark.slow
def test_prediction_and_enumeration_agree_and_the_control_is_biased(finished):
    _, report, _ = finished
    parts = report["parts"]
    assert list(parts) == ["synthetic, threshold 0", "synthetic, threshold 0.5"]
    check_bias(parts["synthetic, threshold 0"], is_control_biased=False)
    assert max(parts["synthetic, threshold 0"]["enumerated"]) < 1e-5
    biased = parts["synthetic, threshold 0.5"]
    check_bias(biased, is_control_biased=True)
    # The rows worked by hand: p = q = (.6, .3, .1), and (.5, .5) with (.875, .125).
    assert biased["enumerated_rows"][0] == 0
    assert biased["enumerated_rows"][-1] == biased["num_rows"] - 1
    for values in (biased["predicted"], biased["enumerated"]):
        assert values[0] == pytest.approx(0.24, abs=1e-6)
        assert values[-1] == pytest.approx(0.0625, abs=1e-6)


@pytest.mark.slow
def test_report(finished):
    out, report, result = finished
    assert sorted(path.name for path in out.iterdir()) == [
        *("gate_bias.json", "gate_bias.png")
    ]
    assert (out / "gate_bias.png").read_bytes().startswith(b"\x89PNG")
    assert {"jax", "jaxlib", "strata_jax"} <= report["versions"].keys()
    assert report["flags"]["seed"] == report["settings"]["seed"] == 0
    assert report["figures"][0]["file"] == "gate_bias.png"
    bias, gates = report["tables"]
    assert {len(row) for row in bias["rows"]} == {len(bias["columns"])}
    assert [row[1] for row in bias["rows"]] == ["0", "0.5"]
    assert gates["rows"] == []
    assert bias["title"] in result.stdout and "0.2400" in result.stdout
    assert all(len(part["library_sha256"]) == 64 for part in report["parts"].values())


def test_published_report():
    report = json.loads(REPORT.read_text())
    thresholds = report["settings"]["sizes"]["thresholds"]
    assert thresholds[0] == 0 and len(thresholds) == 10
    for source in SOURCES:
        parts = [report["parts"][f"{source}, threshold {t:g}"] for t in thresholds]
        check_bias(parts[0], is_control_biased=False)
        for part in parts:
            assert part["num_enumerated"] == 16
            check_bias(part, is_control_biased=max(part["predicted"]) > 0.01)
        assert max(parts[0]["enumerated"]) < 1e-5
        assert max(max(part["enumerated"]) for part in parts) > 0.1


def test_finished_parts_are_skipped_and_faults_reported(tmp_path):
    report = json.loads(REPORT.read_text())
    # Results that no run gives: they are kept, so nothing was computed again.
    parts = report["parts"]
    parts["synthetic, threshold 0"]["enumerated"][0] = 0.125
    parts["bundled, threshold 0.45"]["largest_gap"] = 0.5
    parts["smollm2, threshold 0.45"]["repaired"][1] = 0.25
    for name, part in parts.items():
        if name.startswith("smollm2, threshold"):
            part["predicted"] = [0.0] * part["num_rows"]
    (tmp_path / "gate_bias.json").write_text(json.dumps(report))
    result = gate_bias("--out", tmp_path)
    assert result.returncode == 1, result.stderr
    for fault in (
        "synthetic, threshold 0: a gate that admits all is biased",
        "bundled, threshold 0.45: predicted and enumerated differ",
        "smollm2, threshold 0.45: the repaired gate is biased",
        "smollm2: no bias at any threshold: nothing is shown",
    ):
        assert f"not shown: {fault}" in result.stderr
    assert result.stderr.count("not shown") == 4
    assert read(tmp_path) == report
    assert (tmp_path / "gate_bias.png").read_bytes().startswith(b"\x89PNG")


def test_refuses_an_unknown_source(tmp_path):
    result = gate_bias("--smoke", "--sources", "synthetic,gpt", "--out", tmp_path)
    assert result.returncode == 2
    assert "--sources must be of synthetic, tiny" in result.stderr
    assert "got gpt" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_rows_of_a_model(tmp_path):
    result = gate_bias("--smoke", "--sources", "tiny", "--out", tmp_path)
    assert result.returncode == 0, result.stderr + result.stdout
    parts = read(tmp_path)["parts"]
    check_bias(parts["tiny, threshold 0"], is_control_biased=False)
    check_bias(parts["tiny, threshold 0.5"], is_control_biased=True)
    for gate in ("always", "picked"):
        part = parts[f"tiny, {gate}"]
        assert [len(digest) for digest in part["files"].values()] == [64]
        assert part["num_tokens"] == 16
        kinds = part["num_offered"] + part["num_null"] + part["num_absent"]
        assert kinds == 3 * part["num_windows"]
        assert part["num_tokens"] == part["num_windows"] + part["num_accepted"]
    assert parts["tiny, always"]["num_null"] == 0
    assert parts["tiny, picked"]["num_null"] > 0
