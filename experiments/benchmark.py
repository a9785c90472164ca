"""How fast is exact speculative decoding beside what people use, on the same weights?

SmolLM2 writes answers, prose and repetitive texts, at temperatures 0 and 1: this
library plain, with its draft head, with lookup in the text, and with the head where
lookup finds nothing, each on the packed weights of the file and on the same in float32;
`transformers` plain and with prompt lookup; and llama.cpp. All in one process, in turn
and in another order each round, each system on the same prompts. The policies come from
the cost model (`diagnostics.cost`), measured on other prompts before the first round,
on which each of them is then tried beside plain decoding. Which one is chosen is
marked: plain decoding, unless prediction and trial together make drafts 5 % faster. At
temperature 0 the speculative systems must write the plain one's tokens.
Then verification alone, beside other functions that run on a CPU.

  python experiments/benchmark.py --out /tmp/benchmark
  python experiments/benchmark.py --out /tmp/benchmark --smoke

Results: benchmark.json and benchmark.png. Peers that are not installed are left out,
and named: pip install torch transformers llama-cpp-python. Run it on a quiet machine;
it takes about an hour, and goes on after the last finished round if started again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _command_line import run_command, show_progress
from _models import Model, encode_prompt, load_model
from _peers import LlamaCpp, OwnSystem, Transformers, num_cores, try_peers
from _policies import MOST_DRAFTS, as_json, build_drafter, costs_at, describe
from _prompt_sets import PROMPT_SETS
from _results import Results, figure
from absl import flags

import strata_jax as strata
from strata_jax import checkpoints, models, targets, verifiers
from strata_jax.diagnostics import cost

_TEMPERATURES = (0.0, 1.0)
_WEIGHTS = ("packed", "float32")
_HUES = ("Blues", "Greens", "Oranges")  # of these, and of what others make
# Own systems, and the drafters of which each takes the better.
_OWN = {
    "mtp": ("mtp",),
    "suffix": ("suffix",),
    "both": ("both", "long both"),
}
# Drafts must be so much faster, by the mean of prediction and trial, and slower by
# neither, before they are chosen: both are of other texts, and noisy.
_LEAST_GAIN = 1.05
_VOCABULARIES = (49_152, 151_936)
_NUM_VERIFIED = 7
# Seconds before a system runs, for the threads of the one before may wait by spinning.
_PAUSE = 0.3
# Own systems from which on programs are dropped: a process can hold a limited number.
_MOST_SYSTEMS = 12
# Systems that ran before in this process.
_warm: set[tuple[str, int]] = set()

_SMOKE = flags.DEFINE_bool(
    "smoke", False, "Two rounds of a few tokens, repetitive texts, no peers."
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds over all systems.", 2)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Tokens of a text.", 8)
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length", 256, "Longest context, prompt included.", 64
)


def _set_names() -> list[str]:
    return ["repetitive"] if _SMOKE.value else list(PROMPT_SETS)


def _num_tokens() -> int:
    return 16 if _SMOKE.value else _MAX_NEW_TOKENS.value


def _calibrate() -> dict[str, Any]:
    """Costs of each drafter, and each cell's best policies, by weights."""
    model = _packed()
    target = targets.singleton(model.config, max_length=_MAX_LENGTH.value)
    names = [n for n in MOST_DRAFTS if model.has_draft_head or "suffix" in n]
    # Of the length that texts have in the mean, and with something to look up.
    text = PROMPT_SETS["repetitive"].calibration[-1]
    ids = encode_prompt(model.tokenizer, text, is_chat=False)
    prompt = (ids * 8)[: 48 + _num_tokens() // 2]
    sources = {
        name: build_drafter(model.config.vocab_size, name, MOST_DRAFTS[name])
        for name in names
    }
    costs: dict[str, dict[str, cost.WindowCosts]] = {}
    for weights in _weights():
        params = _model(weights).params
        found = {}
        for name, drafter in sources.items():
            found[name] = cost.measure(
                target,
                drafter,
                params,
                prompt,
                temperature=1.0,
            )
            # A process can hold a limited number of compiled programs.
            jax.clear_caches()
        # One plain step for all, so that noise between them prefers none.
        plain = float(np.median([each.plain for each in found.values()]))
        costs[weights] = {
            name: dataclasses.replace(each, plain=plain) for name, each in found.items()
        }
    policies: dict[str, Any] = {weights: {} for weights in costs}
    cells = [(s, t) for s in _set_names() for t in _TEMPERATURES]
    with show_progress(0, len(names) * len(cells), "calibration") as show:
        done = 0
        for name, drafter in sources.items():
            for set_name, temperature in cells:
                prompts = PROMPT_SETS[set_name]
                # Acceptance is that of the model, whatever form its weights have.
                records = cost.record(
                    target,
                    drafter,
                    model.params,
                    [
                        encode_prompt(model.tokenizer, text, is_chat=prompts.is_chat)
                        for text in prompts.calibration
                    ],
                    max_new_tokens=_num_tokens(),
                    temperature=temperature,
                    eos_ids=model.tokenizer.eos_ids,
                )
                for weights, by_drafter in costs.items():
                    ranked = cost.choose(costs_at(by_drafter, name, records), records)
                    cell = policies[weights].setdefault(
                        f"{set_name}, {temperature:g}", {}
                    )
                    cell["plain"] = as_json("", _only(ranked, is_plain=True))
                    cell[name] = as_json(name, _only(ranked, is_plain=False))
                done += 1
                show(done, name)
            jax.clear_caches()
    return {
        "costs": {
            weights: {name: dataclasses.asdict(each) for name, each in found.items()}
            for weights, found in costs.items()
        },
        "policies": {
            weights: {cell: _best_of_each(found) for cell, found in by_cell.items()}
            for weights, by_cell in policies.items()
        },
    }


def _best_of_each(by_drafter: dict[str, Any]) -> dict[str, Any]:
    """The policy of each own system, as predicted."""
    best = {"plain": by_drafter["plain"]}
    for name, drafters in _OWN.items():
        known = [by_drafter[drafter] for drafter in drafters if drafter in by_drafter]
        if known:
            best[name] = max(known, key=_speed)
    return best


def _try(policies: dict[str, Any]) -> dict[str, Any]:
    """The same policies with what they gained in a trial, and which are chosen."""
    model = _packed()
    gains: dict[str, Any] = {}
    num_prompts = {name: len(PROMPT_SETS[name].calibration) for name in _set_names()}
    with show_progress(
        0, sum(num_prompts.values()) * len(_TEMPERATURES), "trial"
    ) as show:
        done = 0
        for set_name in _set_names():
            _drop_programs()
            prompts = PROMPT_SETS[set_name]
            for number, text in enumerate(prompts.calibration):
                prompt = encode_prompt(model.tokenizer, text, is_chat=prompts.is_chat)
                for temperature in _TEMPERATURES:
                    cell = f"{set_name}, {temperature:g}"
                    systems = _systems({}, policies, cell)
                    runs = _run_in_turn(systems, prompt, temperature, number)
                    for name, run in runs.items():
                        gains.setdefault(cell, {}).setdefault(name, []).append(
                            run.num_timed / max(run.seconds, 1e-9)
                        )
                    done += 1
                    show(done, cell)
    return {
        weights: {
            cell: _choose(
                found,
                {name: _median_gain(gains[cell], name, weights) for name in found},
            )
            for cell, found in by_cell.items()
        }
        for weights, by_cell in policies.items()
    }


def _median_gain(speeds: dict[str, list[float]], name: str, weights: str) -> float:
    """Over prompts, to plain decoding of the same prompt on the same weights."""
    own, plain = (np.array(speeds[_own_name(n, weights)]) for n in (name, "plain"))
    return float(np.median(own / plain))


def _choose(policies: dict[str, Any], tried_gains: dict[str, float]) -> dict[str, Any]:
    """The policies of a cell with their gains, and which of them is chosen."""
    plain = _speed(policies["plain"])
    found = {
        name: policy
        | {"predicted_gain": _speed(policy) / plain, "tried_gain": tried_gains[name]}
        for name, policy in policies.items()
    }

    def gain(name: str) -> float:
        gains = found[name]["predicted_gain"], found[name]["tried_gain"]
        return math.prod(gains) ** 0.5 if min(gains) >= 1 else 0.0

    first = max(found, key=gain)
    chosen = first if gain(first) >= _LEAST_GAIN else "plain"
    return {name: each | {"is_chosen": name == chosen} for name, each in found.items()}


def _speed(found: dict[str, Any]) -> float:
    return found["tokens_per_second"]


def _only(ranked: list[cost.Prediction], is_plain: bool) -> cost.Prediction:
    return next(found for found in ranked if (found.policy.gate == "none") == is_plain)


def _policy(found: dict[str, Any]) -> cost.Policy:
    return cost.Policy(found["gate"], found["threshold"], found["num_draft_tokens"])


def _weights() -> tuple[str, ...]:
    return _WEIGHTS[:1] if _SMOKE.value else _WEIGHTS


@functools.cache
def _own(weights: str, drafter: str, policy: cost.Policy) -> OwnSystem:
    return OwnSystem(_model(weights), drafter, policy, _MAX_LENGTH.value)


def _model(weights: str) -> Model:
    return _packed() if weights == "packed" else _float32_tiled()


@functools.cache
def _packed() -> Model:
    return load_model("smollm2", is_tiled=True)


@functools.cache
def _float32() -> Model:
    return load_model("smollm2")


@functools.cache
def _float32_tiled() -> Model:
    model, head = _float32(), _packed().params.mtp
    params = models.tile_params(model.config, model.params)
    params = dataclasses.replace(params, mtp=head)
    return dataclasses.replace(model, params=params)


def _make_peers() -> tuple[dict[str, Any], dict[str, str]]:
    if _SMOKE.value:
        return {}, {}
    shared: dict[str, Any] = {}

    def plain() -> Transformers:
        shared["plain"] = Transformers(_float32(), is_lookup=False)
        return shared["plain"]

    return try_peers(
        {
            "transformers": plain,
            "transformers, lookup": lambda: Transformers(
                _float32(), is_lookup=True, shared=shared.get("plain")
            ),
            "llama.cpp": lambda: LlamaCpp(
                checkpoints.find_smollm2(), _MAX_LENGTH.value
            ),
        }
    )


def _systems(
    peers: dict[str, Any], policies: dict[str, Any], cell: str
) -> dict[str, Callable[[], Any]]:
    """Systems of a cell by name, made when they are needed."""
    found: dict[str, Callable[[], Any]] = {}
    for weights in _weights():
        for name, own in policies[weights][cell].items():
            found[_own_name(name, weights)] = functools.partial(
                _own, weights, own["drafter"], _policy(own)
            )
    for name, peer in peers.items():
        found[name] = lambda peer=peer: peer
    return found


def _own_name(name: str, weights: str) -> str:
    return f"own, {name}, {weights}"


def _drop_programs() -> None:
    if _own.cache_info().currsize > _MOST_SYSTEMS:
        _own.cache_clear()
        _warm.clear()
        jax.clear_caches()


def _run_in_turn(
    systems: dict[str, Callable[[], Any]],
    prompt: list[int],
    temperature: float,
    number: int,
) -> dict[str, Any]:
    """Runs of all systems on one prompt, in an order of this prompt's own."""
    names, runs = list(systems), {}
    order = np.random.default_rng((number, len(prompt), int(temperature)))
    for index in order.permutation(len(names)):
        name = names[index]
        system = systems[name]()
        if (name, id(system)) not in _warm:
            # The first text of a system compiles.
            system.run(prompt, temperature, number, 12)
            _warm.add((name, id(system)))
        time.sleep(_PAUSE)
        runs[name] = system.run(prompt, temperature, number, _num_tokens())
    return dict(sorted(runs.items()))


def _round(number: int, peers: dict[str, Any], policies: dict[str, Any]) -> Any:
    """All systems of all cells on one prompt of each set."""
    part: dict[str, Any] = {}
    model = _packed()
    for set_name in _set_names():
        _drop_programs()
        prompts = PROMPT_SETS[set_name]
        text = prompts.measured[number % len(prompts.measured)]
        prompt = encode_prompt(model.tokenizer, text, is_chat=prompts.is_chat)
        for temperature in _TEMPERATURES:
            cell = f"{set_name}, {temperature:g}"
            systems = _systems(peers, policies, cell)
            runs = _run_in_turn(systems, prompt, temperature, number)
            part[cell] = {
                name: {
                    "tokens_per_second": run.num_timed / max(run.seconds, 1e-9),
                    "num_tokens": len(run.tokens),
                    "num_windows": run.num_windows,
                    "tokens_sha256": hashlib.sha256(
                        str(run.tokens).encode()
                    ).hexdigest(),
                }
                for name, run in runs.items()
            }
    return part


def _verification() -> dict[str, Any]:
    """Seconds to verify seven drafts, p and q given, by function and vocabulary."""
    found: dict[str, Any] = {}
    for vocab_size in _VOCABULARIES[:1] if _SMOKE.value else _VOCABULARIES:
        rng = np.random.default_rng(vocab_size)
        logits = rng.normal(0, 3, (2, _NUM_VERIFIED + 1, vocab_size))
        logits = logits.astype(np.float32)
        functions: dict[str, Callable[[], Any]] = {"own": _own_verification(logits)}
        theirs = None if _SMOKE.value else _transformers_verification(logits)
        if theirs is not None:
            functions["transformers"] = theirs
        probs = jax.nn.softmax(jnp.asarray(logits), axis=-1)
        total = jax.jit(lambda probs: jnp.sum(probs, axis=-1))
        functions["reading p and q once"] = lambda total=total, probs=probs: total(
            probs
        ).block_until_ready()
        seconds: dict[str, list[float]] = {name: [] for name in functions}
        for number in range(40):
            for index in np.random.default_rng(number).permutation(len(functions)):
                name = list(functions)[index]
                began = time.perf_counter()
                functions[name]()
                seconds[name].append(time.perf_counter() - began)
        found[str(vocab_size)] = {name: values[5:] for name, values in seconds.items()}
    return found


def _own_verification(logits: np.ndarray) -> Callable[[], Any]:
    p, q = jax.nn.softmax(jnp.asarray(logits), axis=-1)
    verifier = verifiers.token()
    draws = verifier.draw(jax.random.key(0), jnp.int32(0), jnp.int32(0), _NUM_VERIFIED)
    proposal = strata.Proposal(
        tokens=jnp.argmax(q[:-1], axis=-1).astype(jnp.int32),
        measure=q[:-1],
        kind=jnp.full(_NUM_VERIFIED, strata.RowKind.OFFERED.value, jnp.int32),
    )
    verify = jax.jit(verifier.verify)
    return lambda: jax.block_until_ready(verify(draws, p, proposal))


def _transformers_verification(logits: np.ndarray) -> Callable[[], Any] | None:
    try:
        torch = importlib.import_module("torch")
        generation = importlib.import_module("transformers.generation.utils")
    except ImportError:
        return None
    sample = generation._speculative_sampling
    p, q = torch.tensor(logits[:, None])
    drafts = q[:, :-1].argmax(dim=-1)
    # As it is called: ids of the text with the drafts behind it.
    return lambda: sample(drafts, q[:, :-1], _NUM_VERIFIED, p)


def _tables(parts: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    rounds = [part for name, part in parts.items() if name.startswith("round")]
    policies = parts["trial"]["policies"]
    rows, chosen, faults = [], [], []
    for cell in (cell for cell in rounds[0] if cell != "library_sha256"):
        own = {
            _own_name(name, weights): (found, _own_name("plain", weights))
            for weights, by_cell in policies.items()
            for name, found in by_cell[cell].items()
        }
        for name in rounds[0][cell]:
            predicted, plain_name = own.get(name, (None, _own_name("plain", "packed")))
            speeds = _speeds(rounds, cell, name)
            ratio = speeds / _speeds(rounds, cell, plain_name)
            to_mean = ""
            if predicted:
                to_mean = f"{_speed(predicted) / _mean_speed(rounds, cell, name):.2f}"
            is_chosen = bool(predicted) and predicted["is_chosen"]
            rows.append(
                [
                    cell,
                    name + (" (chosen)" if is_chosen else ""),
                    describe(predicted["drafter"], _policy(predicted))
                    if predicted
                    else "",
                    f"{np.median(speeds):.1f}",
                    f"{speeds.min():.1f} to {speeds.max():.1f}",
                    f"{np.median(ratio):.2f}",
                    f"{ratio.min():.2f} to {ratio.max():.2f}",
                    f"{_speed(predicted):.1f}" if predicted else "",
                    to_mean,
                    _per_window(rounds, cell, name),
                ]
            )
            if predicted and is_chosen:
                chosen.append(
                    [
                        cell,
                        name,
                        f"{predicted['predicted_gain']:.2f}",
                        f"{predicted['tried_gain']:.2f}",
                        f"{np.median(ratio):.2f}",
                    ]
                )
            if predicted and cell.endswith(", 0"):
                faults += _other_tokens(rounds, cell, name, plain_name)
    tables = [
        {
            "title": "Tokens per second, median over rounds",
            "columns": [
                "texts, temperature",
                "system",
                "policy",
                "tokens/s",
                "range",
                "to plain",
                "range",
                "predicted",
                "predicted to mean",
                "tokens a window",
            ],
            "rows": rows,
        },
        {
            "title": "What was chosen before the first round, beside plain decoding",
            "columns": [
                "texts, temperature",
                "system",
                "predicted",
                "tried",
                "to plain",
            ],
            "rows": chosen,
        },
        {
            "title": f"Verifying {_NUM_VERIFIED} drafts, milliseconds",
            "columns": ["vocabulary", "function", "median", "range"],
            "rows": [
                [
                    size,
                    name,
                    f"{np.median(values) * 1e3:.2f}",
                    f"{min(values) * 1e3:.2f} to {max(values) * 1e3:.2f}",
                ]
                for size, functions in parts["verification"].items()
                if size != "library_sha256"
                for name, values in functions.items()
            ],
        },
    ]
    return tables, faults


def _other_tokens(rounds: list[Any], cell: str, name: str, plain: str) -> list[str]:
    """Rounds in which a system wrote other tokens than plain decoding."""
    return [
        f"{cell}, {name}, round {number}: other tokens"
        for number, part in enumerate(rounds)
        if part[cell][name]["tokens_sha256"] != part[cell][plain]["tokens_sha256"]
    ]


def _speeds(rounds: list[Any], cell: str, name: str) -> np.ndarray:
    return np.array([part[cell][name]["tokens_per_second"] for part in rounds])


def _mean_speed(rounds: list[Any], cell: str, name: str) -> float:
    """All tokens over all seconds."""
    tokens = [part[cell][name]["num_tokens"] for part in rounds]
    speeds = _speeds(rounds, cell, name)
    return sum(tokens) / sum(t / s for t, s in zip(tokens, speeds, strict=True))


def _per_window(rounds: list[Any], cell: str, name: str) -> str:
    """Tokens that a window wrote in the mean, where the system tells."""
    runs = [part[cell][name] for part in rounds]
    if any(run["num_windows"] is None for run in runs):
        return ""
    windows = sum(run["num_windows"] for run in runs)
    return f"{sum(run['num_tokens'] for run in runs) / windows:.2f}"


def _rank(name: str) -> tuple[int, int, str]:
    """The place of a system in the chart: family, order in it, name."""
    if not name.startswith("own, "):
        return len(_WEIGHTS), 0, name
    _, own, weights = name.split(", ")
    return _WEIGHTS.index(weights), ["plain", *_OWN].index(own), name


def _draw(results: Results) -> dict[str, str]:
    rounds = [part for name, part in results.parts.items() if name.startswith("round")]
    cells = [cell for cell in rounds[0] if cell != "library_sha256"]
    names = sorted({name for cell in cells for name in rounds[0][cell]}, key=_rank)
    families = [_rank(name)[0] for name in names]
    path = results.folder / f"{results.name}.png"
    with figure(path, figsize=(10, 4.5)) as (_, axes):
        colormaps = importlib.import_module("matplotlib").colormaps
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            speeds = np.array([_speeds(rounds, cell, name) for cell in cells])
            middle = np.median(speeds, axis=1)
            error = [middle - speeds.min(axis=1), speeds.max(axis=1) - middle]
            at = np.arange(len(cells)) + (place - len(names) / 2 + 0.5) * width
            # One hue for each family, and a shade for each of its systems.
            family = families[place]
            shade = families[:place].count(family) / max(families.count(family) - 1, 1)
            axes.bar(
                at,
                middle,
                width,
                yerr=error,
                label=name,
                color=colormaps[_HUES[family]](0.85 - 0.5 * shade),
                error_kw={"linewidth": 0.8},
            )
        axes.set_xticks(
            np.arange(len(cells)), [c.replace(", ", "\nT = ") for c in cells]
        )
        axes.set_ylabel("tokens per second")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.margins(x=0.02)
        axes.legend(
            fontsize="small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1)
        )
    alt = (
        "Bars of tokens per second for each kind of text and temperature, one for each "
        "system, with the range over rounds"
    )
    return {"file": path.name, "alt": alt}


def _run() -> int:
    settings = {
        "smoke": _SMOKE.value,
        "systems": _OWN,
        "max_new_tokens": _num_tokens(),
        "max_length": _MAX_LENGTH.value,
        "prompts": {
            name: dataclasses.asdict(PROMPT_SETS[name]) for name in _set_names()
        },
    }
    results = Results("benchmark", settings)
    num_rounds = 2 if _SMOKE.value else _ROUNDS.value
    if "calibration" not in results.parts:
        results.keep("calibration", _calibrate())
    if "trial" not in results.parts:
        policies = results.parts["calibration"]["policies"]
        results.keep("trial", {"policies": _try(policies)})
    policies = results.parts["trial"]["policies"]
    wanted = [f"round {number}" for number in range(num_rounds)]
    todo = [name for name in wanted if name not in results.parts]
    if todo:
        peers, missing = _make_peers()
        for name, reason in missing.items():
            print(f"{name} is left out: {reason}")
        versions = {
            name: peer.version
            for name, peer in peers.items()
            if hasattr(peer, "version")
        }
        with show_progress(num_rounds - len(todo), num_rounds, "round") as show:
            for name in todo:
                part = _round(wanted.index(name), peers, policies)
                results.keep(name, part)
                show(wanted.index(name) + 1, "")
        results.keep(
            "peers", {"versions": versions, "missing": missing, "cores": num_cores()}
        )
    if "verification" not in results.parts:
        results.keep("verification", _verification())
    tables, faults = _tables(results.parts)
    return results.finish(tables, faults, [_draw(results)])


if __name__ == "__main__":
    run_command(_run)
