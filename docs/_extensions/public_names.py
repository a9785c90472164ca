"""The API reference: one page for each package, an entry for each public name.

`.. public-names:: strata_jax.gates` lists and documents what the package exports. Links
to an object's private home lead to its public name.
"""

import enum
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx

PACKAGES = (
    "strata_jax",
    "strata_jax.audit",
    "strata_jax.audit.negative_controls",
    "strata_jax.checkpoints",
    "strata_jax.diagnostics",
    "strata_jax.diagnostics.cost",
    "strata_jax.drafters",
    "strata_jax.experts",
    "strata_jax.gates",
    "strata_jax.measures",
    "strata_jax.models",
    "strata_jax.sampling",
    "strata_jax.targets",
    "strata_jax.testing",
    "strata_jax.training",
    "strata_jax.verifiers",
)


def public_names(package: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Yields what a package exports; of a plain module, what it defines itself."""
    is_package = hasattr(package, "__path__")
    for name, value in sorted(vars(package).items()):
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if is_package or getattr(value, "__module__", None) == package.__name__:
            yield name, value


class PublicNames(Directive):
    """Writes a package's tables and entries."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the nodes of the page."""
        (package,) = self.arguments
        groups: dict[str, dict[str, list[str]]] = {
            title: {} for title in ("Functions", "Classes", "Constants")
        }
        for name, value in public_names(importlib.import_module(package)):
            if inspect.isclass(value):
                groups["Classes"][name] = _class_entry(f"{package}.{name}", value)
            elif inspect.isroutine(value):
                groups["Functions"][name] = [f".. autofunction:: {package}.{name}"]
            else:
                groups["Constants"][name] = [f".. autodata:: {package}.{name}"]
        lines = [f"``{package}``", ""]
        lines += [f".. automodule:: {package}", "   :no-members:", ""]
        for title, entries in groups.items():
            if not entries:
                continue
            lines += [title, "-" * len(title), ""]
            if title != "Constants":
                lines += [".. autosummary::", "   :nosignatures:", ""]
                lines += [f"   {name}" for name in entries]
            for entry in entries.values():
                lines += ["", *entry]
            lines.append("")
        container = nodes.section()
        container.document = self.state.document
        self.state.nested_parse(
            StringList(lines, package), 0, container, match_titles=True
        )
        return container.children


def _class_entry(name: str, value: type) -> list[str]:
    lines = [f".. autoclass:: {name}", "   :members:"]
    if issubclass(value, enum.Enum):
        lines += ["   :undoc-members:", "   :no-inherited-members:"]
    return lines


def _skip_fields(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leaves out what is no part of a class's own documentation.

    Fields stand in the `Attributes` section already, and `replace` is the same in every
    pytree.
    """
    if what == "class" and name == "replace":
        return True
    if what == "class" and not callable(obj) and not isinstance(obj, property):
        return True if not isinstance(obj, enum.Enum) else None
    return None


def _public_homes() -> dict[str, str]:
    homes: dict[str, str] = {}
    for package in PACKAGES:
        for name, value in public_names(importlib.import_module(package)):
            home = getattr(value, "__module__", None)
            if home and home != package:
                homes.setdefault(f"{home}.{name}", f"{package}.{name}")
    return homes


def _link_to_public_name(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("strata_jax."):
        return None
    public = _public_homes().get(target)
    if public is None:
        return None
    document = node.get("refdoc", env.docname)
    domain = env.get_domain("py")
    copy = addnodes.pending_xref("", **{**node.attributes, "reftarget": public})
    return domain.resolve_xref(env, document, app.builder, "obj", public, copy, content)


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the directive, and the links from private homes."""
    app.add_directive("public-names", PublicNames)
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("missing-reference", _link_to_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
