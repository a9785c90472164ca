"""How many tokens does a window emit, by drafter, gate, threshold, K and temperature?

Every cell decodes the same prompts with the token rule and counts. Thresholds and
temperatures are numbers of a request, so that a compiled program serves all of them;
only another drafter, gate or K compiles anew.

  python experiments/acceptance_sweep.py --out /tmp/sweep
  python experiments/acceptance_sweep.py --out /tmp/smoke --smoke

Results: acceptance_sweep.json and acceptance_sweep.png. A run that was stopped goes on
where it was.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import _command_line
import _results
import jax
import numpy as np
from _command_line import run_command, show_progress
from _models import Model, load_model, own_drafter
from _results import Results, count_acceptance, figure, require_matplotlib
from absl import flags

import strata_jax as strata
from strata_jax import drafters, gates, targets, verifiers

_PROMPTS = {
    "bundled": (
        "HAMLET.  To be, or not to be, that is the question:\n",
        "KING. Good morrow, good morrow. Good morrow to you all, good mor",
    ),
    "smollm2": (
        "The history of the printing press begins in",
        "One, two, three, four. One, two, three, four. One, two,",
    ),
}
_GATES = ("always", "picked", "top", "entropy", "include_then_stop")
_THRESHOLDS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
_LENGTHS = (1, 2, 3, 5, 7)
_TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
_WINDOWS_PER_CALL = 16

_SMOKE = flags.DEFINE_bool("smoke", False, "One layer and few cells: seconds.")
_MODEL = flags.DEFINE_enum(
    "model", "bundled", ("bundled", "smollm2", "tiny"), "The model."
)
_DRAFTERS = flags.DEFINE_list(
    "drafters",
    None,
    "Of own (the model's draft head, or some of its layers), suffix and suffix_root "
    "(which needs a draft head), with commas; the default is all.",
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens",
    None,
    "Tokens for each of the two prompts of a cell; the default is 96, or 8 with "
    "--smoke.",
    4,
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the requests.", 0)


class _Cell(NamedTuple):
    """One combination."""

    drafter: str
    gate: str
    num_draft_tokens: int
    threshold: float
    temperature: float

    @property
    def name(self) -> str:
        text = f"{self.drafter}, {self.gate}"
        if self.gate != "always":
            text += f" {self.threshold:g}"
        return f"{text}, K {self.num_draft_tokens}, temperature {self.temperature:g}"


def _cells(names: list[str], is_smoke: bool) -> Iterator[_Cell]:
    """Yields all cells; those that share a program follow each other."""
    lengths = (2,) if is_smoke else _LENGTHS
    temperatures = (0.0, 1.0) if is_smoke else _TEMPERATURES
    for drafter in names:
        # Gates look at q: a lookup's rows are point masses, which they all admit.
        for gate in _GATES[: 2 if is_smoke or drafter == "suffix" else None]:
            for length in lengths:
                thresholds = (0.3,) if is_smoke else _THRESHOLDS
                if gate == "always" or drafter == "suffix":
                    thresholds = (0.0,)
                elif length not in (1, 3, 7) and gate != "picked":
                    continue  # the grid is whole for one gate
                if drafter == "suffix_root" and length != 3 and gate != "always":
                    continue  # and for one drafter
                for threshold in thresholds:
                    for temperature in temperatures:
                        yield _Cell(drafter, gate, length, threshold, temperature)


@functools.cache
def _model() -> Model:
    return load_model("tiny" if _SMOKE.value else _MODEL.value)


def _prompts() -> list[list[int]]:
    name = "smollm2" if _model().name == "smollm2" else "bundled"
    return [_model().tokenizer.encode(text) for text in _PROMPTS[name]]


@functools.lru_cache(maxsize=1)
def _decoder(drafter: str, gate: str, length: int) -> strata.SpeculativeDecoder:
    model = _model()
    longest = max(map(len, _prompts())) + _num_tokens() + 8
    if drafter == "suffix":
        source = drafters.suffix(
            num_draft_tokens=length, vocab_size=model.config.vocab_size
        )
    else:
        source = own_drafter(model, length, longest)
        if drafter == "suffix_root":
            source = drafters.suffix_root(source)
    return strata.speculative_decoder(
        targets.singleton(model.config, max_length=longest),
        source,
        getattr(gates, gate)(),
        verifiers.token(),
    )


def _num_tokens() -> int:
    return _MAX_NEW_TOKENS.value or (8 if _SMOKE.value else 96)


def _gate_settings(cell: _Cell) -> dict[str, float]:
    if cell.gate == "always":
        return {}
    if cell.gate == "entropy":
        # The same scale as the others': 0 admits all of 256 tokens, 1 none.
        limit = (1 - cell.threshold) * np.log(_model().config.vocab_size)
        return {"max_entropy": float(limit)}
    return {"threshold": cell.threshold}


def _measure(cell: _Cell) -> dict[str, Any]:
    decoder = _decoder(cell.drafter, cell.gate, cell.num_draft_tokens)
    verdicts = []
    for index, prompt in enumerate(_prompts()):
        state = decoder.init(
            _model().params,
            prompt,
            seed=_SEED.value + index,
            max_new_tokens=_num_tokens(),
            temperature=cell.temperature,
            **_gate_settings(cell),
        )
        while int(state.finish_reason) == strata.FinishReason.RUNNING:
            state, found = strata.decode(
                decoder, _model().params, state, _WINDOWS_PER_CALL
            )
            verdicts.append(jax.tree.map(np.asarray, found))
    stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), *verdicts)
    return {
        **cell._asdict(),
        "settings": _gate_settings(cell),
        **count_acceptance(stacked),
    }


def _tables(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = list(parts.values())
    temperatures = sorted({part["temperature"] for part in found})
    best_rows, grid_rows = [], []
    for drafter in dict.fromkeys(part["drafter"] for part in found):
        for gate in _GATES:
            own = [p for p in found if (p["drafter"], p["gate"]) == (drafter, gate)]
            if not own:
                continue
            for temperature in temperatures:
                cells = [part for part in own if part["temperature"] == temperature]
                best = max(cells, key=lambda part: part["tokens_per_window"])
                best_rows.append(
                    [
                        f"{drafter}, {gate}",
                        f"{temperature:g}",
                        f"{best['tokens_per_window']:.3f}",
                        str(best["num_draft_tokens"]),
                        "" if gate == "always" else f"{best['threshold']:g}",
                        f"{best['acceptance_rate']:.3f}",
                    ]
                )
    for part in found:
        if part["num_draft_tokens"] == 3 and part["temperature"] == temperatures[-1]:
            grid_rows.append(
                [
                    f"{part['drafter']}, {part['gate']}",
                    "" if part["gate"] == "always" else f"{part['threshold']:g}",
                    f"{part['tokens_per_window']:.3f}",
                    f"{part['acceptance_rate']:.3f}",
                    str(part["num_offered"]),
                    str(part["num_null"]),
                    str(part["num_absent"]),
                ]
            )
    tables = [
        {
            "title": "Most tokens per window, by drafter and gate",
            "columns": (
                *("drafter, gate", "temperature", "tokens per window", "K"),
                *("threshold", "acceptance"),
            ),
            "rows": best_rows,
            "note": "The threshold of entropy is on a scale from 0 (all rows) to 1: "
            "the limit is (1 - threshold) ln V nats.",
        }
    ]
    if grid_rows:
        tables.append(
            {
                "title": f"K = 3, temperature {temperatures[-1]:g}",
                "columns": (
                    *("drafter, gate", "threshold", "tokens per window"),
                    *("acceptance", "offered", "NULL", "absent"),
                ),
                "rows": grid_rows,
            }
        )
    return tables


def _draw(path: pathlib.Path, parts: Mapping[str, Any]) -> None:
    """Draws a heat map over threshold and K, and curves over both and temperature."""
    found = list(parts.values())
    hottest = max(part["temperature"] for part in found)
    first = found[0]["drafter"]

    def select(**wanted: Any) -> list[dict[str, Any]]:
        return [p for p in found if all(p[name] == v for name, v in wanted.items())]

    with figure(path, ncols=3, figsize=(14, 4)) as (drawing, axes):
        left, middle, right = axes
        cells = select(drafter=first, gate="picked", temperature=hottest)
        thresholds = sorted({part["threshold"] for part in cells})
        lengths = sorted({part["num_draft_tokens"] for part in cells})
        grid = np.full((len(lengths), len(thresholds)), np.nan)
        for part in cells:
            place = (
                lengths.index(part["num_draft_tokens"]),
                thresholds.index(part["threshold"]),
            )
            grid[place] = part["tokens_per_window"]
        image = left.imshow(grid, origin="lower", aspect="auto", cmap="viridis")
        for row, column in np.ndindex(grid.shape):
            is_dark = grid[row, column] < np.nanmean(grid)
            left.text(
                *(column, row, f"{grid[row, column]:.2f}"),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if is_dark else "black",
            )
        left.set(
            title=f"Tokens per window: {first}, picked, temperature {hottest:g}",
            xlabel="threshold",
            ylabel="K",
            xticks=range(len(thresholds)),
            xticklabels=[f"{value:g}" for value in thresholds],
            yticks=range(len(lengths)),
            yticklabels=lengths,
        )
        drawing.colorbar(image, ax=left)
        length = 3 if 3 in lengths else lengths[-1]
        for gate in _GATES:
            own = select(
                drafter=first, gate=gate, temperature=hottest, num_draft_tokens=length
            )
            if gate == "always":
                for part in own:
                    middle.axhline(
                        *(part["tokens_per_window"],),
                        color="black",
                        linewidth=1,
                        linestyle=":",
                        label=gate,
                    )
            elif own:
                middle.plot(
                    [part["threshold"] for part in own],
                    [part["tokens_per_window"] for part in own],
                    "o-",
                    label=gate,
                )
        middle.set(
            title=f"By threshold: {first}, K = {length}, temperature {hottest:g}",
            xlabel="threshold (entropy: see the table)",
            ylabel="tokens per window",
        )
        for drafter in dict.fromkeys(part["drafter"] for part in found):
            own = select(drafter=drafter, gate="always", num_draft_tokens=length)
            right.plot(
                [part["temperature"] for part in own],
                [part["tokens_per_window"] for part in own],
                "o-",
                label=drafter,
            )
        right.set(
            title=f"By temperature: K = {length}, no gate",
            xlabel="temperature",
            ylabel="tokens per window",
        )
        for each in (middle, right):
            each.grid(alpha=0.3)
            each.set_ylim(bottom=1)
            each.legend(fontsize=8)


def find_faults(parts: Mapping[str, Any]) -> list[str]:
    """Returns what cannot be in any run; nothing if all is well."""
    faults = []
    for name, part in parts.items():
        num_rows = part["num_windows"] * part["num_draft_tokens"]
        if part["num_offered"] + part["num_null"] + part["num_absent"] != num_rows:
            faults.append(f"{name}: the kinds of rows do not add up")
        if part["num_tokens"] != part["num_windows"] + part["num_accepted"]:
            faults.append(f"{name}: tokens are not windows and accepted drafts")
    return faults


def _run() -> int:
    require_matplotlib()
    if _SMOKE.value and flags.FLAGS["model"].present:
        raise ValueError("--model has no use with --smoke, which runs tiny: omit one")
    known = ["own", "suffix", "suffix_root"]
    if not _model().has_draft_head:
        known.remove("suffix_root")
    names = _DRAFTERS.value or (["own"] if _SMOKE.value else known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"--drafters must be of {', '.join(known)}; got {', '.join(unknown)}"
        )
    settings = {
        "model": _model().name,
        "files": _model().files,
        "seed": _SEED.value,
        "max_new_tokens": _num_tokens(),
        "prompts": _PROMPTS,
        "device": jax.devices()[0].device_kind,
    }
    cells = list(_cells(names, _SMOKE.value))
    variant = "smollm2" if _model().name == "smollm2" else ""
    results = Results(
        "acceptance_sweep",
        settings,
        variant=variant,
        order=[cell.name for cell in cells],
    )
    waiting = [cell for cell in cells if cell.name not in results.parts]
    with show_progress(0, len(waiting), "cell") as advance:
        for index, cell in enumerate(waiting):
            results.keep(cell.name, _measure(cell))
            advance(index + 1, cell.name)

    path = results.folder / f"{results.name}.png"
    _draw(path, results.parts)
    return results.finish(
        _tables(results.parts),
        find_faults(results.parts),
        [
            {
                "file": path.name,
                "alt": "Tokens per window: a heat map over threshold and K, and curves "
                "over the threshold and the temperature.",
            }
        ],
    )


flags.adopt_module_key_flags(_command_line)
flags.adopt_module_key_flags(_results)

if __name__ == "__main__":
    run_command(_run)
