"""Trains a draft head for a llama by distillation from the llama itself.

The target writes answers to questions and goes on with passages of public-domain text;
its tokens and hidden states are kept in the folder --out/answers. A head with one layer
then learns to foresee the target's distributions, chained as it drafts. Everything goes
into --out: the texts, the checkpoint of the run, a report and its curves, the head in
Q8_0 and its card. Started again with the same flags, the run goes on where it was.

  python experiments/train_mtp.py --out /tmp/head
  python experiments/train_mtp.py --out /tmp/try --smoke
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import sys
import time
from typing import Any, NamedTuple

import _shakespeare_corpus
import jax
import jax.numpy as jnp
import numpy as np
from _command_line import (
    CACHE,
    describe_run,
    replaced,
    run_command,
    show_progress,
    write_json,
)
from _models import Model, load_model
from _target_answers import KINDS, Prompts, Shard, load_shard, save_shard, write_shard
from absl import flags

from strata_jax import checkpoints, models, training

_HEAD = "draft_head.safetensors"
_CHECKPOINT = "training.safetensors"
_REPORT = "training.json"
_CURVE = "overlap.png"
_CARD = "README.md"
# Numbers of held-out shards lie apart from those of training shards.
_HELD_OUT = 1 << 20
_TEMPERATURES = (1.0, 0.7, 0.0)
_NUM_DRAFTS = 3  # that are chained

_OUT = flags.DEFINE_string("out", None, "Folder for all results; made if need be.")
_TARGET = flags.DEFINE_string(
    "target", "smollm2", '"smollm2", or the path of a GGUF file of a llama.'
)
_SMOKE = flags.DEFINE_bool(
    "smoke", False, "A few short texts and steps; two minutes, most of it compiling."
)
_SHARDS = flags.DEFINE_integer(
    "shards", None, "Shards of texts to train on; 12, or 1 with --smoke.", 1
)
_TEXTS = flags.DEFINE_integer(
    "texts", None, "Texts in a shard; 128, or 8 with --smoke.", 1
)
_LENGTH = flags.DEFINE_integer(
    "length", None, "Tokens in a text; 256, or 64 with --smoke.", 8
)
_STEPS = flags.DEFINE_integer("steps", None, "Steps; 1200, or 4 with --smoke.", 1)
_BATCH = flags.DEFINE_integer("batch", 16, "Texts in a batch.", 1)
_VOCABULARY = flags.DEFINE_integer(
    "vocabulary", 8192, "Tokens that can be drafted: the likeliest of the texts.", 1
)
_WIDTH = flags.DEFINE_integer(
    "width", None, "Inner width of the head's layer; the default is the target's.", 32
)
_OBJECTIVE = flags.DEFINE_enum(
    "objective", "overlap", training.OBJECTIVES, "What to minimise."
)
_WARM_START = flags.DEFINE_float(
    "warm_start",
    0.3,
    "Part of the steps that minimise --warm_objective of the first draft, before all "
    "drafts of a chain and --objective.",
    0.0,
    1.0,
)
_WARM_OBJECTIVE = flags.DEFINE_enum(
    "warm_objective", "cross_entropy", training.OBJECTIVES, "What to minimise first."
)
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer",
    "muon",
    ("muon", "adamw"),
    "What takes the steps; one of muon does more and takes longer.",
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 1.5e-3, "Its peak.")
_WEIGHT_DECAY = flags.DEFINE_float("weight_decay", 0.02, "Of matrices.", 0.0)
_START_FROM = flags.DEFINE_string(
    "start_from", None, "training.safetensors of an earlier run, whose head to improve."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and batches.", 0)
_EVALUATE_EVERY = flags.DEFINE_integer(
    "evaluate_every", 100, "Steps between measurements and checkpoints.", 1
)
_CORPUS_CACHE = flags.DEFINE_string(
    "corpus_cache", CACHE, "Folder where the public-domain text is kept."
)


class _Inputs(NamedTuple):
    """What a step sees; as arguments, tables are not copied into its program."""

    tables: training.DraftTables
    states: training.TargetStates


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The sizes of a run, from the flags."""

    shards: int
    texts: int
    length: int
    steps: int


def _plan() -> _Plan:
    def choose(given: int | None, full: int, small: int) -> int:
        return given if given is not None else small if _SMOKE.value else full

    return _Plan(
        shards=choose(_SHARDS.value, 12, 1),
        texts=choose(_TEXTS.value, 128, 8),
        length=choose(_LENGTH.value, 256, 64),
        steps=choose(_STEPS.value, 1200, 4),
    )


