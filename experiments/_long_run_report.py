"""What the long run found: tables, faults and the figure, from its parts."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.stats
from _long_run_parts import MODES, NUM_DRAFT_TOKENS
from _results import figure

# Inside a word: there the gate drops a part of q. Where a word begins, all of q is
# below the threshold; then both rules draw plainly, and nothing would be shown.
LAW_PROMPTS = (
    "The King is d",
    "HAMLET. To be, or not t",
    "Good morrow, c",
    "Enter the K",
    "ROMEO. O, she doth t",
    "What is th",
    "My lord, I w",
    "Thou ar",
)
FALSE_ALARM = 1e-3


def law_part(prompt: int, mode: str) -> str:
    return f"law: prompt {prompt}, {mode}"


def select_parts(results: Mapping[str, Any], start: str) -> dict[str, Any]:
    return {name: part for name, part in results.items() if name.startswith(start)}


def _per_test() -> float:
    # Bonferroni: 8 prompts, three tests each (plain, repaired, repaired beside plain).
    return FALSE_ALARM / (3 * len(LAW_PROMPTS))


def _law_rows(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns for each prompt the p-values, and where the original is detected."""
    rows = []
    for index, prompt in enumerate(LAW_PROMPTS):
        found = {
            mode: parts[name]
            for mode in MODES
            if (name := law_part(index, mode)) in parts
        }
        if len(found) < len(MODES):
            continue
        cells = np.array(
            [
                [int(count) for count in found[mode]["cell_counts"].split()]
                for mode in ("plain", "repaired")
            ]
        )
        cells = cells[:, cells.sum(axis=0) > 0]
        pair: Any = scipy.stats.chi2_contingency(cells)
        detected = [
            int(size)
            for size, p_value in found["original"]["p_value_by_sample_size"].items()
            if p_value < _per_test()
        ]
        rows.append(
            {
                "prompt": prompt,
                "num_seeds": found["plain"]["num_seeds"],
                **{mode: found[mode]["p_value"] for mode in MODES},
                "repaired_beside_plain": float(pair.pvalue),
                "original_detected_at": min(detected, default=None),
                "cells": found["plain"]["degrees_of_freedom"] + 1,
            }
        )
    return rows


def _interval(values: np.ndarray) -> str:
    half = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():.4f} ± {half:.4f}"


