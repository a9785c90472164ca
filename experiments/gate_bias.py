"""How far does a gate that forgets its dropped drafts move what is sampled?

The rule: drop a drawn draft of probability below t, forget it, and draw plainly from
the target. For rows p and q of real models and for synthetic ones, the total variation
of the emitted law from p against t: as a formula predicts it, and as enumerated through
the decoder's own step; and the same for `gates.picked` with its measure and NULL row.
Beside it, what each gate costs and saves: acceptance and tokens per window.

  python experiments/gate_bias.py --out /tmp/bias
  python experiments/gate_bias.py --out /tmp/smoke --smoke

Results: gate_bias.json and gate_bias.png. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import _command_line
import _results
import jax
import numpy as np
from _command_line import run_command, show_progress
from _models import Model, load_model, own_drafter
from _results import Results, count_acceptance, figure, require_matplotlib
from _row_laws import emitted_laws
from absl import flags

import strata_jax as strata
from strata_jax import diagnostics, gates, targets, verifiers

_PROMPTS = {
    "bundled": (
        "HAMLET.  To be, or not to be, that is the question:\n",
        "KING. Once more unto the breach, dear friends, once more;\n",
        "ROMEO. Good morrow, cousin.\n",
        "Enter the Ghost.\n\nGHOST. ",
    ),
    "smollm2": (
        "The history of the printing press begins in",
        "To make bread, first",
    ),
}
_SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
# None of them is a probability of the rows worked by hand: rounding would decide.
_THRESHOLDS = (0.0, 0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85)
_NUM_DRAFT_TOKENS = 3
_GATES = ("always", "picked", "top", "entropy", "include_then_stop")
_SETTINGS = {
    "picked": {"threshold": 0.3},
    "top": {"threshold": 0.3},
    "entropy": {"max_entropy": 1.0},
    "include_then_stop": {"threshold": 0.3},
}

_SMOKE = flags.DEFINE_bool("smoke", False, "Synthetic rows and one layer: seconds.")
_SOURCES = flags.DEFINE_list(
    "sources",
    None,
    "Where rows come from, with commas; the default is synthetic, bundled, smollm2, or "
    "synthetic, tiny with --smoke.",
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of texts and of synthetic rows.", 0)


class _Sizes:
    """How much of everything, whole or as a try."""

    def __init__(self, is_smoke: bool):
        self.thresholds = [0.0, 0.5] if is_smoke else list(_THRESHOLDS)
        self.num_enumerated = 4 if is_smoke else 16
        self.num_rows = {"synthetic": 32 if is_smoke else 256}
        self.num_rows |= {"tiny": 16, "bundled": 256, "smollm2": 64}
        self.num_tokens = {"tiny": 16, "bundled": 256, "smollm2": 64}


def predicted_laws(
    target_probs: np.ndarray, draft_probs: np.ndarray, threshold: float
) -> np.ndarray:
    """Returns the law of the unaccounted gate by its formula, `[N, V]` float64.

    With A the tokens of q >= t, N = q(not A), Z the sum of (q - p)+ and R its part
    outside A: (1 + N) p - min(p, q) outside A - R (p - q)+ / Z.
    """
    p, q = target_probs.astype(np.float64), draft_probs.astype(np.float64)
    # The gate compares in float32, as rows are.
    dropped = draft_probs < np.float32(threshold)
    missing = np.where(dropped, q, 0).sum(axis=1, keepdims=True)
    positive = np.maximum(q - p, 0)
    total = positive.sum(axis=1, keepdims=True)
    outside = np.where(dropped, positive, 0).sum(axis=1, keepdims=True)
    share = np.divide(outside, total, out=np.zeros_like(total), where=total > 0)
    lost = np.where(dropped, np.minimum(p, q), 0)
    return (1 + missing) * p - lost - share * np.maximum(p - q, 0)


def _synthetic_rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two pairs worked by hand, first and last; in the others q is p with noise."""
    random = np.random.default_rng(seed)
    width = 20
    target_probs, draft_probs = np.zeros((2, count, width))
    target_probs[0, :3] = draft_probs[0, :3] = (0.6, 0.3, 0.1)
    target_probs[-1, :2], draft_probs[-1, :2] = (0.5, 0.5), (0.875, 0.125)
    for index in range(1, count - 1):
        target_probs[index] = random.dirichlet(np.full(width, 0.2))
        noise = random.dirichlet(np.full(width, 0.2))
        draft_probs[index] = 0.7 * target_probs[index] + 0.3 * noise
    return target_probs.astype(np.float32), draft_probs.astype(np.float32)


@functools.cache
def _model(source: str) -> tuple[Model, strata.TargetModel, strata.Drafter, Any]:
    model = load_model(source)
    texts = _PROMPTS["smollm2" if source == "smollm2" else "bundled"]
    prompts = [model.tokenizer.encode(text) for text in texts]
    length = max(map(len, prompts)) + 256
    target = targets.singleton(model.config, max_length=length)
    drafter = own_drafter(model, _NUM_DRAFT_TOKENS, length)
    return model, target, drafter, prompts


