"""What the experiments' command lines share: flags, reports, progress, exit codes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from absl import app, flags

import strata_jax as strata

CACHE = os.path.join(
    os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "strata_jax"
)
# Flags that say where things are on one machine, and change no result.
_PLACES = ("out", "compilation_cache", "corpus_cache")
_LOG_SECONDS = 20.0  # between lines, where there is no progress bar

_PLATFORM = flags.DEFINE_enum(
    "platform",
    None,
    ("cpu", "cuda", "rocm", "tpu"),
    "Where to compute; the default is what JAX finds.",
)
_CACHE_DIR = flags.DEFINE_string(
    "compilation_cache",
    CACHE,
    "Folder where compiled programs are kept between runs; empty for none.",
)


def run_command(run: Callable[[], int]) -> None:
    """Runs a script: bad input ends it with code 2 and a line that says what to do."""

    def main(argv: Sequence[str]) -> int:
        if len(argv) > 1:
            message = f"unknown arguments {argv[1:]}; see --help"
            raise app.UsageError(message, exitcode=2)
        # Backends that are not there are no news.
        for name in ("jax._src.xla_bridge", "matplotlib.font_manager"):
            logging.getLogger(name).setLevel(logging.WARNING)
        if _PLATFORM.value:
            jax.config.update("jax_platforms", _PLATFORM.value)
            try:
                jax.devices()
            except (RuntimeError, AssertionError) as error:
                # JAX says nothing in the case of a missing plug-in.
                reason = str(error) or "JAX finds no such device here"
                print(f"error: --platform: {reason}", file=sys.stderr)
                return 2
        if _CACHE_DIR.value:
            jax.config.update("jax_compilation_cache_dir", _CACHE_DIR.value)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        try:
            return run()
        except (ValueError, FloatingPointError, OSError, ImportError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    app.run(main, flags_parser=_parse_flags)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def describe_run(command: str) -> dict[str, Any]:
    """Returns what every report begins with: when, with what, how it was called."""
    versions = {"python": platform.python_version(), "strata_jax": strata.__version__}
    for name in ("jax", "jaxlib", "numpy", "flax", "optax"):
        versions[name] = importlib.metadata.version(name)
    return {
        "command": command,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions,
        "flags": {
            flag.name: flag.value
            for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])
            if flag.name not in _PLACES
        },
    }


@contextlib.contextmanager
def replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a file to write that takes the path's place when all is written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a report whole or not at all."""
    with replaced(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


@contextlib.contextmanager
def show_progress(
    start: int, total: int, unit: str
) -> Iterator[Callable[[int, str], None]]:
    """Gives (done, note) -> None: a bar on a terminal, else a line now and then."""
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            import tqdm

            with tqdm.tqdm(total=total, initial=start, unit=unit) as bar:

                def advance(done: int, note: str) -> None:
                    bar.update(done - bar.n)
                    bar.set_postfix_str(note, refresh=False)

                yield advance
            return
    began = last = time.monotonic()

    def log(done: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LOG_SECONDS and done < total:
            return
        last = now
        speed = max(done - start, 1) / (now - began)
        print(
            f"{unit} {done}/{total}  {note}  {speed:.2f} {unit}s/s  "
            f"{(total - done) / speed / 60:.0f} min left",
            file=sys.stderr,
            flush=True,
        )

    yield log
