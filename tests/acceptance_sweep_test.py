"""The acceptance sweep script: its report, a small run, faults and refusals."""

import functools
import json
import pathlib

import command_lines
import pytest

ROOT = pathlib.Path(__file__).parents[1]
REPORT = ROOT / "docs" / "results" / "acceptance_sweep.json"
NAMES = [
    "own, always, K 2, temperature 0",
    "own, always, K 2, temperature 1",
    "own, picked 0.3, K 2, temperature 0",
    "own, picked 0.3, K 2, temperature 1",
]


acceptance_sweep = functools.partial(command_lines.run, "acceptance_sweep.py")


def read(out):
    return json.loads((out / "acceptance_sweep.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole small run: its folder, report and output."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    result = acceptance_sweep("--smoke", "--out", out)
    assert result.returncode == 0, result.stderr + result.stdout
    return out, read(out), result


def check_cells(parts, num_tokens):
    for part in parts.values():
        assert part["num_tokens"] == num_tokens
        assert part["num_tokens"] == part["num_windows"] + part["num_accepted"]
        kinds = part["num_offered"] + part["num_null"] + part["num_absent"]
        assert kinds == part["num_draft_tokens"] * part["num_windows"]
        assert 1 <= part["tokens_per_window"] <= part["num_draft_tokens"] + 1
        assert 0 <= part["acceptance_rate"] <= 1
        # A gate that admits all has no NULL rows.
        if part["gate"] == "always":
            assert part["settings"] == {} and part["num_null"] == 0


@pytest.mark.slow
def test_cells_add_up(finished):
    _, report, _ = finished
    parts = report["parts"]
    assert list(parts) == NAMES
    check_cells(parts, num_tokens=16)
    # At temperature 0 a draft has probability 1, which every threshold admits.
    cold = [{**parts[name], "gate": "", "threshold": 0} for name in NAMES[::2]]
    assert cold[0] | {"settings": {}} == cold[1] | {"settings": {}}
    # The gate of the warm cell does something.
    assert parts[NAMES[3]]["num_null"] > 0


@pytest.mark.slow
def test_report(finished):
    out, report, result = finished
    assert sorted(path.name for path in out.iterdir()) == [
        *("acceptance_sweep.json", "acceptance_sweep.png")
    ]
    assert (out / "acceptance_sweep.png").read_bytes().startswith(b"\x89PNG")
    assert {"jax", "jaxlib", "strata_jax"} <= report["versions"].keys()
    settings = report["settings"]
    assert settings["model"] == "tiny" and settings["max_new_tokens"] == 8
    assert [len(digest) for digest in settings["files"].values()] == [64]
    (best,) = report["tables"]
    assert [row[0] for row in best["rows"]] == [
        *("own, always", "own, always", "own, picked", "own, picked")
    ]
    for row, part in zip(best["rows"], report["parts"].values(), strict=True):
        assert row[2] == f"{part['tokens_per_window']:.3f}"
        assert row[2] in result.stdout
    assert all(len(part["library_sha256"]) == 64 for part in report["parts"].values())


def test_published_report():
    parts = json.loads(REPORT.read_text())["parts"]
    assert len(parts) == 512
    check_cells(parts, num_tokens=192)
    for name, part in parts.items():
        if (part["gate"], part["threshold"]) == ("picked", 0):
            # It admits all: the very same run as without a gate.
            other = dict(parts[name.replace("picked 0,", "always,")])
            assert {**part, "gate": "always", "settings": {}} == other


def test_finished_cells_are_skipped_and_faults_reported(tmp_path):
    report = json.loads(REPORT.read_text())
    # Counts that no run gives: they are kept, so nothing was computed again.
    first, *_, last = report["parts"]
    report["parts"][first]["num_absent"] += 1
    report["parts"][last]["num_accepted"] += 1
    (tmp_path / "acceptance_sweep.json").write_text(json.dumps(report))
    result = acceptance_sweep("--out", tmp_path)
    assert result.returncode == 1, result.stderr
    assert f"{first}: the kinds of rows do not add up" in result.stderr
    assert f"{last}: tokens are not windows and accepted drafts" in result.stderr
    assert result.stderr.count("not shown") == 2
    assert read(tmp_path) == report
    assert (tmp_path / "acceptance_sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            ("--drafters", "own,oracle"),
            "--drafters must be of own, suffix, suffix_root; got oracle",
        ),
        (("--model", "smollm2"), "--model has no use with --smoke"),
    ],
)
def test_refuses(arguments, match, tmp_path):
    result = acceptance_sweep("--smoke", *arguments, "--out", tmp_path)
    assert result.returncode == 2
    assert match in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
