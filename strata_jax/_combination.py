"""Which parts go together: refused when a decoder is built, with the alternative."""

from __future__ import annotations

from strata_jax import _checks
from strata_jax._request import (
    check_setting_names,
)
from strata_jax._types import (
    Drafter,
    Gate,
    TargetModel,
    Verifier,
)


def check_parts(
    target: TargetModel, drafter: Drafter, gate: Gate, verifier: Verifier
) -> None:
    """Raises ValueError unless each part is what its factory makes."""
    for name, part, kind in (
        ("target", target, TargetModel),
        ("drafter", drafter, Drafter),
        ("gate", gate, Gate),
        ("verifier", verifier, Verifier),
    ):
        if not isinstance(part, kind):
            called = ": call the factory" if callable(part) else ""
            raise ValueError(
                f"{name} must be a strata_jax.{kind.__name__}, got {part!r}{called}"
            )
    _checks.check_integer("the drafter's num_draft_tokens", drafter.num_draft_tokens, 0)


def check_combination(
    target: TargetModel,
    drafter: Drafter,
    gate: Gate,
    verifier: Verifier,
    draft_rule: str,
    bit_exact: bool,
) -> None:
    """Raises ValueError for parts that are not exact together (contract S1)."""
    if draft_rule not in ("sample", "argmax"):
        raise ValueError(f'draft_rule must be "sample" or "argmax", got {draft_rule!r}')
    if draft_rule not in verifier.draft_rules:
        raise ValueError(
            f"draft_rule={draft_rule!r} does not go with verifiers.{verifier.name}(): "
            "an argmax draft is no draw from the soft measure that it would be "
            "weighed by. Use verifiers.exact_match(), or draft_rule='sample'"
        )
    if bit_exact and not target.is_bit_exact:
        raise ValueError(
            f"targets.{target.name} is not bitwise the singleton's: use "
            "targets.singleton, or pass bit_exact=False to use it as a control"
        )
    if drafter.vocab_size is not None and drafter.vocab_size != target.vocab_size:
        raise ValueError(
            f"the drafter's vocabulary has {drafter.vocab_size} tokens, the target's "
            f"{target.vocab_size}: a drafter must propose ids of the target"
        )
    num_rows = drafter.num_draft_tokens + 1
    if target.max_window is not None and num_rows > target.max_window:
        raise ValueError(
            f"num_draft_tokens={drafter.num_draft_tokens} gives windows of {num_rows} "
            f"rows, and the target takes max_window={target.max_window}: build it with "
            "a larger one"
        )
    if num_rows > target.max_length:
        raise ValueError(
            f"num_draft_tokens={drafter.num_draft_tokens} does not fit into a context "
            f"of max_length={target.max_length}: draft less or give a longer context"
        )
    if drafter.max_length is not None and drafter.max_length < target.max_length:
        raise ValueError(
            f"the drafter's max_length={drafter.max_length} is shorter than the "
            f"target's {target.max_length}: build both with one max_length"
        )
    check_setting_names(gate)
