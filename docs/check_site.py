"""Checks a built site: every public name has an entry, and no page asks other hosts.

python docs/check_site.py docs/_build/html
"""

import html.parser
import pathlib
import re
import sys

from sphinx.util.inventory import InventoryFile

ROOT = pathlib.Path(__file__).parents[1]
PUBLIC_NAMES = ROOT / "tests" / "testdata" / "public_names.txt"
# Attributes by which an element makes the browser fetch something.
_FETCHED = {"src", "srcset", "data", "poster"}
_FETCHED_BY_STYLE = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)")


class Page(html.parser.HTMLParser):
    """Collects what a page fetches from other hosts as it opens."""

    def __init__(self) -> None:
        """Starts with nothing found."""
        super().__init__()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Looks at one element."""
        for name, value in attrs:
            is_fetched = name in _FETCHED or (tag == "link" and name == "href")
            if is_fetched and re.match(r"(https?:)?//", value or ""):
                self.remote.append(f"<{tag} {name}={value}>")


def remote_requests(folder: pathlib.Path) -> list[str]:
    """Returns what the pages and styles of a site ask of other hosts."""
    found = []
    for path in sorted(folder.rglob("*.html")):
        page = Page()
        page.feed(path.read_text("utf-8"))
        found += [f"{path.relative_to(folder)}: {element}" for element in page.remote]
    for path in sorted(folder.rglob("*.css")):
        text = path.read_text("utf-8")
        for address in _FETCHED_BY_STYLE.findall(text):
            found.append(f"{path.relative_to(folder)}: {address}")
    return found


def missing_entries(folder: pathlib.Path) -> list[str]:
    """Returns the public names that the site's API reference does not document."""
    with (folder / "objects.inv").open("rb") as stream:
        inventory = InventoryFile.load(stream, "", lambda base, path: path)
    documented = {
        name
        for role, entries in inventory.items()
        if role.startswith("py:") and role != "py:module"
        for name in entries
    }
    names = PUBLIC_NAMES.read_text("utf-8").split()
    return [name for name in names if f"strata_jax.{name}" not in documented]


def missing_notebooks(folder: pathlib.Path) -> list[str]:
    """Returns the notebooks that are no page of the site."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    pages = folder / "notebooks"
    return [
        path.name for path in notebooks if not (pages / f"{path.stem}.html").exists()
    ]


def main(folder: pathlib.Path) -> int:
    """Prints what is wrong with a site; returns the exit code."""
    faults = [
        *(f"no entry in the API reference: {name}" for name in missing_entries(folder)),
        *(f"no page: notebooks/{name}" for name in missing_notebooks(folder)),
        *(f"asks another host: {request}" for request in remote_requests(folder)),
    ]
    print("\n".join(faults) or "every public name has an entry; no other host is asked")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
