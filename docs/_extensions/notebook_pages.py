"""Makes pages of the notebooks, which lie beside the documentation.

A copy leaves out what a page must not do or ask for: cells that install packages, and
images of other hosts. It names the kernel that runs it.
"""

import json
import pathlib
import re

from sphinx.application import Sphinx

_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
_REMOTE_IMAGE = re.compile(r"\[?!\[[^\]]*\]\(https?://[^)]*\)(\]\([^)]*\))?\n*")


def page_of(notebook: dict) -> dict:
    """Returns the notebook as it stands on the site."""
    cells = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] == "code":
            lines = source.splitlines()
            kept = [line for line in lines if not line.startswith(("!", "%pip"))]
            source = "\n".join(kept).strip()
            if "skip-execution" in tags and len(kept) < len(lines):
                source = ""
        else:
            source = _REMOTE_IMAGE.sub("", source)
        if source.strip():
            cells.append({**cell, "source": source})
    metadata = {**notebook["metadata"], "kernelspec": _KERNEL}
    return {**notebook, "cells": cells, "metadata": metadata}


def _write_pages(app: Sphinx) -> None:
    source = pathlib.Path(app.srcdir).parent / "notebooks"
    folder = pathlib.Path(app.srcdir) / "notebooks"
    folder.mkdir(exist_ok=True)
    pages = {}
    for path in sorted(source.glob("*.ipynb")):
        page = page_of(json.loads(path.read_text("utf-8")))
        pages[path.name] = json.dumps(page, indent=1) + "\n"
    for path in folder.glob("*.ipynb"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        # An unchanged page keeps its time, so that it is not read again.
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Writes the pages before the sources are listed."""
    app.connect("builder-inited", _write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
