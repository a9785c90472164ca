"""experiments/train_mtp.py: a small run from texts to a head, and its refusals."""

import json

import command_lines
import numpy as np
import pytest

from strata_jax import checkpoints, models

REFUSED = [
    ([], "give --out"),
    (["--out", __file__], "that is a file; name a folder"),
    (["--out", "/tmp/x", "--learning_rate", "0"], "--learning_rate 0.0 must be pos"),
    (["--out", "/tmp/x", "--start_from", "/no/such"], "--start_from /no/such: no such"),
    (
        ["--out", "/tmp/x", "--start_from", str(checkpoints.bundled_path())],
        "not a checkpoint of a training run",
    ),
    (["--out", "/tmp/x", "--target", "/no/such.gguf"], "no such file"),
    (["--out", "/tmp/x", "--target", "tiny"], "only llamas"),
]


@pytest.fixture(scope="module")
def refusals():
    return command_lines.run_each("train_mtp.py", [line for line, _ in REFUSED])


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: REFUSED[n][1])
def test_refuses(refusals, number):
    command_lines.assert_refused(refusals[number], REFUSED[number][1])


@pytest.mark.slow
def test_smoke_run(tmp_path):
    arguments = ("--smoke", "--out", tmp_path)
    result = command_lines.run("train_mtp.py", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "training.json").read_text())
    shipped = report["shipped"]
    assert shipped["bytes"] <= 10_000_000
    for values in shipped["held_out"]["all"].values():
        assert len(values) == 3 and all(0 < value < 1 for value in values)
    _, params = checkpoints.load_gguf_tiled(checkpoints.find_smollm2())
    head = checkpoints.load_draft_head(tmp_path / "draft_head.safetensors", params)
    assert len(np.asarray(head.mtp.draft_tokens)) == 8192
    models.check_tiled_mtp_params(models.with_shared_tables(head))
    # Started again, it has nothing left to do.
    before = (tmp_path / "draft_head.safetensors").read_bytes()
    again = command_lines.run("train_mtp.py", *arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "draft_head.safetensors").read_bytes() == before
