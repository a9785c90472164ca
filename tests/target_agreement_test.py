"""The target agreement script: a small run, going on with it, and its refusals."""

import functools
import json
import pathlib

import command_lines
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
REPORT = ROOT / "docs" / "results" / "target_agreement.json"
PREFIX = "tiny, 12 positions: "


target_agreement = functools.partial(command_lines.run, "target_agreement.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("agreement") / "out"
    result = target_agreement("--smoke", "--out", out)
    assert result.returncode == 0, result.stderr + result.stdout
    return out, json.loads((out / "target_agreement.json").read_text()), result


def distribution(text):
    pairs = [pair.split(":") for pair in text.split()]
    return {int(token): np.float32(probability) for token, probability in pairs}


@pytest.mark.slow
def test_repaired_rows_are_the_targets_and_the_originals_are_not(finished):
    _, report, _ = finished
    parts = {name.removeprefix(PREFIX): part for name, part in report["parts"].items()}
    assert len(parts) == 6
    for name, part in parts.items():
        assert part["replay"]["difference"] is None
        assert part["replay"]["num_decisions"] >= 12
        assert len(part["positions"]) == len(part["tokens"]) == 12
        num_equal = part["num_equal"]
        assert num_equal["repaired"] == num_equal["original"]
        if name.startswith("repaired") or name.endswith("no drafts"):
            assert num_equal["repaired"] == 12
            assert part["largest"]["emitted_max"] < 1e-6
        else:
            assert num_equal["repaired"] < 12
            assert 0 < part["largest"]["arithmetic_max"] < 1e-5
    biased = parts["original, gated"]["largest"]
    assert biased["gate_max"] > 1e-2 and biased["emitted_max"] > 1e-2
    defaults = [
        parts[f"{rule}, default"]["tokens"] for rule in ("original", "repaired")
    ]
    assert defaults[0] == defaults[1] == parts["repaired, no drafts"]["tokens"]
    sampled = parts["original, gated"], parts["repaired, gated"]
    assert sum(part["replay"]["num_decisions"] for part in sampled) >= 24


@pytest.mark.slow
def test_distributions_are_kept(finished):
    _, report, _ = finished
    for part in report["parts"].values():
        for position in part["positions"]:
            assert ("p_in_window" in position) == (not position["is_equal"])
            assert ("emitted" in position) == ("tv_gate" in position)
            for name in {"p", "p_in_window", "emitted"} & position.keys():
                probs = distribution(position[name])
                assert sum(probs.values()) == pytest.approx(1, abs=1e-5)
                assert len(probs) <= 40
            if "emitted" in position:
                p, law = distribution(position["p"]), distribution(position["emitted"])
                gap = sum(abs(p.get(x, 0) - law.get(x, 0)) for x in {*p, *law}) / 2
                assert gap == pytest.approx(position["tv_emitted"], abs=1e-6)


@pytest.mark.slow
def test_report(finished):
    out, report, result = finished
    assert sorted(path.name for path in out.iterdir()) == [
        *("target_agreement.json", "target_agreement.png")
    ]
    assert (out / "target_agreement.png").read_bytes().startswith(b"\x89PNG")
    assert {"jax", "jaxlib", "strata_jax"} <= report["versions"].keys()
    assert report["flags"]["threshold"] == report["settings"]["threshold"] == 0.5
    (table,) = report["tables"]
    assert [row[0] for row in table["rows"]] == [
        name.removeprefix(PREFIX) for name in report["parts"]
    ]
    for row in table["rows"]:
        assert row[0] in result.stdout and row[1] in result.stdout
    for part in report["parts"].values():
        assert [len(digest) for digest in part["files"].values()] == [64]


def test_published_report():
    parts = json.loads(REPORT.read_text())["parts"]
    assert len(parts) == 54
    for name, part in parts.items():
        assert part["replay"]["difference"] is None
        assert part["replay"]["num_decisions"] >= part["num_positions"]
        if "repaired" in name or name.endswith("no drafts"):
            assert part["num_equal"]["repaired"] == part["num_positions"]
            assert part["num_equal"]["original"] == part["num_positions"]
            assert part["largest"]["emitted_max"] < 1e-6
        else:
            assert part["num_equal"]["repaired"] < part["num_positions"]
        if name.endswith("original, gated"):
            assert part["largest"]["gate_max"] > 0.1
            size = 1e-3 if "bfloat16" in name else 0
            limit = 0.1 if "bfloat16" in name else 1e-5
            assert size < part["largest"]["arithmetic_max"] < limit
    for model in ("bundled", "bundled-q4_0", "smollm2"):
        for length in (12, 256):
            tokens = [
                parts[f"{model}, {length} positions: {rule}, default"]["tokens"]
                for rule in ("original", "repaired")
            ]
            assert tokens[0] == tokens[1]


def test_finished_runs_are_skipped_and_faults_reported(tmp_path):
    report = json.loads(REPORT.read_text())
    parts, prefix = report["parts"], "smollm2, 256 positions: "
    # Results that no run gives: they are kept, so nothing was computed again.
    parts[f"{prefix}repaired, gated"]["num_equal"]["repaired"] = 255
    parts[f"{prefix}original, gated"]["largest"]["gate_max"] = 0
    parts[f"{prefix}original, default"]["tokens"][3] ^= 1
    (tmp_path / "target_agreement.json").write_text(json.dumps(report))
    result = target_agreement("--out", tmp_path)
    assert result.returncode == 1, result.stderr
    for fault in (
        "repaired, gated: 255 of 256 rows equal the reference without drafts",
        "original, gated: no bias: nothing is shown",
        "the default mode's tokens differ between original and repaired",
    ):
        assert f"not shown: {prefix}{fault}" in result.stderr
    assert result.stderr.count("not shown") == 3
    assert json.loads((tmp_path / "target_agreement.json").read_text()) == report


def test_refuses(tmp_path):
    refused = {
        "give --out": ["--smoke"],
        "--configurations must be of tiny": ["--configurations", "gpt"],
        "--positions must be numbers": ["--positions", "12,many"],
    }
    lists = [
        arguments if "--smoke" in arguments else [*arguments, "--out", tmp_path]
        for arguments in refused.values()
    ]
    results = command_lines.run_each("target_agreement.py", lists)
    for result, match in zip(results, refused, strict=True):
        command_lines.assert_refused(result, match)
