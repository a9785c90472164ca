"""Runs every notebook as a user does, cell by cell, and checks how it is stored."""

import json
import pathlib
import re

import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
SKIP = "skip-execution"

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def read(path):
    return json.loads(path.read_text("utf-8"))


def cells_of(path, cell_type):
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == cell_type]


def text_of(cell):
    return "".join(cell["source"])


def python_of(cell):
    lines = text_of(cell).splitlines()
    return "\n".join(line for line in lines if line[:1] not in ("!", "%"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@every_notebook
def test_notebook_is_stored_without_outputs(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    for cell in cells_of(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@every_notebook
def test_notebook_opens_in_colab_and_installs_the_library(path):
    first, second, *_ = read(path)["cells"]
    assert first["cell_type"] == "markdown"
    assert text_of(first).startswith(f"[![Open in Colab]({BADGE})]")
    assert text_of(second) == "!pip install -q strata_jax"
    assert second["metadata"]["tags"] == [SKIP]


@every_notebook
def test_notebook_makes_a_page(path):
    text = "\n\n".join(text_of(cell) for cell in cells_of(path, "markdown"))
    assert len(re.findall(r"^# ", text, re.M)) == 1
    assert not re.search(r"</?[a-z]+[^>]*>", text)


@every_notebook
def test_notebook_runs_and_ends_with_an_assertion(path, tmp_path, monkeypatch):
    cells = cells_of(path, "code")
    assert re.search(r"^\s*(assert |np\.testing\.assert_)", text_of(cells[-1]), re.M)
    matplotlib.use("Agg")
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    monkeypatch.chdir(tmp_path)  # a notebook may write files
    names = {}
    try:
        for cell in cells:
            if SKIP not in cell["metadata"].get("tags", []):
                exec(compile(python_of(cell), path.name, "exec"), names)
        assert not plt.get_fignums(), "a figure was drawn and not shown"
    finally:
        plt.close("all")
