"""The tokenizer of byte-level models: a token is a byte of UTF-8."""

from __future__ import annotations

import codecs
import operator
from collections.abc import Iterable
from typing import SupportsIndex, final

_END_OF_TEXT = 0
_VOCAB_SIZE = 256


@final
class ByteTokenizer:
    """Text to bytes and back; byte 0, which no text has, ends one.

    Attributes:
      eos_ids: `(0,)`.
      vocab_size: 256.

    Exactness: neither; decoding what was encoded gives the same text.
    """

    eos_ids = (_END_OF_TEXT,)
    vocab_size = _VOCAB_SIZE

    def encode(self, text: str) -> list[int]:
        """Converts text to token ids.

        Args:
          text: any text; empty text is a single end of text, after which a new one
            begins.

        Returns:
          Token ids.

        Raises:
          ValueError: if `text` holds a NUL or a lone surrogate.

        Exactness: neither; nothing is computed.
        """
        if "\0" in text:
            raise ValueError("text holds the character NUL, which ends a text")
        try:
            return list(text.encode("utf-8")) or [_END_OF_TEXT]
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has a lone surrogate {text[error.start]!r} at index "
                f"{error.start}, which is not a character"
            ) from error

    def decode(self, token_ids: Iterable[SupportsIndex]) -> str:
        """Converts token ids to text.

        Args:
          token_ids: the ids; ends of text are left out.

        Returns:
          The text, U+FFFD for bytes that are no UTF-8.

        Raises:
          ValueError: if an id is not a byte.

        Exactness: neither; nothing is computed.
        """
        values = [_check_id(token_id) for token_id in token_ids]
        kept = bytes(value for value in values if value != _END_OF_TEXT)
        return kept.decode("utf-8", errors="replace")

    def decode_stream(self, *, special: bool) -> ByteStream:
        """Returns a stream that never emits half a character.

        Args:
          special: whether ends of text show, as NUL.

        Returns:
          The stream.

        Exactness: neither; nothing is computed.
        """
        return ByteStream(special=special)


@final
class ByteStream:
    """Decodes bytes one at a time; made by `ByteTokenizer.decode_stream`.

    Exactness: neither.
    """

    def __init__(self, *, special: bool) -> None:
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token: SupportsIndex) -> str:
        """Takes the next id.

        Args:
          token: a token id.

        Returns:
          The text that is now certain.

        Raises:
          ValueError: if the id is not a byte.

        Exactness: neither.
        """
        value = _check_id(token)
        if value == _END_OF_TEXT and not self._special:
            return ""
        return self._decoder.decode(bytes([value]))

    def flush(self) -> str:
        """Ends the text.

        Returns:
          U+FFFD if a character was incomplete, or empty.

        Exactness: neither.
        """
        return self._decoder.decode(b"", final=True)


def _check_id(token_id: SupportsIndex) -> int:
    value = operator.index(token_id)
    if not 0 <= value < _VOCAB_SIZE:
        raise ValueError(f"token id {value} is not a byte, 0 to {_VOCAB_SIZE - 1}")
    return value