def _write_answers(
    model: Model, corpus: Any, plan: _Plan, folder: pathlib.Path
) -> tuple[list[Shard], Shard]:
    """Returns the texts to train on and those held out, writing what is missing."""
    settings = {
        "target": model.files,
        "corpus": corpus.sha256,
        "texts": plan.texts,
        "length": plan.length,
        "rounded": "all but held_out",
    }
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "settings.json"
    if note.exists() and json.loads(note.read_text()) != settings:
        raise ValueError(f"{folder}: texts of another run; name another --out")
    write_json(note, settings)
    jobs = [("held_out", 0), *(("train", number) for number in range(plan.shards))]
    paths = [folder / f"{split}_{number:04d}.safetensors" for split, number in jobs]
    shards = []
    num_there = sum(path.exists() for path in paths)
    prompts: dict[str, Prompts] = {}
    with show_progress(num_there, len(jobs), "shard") as show:
        for done, ((split, number), path) in enumerate(
            zip(jobs, paths, strict=True), 1
        ):
            if not path.exists():
                is_held_out = split == "held_out"
                if split not in prompts:
                    assert isinstance(model.tokenizer, checkpoints.Tokenizer)
                    prompts[split] = Prompts(
                        model.tokenizer, corpus, is_held_out=is_held_out
                    )
                shard = write_shard(
                    model.config,
                    model.params,
                    prompts[split],
                    number + _HELD_OUT * is_held_out,
                    num_texts=plan.texts,
                    length=plan.length,
                    eos_id=model.tokenizer.eos_ids[0],
                    is_rounded=not is_held_out,
                )
                save_shard(path, shard)
                show(done, split)
            shards.append(load_shard(path))
    return shards[1:], shards[0]


def _choose_vocabulary(model: Model, shards: list[Shard], size: int) -> np.ndarray:
    """Returns the ids that the target is likeliest to emit over its own texts.

    Counted by its distributions at some of the positions, not by what it drew.
    """

    @jax.jit
    def expect(
        head: jax.Array, hidden: jax.Array, log_normalizer: jax.Array
    ) -> jax.Array:
        logits = _norm(hidden.astype(jnp.float32), model) @ head.T
        return jnp.sum(jnp.exp(logits - log_normalizer[:, None]), axis=0)

    total = np.zeros(model.config.vocab_size)
    for shard in shards:
        width = shard.hidden.shape[-1]
        hidden = shard.hidden.reshape(-1, width)
        normalizer = shard.log_normalizer.reshape(-1)
        # Every seventh position, so that it takes seconds.
        picked = np.arange(0, len(hidden) - 255, 7 * 256)
        for start in picked:
            rows = slice(start, start + 256)
            total += np.asarray(expect(_head(model), hidden[rows], normalizer[rows]))
    return np.sort(np.argsort(-total, kind="stable")[:size]).astype(np.int32)


def _head(model: Model) -> jax.Array:
    params = model.params
    return params.embedding if params.head is None else params.head


def _norm(hidden: jax.Array, model: Model) -> jax.Array:
    mean = jnp.mean(hidden * hidden, axis=-1, keepdims=True)
    scaled = hidden * jax.lax.rsqrt(mean + model.config.norm_epsilon)
    return scaled * model.params.final_norm


def _first_params(model: Model) -> models.MtpParams:
    """A new head: its layer is a copy of the target's last where sizes agree."""
    config = dataclasses.replace(model.config, num_layers=1)
    if _WIDTH.value is not None:
        config = dataclasses.replace(config, intermediate_size=_WIDTH.value)
    mtp = models.random_mtp_params(config, jax.random.key(_SEED.value))
    last = model.params.layers[-1]
    same = {
        name: getattr(last, name)
        for name in ("query", "key", "value", "output", "attention_norm")
    }
    if config.intermediate_size == model.config.intermediate_size:
        names = ("gate", "up", "down", "feed_forward_norm")
        same |= {name: getattr(last, name) for name in names}
    layer = dataclasses.replace(mtp.layer, **same)
    return dataclasses.replace(mtp, layer=layer, final_norm=model.params.final_norm)


