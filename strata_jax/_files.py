"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def replaced_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives an empty file to write, which takes a path's place when all is written.

    Args:
      path: what to replace; if the block fails, it stays as it is.

    Yields:
      A file in the same folder, since a rename is atomic only within a file system.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
