"""Reads JSON from files that are not trusted."""

from __future__ import annotations

import json
from typing import Any


def read_json_object(source: object, text: bytes) -> dict[str, Any]:
    """Parses a JSON object in which no key appears twice.

    Args:
      source: what the text is, for the message.
      text: UTF-8.

    Returns:
      The object.

    Raises:
      ValueError: naming the source, if the text is not such an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        collected: dict[str, Any] = {}
        for name, value in pairs:
            if name in collected:
                raise ValueError(f"{name!r} appears twice")
            collected[name] = value
        return collected

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    # Deep nesting exhausts the stack before it exhausts memory.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{source} must be a JSON object, got {type(parsed).__name__}")
    return parsed
