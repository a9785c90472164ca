"""Runs every notebook as a user does, cell by cell."""

import json
import pathlib

import matplotlib
import pytest
from matplotlib import pyplot

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    notebook = json.loads(path.read_text("utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def text(cell):
    return "".join(cell["source"])


def is_run(cell):
    return "skip-execution" not in cell["metadata"].get("tags", [])


def test_there_are_five_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_stored_as_it_should_be(path):
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    first = text(cells(path, "markdown")[0])
    assert first.startswith("[![Open in Colab]")
    assert first.count("\n# ") == 1
    install, *others = cells(path, "code")
    assert text(install) == "!pip install -q strata_jax" and not is_run(install)
    assert all(is_run(cell) for cell in others)
    assert "assert" in text(others[-1])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    names = {}
    with matplotlib.rc_context({"backend": "Agg"}):
        pyplot.switch_backend("Agg")
        monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))
        for cell in cells(path, "code"):
            if is_run(cell):
                exec(compile(text(cell), path.name, "exec"), names)