def _by_row(parts: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (offered, accepted) by draft position, over parts."""
    offered = sum(
        (np.array(part["acceptance"]["offered_by_row"]) for part in parts.values()),
        start=np.zeros(NUM_DRAFT_TOKENS, int),
    )
    accepted = sum(
        (np.array(part["acceptance"]["accepted_by_row"]) for part in parts.values()),
        start=np.zeros(NUM_DRAFT_TOKENS, int),
    )
    return offered, accepted


def _sum(parts: Mapping[str, Any], *path: str) -> int:
    total = 0
    for part in parts.values():
        for name in path:
            part = part[name]
        total += part
    return total


def make_tables(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    tables = []
    rows = []
    runs = {"one run, repaired": select_parts(parts, "one_run")}
    runs |= {
        f"prompts, {mode}": select_parts(parts, f"prompts: {mode}")
        for mode in reversed(MODES)
    }
    for title, found in runs.items():
        if not found:
            continue
        if title.endswith("plain"):
            by_row = "no drafts"
        else:
            pairs = zip(*reversed(_by_row(found)), strict=True)
            by_row = ", ".join(f"{a} of {o}" for a, o in pairs)
        num_tokens = _sum(found, "acceptance", "num_tokens")
        num_windows = _sum(found, "acceptance", "num_windows")
        rows.append(
            [
                title,
                f"{_sum(found, 'num_equal'):,} of {_sum(found, 'num_rows'):,}",
                f"{num_tokens / num_windows:.3f}",
                by_row,
            ]
        )
    if rows:
        tables.append(
            {
                "title": "Rows that equal plain decoding, bit for bit",
                "columns": (
                    *("run", "rows equal", "tokens per window"),
                    "accepted of offered, by draft position",
                ),
                "rows": rows,
            }
        )
    memory = [
        (name.split()[-1], part["resident_megabytes"], part["seconds_by_thousand"])
        for name, part in select_parts(parts, "one_run").items()
    ]
    if memory and memory[0][1] is not None:
        tables.append(
            {
                "title": "One run: memory and time by position",
                "columns": ("from token", "resident MiB", "seconds for 1,000 tokens"),
                "rows": [[name, f"{mib:.0f}", f"{s:.1f}"] for name, mib, s in memory],
            }
        )
    law = _law_rows(parts)
    if law:
        tables.append(
            {
                "title": "Law of two tokens: p-values of the chi-square test",
                "columns": (
                    *("prompt", "seeds", "cells", "plain", "repaired"),
                    *("repaired beside plain", "original", "original detected at"),
                ),
                "rows": [
                    [
                        row["prompt"],
                        f"{row['num_seeds']:,}",
                        str(row["cells"]),
                        *(
                            f"{row[name]:.2g}"
                            for name in (
                                *("plain", "repaired", "repaired_beside_plain"),
                                "original",
                            )
                        ),
                        f"{row['original_detected_at'] or 'not'} seeds",
                    ]
                    for row in law
                ],
                "note": f"False-alarm rate {FALSE_ALARM:g} over all tests of plain "
                f"and repaired, hence {_per_test():.2g} for each.",
            }
        )
    quality = _quality(parts)
    if quality:
        tables.append(
            {
                "title": "Mean log-probability of a token under the plain target, nats",
                "columns": ("text of", "mean", "difference from plain's"),
                "rows": [
                    [
                        mode,
                        _interval(values),
                        "" if mode == "plain" else _interval(values - quality["plain"]),
                    ]
                    for mode, values in quality.items()
                ],
                "note": "With 95 % intervals over prompts; differences are paired by "
                "prompt.",
            }
        )
    return tables


def _quality(parts: Mapping[str, Any]) -> dict[str, np.ndarray]:
    found = {
        mode: np.concatenate(
            [
                part["log_prob_by_prompt"]
                for part in select_parts(parts, f"prompts: {mode}").values()
            ]
            or [np.zeros(0)]
        )
        for mode in MODES
    }
    sizes = {len(values) for values in found.values()}
    return found if len(sizes) == 1 and sizes != {0} else {}


def find_faults(parts: Mapping[str, Any]) -> list[str]:
    """Returns what speaks against the claims; nothing if they hold."""
    faults = []
    for start in ("one_run", "prompts: plain", "prompts: repaired"):
        found = select_parts(parts, start)
        num_rows, num_equal = _sum(found, "num_rows"), _sum(found, "num_equal")
        if num_equal != num_rows:
            faults.append(f"{start}: {num_rows - num_equal} rows differ")
    control = select_parts(parts, "prompts: original")
    if control and _sum(control, "num_equal") == _sum(control, "num_rows"):
        faults.append("prompts: original: no row differs: nothing is shown")
    rows = _law_rows(parts)
    for row in rows:
        for name in ("plain", "repaired", "repaired_beside_plain"):
            if row[name] < _per_test():
                faults.append(
                    f"law, {row['prompt']!r}: {name}, p-value {row[name]:.2g}"
                )
        for mode in MODES:
            part = parts[law_part(LAW_PROMPTS.index(row["prompt"]), mode)]
            if part["num_same"] != part["num_checked"]:
                faults.append(
                    f"law, {row['prompt']!r}: {mode}, {part['num_same']} of "
                    f"{part['num_checked']} requests are those of the model itself"
                )
            # With all or nothing dropped, both rules are the same.
            if mode != "plain" and not 0.05 < part["dropped_mass"] < 0.95:
                faults.append(f"law, {row['prompt']!r}: the gate has nothing to do")
        # A try has too few seeds to tell.
        if row["original"] >= _per_test() and row["num_seeds"] >= 20_000:
            faults.append(f"law, {row['prompt']!r}: the original passes")
    return faults


_COLOURS = {"plain": "#777777", "repaired": "#1f6fb4", "original": "#c8452c"}


def draw(path: pathlib.Path, parts: Mapping[str, Any]) -> None:
    with figure(path, ncols=3, figsize=(13, 3.8)) as (_, axes):
        left, middle, right = axes
        for shift, (title, start) in enumerate(
            (("one run", "one_run"), ("prompts", "prompts: repaired"))
        ):
            offered, accepted = _by_row(select_parts(parts, start))
            place = np.arange(1, NUM_DRAFT_TOKENS + 1) + 0.4 * shift - 0.2
            left.bar(place, accepted / np.maximum(offered, 1), 0.38, label=title)
        left.set(
            title="Acceptance by draft position, repaired",
            xlabel="draft position",
            ylabel="accepted of offered",
            ylim=(0, 1.2),
            xticks=range(1, NUM_DRAFT_TOKENS + 1),
        )
        left.legend(loc="upper right", ncols=2)
        run = select_parts(parts, "one_run")
        places = [int(name.split()[-1]) for name in run]
        memory = [part["resident_megabytes"] or np.nan for part in run.values()]
        middle.plot(places, memory, "o-", color=_COLOURS["repaired"])
        middle.set(title="Memory in one run", xlabel="tokens", ylabel="resident MiB")
        middle.set_ylim(bottom=0)
        for mode in MODES:
            for index in range(len(LAW_PROMPTS)):
                part = parts.get(law_part(index, mode))
                if part is None:
                    continue
                sizes = [int(size) for size in part["p_value_by_sample_size"]]
                values = [
                    max(value, 1e-30)
                    for value in part["p_value_by_sample_size"].values()
                ]
                right.plot(
                    *(sizes, values, ".-"),
                    color=_COLOURS[mode],
                    alpha=0.7,
                    linewidth=1,
                    label=mode if index == 0 else None,
                )
        right.axhline(_per_test(), color="black", linewidth=1, linestyle=":")
        right.set(
            title="Law of two tokens, 8 prompts",
            xlabel="seeds",
            ylabel="p-value (1e-30 at the bottom)",
            xscale="log",
            yscale="log",
        )
        right.legend(loc="lower left")
        for each in axes:
            each.grid(alpha=0.3)
