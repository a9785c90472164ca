"""Runs every notebook as a user does, cell by cell."""

import json
import pathlib

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_cells(path):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield cell


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_stored_without_outputs(path):
    for cell in code_cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs_and_ends_with_an_assertion(path):
    names, source = {}, ""
    for cell in code_cells(path):
        lines = "".join(cell["source"]).splitlines()
        source = "\n".join(line for line in lines if line[:1] not in ("!", "%"))
        exec(compile(source, path.name, "exec"), names)
    assert "assert" in source
