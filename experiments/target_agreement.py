"""Does a speculating decoder sample the target that it decodes alone?

Six runs of one prompt: {original, repaired} x {no drafts, gated drafts, default mode}.
"original" drops a drawn draft below the threshold and forgets it, and scores a window
in shared products; "repaired" keeps the measure with its NULL row, and scores row by
row. The default mode emits the target's own draws and keeps the drafts that equal them.
Each position of a run is compared with plain decoding of the same text, one token at a
time:

  arithmetic  total variation between the row inside the window and the row alone;
  gate        between the law that the gate makes of the exact row and that row;
  emitted     between the law of what is really emitted and the exact row.

Laws are enumerated through the decoder's own step, over the row's draw, coin and final
draw. Every decision of a run is replayed from p, mu and counters.

  python experiments/target_agreement.py --out /tmp/agreement
  python experiments/target_agreement.py --out /tmp/smoke --smoke

Results: target_agreement.json and target_agreement.png. Started again with the same
flags, the script skips the runs that are done.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import _command_line
import _results
import jax
import jax.numpy as jnp
from _agreement_runs import NUM_DRAFT_TOKENS, RUNS, SAMPLING, Study
from _command_line import run_command, show_progress
from _models import Model, load_model
from _results import Results, figure, require_matplotlib
from absl import flags

from strata_jax import experts, models

_PROMPTS = {
    "bundled": "HAMLET.  To be, or not to be, that is the question:\n",
    "smollm2": "The history of the printing press begins in",
}

_SMOKE = flags.DEFINE_bool(
    "smoke", False, "One layer of the bundled model, 12 positions: seconds."
)
_CONFIGURATIONS = flags.DEFINE_list(
    "configurations",
    None,
    "Models and weights, with commas; the default is bundled, bundled-bfloat16, "
    "bundled-q4_0, smollm2, smollm2-bfloat16 (its shortest run only), or tiny with "
    "--smoke.",
)
_POSITIONS = flags.DEFINE_list(
    "positions", None, "Lengths of the runs; the default is 12,256, or 12 with --smoke."
)
_THRESHOLD = flags.DEFINE_float(
    "threshold", 0.5, "Of the confidence gate, a probability.", 0.0, 1.0
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the requests.", 0)


def _unpacked(model: Model) -> Any:
    return models.unpack_model_experts(model.params)


def _halved(params: Any) -> Any:
    """Rounds all weights to bfloat16."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf,
        params,
    )


_WEIGHTS: dict[str, tuple[str, Callable[[Model], Any]]] = {
    "tiny": ("tiny", lambda model: model.params),
    "bundled": ("bundled", lambda model: model.params),
    "bundled-bfloat16": ("bundled", lambda model: _halved(_unpacked(model))),
    "bundled-q4_0": (
        "bundled",
        lambda model: models.pack_model_experts(
            _unpacked(model), experts.uniform_layout("q4_0")
        ),
    ),
    "smollm2": ("smollm2", lambda model: model.params),
    "smollm2-bfloat16": ("smollm2", lambda model: _halved(model.params)),
}
_DEFAULT = tuple(name for name in _WEIGHTS if name != "tiny")
# Products in bfloat16 are slow on a processor: the shortest run only.
_SHORT = ("smollm2-bfloat16",)


def _lengths(configuration: str, lengths: list[int]) -> list[int]:
    return lengths[:1] if configuration in _SHORT else lengths


def _study(name: str, max_length: int) -> tuple[Study, list[int], dict[str, str]]:
    source, weights = _WEIGHTS[name]
    model = load_model(source)
    prompt = model.tokenizer.encode(
        _PROMPTS["smollm2" if source == "smollm2" else "bundled"]
    )
    model = dataclasses.replace(model, params=weights(model))
    study = Study(model, len(prompt) + max_length, _THRESHOLD.value)
    return study, prompt, model.files


def _part(configuration: str, num_positions: int, run: str) -> str:
    return f"{configuration}, {num_positions} positions: {run}"


