"""Results of an experiment: one JSON file that grows, its tables and its figure."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from _command_line import describe_run, replaced, write_json
from absl import flags

import strata_jax as strata
from strata_jax import diagnostics

_OUT = flags.DEFINE_string("out", None, "Folder for all results; made if need be.")


def library_sha256() -> str:
    """Returns a hash of the library's sources."""
    digest = hashlib.sha256()
    folder = pathlib.Path(strata.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Results:
    """The parts of a run that are done, kept in `NAME.json` after each of them.

    Started again with the same settings, a run finds its finished parts there.
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        *,
        variant: str = "",
        key: str = "parts",
        order: Sequence[str] = (),
    ):
        """Opens the folder --out.

        Args:
          name: the script's name, hence the file's.
          variant: ends the file's name, where one script has several files.
          settings: what decides the results; a file with others is refused.
          key: under which the parts stand in the file.
          order: names of parts in the order in which the file lists them.

        Raises:
          ValueError: if --out is missing or holds another run.
        """
        if not _OUT.value:
            raise ValueError("give --out, the folder for the results")
        self.folder = pathlib.Path(_OUT.value)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"--out {self.folder}: that is a file; name a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK):
            raise ValueError(f"--out {self.folder}: the folder cannot be written to")
        self._script, self._key, self._order = name, key, list(order)
        self.name = f"{name}_{variant}" if variant else name
        self._settings = json.loads(json.dumps(settings))
        self._library = library_sha256()
        self._extra: dict[str, Any] = {}
        self._is_finished = False  # whether the file holds all that it should
        self.parts = self._load()

    @property
    def path(self) -> pathlib.Path:
        """The JSON file."""
        return self.folder / f"{self.name}.json"

    def _load(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        try:
            report = json.loads(self.path.read_text("utf-8"))
            before, parts = report["settings"], report[self._key]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--out: {self.path} cannot be read ({error!r})"
            ) from error
        for name, value in self._settings.items():
            if before.get(name) != value:
                raise ValueError(
                    f"--out: {self.path} is of another run ({name}: "
                    f"{before.get(name)} there, {value} here): name another folder"
                )
        self._is_finished = "tables" in report
        return parts

    def keep(self, name: str, part: dict[str, Any]) -> None:
        """Adds a finished part and writes the file, whole or not at all."""
        # Through JSON, so that a fresh part is what a later run would read.
        part = {"library_sha256": self._library, **part}
        self.parts[name] = json.loads(json.dumps(part))
        self._is_finished = False
        self._write()

    def finish(
        self,
        tables: Sequence[dict[str, Any]],
        faults: Sequence[str],
        figures: Sequence[dict[str, str]] = (),
    ) -> int:
        """Prints the tables, adds them and the figures to the file, names the faults.

        Args:
          tables: each {"title", "columns", "rows"}, cells as text; "note" if need be.
          faults: what speaks against the experiment's claims.
          figures: each {"file", "alt"}; files of the folder.

        Returns:
          The exit code of the script: 1 if there is a fault.
        """
        if not self._is_finished:
            self._extra = {"tables": list(tables), "figures": list(figures)}
            self._write()
            self._is_finished = True
        for table in tables:
            print()
            print_table(**table)
        for fault in faults:
            print(f"not shown: {fault}", file=sys.stderr)
        return 1 if faults else 0

    def _write(self) -> None:
        names = [name for name in self._order if name in self.parts]
        names += [name for name in self.parts if name not in names]
        write_json(
            self.path,
            {
                **describe_run(self._script),
                "settings": self._settings,
                self._key: {name: self.parts[name] for name in names},
                **self._extra,
            },
        )


def count_acceptance(verdicts: strata.Verdict) -> dict[str, Any]:
    """Returns the counts and rates of a run's windows, as they go into a report."""
    summary = diagnostics.summarize_acceptance(verdicts)
    names = ("num_tokens", "num_windows", "num_offered", "num_accepted", "num_null")
    names += ("num_absent", "acceptance_rate", "tokens_per_window")
    return {name: getattr(summary, name) for name in names}


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> None:
    """Prints a table: the first column to the left, the others to the right."""
    if title:
        print(title)
    lines = [list(columns), *[list(row) for row in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells[1:]]))
    if note:
        print(note)


@contextlib.contextmanager
def figure(path: pathlib.Path, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Gives a figure and its axes to draw on, and writes them as a PNG at the end.

    Args:
      path: the file.
      **options: of `matplotlib.pyplot.subplots`.

    Raises:
      ImportError: if matplotlib is missing, before anything is drawn.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    options.setdefault("layout", "constrained")
    drawing, axes = pyplot.subplots(**options)
    try:
        yield drawing, axes
        with replaced(path) as part:
            drawing.savefig(part, dpi=150, format="png")
    finally:
        pyplot.close(drawing)


def require_matplotlib() -> None:
    """Raises ImportError, which says what to install, if there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the figure needs matplotlib: pip install 'strata-jax[plot]'"
        ) from error
