"""Runs the Python of README.md and of the pages in docs."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import jax
import numpy as np
import pytest

import strata_jax as strata
from strata_jax import models, targets

ROOT = pathlib.Path(__file__).parents[1]


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text("utf-8"), re.S)


def test_readme_example_runs(capsys):
    (block,) = python_blocks("README.md")
    exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) > 5


def test_how_to_examples_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example writes a file
    config = models.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=256,
    )
    target = targets.singleton(config, max_length=64)
    names = {
        "target": target,
        "params": models.random_params(config, jax.random.key(0)),
        "token_ids": np.random.default_rng(0).integers(0, 64, 20),
        "decoder": None,
        "prompt": [0],
        "output": [1, 1],
        "seed": 3,
    }
    blocks = python_blocks("docs/how_to.md")
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "docs/how_to.md", "exec"), names)
    assert names["state"].context.length == 3
    printed = capsys.readouterr().out
    variation = float(re.search(r"total_variation=([\d.e-]+)", printed).group(1))
    assert variation < 1e-6


def modules():
    packages = pkgutil.walk_packages(strata.__path__, "strata_jax.")
    return [module.name for module in packages]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_some_docstrings_have_examples():
    finder = doctest.DocTestFinder()
    found = [
        test
        for name in modules()
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert len(found) >= 3


def test_links_of_the_pages_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
