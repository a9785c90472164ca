"""Shows an experiment's results from its JSON file, on the page of all results.

In a page, `{experiment-results} NAME` gives the command line, the hashes, the tables
and the figures of `results/NAME.json`; without that file, a note that it has not run.
"""

import hashlib
import json
import pathlib
import shlex
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = "results"


def command_line(report: dict[str, Any]) -> str:
    """Returns the command line that makes the report again."""
    words = ["python", f"experiments/{report['command']}.py"]
    for name, value in report["flags"].items():
        if isinstance(value, bool):
            words += [f"--{name}"] if value else []
        elif isinstance(value, list):
            words += [f"--{name}={','.join(map(str, value))}"] if value else []
        elif value is not None:
            words.append(f"--{name}={value}")
    lines = [shlex.join(words[:2])]
    for word in [*words[2:], "--out=docs/results"]:
        if len(lines[-1]) + len(word) > 76:
            lines.append(" ")
        lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)


def library_hashes(report: dict[str, Any]) -> list[str]:
    """Returns the hashes of the library's sources that a report names, in order."""
    found: dict[str, None] = {}

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("library_sha256"), str):
                found[value["library_sha256"]] = None
            for part in value.values():
                walk(part)

    walk(report)
    return list(found)


def tables(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a report's tables; those of reports that hold none are made here."""
    if "tables" in report:
        return report["tables"]
    maker = _MAKERS.get(report["command"])
    return maker(report) if maker else []


def _training_tables(report: dict[str, Any]) -> list[dict[str, Any]]:
    history = report["history"]
    names = {
        "held_out_step": "step",
        "held_out_next_token": "next token, nats a byte",
        "held_out_overlap_1": "draft 1: sum min(p, q)",
        "held_out_overlap_2": "draft 2: sum min(p, q)",
    }
    rows = [
        [f"{step:,.0f}", *(f"{value:.4f}" for value in values)]
        for step, *values in zip(*(history[name] for name in names), strict=True)
    ]
    return [
        {
            "title": "Held-out text during training",
            "columns": list(names.values()),
            "rows": rows,
            "note": f"{report['num_parameters']:,} parameters, "
            f"{report['seconds'] / 60:.0f} minutes.",
        }
    ]


_MAKERS = {"train_bundled": _training_tables}


class ExperimentResults(SphinxDirective):
    """Writes what one JSON file holds."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the nodes of the experiment."""
        (name,) = self.arguments
        path = pathlib.Path(self.env.srcdir) / FOLDER / f"{name}.json"
        self.env.note_dependency(str(path))
        try:
            content = path.read_bytes()
            report = json.loads(content)
            command = command_line(report)
            is_done = "tables" in report or not {"parts", "cells"} & report.keys()
        except FileNotFoundError:
            return [_paragraph("Not run yet.")]
        except (ValueError, KeyError, TypeError):
            return [_paragraph(f"{FOLDER}/{name}.json is no finished report.")]
        if not is_done:
            return [
                nodes.literal_block(command, command, language="bash"),
                _paragraph("The run is not finished; its parts so far are not shown."),
            ]
        return [
            nodes.literal_block(command, command, language="bash"),
            _facts(path.name, content, report),
            *self._figures(report),
            *self._tables(report),
        ]

    def _tables(self, report: dict[str, Any]) -> Iterator[nodes.Node]:
        for content in tables(report):
            yield _table(content)
            if content.get("note"):
                yield _paragraph(content["note"])

    def _figures(self, report: dict[str, Any]) -> Iterator[nodes.Node]:
        for content in report.get("figures", ()):
            path = pathlib.Path(self.env.srcdir) / FOLDER / content["file"]
            if path.exists():
                yield nodes.image(uri=f"/{FOLDER}/{path.name}", alt=content["alt"])


def _facts(name: str, content: bytes, report: dict[str, Any]) -> nodes.Node:
    versions = [f"{package} {number}" for package, number in report["versions"].items()]
    facts = {
        "Finished": report["time"],
        "Versions": ", ".join(versions),
        f"SHA-256 of {name}": hashlib.sha256(content).hexdigest(),
    }
    hashes = library_hashes(report)
    for place, value in enumerate(hashes, 1):
        number = f" ({place} of {len(hashes)})" if len(hashes) > 1 else ""
        facts[f"SHA-256 of the library's sources{number}"] = value
    if not hashes:
        facts["SHA-256 of the library's sources"] = "not recorded"
    items = [
        nodes.field(
            "",
            nodes.field_name("", label),
            nodes.field_body("", nodes.paragraph("", "", _value(value))),
        )
        for label, value in facts.items()
    ]
    return nodes.field_list("", *items, classes=["facts"])


def _value(text: str) -> nodes.Node:
    is_hash = len(text) == 64 and text.isalnum()
    return nodes.literal(text, text) if is_hash else nodes.Text(text)


def _paragraph(text: str) -> nodes.paragraph:
    return nodes.paragraph("", "", nodes.Text(text))


def _table(content: dict[str, Any]) -> nodes.table:
    columns, rows = content["columns"], content["rows"]
    group = nodes.tgroup("", cols=len(columns))
    group += [nodes.colspec(colwidth=1) for _ in columns]
    group += nodes.thead("", _row(columns))
    group += nodes.tbody("", *map(_row, rows))
    table = nodes.table("", classes=["results"])
    if content.get("title"):
        table += nodes.title("", content["title"])
    table += group
    return table


def _row(cells: list[Any]) -> nodes.row:
    entries = []
    for place, cell in enumerate(cells):
        # The first column to the left, numbers to the right.
        classes = ["text-left" if place == 0 else "text-right"]
        entry = nodes.entry("", _paragraph(str(cell)), classes=classes)
        entries.append(entry)
    return nodes.row("", *entries)


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the directive."""
    app.add_directive("experiment-results", ExperimentResults)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
