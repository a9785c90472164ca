"""The suffix drafter in NumPy."""

from __future__ import annotations

from collections.abc import Sequence


def oracle_suffix(
    context: Sequence[int], *, max_match: int, min_match: int, num_draft_tokens: int
) -> list[int]:
    """Finds the continuation of the longest earlier copy of the context's suffix.

    Lengths are tried from `max_match` down to `min_match`; among copies of one length
    the latest wins. The suffix does not match itself, but a copy may overlap it. The
    continuation may run into the suffix and stops at the end of the context.

    Args:
      context: token ids so far.
      max_match: longest suffix tried, in tokens.
      min_match: shortest suffix tried, >= 1.
      num_draft_tokens: most tokens returned, >= 0.

    Returns:
      Up to `num_draft_tokens` ids; empty if nothing matches (no attempt, not NULL).

    Raises:
      ValueError: if `1 <= min_match <= max_match` or `num_draft_tokens >= 0` fails.

    Exactness: bit-exact to the singleton; a function of the committed context alone,
      so a draft from it may be verified with mu = one-hot (law-exact).

    Example:
      >>> oracle_suffix([1, 2, 5, 1, 2, 6, 1, 2], max_match=2, min_match=2,
      ...               num_draft_tokens=3)
      [6, 1, 2]
    """
    if not 1 <= min_match <= max_match:
        raise ValueError(
            f"need 1 <= min_match <= max_match, got {min_match} and {max_match}"
        )
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must be >= 0, got {num_draft_tokens}")
    ids = [int(token) for token in context]
    for length in range(min(max_match, len(ids) - 1), min_match - 1, -1):
        suffix = ids[-length:]
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start : start + length] == suffix:
                return ids[start + length : start + length + num_draft_tokens]
    return []