_COLUMNS = (
    "run",
    "rows equal",
    "arithmetic mean",
    "max",
    "gate mean",
    "max",
    "emitted mean",
    "max",
    "decisions replayed",
)


def _tables(parts: Mapping[str, Any], lengths: list[int]) -> list[dict[str, Any]]:
    tables = []
    for configuration in _WEIGHTS:
        for length in lengths:
            found = {
                run: parts[name]
                for run in RUNS
                if (name := _part(configuration, length, run)) in parts
            }
            if not found:
                continue
            rows = []
            for run, part in found.items():
                largest = part["largest"]
                rows.append(
                    [
                        run,
                        f"{part['num_equal']['repaired']} of {part['num_positions']}",
                        *(
                            f"{largest[f'{kind}_{statistic}']:.2g}"
                            for kind in ("arithmetic", "gate", "emitted")
                            for statistic in ("mean", "max")
                        ),
                        str(part["replay"]["num_decisions"]),
                    ]
                )
            table = {
                "title": f"{configuration}, {length} positions",
                "columns": _COLUMNS,
                "rows": rows,
            }
            if len(found) == len(RUNS):
                ours, others = (
                    found[f"{rule}, default"]["tokens"]
                    for rule in ("repaired", "original")
                )
                num_same = sum(a == b for a, b in zip(ours, others, strict=True))
                table["note"] = (
                    f"Default mode: at {num_same} of {length} positions the original "
                    "emits the token of the repaired run, which is plain decoding's."
                )
            tables.append(table)
    return tables


def find_faults(
    parts: Mapping[str, Any], part_name: Callable[[str], str], *, has_same_tokens: bool
) -> list[str]:
    """Returns what speaks against the claims for one prompt; nothing if they hold."""
    found = {run: parts[part_name(run)] for run in RUNS}
    faults = []
    for run, part in found.items():
        num_positions, num_equal = part["num_positions"], part["num_equal"]
        if part["replay"]["difference"]:
            faults.append(f"{run}: {part['replay']['difference']}")
        if run.startswith("repaired") or run.endswith("no drafts"):
            for reference in ("original", "repaired"):
                if num_equal[reference] != num_positions:
                    faults.append(
                        f"{run}: {num_equal[reference]} of {num_positions} rows equal "
                        f"the reference without drafts ({reference})"
                    )
            if part["largest"]["emitted_max"] > 1e-6:
                faults.append(f"{run}: the emitted law is not the target's")
        elif num_equal["repaired"] == num_positions:
            faults.append(f"{run}: all rows are equal: nothing is shown")
    if found["original, gated"]["largest"]["gate_max"] < 1e-3:
        faults.append("original, gated: no bias: nothing is shown")
    if not found["repaired, gated"]["num_drafted"]:
        faults.append("repaired, gated: nothing was drafted: nothing is shown")
    tokens = [found[f"{rule}, default"]["tokens"] for rule in ("original", "repaired")]
    if tokens[1] != found["repaired, no drafts"]["tokens"]:
        faults.append("repaired, default: other tokens than plain decoding")
    if has_same_tokens and tokens[0] != tokens[1]:
        faults.append("the default mode's tokens differ between original and repaired")
    return faults


_BLUE, _RED = "#1f6fb4", "#c8452c"


