"""The public face: what is exported, documented, and what stays inside."""

import importlib
import inspect
import pathlib
import types

import pytest

NAMES = pathlib.Path(__file__).parent / "testdata" / "public_names.txt"
PACKAGES = (
    "",
    "audit",
    "checkpoints",
    "diagnostics",
    "diagnostics.cost",
    "drafters",
    "experts",
    "gates",
    "measures",
    "models",
    "sampling",
    "targets",
    "testing",
    "training",
    "verifiers",
)


def module(package):
    return importlib.import_module(f"strata_jax.{package}".rstrip("."))


def public_objects(package):
    """Public names of a package; submodules count only in the root."""
    for name, value in sorted(vars(module(package)).items()):
        if name.startswith("_") or inspect.ismodule(value):
            continue
        yield name, value


def test_public_names_are_those_checked_in():
    """A change here is a change of the API: edit the list with the changelog."""
    found = [
        f"{package}.{name}".lstrip(".")
        for package in PACKAGES
        for name, _ in public_objects(package)
    ]
    assert found == NAMES.read_text("utf-8").split()


def test_negative_controls_are_imported_by_name_only():
    assert "negative_controls" not in dir(module("audit")) or isinstance(
        module("audit").negative_controls, types.ModuleType
    )
    source = inspect.getsource(module("audit")) + inspect.getsource(module(""))
    assert "negative_controls" not in source


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package):
    missing = []
    for name, value in public_objects(package):
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not (value.__doc__ or "").strip():
            missing.append(f"{name}: no docstring")
        if inspect.isfunction(value) and "Exactness:" not in value.__doc__:
            missing.append(f"{name}: no Exactness line")
    assert not missing


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_names_its_arguments(package):
    missing = []
    for name, value in public_objects(package):
        if not inspect.isfunction(value):
            continue
        for argument in inspect.signature(value).parameters:
            if f"{argument}:" not in value.__doc__:
                missing.append(f"{name}({argument})")
    assert not missing