@functools.cache
def _decoder(source: str, gate: str) -> strata.SpeculativeDecoder:
    _, target, drafter, _ = _model(source)
    return strata.speculative_decoder(
        target, drafter, getattr(gates, gate)(), verifiers.token()
    )


def _windows(source: str, gate: str, num_tokens: int) -> strata.Window:
    """Runs the prompts in equal parts and returns all their windows."""
    model, _, _, prompts = _model(source)
    decoder = _decoder(source, gate)
    pieces = []
    for index, prompt in enumerate(prompts):
        state = decoder.init(
            model.params,
            prompt,
            seed=_SEED.value + index,
            max_new_tokens=num_tokens // len(prompts),
            **_SAMPLING,
            **_SETTINGS.get(gate, {}),
        )
        while int(state.finish_reason) == strata.FinishReason.RUNNING:
            state, windows = strata.decode(decoder, model.params, state, 16, trace=True)
            ran = np.asarray(windows.verdict.num_emitted) > 0
            pieces.append(jax.tree.map(lambda leaf: np.asarray(leaf)[ran], windows))  # noqa: B023
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)


def _rows(source: str, sizes: _Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Returns p and q of drafted rows along sampled text."""
    count = sizes.num_rows[source]
    if source == "synthetic":
        return _synthetic_rows(count, _SEED.value)
    windows = _windows(source, "always", sizes.num_tokens[source])
    # The rows that were reached: those of accepted drafts, and the one that ended it.
    num_reached = np.minimum(windows.verdict.num_accepted + 1, _NUM_DRAFT_TOKENS)
    is_reached = np.arange(_NUM_DRAFT_TOKENS) < num_reached[:, None]
    is_reached &= windows.proposal.kind == strata.RowKind.OFFERED
    target_probs = np.asarray(windows.target_probs)[:, :-1][is_reached]
    draft_probs = np.asarray(windows.proposal.measure)[is_reached]
    return target_probs[:count], draft_probs[:count]


def _bias_part(source: str, threshold: float) -> str:
    return f"{source}, threshold {threshold:g}"


def _measure_bias(
    rows: tuple[np.ndarray, np.ndarray], threshold: float, num_enumerated: int
) -> dict[str, Any]:
    target_probs, draft_probs = rows
    predicted = diagnostics.total_variation(
        predicted_laws(target_probs, draft_probs, threshold),
        target_probs.astype(np.float64),
    )
    count = min(num_enumerated, len(target_probs))
    some = np.linspace(0, len(target_probs) - 1, count).astype(int)
    enumerated, ours = (
        diagnostics.total_variation(
            emitted_laws(rule, target_probs[some], draft_probs[some], threshold),
            target_probs[some],
        )
        for rule in ("original", "repaired")
    )
    return {
        "num_rows": len(target_probs),
        "num_enumerated": len(enumerated),
        "predicted": predicted.tolist(),
        "enumerated_rows": some.tolist(),
        "enumerated": enumerated.tolist(),
        "repaired": ours.tolist(),
        "largest_gap": float(np.abs(enumerated - predicted[some]).max()),
    }


def _measure_gate(source: str, gate: str, num_tokens: int) -> dict[str, Any]:
    windows = _windows(source, gate, num_tokens)
    return {
        "settings": _SETTINGS.get(gate, {}),
        **count_acceptance(windows.verdict),
    }


def _tables(
    parts: Mapping[str, Any], sources: list[str], sizes: _Sizes
) -> list[dict[str, Any]]:
    bias = []
    for source in sources:
        for threshold in sizes.thresholds:
            part = parts[_bias_part(source, threshold)]
            bias.append(
                [
                    source,
                    f"{threshold:g}",
                    str(part["num_rows"]),
                    f"{np.mean(part['predicted']):.4f}",
                    f"{np.max(part['predicted']):.4f}",
                    str(part["num_enumerated"]),
                    f"{np.mean(part['enumerated']):.4f}",
                    f"{part['largest_gap']:.1e}",
                    f"{np.max(part['repaired']):.1e}",
                ]
            )
    gate_rows = []
    for source in sources:
        for gate in _GATES:
            part = parts.get(f"{source}, {gate}")
            if part is None:
                continue
            numbers = ", ".join(f"{k} {v:g}" for k, v in part["settings"].items())
            gate_rows.append(
                [
                    source,
                    f"{gate} {numbers}".strip(),
                    f"{part['acceptance_rate']:.3f}",
                    f"{part['tokens_per_window']:.3f}",
                    str(part["num_windows"]),
                    str(part["num_offered"]),
                    str(part["num_null"]),
                    str(part["num_absent"]),
                ]
            )
    return [
        {
            "title": "Bias of the unaccounted gate, total variation from p",
            "columns": (
                *("rows of", "threshold", "rows", "predicted, mean", "largest"),
                *("enumerated rows", "mean", "largest gap", "repaired, largest"),
            ),
            "rows": bias,
            "note": "Gap: between the enumerated law's distance and the predicted one.",
        },
        {
            "title": f"Gates at K = {_NUM_DRAFT_TOKENS}, verified by the token rule",
            "columns": (
                *("rows of", "gate", "acceptance", "tokens per window", "windows"),
                *("offered", "NULL", "absent"),
            ),
            "rows": gate_rows,
        },
    ]


def find_faults(
    parts: Mapping[str, Any], sources: list[str], thresholds: list[float]
) -> list[str]:
    """Returns what speaks against the claims; nothing if they hold."""
    faults = []
    for source in sources:
        found = {t: parts[_bias_part(source, t)] for t in thresholds}
        for threshold, part in found.items():
            name = _bias_part(source, threshold)
            if part["largest_gap"] > 1e-5:
                faults.append(f"{name}: predicted and enumerated differ")
            if max(part["repaired"]) > 1e-5:
                faults.append(f"{name}: the repaired gate is biased")
            if threshold == 0 and max(part["enumerated"]) > 1e-5:
                faults.append(f"{name}: a gate that admits all is biased")
        if max(max(part["predicted"]) for part in found.values()) < 1e-2:
            faults.append(f"{source}: no bias at any threshold: nothing is shown")
    return faults


def _draw(
    path: pathlib.Path, parts: Mapping[str, Any], sources: list[str], sizes: _Sizes
) -> None:
    colours = ("#777777", "#1f6fb4", "#c8452c", "#3a8f4d")

    def means(found: list[Any], name: str) -> list[float]:
        return [float(np.mean(part[name])) for part in found]

    last = sources[-1]
    with figure(path, figsize=(6.6, 4.2)) as (_, axes):
        for source, colour in zip(sources, colours, strict=False):
            found = [parts[_bias_part(source, t)] for t in sizes.thresholds]
            same = [
                np.mean([part["predicted"][row] for row in part["enumerated_rows"]])
                for part in found
            ]
            axes.plot(
                *(sizes.thresholds, means(found, "predicted"), "-"),
                color=colour,
                label=f"{source}: predicted, {found[0]['num_rows']} rows",
            )
            axes.plot(sizes.thresholds, same, "--", color=colour, linewidth=1)
            axes.plot(
                *(sizes.thresholds, means(found, "enumerated"), "o"),
                color=colour,
                label=f"{source}: enumerated, {found[0]['num_enumerated']} of them "
                "(predicted: dashed)",
            )
            axes.plot(
                *(sizes.thresholds, means(found, "repaired"), "kx"),
                markersize=5,
                label="repaired: enumerated, the same rows" if source == last else None,
            )
        axes.set(
            xlabel="threshold of the gate",
            ylabel="mean total variation of the emitted law from p",
            title="A gate that forgets its dropped drafts is biased",
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)


def _run() -> int:
    require_matplotlib()
    sizes = _Sizes(_SMOKE.value)
    whole = ["synthetic", "bundled", "smollm2"]
    sources = _SOURCES.value or (["synthetic", "tiny"] if _SMOKE.value else whole)
    unknown = [name for name in sources if name not in sizes.num_rows]
    if unknown:
        raise ValueError(
            f"--sources must be of {', '.join(sizes.num_rows)}; got "
            f"{', '.join(unknown)}"
        )
    settings = {
        "seed": _SEED.value,
        "sampling": _SAMPLING,
        "num_draft_tokens": _NUM_DRAFT_TOKENS,
        "gates": _SETTINGS,
        "prompts": _PROMPTS,
        "sizes": vars(sizes),
        "device": jax.devices()[0].device_kind,
    }
    results = Results("gate_bias", settings)
    work: list[tuple[str, str, Any]] = []
    for source in sources:
        if source != "synthetic":
            names = _GATES[:2] if _SMOKE.value else _GATES
            work += [(f"{source}, {gate}", source, gate) for gate in names]
        work += [(_bias_part(source, t), source, t) for t in sizes.thresholds]
    waiting = [each for each in work if each[0] not in results.parts]
    rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    with show_progress(0, len(waiting), "part") as advance:
        for index, (name, source, what) in enumerate(waiting):
            files = {} if source == "synthetic" else _model(source)[0].files
            if isinstance(what, str):
                part = _measure_gate(source, what, sizes.num_tokens[source])
            else:
                if source not in rows:
                    rows[source] = _rows(source, sizes)
                part = _measure_bias(rows[source], what, sizes.num_enumerated)
            results.keep(name, {"files": files, **part})
            advance(index + 1, name)

    # All that the file holds, also from earlier runs with other sources.
    sources = [
        name
        for name in sizes.num_rows
        if all(_bias_part(name, t) in results.parts for t in sizes.thresholds)
    ]
    path = results.folder / "gate_bias.png"
    _draw(path, results.parts, sources, sizes)
    return results.finish(
        _tables(results.parts, sources, sizes),
        find_faults(results.parts, sources, sizes.thresholds),
        [
            {
                "file": path.name,
                "alt": "Total variation of the emitted law from p against the gate's "
                "threshold: it rises from 0 and falls towards 1, predicted and "
                "enumerated alike; the repaired rule stays at 0.",
            }
        ],
    )


flags.adopt_module_key_flags(_command_line)
flags.adopt_module_key_flags(_results)

if __name__ == "__main__":
    run_command(_run)