def _draw(
    path: pathlib.Path, parts: Mapping[str, Any], names: list[str], length: int
) -> None:
    """Draws the agreement by position, and below it the arithmetic alone."""
    with figure(
        path,
        nrows=2,
        ncols=len(names),
        figsize=(1 + 3.6 * len(names), 5.6),
        sharex=True,
        sharey="row",
        squeeze=False,
    ) as (drawing, axes):
        for column, name in enumerate(names):
            above, below = axes[0][column], axes[1][column]
            for rule, colour, marker in (
                ("original", _RED, "."),
                ("repaired", _BLUE, "."),
            ):
                positions = parts[_part(name, length, f"{rule}, gated")]["positions"]
                agreement = [
                    1 - each.get("tv_emitted", each["tv_arithmetic"])
                    for each in positions
                ]
                above.plot(
                    agreement, marker, color=colour, markersize=4, alpha=0.8, label=rule
                )
                arithmetic = [each["tv_arithmetic"] for each in positions]
                num_equal = sum(each["is_equal"] for each in positions)
                below.plot(
                    arithmetic,
                    marker,
                    color=colour,
                    markersize=4,
                    alpha=0.8,
                    label=f"{rule}: {num_equal} of {len(positions)} rows equal",
                )
            above.set_title(name)
            below.set_yscale("symlog", linthresh=1e-9)
            below.set_ylim(-2e-10, 1)
            below.set_xlabel("position")
            below.legend(loc="upper right", fontsize=8)
            for each in (above, below):
                each.grid(alpha=0.3)
        axes[0][0].set_ylabel("target agreement\n1 - TV(emitted law, p)")
        axes[1][0].set_ylabel("arithmetic alone\nTV(row in its window, row alone)")
        axes[0][0].legend(loc="lower right", fontsize=8)
        drawing.suptitle("Gated drafts: is the target sampled at each position?")


def _run() -> int:
    require_matplotlib()
    names = _CONFIGURATIONS.value or (["tiny"] if _SMOKE.value else list(_DEFAULT))
    unknown = [name for name in names if name not in _WEIGHTS]
    if unknown:
        raise ValueError(
            f"--configurations must be of {', '.join(_WEIGHTS)}; got "
            f"{', '.join(unknown)}"
        )
    texts = _POSITIONS.value or (["12"] if _SMOKE.value else ["12", "256"])
    if not all(text.isdecimal() and 2 <= int(text) <= 512 for text in texts):
        raise ValueError(f"--positions must be numbers from 2 to 512, got {texts}")
    lengths = sorted({int(text) for text in texts})
    settings = {
        "threshold": _THRESHOLD.value,
        "seed": _SEED.value,
        "num_draft_tokens": NUM_DRAFT_TOKENS,
        "sampling": SAMPLING,
        "prompts": _PROMPTS,
        "device": jax.devices()[0].device_kind,
    }
    results = Results("target_agreement", settings)
    waiting = [
        (name, length, run)
        for name in names
        for length in _lengths(name, lengths)
        for run in RUNS
        if _part(name, length, run) not in results.parts
    ]
    study = prompt = files = current = None
    with show_progress(0, len(waiting), "run") as advance:
        for index, (name, length, run) in enumerate(waiting):
            if name != current:
                study, prompt, files = _study(name, max(lengths))
                current = name
            assert study is not None and prompt is not None
            part = study.run(run, prompt, length, _SEED.value)
            results.keep(_part(name, length, run), {"files": files, **part})
            advance(index + 1, _part(name, length, run))

    # All that the file holds, also from earlier runs with other configurations.
    names = [
        name
        for name in _WEIGHTS
        if all(
            _part(name, length, run) in results.parts
            for length in _lengths(name, lengths)
            for run in RUNS
        )
    ]
    path = results.folder / "target_agreement.png"
    whole = [name for name in names if _lengths(name, lengths) == lengths]
    _draw(path, results.parts, whole or names, lengths[-1 if whole else 0])
    faults = [
        f"{name}, {length} positions: {fault}"
        for name in names
        for length in _lengths(name, lengths)
        for fault in find_faults(
            results.parts,
            lambda run: _part(name, length, run),  # noqa: B023
            # Rows that are off by percents lead to other draws.
            has_same_tokens=not name.endswith("bfloat16"),
        )
    ]
    return results.finish(
        _tables(results.parts, lengths),
        faults,
        [
            {
                "file": path.name,
                "alt": "Agreement of the emitted law with the target by position, for "
                "the original and the repaired rule, and the arithmetic part alone.",
            }
        ],
    )


flags.adopt_module_key_flags(_command_line)
flags.adopt_module_key_flags(_results)

if __name__ == "__main__":
    run_command(_run)