def _warm_loss(mtp: Any, inputs: _Inputs) -> Any:
    tables, states = inputs
    loss, metrics = training.distillation_loss(
        tables,
        mtp,
        states,
        objective=_WARM_OBJECTIVE.value,
        draft_weights=(1.0,),
        is_rounded=True,
    )
    later = range(1, _NUM_DRAFTS)
    return loss, metrics | {f"overlap_{i + 1}": jnp.float32(jnp.nan) for i in later}


def _loss(mtp: Any, inputs: _Inputs) -> Any:
    tables, states = inputs
    return training.distillation_loss(
        tables, mtp, states, objective=_OBJECTIVE.value, is_rounded=True
    )


def _batches(tables: training.DraftTables, shards: list[Shard], seed: int) -> Any:
    """Returns step -> tables and states of a batch, a function of the step alone."""
    sizes = np.cumsum([0, *(len(shard.tokens) for shard in shards)])

    def batch(step: int) -> _Inputs:
        rng = np.random.default_rng([seed, step])
        rows = rng.integers(sizes[-1], size=_BATCH.value)
        picked = []
        for row in rows:
            index = int(np.searchsorted(sizes, row, side="right")) - 1
            shard, place = shards[index], row - sizes[index]
            picked.append(
                (shard.tokens[place], shard.hidden[place], shard.log_normalizer[place])
            )
        states = training.TargetStates(
            *(np.stack(leaf) for leaf in zip(*picked, strict=True))
        )
        return _Inputs(tables, states)

    return batch


def _measure(
    model: Model,
    tables: training.DraftTables,
    vocabulary: np.ndarray,
    mtp: models.MtpParams,
    held_out: Shard,
) -> dict[str, Any]:
    """Overlaps with held-out texts by temperature, kind and draft.

    Rows are those whose token the target wrote. A draft's row counts if the tokens
    before it in its chain were written too.
    """
    index = jnp.asarray(vocabulary)

    @jax.jit
    def overlaps(
        tables: training.DraftTables,
        head: jax.Array,
        mtp: models.MtpParams,
        states: training.TargetStates,
    ) -> jax.Array:
        tokens = jnp.asarray(states.tokens)
        hidden = jnp.asarray(states.hidden).astype(jnp.float32)
        drafts, _ = models.mtp_forward(tables, mtp, hidden[:, :-1], tokens, _NUM_DRAFTS)
        logits = _norm(hidden[:, 1:], model) @ head.T
        found = []
        for temperature in _TEMPERATURES:
            if temperature:
                target = jax.nn.softmax(logits / temperature, axis=-1)[..., index]
            else:
                best = jnp.argmax(logits, axis=-1)
                target = (index == best[..., None]).astype(jnp.float32)
            of_drafts = []
            for draft in drafts:
                if temperature:
                    q = jax.nn.softmax(draft / temperature, axis=-1)
                else:
                    best = jnp.argmax(draft, axis=-1)
                    q = jax.nn.one_hot(best, len(vocabulary))
                of_drafts.append(jnp.sum(jnp.minimum(q, target), axis=-1))
            found.append(jnp.stack(of_drafts))
        return jnp.stack(found)  # [temperature, draft, N, L - 1]

    pieces = []
    for start in range(0, len(held_out.tokens), 4):
        rows = slice(start, start + 4)
        states = training.TargetStates(
            held_out.tokens[rows], held_out.hidden[rows], held_out.log_normalizer[rows]
        )
        pieces.append(np.asarray(overlaps(tables, _head(model), mtp, states)))
    values = np.concatenate(pieces, axis=2)
    # Cell c drafts what row c + 1 is about: the token at c + 2.
    written = held_out.is_written
    result: dict[str, Any] = {}
    for name in ("all", *KINDS):
        of_kind = np.ones(len(written), bool)
        if name != "all":
            of_kind = held_out.kind == KINDS.index(name)
        counts = np.zeros_like(written[:, 1:])
        counts[:, :-1] = written[:, 2:]
        counts[~of_kind] = False
        if not counts.any():
            continue
        result[name] = {
            f"temperature {temperature:g}": [
                float(values[place, draft, :, draft:][counts[:, draft:]].mean())
                for draft in range(_NUM_DRAFTS)
            ]
            for place, temperature in enumerate(_TEMPERATURES)
        }
    return result


