"""Does the cost model predict how fast decoding is, for any gate, threshold and length?

Measures what windows of SmolLM2 cost on this machine, records how sure the drafters are
and how often their drafts are accepted on some prompts, and predicts the throughput of
a number of exact policies (`diagnostics.cost`). Then decodes the same prompts, with
other seeds, with each of these policies in turn, over several rounds. In the end the
policy that the model would choose of all that it can try.

  python experiments/cost_model.py --out /tmp/cost
  python experiments/cost_model.py --out /tmp/cost --smoke

Results: cost_model.json. Run it on a quiet machine; it takes about five minutes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from _command_line import run_command, show_progress
from _models import Model, encode_prompt, load_model
from _peers import OwnSystem
from _policies import MOST_DRAFTS, as_json, build_drafter, describe
from _prompt_sets import PROMPT_SETS
from _results import Results
from absl import flags

from strata_jax import checkpoints, targets
from strata_jax.diagnostics import cost

_Policy = cost.Policy
_POLICIES = (
    ("", _Policy("none", None, 0)),
    ("mtp", _Policy("always", None, 1)),
    ("mtp", _Policy("always", None, 2)),
    ("mtp", _Policy("always", None, 3)),
    ("mtp", _Policy("picked", 0.3, 3)),
    ("mtp", _Policy("picked", 0.6, 2)),
    ("mtp", _Policy("include_then_stop", 0.5, 3)),
    ("mtp", _Policy("top", 0.5, 3)),
    ("mtp", _Policy("entropy", 1.5, 3)),
    ("suffix", _Policy("always", None, 3)),
    ("suffix", _Policy("always", None, 7)),
)
_CLOSE = 0.15  # relative error of a good prediction

_SMOKE = flags.DEFINE_bool("smoke", False, "The bundled model's first layer.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds over all policies.", 1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 96, "Tokens of a text.", 8)
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Of all requests.", 0.0)


def _prompts(model: Model) -> list[list[int]]:
    """One prompt of each kind: the model's own text follows."""
    has_chats = isinstance(model.tokenizer, checkpoints.Tokenizer)
    found = []
    for prompts in PROMPT_SETS.values():
        is_chat = prompts.is_chat and has_chats
        text = prompts.calibration[0]
        ids = encode_prompt(model.tokenizer, text, is_chat=is_chat)
        found.append(ids if is_chat else ids[-96:])
    return found


def _predict(model: Model, max_length: int, num_tokens: int) -> dict[str, Any]:
    target = targets.singleton(model.config, max_length=max_length)
    prompts = _prompts(model)
    repeated = (prompts[-1] * 8)[: num_tokens // 2 + 48]
    part: dict[str, Any] = {"costs": {}, "predicted": {}, "chosen": {}}
    for name in ("mtp", "suffix"):
        drafter = build_drafter(model.config.vocab_size, name, MOST_DRAFTS[name])
        costs = cost.measure(
            target, drafter, model.params, repeated, temperature=_TEMPERATURE.value
        )
        records = cost.record(
            target,
            drafter,
            model.params,
            prompts,
            max_new_tokens=num_tokens,
            eos_ids=model.tokenizer.eos_ids,
            temperature=_TEMPERATURE.value,
        )
        part["costs"][name] = dataclasses.asdict(costs)
        part["chosen"][name] = [
            as_json(name, found) for found in cost.choose(costs, records)[:3]
        ]
        for drafter_name, policy in _POLICIES:
            if drafter_name in ("", name):
                found = cost.predict(costs, records, policy)
                part["predicted"][describe(drafter_name, policy)] = as_json(name, found)
    return part


def _measure(model: Model, max_length: int, num_tokens: int) -> dict[str, Any]:
    systems = {
        describe(name, policy): OwnSystem(model, name, policy, max_length)
        for name, policy in _POLICIES
    }
    prompts = _prompts(model)
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    for system in systems.values():
        system.run(prompts[0], _TEMPERATURE.value, 0, 12)  # compiles
    with show_progress(0, _ROUNDS.value, "round") as show:
        for number in range(_ROUNDS.value):
            for index in np.random.default_rng(number).permutation(len(systems)):
                name = list(systems)[index]
                runs = [
                    systems[name].run(
                        prompt, _TEMPERATURE.value, 100 + number, num_tokens
                    )
                    for prompt in prompts
                ]
                tokens = sum(run.num_timed for run in runs)
                speeds[name].append(tokens / sum(run.seconds for run in runs))
            show(number + 1, "")
    return speeds


def _tables(parts: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    rows, num_close = [], 0
    predicted, measured = parts["prediction"]["predicted"], parts["measurement"]
    for name, found in predicted.items():
        speeds = np.array(measured[name])
        middle = float(np.median(speeds))
        error = found["tokens_per_second"] / middle - 1
        num_close += abs(error) <= _CLOSE
        rows.append(
            [
                name,
                f"{found['tokens_per_window']:.2f}",
                f"{found['seconds_per_window'] * 1e3:.1f}",
                f"{found['tokens_per_second']:.1f}",
                f"{middle:.1f}",
                f"{speeds.min():.1f} to {speeds.max():.1f}",
                f"{error * 100:+.0f} %",
            ]
        )
    costs = [
        [
            name,
            *(f"{found[key] * 1e3:.2f}" for key in ("plain", "window", "draft_call")),
            ", ".join(f"{value * 1e3:.1f}" for value in found["offered"][1:]),
        ]
        for name, found in parts["prediction"]["costs"].items()
    ]
    tables = [
        {
            "title": "What a window costs, milliseconds",
            "columns": [
                "drafter",
                "plain",
                "v0",
                "c",
                "1, 2, ... offered rows",
            ],
            "rows": costs,
        },
        {
            "title": "Throughput, predicted and measured",
            "columns": [
                "policy",
                "tokens per window",
                "ms per window",
                "predicted",
                "measured",
                "range",
                "error",
            ],
            "rows": rows,
        },
    ]
    faults = []
    if num_close < 6 and not _SMOKE.value:
        faults.append(f"{num_close} predictions within {_CLOSE:.0%}, 6 wanted")
    return tables, faults


def _run() -> int:
    num_tokens = 16 if _SMOKE.value else _MAX_NEW_TOKENS.value
    max_length = 384 if _SMOKE.value else 256
    settings = {
        "smoke": _SMOKE.value,
        "rounds": _ROUNDS.value,
        "max_new_tokens": num_tokens,
        "temperature": _TEMPERATURE.value,
    }
    results = Results("cost_model", settings)
    model = load_model("tiny") if _SMOKE.value else load_model("smollm2", is_tiled=True)
    if "prediction" not in results.parts:
        results.keep("prediction", _predict(model, max_length, num_tokens))
    if "measurement" not in results.parts:
        results.keep("measurement", _measure(model, max_length, num_tokens))
    tables, faults = _tables(results.parts)
    return results.finish(tables, faults)


if __name__ == "__main__":
    run_command(_run)
