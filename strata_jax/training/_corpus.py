"""Text as bytes: one array of documents, and windows cut from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from strata_jax import _checks

END_OF_TEXT = 0  # the byte after each document


def join_documents(documents: Iterable[bytes]) -> np.ndarray:
    """Joins documents to one array of bytes, each followed by byte 0.

    Args:
      documents: their contents; none has a byte 0.

    Returns:
      `[N]` uint8.

    Raises:
      ValueError: if there is no document, or one has a byte 0.

    Exactness: neither; nothing is computed.
    """
    pieces = list(documents)
    if not pieces:
        raise ValueError("documents must not be empty")
    for index, piece in enumerate(pieces):
        if END_OF_TEXT in piece:
            raise ValueError(
                f"documents: number {index} has a byte 0, which ends a text; is it a "
                "text file?"
            )
    end = bytes([END_OF_TEXT])
    return np.frombuffer(b"".join(piece + end for piece in pieces), np.uint8)


def sample_batches(
    corpus: np.ndarray, *, batch_size: int, length: int, seed: int
) -> Callable[[int], np.ndarray]:
    """Returns a function that draws the batch of a step.

    A batch depends on (`seed`, step) alone, so a run that is resumed sees what it
    would have seen. Windows start anywhere, with replacement.

    Args:
      corpus: `[N]` uint8, as `join_documents` makes it.
      batch_size: windows in a batch.
      length: bytes in a window.
      seed: any integer from 0 to 2**63 - 1.

    Returns:
      step -> `[batch_size, length]` int32.

    Raises:
      ValueError: naming the argument, if one is out of range or the corpus is
        shorter than a window.

    Exactness: neither; the same windows on every machine, since NumPy keeps the
      raw bits of a Philox generator between versions.
    """
    _checks.check_integer("batch_size", batch_size, 1)
    _checks.check_integer("seed", seed, 0, 2**63 - 1)
    _check_length(corpus, length)
    num_starts = len(corpus) - length + 1
    offsets = np.arange(length, dtype=np.int64)

    def batch(step: int) -> np.ndarray:
        # Each step has 2**128 counts of the generator to itself.
        bits = np.random.Philox(key=seed, counter=int(step) << 128)
        starts = (bits.random_raw(batch_size) % np.uint64(num_starts)).astype(np.int64)
        return corpus[starts[:, None] + offsets].astype(np.int32)

    return batch


def cut_windows(corpus: np.ndarray, length: int) -> np.ndarray:
    """Cuts a corpus into windows, so that each byte but the first is predicted once.

    Each window starts with the last byte of the one before. Bytes at the end that
    do not fill a window are left out.

    Args:
      corpus: `[N]` uint8.
      length: bytes in a window, at least 2.

    Returns:
      `[M, length]` int32.

    Raises:
      ValueError: if `length` is less than 2 or more than the corpus has.

    Exactness: neither; nothing is computed.
    """
    _check_length(corpus, length)
    starts = np.arange(0, len(corpus) - length + 1, length - 1)
    return corpus[starts[:, None] + np.arange(length)].astype(np.int32)


def _check_length(corpus: np.ndarray, length: int) -> None:
    if corpus.dtype != np.uint8 or corpus.ndim != 1:
        raise ValueError(
            f"corpus must be [N] uint8, got {list(corpus.shape)} {corpus.dtype}; use "
            "join_documents"
        )
    _checks.check_integer("length", length, 2)
    if length > len(corpus):
        raise ValueError(
            f"length {length}: the corpus has only {len(corpus)} bytes; use shorter "
            "windows or more text"
        )