def _plot(history: dict[str, np.ndarray], path: pathlib.Path) -> None:
    try:
        import matplotlib.figure
    except ImportError:
        print("no curves: pip install 'strata-jax[plot]'", file=sys.stderr)
        return
    figure = matplotlib.figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    names = sorted(name for name in history if name.startswith("overlap_"))
    for name in names:
        values = history[name]
        width = max(1, len(values) // 60)
        starts = np.arange(0, len(values), width)
        sizes = np.diff(starts, append=len(values))
        means = np.add.reduceat(values, starts) / sizes
        number = name.removeprefix("overlap_")
        (line,) = axes.plot(starts + 1, means, alpha=0.5)
        axes.plot(
            history["held_out_step"],
            history[f"held_out_{name}"],
            "o-",
            color=line.get_color(),
            markersize=3,
            label=f"draft {number}, held out",
        )
    axes.set(xlabel="step", ylabel="mean sum min(p, q), temperature 1", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    with replaced(path) as part:
        figure.savefig(part, dpi=150, format="png")


def _write_card(folder: pathlib.Path, report: dict[str, Any]) -> None:
    rows = []
    for kind, by_temperature in report["shipped"]["held_out"].items():
        for temperature, values in by_temperature.items():
            numbers = " | ".join(f"{value:.3f}" for value in values)
            rows.append(f"| {kind}, {temperature} | {numbers} |")
    columns = len(report["shipped"]["held_out"]["all"]["temperature 1"])
    head = " | ".join(f"draft {number + 1}" for number in range(columns))
    configuration = report["configuration"]
    goes_on = "started_from" in configuration
    lines = [
        f"# Draft head for {configuration['target']}",
        "",
        "A multi-token-prediction head with one decoder layer, in Q8_0, trained by",
        "`experiments/train_mtp.py` of strata_jax. Whatever it drafts is verified: it",
        "changes the speed of decoding and no probability.",
        "",
        f"- Target: {', '.join(configuration['files'])} (SHA-256 "
        f"{', '.join(configuration['files'].values())})",
        f"- Size: {report['shipped']['bytes']} bytes, SHA-256 "
        f"{report['shipped']['sha256']}",
        f"- Drafts {configuration['vocabulary']} of the target's tokens, with the "
        "target's own head",
        f"- Data: {report['num_tokens']} tokens, written by the target or passages of "
        "Shakespeare (public domain)",
        *(["- Started from the head of an earlier run"] if goes_on else []),
        "- License: Apache-2.0, as that of the target",
        "",
        "Mean sum min(p, q) on held-out prompts, behind accepted drafts:",
        "",
        f"| texts | {head} |",
        "|---" * (columns + 1) + "|",
        *rows,
        "",
    ]
    with replaced(folder / _CARD) as part:
        part.write_text("\n".join(lines), "utf-8")


def _run() -> int:
    if not _OUT.value:
        raise ValueError("give --out, the folder for the results")
    out = pathlib.Path(_OUT.value)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: that is a file; name a folder")
    if not 0 < _LEARNING_RATE.value < math.inf:
        raise ValueError(f"--learning_rate {_LEARNING_RATE.value} must be positive")
    earlier = pathlib.Path(_START_FROM.value) if _START_FROM.value else None
    if earlier and not earlier.is_file():
        raise ValueError(f"--start_from {earlier}: no such file")
    model = load_model(_TARGET.value)
    if not isinstance(model.config, models.LlamaConfig):
        raise ValueError(f"--target {_TARGET.value}: only llamas can have such a head")
    # Before any text is written, since that takes long.
    first_params = _first_params(model)
    if earlier:
        first_params = training.load_trained_params(earlier, first_params)
    plan = _plan()
    out.mkdir(parents=True, exist_ok=True)
    corpus = _shakespeare_corpus.load_shakespeare(pathlib.Path(_CORPUS_CACHE.value))
    shards, held_out = _write_answers(model, corpus, plan, out / "answers")
    vocabulary = _choose_vocabulary(model, shards, _VOCABULARY.value)
    tables = training.DraftTables(
        embedding=model.params.embedding,
        final_norm=model.params.final_norm,
        head=_head(model)[jnp.asarray(vocabulary)],
    )

    make_optimizer = {"muon": training.muon, "adamw": training.adamw}
    optimizer = make_optimizer[_OPTIMIZER.value](
        plan.steps,
        learning_rate=_LEARNING_RATE.value,
        warmup_steps=math.ceil((plan.steps - 1) * 0.04),
        weight_decay=_WEIGHT_DECAY.value,
    )
    warm_trainer = training.trainer(_warm_loss, optimizer)
    trainer = training.trainer(_loss, optimizer)
    warm_steps = round(_WARM_START.value * plan.steps)
    batch = _batches(tables, shards, _SEED.value)

    configuration = {
        "target": model.name,
        "files": model.files,
        **dataclasses.asdict(plan),
        "corpus": corpus.sha256,
        "vocabulary": len(vocabulary),
        "vocabulary_sha256": hashlib.sha256(vocabulary.tobytes()).hexdigest(),
        "batch": _BATCH.value,
        "width": _WIDTH.value or model.config.intermediate_size,
        "products": "bfloat16",
        "objective": _OBJECTIVE.value,
        "warm_start": _WARM_START.value,
        "warm_objective": _WARM_OBJECTIVE.value,
        "optimizer": _OPTIMIZER.value,
        "learning_rate": _LEARNING_RATE.value,
        "weight_decay": _WEIGHT_DECAY.value,
        "seed": _SEED.value,
    }
    if earlier:
        configuration["started_from"] = hashlib.sha256(earlier.read_bytes()).hexdigest()
    state = trainer.init(first_params)
    history: dict[str, np.ndarray] = {}
    checkpoint = out / _CHECKPOINT
    if checkpoint.exists():
        state, history = training.load_training(checkpoint, state, configuration)
    start = step = int(state.step)
    before = float(history.pop("seconds", np.zeros(1))[0])
    began = time.monotonic()
    with show_progress(start, plan.steps, "step") as show:

        def on_step(step: int, metrics: dict[str, float]) -> None:
            overlaps = [metrics[f"overlap_{i + 1}"] for i in range(_NUM_DRAFTS)]
            shown = "/".join(f"{value:.3f}" for value in overlaps if value == value)
            show(step, f"overlap {shown}")

        while step < plan.steps:
            every = _EVALUATE_EVERY.value
            is_warm = step < warm_steps
            end = warm_steps if is_warm else plan.steps
            step = min(end, step + every - step % every)
            state, history = training.train(
                warm_trainer if is_warm else trainer,
                state,
                batch,
                step,
                history=history,
                on_step=on_step,
            )
            measured = _measure(model, tables, vocabulary, state.params, held_out)[
                "all"
            ]["temperature 1"]
            for name, value in {
                "step": step,
                **{f"overlap_{i + 1}": v for i, v in enumerate(measured)},
            }.items():
                key = f"held_out_{name}"
                history[key] = np.append(history.get(key, np.zeros(0)), value)
            kept = {**history, "seconds": np.array([before + time.monotonic() - began])}
            training.save_training(checkpoint, state, kept, configuration)

    print("measuring on held-out prompts ...", file=sys.stderr, flush=True)
    final = _measure(model, tables, vocabulary, state.params, held_out)
    tiled = models.tile_mtp(state.params, is_quantized=True)
    table = models.cut_tiles([np.asarray(_head(model)).T])
    tiled = models.draft_from(tiled, table, vocabulary)
    checkpoints.save_draft_head(
        out / _HEAD, tiled, metadata={"target": model.name, **model.files}
    )
    content = (out / _HEAD).read_bytes()
    rounded = _rounded(state.params)
    report = {
        **describe_run("train_mtp"),
        "configuration": configuration,
        "num_tokens": plan.shards * plan.texts * plan.length,
        "resumed_from": start,
        "seconds": before + time.monotonic() - began,
        "held_out": final,
        "shipped": {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "held_out": _measure(model, tables, vocabulary, rounded, held_out),
        },
        "history": {
            name: [_as_json(value) for value in values]
            for name, values in history.items()
        },
    }
    write_json(out / _REPORT, report)
    _plot(history, out / _CURVE)
    _write_card(out, report)
    for temperature, values in report["shipped"]["held_out"]["all"].items():
        print(f"{temperature:<16}" + "  ".join(f"{value:.4f}" for value in values))
    print(f"{out / _HEAD}: {len(content)} bytes")
    return 0


def _as_json(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _rounded(mtp: models.MtpParams) -> models.MtpParams:
    """The head with its matrices as Q8_0 holds them."""

    def rounded(leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2:
            return leaf
        values, scale = models.quantize(np.asarray(leaf))
        return jnp.asarray(values * np.repeat(scale.astype(np.float32), 32, axis=0))

    return jax.tree.map(rounded, mtp)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    run_command(_run)
