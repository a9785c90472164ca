"""Runs the Python of README.md and of the pages in docs."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import public_api_test
import pytest

import strata_jax as strata

ROOT = pathlib.Path(__file__).parents[1]
HOW_TO = (
    "audit_a_rule",
    "choose_a_policy",
    "new_drafter",
    "new_gate",
    "place_experts",
    "replay_a_trace",
    "resume_a_run",
    "wrap_a_model",
)


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text("utf-8"), re.S)


PAGES = ("README.md", "docs/**/*.md")


def pages():
    """The written pages: not what a build leaves beside them."""
    found = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    return [path for path in found if "_build" not in path.parts]


def run_page(path, names):
    """Runs a page's blocks in order; returns how many there are."""
    blocks = python_blocks(path)
    for block in blocks:
        exec(compile(block, str(path), "exec"), names)
    return len(blocks)


def printed_distances(text):
    return [float(found) for found in re.findall(r"total_variation=([\d.e-]+)", text)]


def test_readme_example_runs_and_the_quickstart_goes_on_from_it(capsys):
    names = {}
    assert run_page("README.md", names) == 1
    assert len(capsys.readouterr().out.split()) > 5
    assert run_page("docs/quickstart.md", names) == 1
    assert names["verdicts"].num_emitted.shape == (8,)
    assert "tokens by window" in capsys.readouterr().out


def test_a_gate_a_drafter_and_places_for_experts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example writes a file
    assert run_page("docs/how_to/new_gate.md", {}) == 1
    assert run_page("docs/how_to/new_drafter.md", {}) == 1
    assert run_page("docs/how_to/place_experts.md", {}) == 1


def test_a_rule_is_audited_and_its_control_fails(capsys):
    assert run_page("docs/how_to/audit_a_rule.md", {}) == 2
    right, wrong = printed_distances(capsys.readouterr().out)
    assert right < 1e-6
    assert wrong > 0.05


def test_an_nnx_model_is_wrapped_bit_by_bit(capsys):
    assert run_page("docs/how_to/wrap_a_model.md", {}) == 2
    assert "'widths'" in capsys.readouterr().out


def test_a_policy_is_chosen(capsys):
    assert run_page("docs/how_to/choose_a_policy.md", {}) == 1
    assert capsys.readouterr().out.count("tokens/s") == 3


def test_a_trace_is_replayed_and_a_run_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    assert run_page("docs/how_to/replay_a_trace.md", names) == 2
    assert names["replay"].num_rows == 12
    output = strata.output_tokens(names["state"]).tolist()
    names |= {
        "params": names["weights"],
        "prompt": [0],
        "output": output[:3],
        "seed": 7,
    }
    assert run_page("docs/how_to/resume_a_run.md", names) == 1
    assert names["state"].context.length == 4


def test_every_page_with_examples_is_run_above():
    run = {
        "README.md",
        "docs/quickstart.md",
        *(f"docs/how_to/{name}.md" for name in HOW_TO),
    }
    found = {
        path.relative_to(ROOT).as_posix() for path in pages() if python_blocks(path)
    }
    assert found == run


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
    for page in pages():
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_page_is_in_the_table_of_contents():
    """A page that no toctree names would fail the build; this needs no Sphinx."""
    docs = ROOT / "docs"
    toctree = re.compile(r"```\{toctree\}\n(.*?)```", re.S)
    named = {"index"}
    for page in pages():
        for block in toctree.findall(page.read_text("utf-8")):
            lines = [line for line in block.splitlines() if line[:1].isalpha()]
            folder = page.parent.relative_to(docs)
            named |= {(folder / line).as_posix() for line in lines}
    written = {
        path.relative_to(docs).with_suffix("").as_posix()
        for path in pages()
        if docs in path.parents
    }
    assert written <= named


def test_every_package_has_a_page_of_the_reference():
    pattern = re.compile(r"public-names:: (\S+)")
    found = [
        name
        for page in (ROOT / "docs" / "api").glob("*.rst")
        for name in pattern.findall(page.read_text("utf-8"))
    ]
    packages = [f"strata_jax.{name}".rstrip(".") for name in public_api_test.PACKAGES]
    assert sorted(found) == sorted([*packages, "strata_jax.audit.negative_controls"])
