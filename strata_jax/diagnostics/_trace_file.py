"""A trace as a file: written whole, read with all checks."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from strata_jax._files import replaced_file
from strata_jax._types import Draws, Proposal, RowKind, Verdict, Window
from strata_jax.diagnostics._trace import DRAWS, Trace

SCHEMA = "strata_jax.trace"
SCHEMA_VERSION = 1


def save_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Writes a trace as one `.npz` file, whole or not at all.

    Every row of p and mu is an array of its own, and every row of every field has a
    checksum, so that damage can be named.

    Args:
      path: the file, whose name ends in `.npz`.
      trace: the trace.

    Raises:
      ValueError: if the name does not end in `.npz`.
      OSError: if it cannot be written.

    Exactness: bits are kept.
    """
    path = _checked_path(path)
    windows = trace.windows
    header = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "verifier": trace.verifier,
        "window": trace.window,
        "num_output": trace.num_output,
        "versions": dict(trace.versions),
        "files": dict(trace.files),
        "num_windows": len(windows.verdict.status),
        "num_draft_tokens": windows.proposal.kind.shape[-1],
        "vocab_size": windows.target_probs.shape[-1],
        "dtype": str(windows.target_probs.dtype),
    }
    text = json.dumps(header, sort_keys=True).encode()
    arrays = {
        "header": np.frombuffer(text, np.uint8),
        "key_data": trace.key_data,
        "context": trace.context,
        **{f"settings/{name}": value for name, value in trace.settings.items()},
    }
    checksums = [
        [name, row, zlib.crc32(value.tobytes())]
        for name, row, value in _all_rows(arrays, windows)
    ]
    arrays["checksums"] = np.frombuffer(json.dumps(checksums).encode(), np.uint8)
    for name, value in _small_fields(windows).items():
        arrays[f"windows/{name}"] = value
    for name, rows in _wide_fields(windows).items():
        for window, row in zip(*np.nonzero(rows.any(axis=-1)), strict=True):
            arrays[f"windows/{name}/{window}/{row}"] = rows[window, row]
    with replaced_file(path) as part, part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace and checks all of it.

    Args:
      path: a file that `save_trace` wrote.

    Returns:
      The trace.

    Raises:
      ValueError: if the file is no trace, is of another version, is damaged, or was
        changed; the message names the window, the row and the field.
      OSError: if it cannot be read.

    Exactness: the bits that were written, or an error.
    """
    path = _checked_path(path)
    try:
        archive = zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is no trace: {error}") from None
    with archive:
        return _read_trace(path, archive)


def _read_trace(path: pathlib.Path, archive: zipfile.ZipFile) -> Trace:
    names = [name.removesuffix(".npy") for name in archive.namelist()]
    if "header" not in names or "checksums" not in names:
        raise ValueError(f"{path} is no trace: it has no header")

    def read(name: str) -> np.ndarray:
        try:
            with archive.open(f"{name}.npy") as member:
                return np.lib.format.read_array(member, allow_pickle=False)
        except (OSError, EOFError, ValueError, KeyError, zlib.error) as error:
            raise _damaged(path, name, error) from None
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise _damaged(path, name, error) from None

    header = _read_header(path, read)
    settings = {
        name.removeprefix("settings/"): read(name)
        for name in names
        if name.startswith("settings/")
    }
    num_windows, num_rows = header["num_windows"], header["num_draft_tokens"]
    width, dtype = header["vocab_size"], np.dtype(header["dtype"])
    wide = {
        "target_probs": np.zeros((num_windows, num_rows + 1, width), dtype),
        "measure": np.zeros((num_windows, num_rows, width), dtype),
    }
    small: dict[str, Any] = {}
    for name in names:
        _, *parts = name.split("/")
        if not name.startswith("windows/"):
            continue
        if len(parts) == 1:
            small[parts[0]] = read(name)
            continue
        row = read(name)
        try:
            place = wide[parts[0]][int(parts[1]), int(parts[2])]
            if place.shape != row.shape or row.dtype != dtype:
                raise ValueError(f"shape {row.shape}, dtype {row.dtype}")
        except (KeyError, ValueError, IndexError) as error:
            raise _damaged(path, name, error) from None
        place[:] = row
    try:
        windows = _windows(header["verifier"], small, wide)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: fields of the windows are missing: {error}"
        ) from None
    arrays = {
        "header": read("header"),
        "key_data": read("key_data"),
        "context": read("context"),
        **{f"settings/{name}": value for name, value in settings.items()},
    }
    _check_sums(path, read("checksums"), arrays, windows)
    return Trace(
        verifier=header["verifier"],
        key_data=arrays["key_data"],
        window=header["window"],
        context=arrays["context"],
        num_output=header["num_output"],
        settings=settings,
        versions=header["versions"],
        files=header["files"],
        windows=windows,
    )


def _read_header(path: pathlib.Path, read: Any) -> dict[str, Any]:
    try:
        header = json.loads(read("header").tobytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _damaged(path, "header", error) from None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no trace of strata_jax")
    if header.get("version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has version {header.get('version')} of the trace format; this "
            f"library reads version {SCHEMA_VERSION}: record it again"
        )
    numbers = ("window", "num_output", "num_windows", "num_draft_tokens", "vocab_size")
    for name in (*numbers, "versions", "files", "dtype"):
        if name not in header:
            raise _damaged(path, "header", KeyError(name))
    if header.get("verifier") not in DRAWS:
        raise ValueError(
            f"{path}: verifier {header.get('verifier')!r} is unknown here; known are "
            f"{sorted(DRAWS)}"
        )
    return header


def _check_sums(
    path: pathlib.Path,
    stored: np.ndarray,
    arrays: dict[str, np.ndarray],
    windows: Window,
) -> None:
    try:
        checksums = json.loads(stored.tobytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _damaged(path, "checksums", error) from None
    found = list(_all_rows(arrays, windows))
    if len(found) != len(checksums):
        raise ValueError(
            f"{path} was changed: {len(checksums)} checksums for {len(found)} fields"
        )
    for (name, row, value), (_, _, checksum) in zip(found, checksums, strict=True):
        if zlib.crc32(value.tobytes()) != checksum:
            raise ValueError(
                f"{path} was changed: {_place(name, row)} is not what was written; "
                "record the trace again"
            )


def _place(name: str, row: int | None) -> str:
    if not name.startswith("windows/"):
        return name
    _, field, window, *_ = name.split("/")
    where = f"window {window}" + ("" if row is None else f", row {row}")
    return f"{where}, {field}"


def _damaged(path: pathlib.Path, name: str, error: Exception) -> ValueError:
    parts = name.split("/")
    if len(parts) == 4:
        place = f"window {parts[2]}, row {parts[3]}, {parts[1]}"
    else:
        place = parts[-1]
    return ValueError(f"{path} is damaged at {place}: {error}")


def _all_rows(
    arrays: dict[str, np.ndarray], windows: Window
) -> Iterator[tuple[str, int | None, np.ndarray]]:
    """Yields (name, row, value) of all that has a checksum."""
    for name, value in arrays.items():
        yield name, None, value
    fields = {**_small_fields(windows), **_wide_fields(windows)}
    for window in range(len(windows.verdict.status)):
        for name, value in fields.items():
            if value.ndim == 1 or name == "residual_uniforms":
                yield f"windows/{name}/{window}", None, value[window]
                continue
            for row in range(value.shape[1]):
                yield f"windows/{name}/{window}", row, value[window, row]


def _small_fields(windows: Window) -> dict[str, Any]:
    """Returns all fields but p and mu, leading axis W."""
    verdict, draws = windows.verdict, windows.draws
    return {
        "kind": windows.proposal.kind,
        "draft_tokens": windows.draft_tokens,
        "draft_uniforms": draws.draft,
        "gate_uniforms": draws.gate,
        **{
            f"{field.name}_uniforms": getattr(draws.verifier, field.name)
            for field in dataclasses.fields(draws.verifier)
        },
        "tokens": verdict.tokens,
        "num_accepted": verdict.num_accepted,
        "num_emitted": verdict.num_emitted,
        "source": verdict.source,
        "status": verdict.status,
    }


def _wide_fields(windows: Window) -> dict[str, Any]:
    return {
        "target_probs": windows.target_probs,
        "measure": windows.proposal.measure,
    }


def _windows(verifier: str, small: dict[str, Any], wide: dict[str, Any]) -> Window:
    num_windows, num_rows, _ = wide["measure"].shape
    draws = DRAWS[verifier]
    names = [field.name for field in dataclasses.fields(draws)]
    kind = small["kind"]
    for name, value in small.items():
        if value.shape[:1] != (num_windows,) or kind.shape != (num_windows, num_rows):
            raise ValueError(f"{name} has shape {value.shape}")
    tokens: Any = np.where(kind == RowKind.OFFERED, small["draft_tokens"], -1)
    return Window(
        proposal=Proposal(
            tokens=tokens.astype(np.int32),
            measure=wide["measure"],
            kind=kind,
        ),
        draft_tokens=small["draft_tokens"],
        draws=Draws(
            draft=small["draft_uniforms"],
            gate=small["gate_uniforms"],
            verifier=draws(**{name: small[f"{name}_uniforms"] for name in names}),
        ),
        verdict=Verdict(
            tokens=small["tokens"],
            num_accepted=small["num_accepted"],
            num_emitted=small["num_emitted"],
            source=small["source"],
            status=small["status"],
            kind=kind,
        ),
        target_probs=wide["target_probs"],
    )


def _checked_path(path: str | os.PathLike[str]) -> pathlib.Path:
    path = pathlib.Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"path must end in .npz, got {path}")
    return path
