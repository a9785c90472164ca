"""Does exactness last: over a long text, over many prompts, over many seeds?

  one_run  one run of 10,000 tokens; every row of every window is compared, bit for bit,
           with plain decoding of the same text, one token at a time;
  prompts  1,000 prompts of 64 tokens, likewise; the original system (unaccounted gate,
           rows in shared products) is the control; and the plain target's mean
           log-probability of each system's text;
  law      the first two tokens after each of 8 prompts, 20,000 seeds, against their law
           by plain decoding, for plain, repaired and original. All requests run through
           the decoder's step; logits come from tables of rows that the model computed,
           and the first 500 requests of each run the model itself too.

  python experiments/long_run.py --out /tmp/long
  python experiments/long_run.py --out /tmp/smoke --smoke

Results: long_run.json and long_run.png. A run that was stopped goes on where it was.
The long text goes far beyond the context that the bundled model was trained on: the
text gets worse there, and it is the arithmetic that is looked at.
"""

from __future__ import annotations

import functools
import pathlib
import time
from typing import Any

import _command_line
import _results
import jax
import numpy as np
from _command_line import run_command, show_progress
from _long_run_parts import (
    MODES,
    NUM_DRAFT_TOKENS,
    Systems,
    emitted_rows,
    reference_law,
)
from _long_run_report import (
    FALSE_ALARM,
    LAW_PROMPTS,
    draw,
    find_faults,
    law_part,
    make_tables,
    select_parts,
)
from _models import Model, load_model
from _results import Results, require_matplotlib
from absl import flags

import strata_jax as strata
from strata_jax import diagnostics

_LONG_PROMPT = "KING HENRY. Once more unto the breach, dear friends, once more;\n"
_SPEAKERS = (
    *("HAMLET", "ROMEO", "JULIET", "KING", "QUEEN", "BRUTUS", "PORTIA", "IAGO"),
    *("OTHELLO", "LEAR", "PUCK", "HELENA", "DUKE", "FOOL", "FALSTAFF", "PRINCE"),
    *("VIOLA", "ORLANDO", "NURSE", "MESSENGER"),
)
_OPENINGS = (
    *("I ", "My lord, ", "What, ", "O ", "Good ", "Come, ", "The ", "And ", "But "),
    *("Thou ", "Sir, ", "No, ", "Ay, ", "Why ", "How ", "Let ", "Now ", "If ", "So "),
    *("He ", "She ", "We ", "You ", "They ", "This ", "That ", "There ", "Here "),
    *("When ", "Then ", "Who ", "Where ", "Give me ", "Tell me ", "I have ", "It is "),
    *("O, I ", "For ", "Is ", "Are ", "Will ", "Shall ", "Must ", "May ", "Not "),
    *("All ", "Yet ", "Nor ", "Hark, ", "Peace, "),
)
_SAMPLE_SIZES = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)

_SMOKE = flags.DEFINE_bool("smoke", False, "One layer, few tokens and seeds: seconds.")
_PARTS = flags.DEFINE_list(
    "parts", ["law", "one_run", "prompts"], "What to run, with commas, in this order."
)
_SEED = flags.DEFINE_integer("seed", 0, "First seed.", 0)
_THRESHOLD = flags.DEFINE_float(
    "threshold", 0.3, "Of the confidence gate, a probability.", 0.0, 1.0
)


class _Sizes:
    """How much of everything, whole or as a try."""

    def __init__(self, is_smoke: bool):
        self.num_tokens = 128 if is_smoke else 10_000
        self.piece = 64 if is_smoke else 1_000
        self.num_prompts = 4 if is_smoke else 1_000
        self.prompts_in_piece = 2 if is_smoke else 100
        self.prompt_tokens = 16 if is_smoke else 64
        self.num_law_prompts = 1 if is_smoke else len(LAW_PROMPTS)
        self.num_seeds = 500 if is_smoke else 20_000
        # Of the seeds, how many run the model itself too.
        self.num_checked = 20 if is_smoke else 500
        # One length for all parts of a try, so that they share their programs.
        self.shared_length = 256 if is_smoke else None

    def context_length(self, needed: int) -> int:
        """Returns S for a part that needs so many positions."""
        return self.shared_length or needed


def _prompts(count: int) -> list[str]:
    every = [f"{name}. {text}" for text in _OPENINGS for name in _SPEAKERS]
    return every[:count]


def _is_running(state: Any) -> bool:
    return int(state.finish_reason) == strata.FinishReason.RUNNING


