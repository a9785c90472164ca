"""Makes the library's docstrings ready for napoleon.

A field's shape, dtype and meaning stand in a comment on its line, or in a string below
it: these become the `Attributes` section of its dataclass or NamedTuple. The line that
begins with "Exactness:" gets a bold head.
"""

import ast
import inspect
import textwrap
from typing import Any

from sphinx.application import Sphinx


def field_comments(cls: type) -> dict[str, str]:
    """Returns the comment of each annotated field; "" for one without any."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    lines = source.splitlines()
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    comments = {}
    for place, statement in enumerate(body.body):
        if not isinstance(statement, ast.AnnAssign):
            continue
        assert isinstance(statement.target, ast.Name) and statement.end_lineno
        text = _comment(
            lines[statement.end_lineno - 1][statement.end_col_offset or 0 :]
        )
        if not text:
            text = _comments_above(lines, statement.lineno - 1)
        following = body.body[place + 1] if place + 1 < len(body.body) else None
        if isinstance(following, ast.Expr) and isinstance(
            following.value, ast.Constant
        ):
            text = inspect.cleandoc(str(following.value.value))
        if not statement.target.id.startswith("_"):
            comments[statement.target.id] = _escaped(" ".join(text.split()))
    return comments


def _comment(text: str) -> str:
    return text.split("#", 1)[1].strip() if "#" in text else ""


def _escaped(text: str) -> str:
    """Keeps stars outside of code from being read as emphasis."""
    pieces = text.split("`")
    pieces[::2] = [piece.replace("*", r"\*") for piece in pieces[::2]]
    return "`".join(pieces)


def _comments_above(lines: list[str], line: int) -> str:
    found: list[str] = []
    while line and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, _comment(lines[line]))
    return " ".join(found)


def _edit(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    for place, line in enumerate(lines):
        if line.startswith("Exactness:"):
            lines[place] = line.replace("Exactness:", "**Exactness:**", 1)
    is_class = what in ("class", "exception") and inspect.isclass(obj)
    if not is_class or any(line.strip() == "Attributes:" for line in lines):
        return
    comments = field_comments(obj)
    if any(comments.values()):
        lines += ["", "Attributes:"]
        lines += [f"  {name}: {text}".rstrip() for name, text in comments.items()]
        lines.append("")


def setup(app: Sphinx) -> dict[str, bool]:
    """Edits a docstring before napoleon reads it."""
    app.connect("autodoc-process-docstring", _edit, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
