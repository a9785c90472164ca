"""The long run script: a small run, going on with it, faults and refusals."""

import functools
import json
import pathlib

import command_lines
import pytest

ROOT = pathlib.Path(__file__).parents[1]
REPORT = ROOT / "docs" / "results" / "long_run.json"


long_run = functools.partial(command_lines.run, "long_run.py")


@pytest.mark.slow
def test_smoke_run(tmp_path):
    result = long_run("--smoke", "--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "long_run.json").read_text())
    parts = report["parts"]
    for name, part in parts.items():
        if name.startswith(("one_run", "prompts: plain", "prompts: repaired")):
            assert part["num_equal"] == part["num_rows"] > 0
        if name.startswith("prompts: original"):
            assert part["num_equal"] < part["num_rows"]
    run = [part for name, part in parts.items() if name.startswith("one_run")]
    assert sum(len(part["tokens"]) for part in run) == 128
    # A run that was killed after its first piece goes on to the same text.
    pieces = [name for name in parts if name.startswith("one_run")]
    assert len(pieces) > 1
    whole = [token for part in run for token in part["tokens"]]
    del parts[pieces[-1]], report["tables"]
    (tmp_path / "long_run.json").write_text(json.dumps(report))
    again = long_run("--smoke", "--out", tmp_path, "--parts", "one_run")
    assert again.returncode == 0, again.stdout + again.stderr
    parts = json.loads((tmp_path / "long_run.json").read_text())["parts"]
    run = [part for name, part in parts.items() if name.startswith("one_run")]
    assert [token for part in run for token in part["tokens"]] == whole


def test_report_is_finished_and_its_faults_are_seen(tmp_path):
    report = json.loads(REPORT.read_text())
    assert report["settings"]["sizes"]["num_seeds"] == 20_000
    parts = report["parts"]
    run = [part for name, part in parts.items() if name.startswith("one_run")]
    assert sum(len(part["tokens"]) for part in run) == 10_000
    # Nothing is computed again: all parts are there. These no run would give.
    first = next(name for name in parts if name.startswith("prompts: repaired"))
    parts[first]["num_equal"] -= 1
    parts["law: prompt 2, repaired"]["p_value"] = 1e-9
    parts["law: prompt 3, original"]["p_value"] = 0.5
    (tmp_path / "long_run.json").write_text(json.dumps(report))
    result = long_run("--out", tmp_path)
    assert result.returncode == 1, result.stderr
    assert "prompts: repaired: 1 rows differ" in result.stderr
    assert "law, 'Good morrow, c': repaired, p-value 1e-09" in result.stderr
    assert "law, 'Enter the K': the original passes" in result.stderr
    assert "Rows that equal plain decoding" in result.stdout
    assert (tmp_path / "long_run.png").read_bytes().startswith(b"\x89PNG")


def test_refuses_an_unknown_part(tmp_path):
    result = long_run("--out", tmp_path, "--parts", "law,lunch")
    assert result.returncode == 2
    assert "--parts must be of law, one_run, prompts; got lunch" in result.stderr
    assert "Traceback" not in result.stderr