def _resident_megabytes() -> float | None:
    path = pathlib.Path("/proc/self/statm")
    if not path.exists():
        return None
    # In pages of 4 KiB on the machines that have this file.
    return int(path.read_text().split()[1]) * 4096 / 2**20


def _acceptance(verdicts: strata.Verdict) -> dict[str, Any]:
    summary = diagnostics.summarize_acceptance(verdicts)
    return {
        "num_windows": summary.num_windows,
        "num_tokens": summary.num_tokens,
        "num_null": summary.num_null,
        "offered_by_row": summary.offered_by_row.tolist(),
        "accepted_by_row": summary.accepted_by_row.tolist(),
    }


def _log_probs(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.log(rows[np.arange(len(tokens)), tokens].astype(np.float64))


@functools.cache
def _systems(length: int) -> Systems:
    return Systems(_model(), length, _THRESHOLD.value)


@functools.cache
def _model() -> Model:
    return load_model("tiny" if _SMOKE.value else "bundled")


def _run_long(sizes: _Sizes, results: Results, advance: Any) -> None:
    """One text, in pieces; a later process reads what is there and goes on."""
    prompt = _model().tokenizer.encode(_LONG_PROMPT)
    done = select_parts(results.parts, "one_run")
    text = prompt + [token for part in done.values() for token in part["tokens"]]
    if len(text) - len(prompt) >= sizes.num_tokens:
        return
    systems = _systems(sizes.context_length(len(prompt) + sizes.num_tokens))
    state = systems.start(
        *("repaired", text, _SEED.value, sizes.num_tokens),
        prompt_length=len(prompt),
        window=sum(part["acceptance"]["num_windows"] for part in done.values()),
    )
    follower = systems.start(
        *("plain", text, 0, sizes.num_tokens + 1), prompt_length=len(prompt)
    )
    while _is_running(state):
        first = len(text) - len(prompt)
        began = time.monotonic()
        pieces = []
        count = 0
        while count < sizes.piece and (
            not pieces or pieces[-1].verdict.tokens[-1, 0] >= 0
        ):
            state, windows = systems.windows("repaired", state, 16)
            pieces.append(windows)
            count += int(windows.verdict.num_emitted.sum())
        seconds = time.monotonic() - began
        windows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
        tokens = strata.output_tokens(state)[first:]
        follower, exact = systems.follow(follower, tokens)
        rows = emitted_rows(windows)
        name = f"one_run: from token {first}"
        results.keep(
            name,
            {
                "tokens": tokens.tolist(),
                "num_rows": len(rows),
                "num_equal": int((rows == exact).all(axis=1).sum()),
                "acceptance": _acceptance(windows.verdict),
                "resident_megabytes": _resident_megabytes(),
                "seconds_by_thousand": seconds / len(tokens) * 1000,
            },
        )
        text += tokens.tolist()
        advance(name)


def _run_prompts(sizes: _Sizes, results: Results, advance: Any) -> None:
    prompts = [_model().tokenizer.encode(text) for text in _prompts(sizes.num_prompts)]
    longest = max(map(len, prompts)) + sizes.prompt_tokens
    systems = _systems(sizes.context_length(longest))
    for start in range(0, len(prompts), sizes.prompts_in_piece):
        piece = prompts[start : start + sizes.prompts_in_piece]
        for mode in MODES:
            name = f"prompts: {mode}, from {start}"
            if name in results.parts:
                continue
            verdicts, num_rows, num_equal, quality = [], 0, 0, []
            for index, prompt in enumerate(piece, start):
                # Seeds of their own, so that the texts are independent.
                seed = _SEED.value + 3 * index + MODES.index(mode)
                state = systems.start(mode, prompt, seed, sizes.prompt_tokens)
                state, windows = systems.windows(mode, state, sizes.prompt_tokens)
                tokens = strata.output_tokens(state)
                follower = systems.start("plain", prompt, 0, sizes.prompt_tokens)
                _, exact = systems.follow(follower, tokens)
                rows = emitted_rows(windows)
                num_rows += len(rows)
                num_equal += int((rows == exact).all(axis=1).sum())
                quality.append(float(_log_probs(exact, tokens).mean()))
                verdicts.append(windows.verdict)
            stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *verdicts)
            results.keep(
                name,
                {
                    "num_rows": num_rows,
                    "num_equal": num_equal,
                    "acceptance": _acceptance(stacked),
                    "log_prob_by_prompt": [round(value, 6) for value in quality],
                    "resident_megabytes": _resident_megabytes(),
                },
            )
            advance(name)


