"""The arithmetic parity script: a small run, going on with it, and its refusals."""

import functools
import json

import command_lines
import pytest

NAMES = ["q8_0-hadamard-cold", "q4_0-host"]


arithmetic_parity = functools.partial(command_lines.run, "arithmetic_parity.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole small run: its folder, its report and what it printed."""
    out = tmp_path_factory.mktemp("parity") / "out"
    result = arithmetic_parity("--smoke", "--out", out)
    assert result.returncode == 0, result.stderr
    return out, json.loads((out / "arithmetic_parity.json").read_text()), result


def test_the_published_run_found_no_difference():
    path = command_lines.ROOT / "docs" / "results" / "arithmetic_parity.json"
    report = json.loads(path.read_text())
    assert len(report["configurations"]) == 10
    for found in report["configurations"].values():
        assert found["exact"]["num_compared"] >= report["settings"]["comparisons"]
        assert found["exact"]["num_different"] == 0
        assert all(part["share"] > 0.9 for part in found["control"].values())


@pytest.mark.slow
def test_nothing_differs_but_the_control(finished):
    _, report, _ = finished
    assert list(report["configurations"]) == NAMES
    for entry in report["configurations"].values():
        exact, parts = entry["exact"], entry["parts"]
        assert exact["num_different"] == exact["num_not_finite"] == 0
        assert list(parts) == ["windows", "windows_shared", "alone", "model"]
        for part in ("windows", "windows_shared"):
            assert list(parts[part]) == [str(width) for width in range(1, 9)]
            compared = sum(tally["num_compared"] for tally in parts[part].values())
            assert compared >= report["settings"]["comparisons"] == 36_864
        assert parts["alone"]["1"]["num_compared"] > 0
        assert sum(tally["num_compared"] for tally in parts["model"].values()) > 0
        # What the exact parts pass, the same rows in shared products do not.
        for control in entry["control"].values():
            assert control["num_not_finite"] == 0
            assert 0.5 < control["share"] <= 1
            assert control["largest_difference"] > 0
        assert entry["num_jobs_of_several_rows"] > 0
    assert report["configurations"]["q4_0-host"]["num_brought_into_cache"] > 0


@pytest.mark.slow
def test_report(finished):
    out, report, result = finished
    assert sorted(path.name for path in out.iterdir()) == [
        *("arithmetic_parity.json", "arithmetic_parity.md")
    ]
    settings = report["settings"]
    assert settings["seed"] == 0
    assert settings["model"]["hidden_size"] == settings["model"]["expert_size"] == 256
    assert {"jax", "jaxlib", "strata_jax"} <= settings["versions"].keys()
    page = (out / "arithmetic_parity.md").read_text()
    hashes = set()
    for name, entry in report["configurations"].items():
        compared = f"{entry['exact']['num_compared']:,}"
        assert f"| {name} | {entry['num_cached']} | {compared} | 0 |" in page
        assert name in result.stdout and compared in result.stdout
        assert name in result.stderr  # the progress
        assert len(entry["inputs_sha256"]) == 64
        hashes.add(entry["inputs_sha256"])
    assert len(hashes) == len(NAMES)


@pytest.mark.slow
def test_finished_configurations_are_skipped_and_faults_reported(finished, tmp_path):
    _, report, _ = finished
    # Results that no run gives: they are kept, so nothing was computed again.
    first, second = report["configurations"].values()
    first["exact"]["num_different"] = 7
    second["control"]["model"]["num_different"] = 0
    path = tmp_path / "arithmetic_parity.json"
    path.write_text(json.dumps(report))
    result = arithmetic_parity("--smoke", "--out", tmp_path)
    assert result.returncode == 1
    assert "2 of 2 configurations are done" in result.stdout
    assert f"{NAMES[0]}: 7 values differ from the singleton" in result.stderr
    assert f"{NAMES[1]}: the control does not differ (model)" in result.stderr
    assert json.loads(path.read_text()) == report


# Command lines that are refused, and a part of the message; the last needs a run.
REFUSED = [
    (["--comparisons", "0"], "--comparisons must be at least 1"),
    (["--configurations", "q8_0-resident,q9"], "--configurations must be of"),
    (["--seed", "one"], "--seed=one"),
    (["--smoke", "--seed", "1"], "is of another run (seed: 0 there, 1 here)"),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """All but the last in one process."""
    out = tmp_path_factory.mktemp("refused") / "out"
    own = ("--platform=cpu", "--compilation_cache=", "--out", out)
    lists = [[*own, *arguments] for arguments, _ in REFUSED[:-1]]
    return command_lines.run_each("arithmetic_parity.py", lists)


@pytest.mark.parametrize("number", range(len(REFUSED) - 1), ids=lambda n: REFUSED[n][1])
def test_refuses(refusals, number):
    command_lines.assert_refused(refusals[number], REFUSED[number][1])


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "match"), REFUSED)
def test_refuses_as_a_command(finished, arguments, match):
    result = arithmetic_parity("--out", finished[0], *arguments)
    command_lines.assert_refused(result, match)
