"""Runs the experiments' command lines as a user does."""

import json
import pathlib
import subprocess
import sys

import command_lines
import pytest

ROOT = pathlib.Path(__file__).parents[1]


def generate(*arguments, timeout=300):
    return subprocess.run(
        [
            sys.executable,
            ROOT / "experiments" / "generate.py",
            f"--compilation_cache={ROOT / '.cache' / 'jax'}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


TINY = ("--model", "tiny", "--drafter", "suffix_first")
BUNDLED = ("--drafter", "mtp")
PACKED = ("--model", "smollm2")
SMOLLM2 = (
    *("--model", "smollm2", "--drafter", "layer_skip", "--layers", "0,1,2,11,28,29"),
)


@pytest.mark.parametrize(
    "model",
    [
        TINY,
        pytest.param(BUNDLED, marks=pytest.mark.slow),
        pytest.param(PACKED, marks=pytest.mark.slow),
        pytest.param(SMOLLM2, marks=pytest.mark.slow),
    ],
)
def test_generate_streams_verifies_and_reports(model, tmp_path):
    out = tmp_path / "run.json"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The capital of France is")
    result = generate(
        *(*model, "--prompt_file", str(prompt)),
        *("--temperature", "0.8", "--verifier", "token"),
        *("--gate", "picked", "--threshold", "0.3", "--num_draft_tokens", "3"),
        *("--seed", "0", "--max_new_tokens", "12", "--max_length", "128"),
        *("--verify_target", "--out", str(out)),
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(out.read_text())
    rows = report["verify_target"]["num_rows"]
    assert rows == report["statistics"]["num_tokens"] > 0
    assert report["verify_target"]["num_equal"] == rows
    assert f"{rows} of {rows}" in result.stdout
    assert report["text"].strip() in result.stdout
    assert report["settings"]["threshold"] == 0.3
    assert len(next(iter(report["files"].values()))) == 64
    statistics = report["statistics"]
    num_rows = 3 * statistics["num_windows"]
    parts = ("num_offered", "num_null", "num_absent")
    assert sum(statistics[part] for part in parts) == num_rows


@pytest.mark.slow
def test_generate_nothing():
    result = generate(
        *("--model", "tiny", "--prompt", "a", "--max_new_tokens", "0"),
        *("--max_length", "64", "--verify_target"),
    )
    assert result.returncode == 0, result.stderr
    assert "0 of 0" in result.stdout


# Command lines that are refused, and a part of the message.
REFUSED = [
    ([], "--prompt and --prompt_file"),
    (["--prompt", "a", "--model", "/no/such/file"], "no such file"),
    (["--prompt", "a", "--out", "/no/such/folder/x.json"], "does not exist"),
    (["--prompt", "a", "--temperature", "-1"], "temperature must be in"),
    (["--prompt", "a", "--gate", "picked", "--threshold", "1.5"], "threshold"),
    (["--prompt", "a", "--top_k", "-2"], "top_k"),
    (["--prompt", "", "--model", "smollm2"], "context is empty"),
    (["--prompt", "a", "--max_length", "1000000"], "takes at most 1024"),
    (["--prompt", "a", "--threshold", "0.5"], "--threshold has no use"),
    (["--prompt", "a", "--layers", "0,1"], "--layers has no use"),
    (["--prompt", "a", "--out", "/"], "that is a folder"),
    (["--prompt", "a", "--chat"], "knows no chats"),
    (["--prompt", "a", "--drafter", "layer_skip"], "is no llama"),
    (["--prompt", "a", "--weights", "packed"], "no GGUF"),
    (
        [
            "--prompt",
            "a",
            "--model",
            "smollm2",
            "--weights=packed",
            "--drafter=layer_skip",
        ],
        "needs --weights float32",
    ),
    (
        ["--prompt=a", "--drafter=mtp", "--model=smollm2", "--weights=float32"],
        "no draft head",
    ),
]


@pytest.fixture(scope="module")
def refusals():
    """All of them in one process, with a compilation cache as in the other tests."""
    cache = f"--compilation_cache={ROOT / '.cache' / 'jax'}"
    lists = [[cache, *arguments] for arguments, _ in REFUSED]
    return command_lines.run_each("generate.py", lists)


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: REFUSED[n][1])
def test_generate_refuses(refusals, number):
    command_lines.assert_refused(refusals[number], REFUSED[number][1])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        REFUSED[0],
        *[pytest.param(*case, marks=pytest.mark.slow) for case in REFUSED[1:]],
    ],
)
def test_generate_refuses_as_a_command(arguments, match):
    command_lines.assert_refused(generate(*arguments), match)