def _run_law(sizes: _Sizes, results: Results, advance: Any) -> None:
    prompts = [_model().tokenizer.encode(text) for text in LAW_PROMPTS]
    systems = _systems(sizes.context_length(max(map(len, prompts)) + 8))
    # In a try, the prompt behind which one layer's gate drops a part of q, not all.
    chosen = range(len(prompts)) if sizes.num_law_prompts > 1 else (2,)
    for index in chosen:
        prompt = prompts[index]
        waiting = [mode for mode in MODES if law_part(index, mode) not in results.parts]
        if not waiting:
            continue
        law = reference_law(systems, prompt).ravel()
        for mode in waiting:
            # Other seeds for each system: their samples are independent.
            first = _SEED.value + MODES.index(mode) * sizes.num_seeds
            seeds = np.arange(first, first + sizes.num_seeds)
            pairs, num_same, dropped = systems.sample_pairs(
                mode, prompt, seeds, sizes.num_checked
            )
            p_values = {}
            for size in _SAMPLE_SIZES:
                if size <= len(pairs):
                    counts = np.bincount(pairs[:size], minlength=len(law))
                    p_values[str(size)] = diagnostics.chi_square(counts, law).p_value
            counts = np.bincount(pairs, minlength=len(law))
            test = diagnostics.chi_square(counts, law)
            results.keep(
                law_part(index, mode),
                {
                    "prompt": LAW_PROMPTS[index],
                    "num_seeds": len(pairs),
                    "num_checked": sizes.num_checked,
                    "num_same": num_same,
                    "dropped_mass": dropped,
                    "p_value": test.p_value,
                    "degrees_of_freedom": test.degrees_of_freedom,
                    "p_value_by_sample_size": p_values,
                    "total_variation_of_sample": float(
                        diagnostics.total_variation(counts / counts.sum(), law)
                    ),
                    "cell_counts": _pooled(counts, law),
                },
            )
            advance(law_part(index, mode))


def _pooled(counts: np.ndarray, law: np.ndarray) -> str:
    """Counts of the cells that expect at least 5, then of the rest, as one line."""
    order = np.argsort(-law, kind="stable")
    num_common = int((law * counts.sum() >= 5).sum())
    common = counts[order[:num_common]]
    return " ".join(map(str, [*common, counts.sum() - common.sum()]))


_RUNNERS = {"law": _run_law, "one_run": _run_long, "prompts": _run_prompts}


def _num_pieces(name: str, sizes: _Sizes) -> int:
    return {
        "law": sizes.num_law_prompts * len(MODES),
        "one_run": sizes.num_tokens // sizes.piece,
        "prompts": sizes.num_prompts // sizes.prompts_in_piece * len(MODES),
    }[name]


def _run() -> int:
    require_matplotlib()
    unknown = [name for name in _PARTS.value if name not in _RUNNERS]
    if unknown or not _PARTS.value:
        raise ValueError(
            f"--parts must be of {', '.join(_RUNNERS)}; got {', '.join(unknown)}"
        )
    sizes = _Sizes(_SMOKE.value)
    settings = {
        "model": _model().name,
        "files": _model().files,
        "seed": _SEED.value,
        "threshold": _THRESHOLD.value,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "sizes": vars(sizes),
        "law_prompts": LAW_PROMPTS,
        "false_alarm_rate": FALSE_ALARM,
        "device": jax.devices()[0].device_kind,
    }
    results = Results("long_run", settings)
    total = sum(_num_pieces(name, sizes) for name in _PARTS.value)
    done = sum(len(select_parts(results.parts, f"{name}:")) for name in _PARTS.value)
    with show_progress(done, total, "piece") as show:

        def advance(note: str) -> None:
            nonlocal done
            done += 1
            show(done, note)

        for name in _PARTS.value:
            _RUNNERS[name](sizes, results, advance)

    path = results.folder / "long_run.png"
    draw(path, results.parts)
    return results.finish(
        make_tables(results.parts),
        find_faults(results.parts),
        [
            {
                "file": path.name,
                "alt": "Acceptance by draft position; memory over 10,000 tokens; "
                "p-values of the law against the number of seeds.",
            }
        ],
    )


flags.adopt_module_key_flags(_command_line)
flags.adopt_module_key_flags(_results)

if __name__ == "__main__":
    run_command(_run)
