"""Are law and bits on this machine's device what they are elsewhere?

For a machine with an accelerator: it needs no network and runs from the source tree.
The first line names the versions and the device. On the bundled model, in float32 at
matmul precision "default" and "highest", and (widths and speed) in bfloat16:

  widths  windows of 1 to 8 tokens, by a program with room for 8, against the program
          for one token, bit for bit, for `targets.singleton`; `targets.batched` is the
          control;
  law     the first token after a prompt over many seeds against p, by a chi-square
          test, for the repaired gate; the control is the original system, with the
          unaccounted gate and rows in shared products;
  speed   tokens per second, plain and drafted by the model's own head.

  python experiments/backend_check.py --platform cuda --out /tmp/backend
  python experiments/backend_check.py --out /tmp/smoke --smoke
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import pathlib
import sys
import time
from typing import Any

try:
    import flax  # noqa: F401
    import jax
    import jax.numpy as jnp
    import numpy as np
    import safetensors  # noqa: F401
    from absl import flags
except ImportError as error:
    sys.exit(f"error: {error}: install jax, flax, numpy, safetensors and absl-py")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import _command_line
import _results
from _command_line import run_command
from _long_run_parts import Systems
from _models import Model, load_model
from _results import Results

import strata_jax as strata
from strata_jax import diagnostics, drafters, gates, models, targets, verifiers

_TEXT = "ROMEO. Good morrow, cousin. Is the day so young? But new struck nine."
_LAW_PROMPT = "The King is d"
_FALSE_ALARM = 1e-4
_WIDTHS = range(1, 9)

_SMOKE = flags.DEFINE_bool("smoke", False, "One layer and few seeds: seconds.")
_THRESHOLD = flags.DEFINE_float("threshold", 0.3, "Of the gate.", 0.0, 1.0)


_CAPACITY = 8


def _rows(
    target: strata.TargetModel, params: Any, text: np.ndarray, width: int, capacity: int
) -> Any:
    """Scores a text in windows of a width, by a program for `capacity` rows."""
    score, commit = jax.jit(target.score), jax.jit(target.commit)
    state = target.init(params)
    found = []
    for position in range(0, len(text) - width + 1, width):
        window = np.zeros(capacity, np.int32)
        window[:width] = text[position : position + width]
        place, count = jnp.int32(position), jnp.int32(width)
        rows, state = score(params, state, jnp.asarray(window), place, count)
        state = commit(state, place, count)
        found.append(np.asarray(rows.logits)[:width])
    return np.concatenate(found)


def _check_widths(model: Model) -> dict[str, Any]:
    text = np.asarray(model.tokenizer.encode(_TEXT)[:64])
    found: dict[str, Any] = {}
    for name in ("singleton", "batched"):
        target = getattr(targets, name)(model.config, max_length=128)
        alone = _rows(target, model.params, text, 1, 1)
        widths = {}
        for width in _WIDTHS:
            rows = _rows(target, model.params, text, width, _CAPACITY)
            is_equal = (rows == alone[: len(rows)]).all(axis=1)
            widths[str(width)] = [int(is_equal.sum()), len(rows)]
        found[name] = widths
    return found


def _check_law(model: Model, num_seeds: int) -> dict[str, Any]:
    prompt = model.tokenizer.encode(_LAW_PROMPT)
    systems = Systems(model, len(prompt) + 8, _THRESHOLD.value)
    law = systems.next_row(prompt).astype(np.float64)
    found: dict[str, Any] = {"num_seeds": num_seeds}
    for index, mode in enumerate(("repaired", "original")):
        seeds = np.arange(num_seeds) + index * num_seeds
        pairs, num_same, _ = systems.sample_pairs(mode, prompt, seeds, num_seeds // 100)
        counts = np.bincount(pairs // systems.vocab_size, minlength=len(law))
        found[mode] = {
            "p_value": diagnostics.chi_square(counts, law / law.sum()).p_value,
            "num_checked": num_seeds // 100,
            "num_same": num_same,
        }
    return found


def _check_speed(model: Model) -> dict[str, Any]:
    """Tokens per second, plain and speculative, the best of three requests each."""
    prompt = model.tokenizer.encode(_TEXT)
    num_tokens = 32 if _SMOKE.value else 256
    target = targets.singleton(
        model.config, max_length=len(prompt) + num_tokens + _CAPACITY
    )
    speculative = strata.speculative_decoder(
        target,
        drafters.mtp(num_draft_tokens=3),
        gates.picked(_THRESHOLD.value),
        verifiers.token(),
    )
    found = {}
    for name, decoder in (
        ("plain", strata.ancestral_decoder(target)),
        ("speculative", speculative),
    ):
        speeds = []
        for seed in range(4):  # the first compiles
            state = decoder.init(
                model.params, prompt, seed=seed, max_new_tokens=num_tokens
            )
            jax.block_until_ready(state)
            began = time.perf_counter()
            while int(state.finish_reason) == strata.FinishReason.RUNNING:
                state, _ = strata.decode(decoder, model.params, state, 32)
            seconds = time.perf_counter() - began
            speeds.append(len(strata.output_tokens(state)) / seconds)
        found[name] = {"tokens_per_second": max(speeds[1:])}
    return found


def _in_bfloat16(model: Model) -> Model:
    params = models.unpack_model_experts(model.params)
    return dataclasses.replace(
        model, params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    )


def _run() -> int:
    device = jax.devices()[0]
    names = ("jax", "jaxlib", "flax")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(f"{versions}, {device.platform}: {device.device_kind}", flush=True)
    num_seeds = 500 if _SMOKE.value else 20_000
    model = load_model("tiny" if _SMOKE.value else "bundled")
    settings = {
        "model": model.name,
        "files": model.files,
        "platform": device.platform,
        "device": device.device_kind,
        "num_seeds": num_seeds,
        "threshold": _THRESHOLD.value,
    }
    results = Results("backend_check", settings, variant=device.platform)
    faults, rows = [], []
    checks = {
        "widths": _check_widths,
        "law": functools.partial(_check_law, num_seeds=num_seeds),
        "speed": _check_speed,
    }
    plan = {"default": ("widths", "law", "speed")}
    if not _SMOKE.value:
        plan |= {"highest": ("widths", "law"), "bfloat16": ("widths", "speed")}
    for precision, names in plan.items():
        is_bfloat16 = precision == "bfloat16"
        for name in names:
            part = f"{name}, {precision}"
            if part in results.parts:
                continue
            began = time.monotonic()
            subject = _in_bfloat16(model) if is_bfloat16 else model
            with jax.default_matmul_precision("default" if is_bfloat16 else precision):
                found = checks[name](subject)
            seconds = time.monotonic() - began
            print(f"{part}: {seconds:.0f} s", file=sys.stderr, flush=True)
            results.keep(part, {"seconds": seconds, **found})
        parts = {name: results.parts[f"{name}, {precision}"] for name in names}
        widths = parts["widths"]
        for name in ("singleton", "batched"):
            pairs = [widths[name][str(width)] for width in _WIDTHS]
            num_equal, total = (sum(column) for column in zip(*pairs, strict=True))
            rows.append([f"widths, {name}", precision, f"{num_equal} of {total} rows"])
            if name == "singleton" and num_equal != total:
                faults.append(f"{precision}: {total - num_equal} rows differ")
            if name == "batched" and num_equal == total:
                faults.append(f"{precision}: the control does not differ")
        if "speed" in parts:
            for name in ("plain", "speculative"):
                speed = parts["speed"][name]["tokens_per_second"]
                rows.append([f"speed, {name}", precision, f"{speed:.1f} tokens/s"])
        for name in ("repaired", "original") if "law" in parts else ():
            law = parts["law"]
            p_value = law[name]["p_value"]
            rows.append([f"law, {name}", precision, f"p-value {p_value:.2g}"])
            if name == "repaired" and p_value < _FALSE_ALARM:
                faults.append(f"{precision}: the law is not the target's")
            if name == "original" and p_value > _FALSE_ALARM and not _SMOKE.value:
                faults.append(f"{precision}: the biased gate passes")
            if law[name]["num_same"] != law[name]["num_checked"]:
                faults.append(f"{precision}, {name}: requests differ from the model's")
    return results.finish(
        [
            {
                "title": f"{device.platform}: {device.device_kind}, {versions}",
                "columns": ("check", "matmul precision", "result"),
                "rows": rows,
            }
        ],
        faults,
    )


flags.adopt_module_key_flags(_command_line)
flags.adopt_module_key_flags(_results)

if __name__ == "__main__":
    run_command(_run)
