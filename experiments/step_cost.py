"""What does everything in a window cost that is not the model?

First the parts, on rows of SmolLM2's vocabulary and of one three times as large: the
sampling chain on all rows of a window beside one softmax of them; and the verifier, its
draws and the commit beside reading p and mu once. Then whole windows around a model
that costs next to nothing, a table of one row, beside one step of SmolLM2.

  python experiments/step_cost.py --out /tmp/cost
  python experiments/step_cost.py --out /tmp/cost --smoke

Results: step_cost.json. Run it on a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _command_line import run_command, show_progress
from _models import small_llama
from _results import Results
from absl import flags

import strata_jax as strata
from strata_jax import checkpoints, models, sampling, targets, verifiers
from strata_jax.drafters import stateless

_VOCABULARIES = (49_152, 151_936)
_NUM_DRAFTS = 7
_WINDOWS = (0, 1, 3, 7)
_WINDOWS_PER_CALL = 8
_LENGTH = 256
# The largest ratios that are fine, on the large vocabulary.
_MOST_CHAIN, _MOST_VERIFY = 4.0, 2.0

_SMOKE = flags.DEFINE_bool("smoke", False, "A small vocabulary and a random model.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Rounds over all functions.", 2)


def _functions(vocab_size: int) -> dict[str, Callable[[], Any]]:
    """The parts, compiled, on rows that need no filter, as most requests."""
    num_rows = 2 * _NUM_DRAFTS + 1
    rng = np.random.default_rng(vocab_size)
    logits = jnp.asarray(rng.normal(0, 3, (num_rows, vocab_size)), jnp.float32)
    settings = sampling.sampling_settings(vocab_size, temperature=0.8)
    text = jnp.arange(64, dtype=jnp.int32)
    counts = sampling.count_tokens(text, jnp.int32(32), jnp.int32(64), vocab_size)
    probs = jax.nn.softmax(logits, axis=-1)
    p, mu = probs[: _NUM_DRAFTS + 1], probs[_NUM_DRAFTS + 1 :]
    proposal = strata.Proposal(
        tokens=jnp.argmax(mu, axis=-1).astype(jnp.int32),
        measure=mu,
        kind=jnp.full(_NUM_DRAFTS, strata.RowKind.OFFERED.value, jnp.int32),
    )
    verifier = verifiers.token()
    key = jax.random.key(0)

    @jax.jit
    def chain(logits: jax.Array, counts: Any) -> jax.Array:
        def row(index: jax.Array, probs: jax.Array) -> jax.Array:
            found, _ = sampling.chain_probs(settings, logits[index], counts)
            return probs.at[index].set(found)

        return jax.lax.fori_loop(0, num_rows, row, jnp.zeros_like(logits))

    @jax.jit
    def judge(p: jax.Array, proposal: strata.Proposal, text: jax.Array) -> Any:
        draws = verifier.draw(key, jnp.int32(5), jnp.int32(0), _NUM_DRAFTS)
        verdict = verifier.verify(draws, p, proposal)
        return verdict, text.at[8 : 8 + _NUM_DRAFTS + 1].set(verdict.tokens)

    softmax = jax.jit(lambda logits: jax.nn.softmax(logits, axis=-1))
    read = jax.jit(lambda p, mu: (jnp.sum(p, axis=-1), jnp.sum(mu, axis=-1)))
    ready = jax.block_until_ready
    return {
        f"softmax of {num_rows} rows": lambda: ready(softmax(logits)),
        f"sampling chain on {num_rows} rows": lambda: ready(chain(logits, counts)),
        "reading p and mu once": lambda: ready(read(p, mu)),
        "draws, verifier and commit": lambda: ready(judge(p, proposal, text)),
    }


def _time(functions: dict[str, Callable[[], Any]], unit: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for run in functions.values():
        run()
    with show_progress(0, _ROUNDS.value, unit) as show:
        for number in range(_ROUNDS.value):
            for index in np.random.default_rng(number).permutation(len(functions)):
                name = list(functions)[index]
                best = float("inf")
                for _ in range(3):
                    began = time.perf_counter()
                    functions[name]()
                    best = min(best, time.perf_counter() - began)
                seconds[name].append(best)
            show(number + 1, "")
    return seconds


def _windows(vocab_size: int) -> dict[str, Callable[[], Any]]:
    """Calls of some windows around a target that reads one row of logits."""
    target = targets.tabular(vocab_size, max_length=_LENGTH, order=0)
    # Small differences, so that most drafts are accepted.
    rows = np.random.default_rng(0).normal(0, 1, (2, vocab_size))
    logits, draft_logits = jnp.asarray(rows, jnp.float32)
    params = targets.TabularParams(logits)
    functions = {}
    for num_drafts in _WINDOWS:
        decoder = strata.ancestral_decoder(target)
        if num_drafts:
            drafter = stateless(
                lambda context: lambda step: step.to_row(draft_logits),
                num_draft_tokens=num_drafts,
                vocab_size=vocab_size,
            )
            decoder = strata.speculative_decoder(
                target, drafter, verifier=verifiers.token()
            )
        start = decoder.init(params, [1, 2, 3], temperature=1.0)

        def run(decoder: Any = decoder, start: Any = start) -> None:
            # The state is given away; copying it is counted, and small.
            state = jax.tree.map(jnp.copy, start)
            jax.block_until_ready(
                strata.decode(decoder, params, state, _WINDOWS_PER_CALL)
            )

        functions[f"window of {num_drafts} drafts"] = run
    return functions


def _model_steps(vocab_size: int) -> dict[str, Callable[[], Any]]:
    """One row of SmolLM2, packed and in float32."""
    if _SMOKE.value:
        config, params = small_llama(vocab_size)
        weights = {"float32": models.tile_params(config, params)}
    else:
        path = checkpoints.find_smollm2()
        config, params = checkpoints.load_gguf(path)
        weights = {
            "packed": checkpoints.load_gguf_tiled(path)[1],
            "float32": models.tile_params(config, params),
        }
    target = targets.singleton(config, max_length=_LENGTH)
    functions = {}
    for name, params in weights.items():
        score = jax.jit(target.score, donate_argnums=1)
        held = [target.init(params)]

        def run(score: Any = score, held: Any = held, params: Any = params) -> None:
            token, place = jnp.array([5], jnp.int32), jnp.int32(100)
            rows, held[0] = score(params, held[0], token, place, jnp.int32(1))
            rows.logits.block_until_ready()

        functions[f"one step of the model, {name}"] = run
    return functions


def _tables(parts: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    faults, rows = [], []

    def middle(values: list[float]) -> float:
        return float(np.median(values))

    for size, part in parts.items():
        if size == "windows":
            continue
        names = [name for name in part if name != "library_sha256"]
        for base, name, most in (
            (names[0], names[1], _MOST_CHAIN),
            (names[2], names[3], _MOST_VERIFY),
        ):
            ratio = middle(part[name]) / middle(part[base])
            for shown in (base, name):
                rows.append(
                    [
                        size,
                        shown,
                        f"{middle(part[shown]) * 1e3:.2f}",
                        f"{min(part[shown]) * 1e3:.2f} to {max(part[shown]) * 1e3:.2f}",
                        f"{ratio:.2f}" if shown == name else "",
                    ]
                )
            if ratio > most and size == str(_VOCABULARIES[-1]):
                faults.append(f"{name}, {size}: {ratio:.2f} times {base}")
    windows = parts["windows"]
    steps = {n: v for n, v in windows.items() if n.startswith("one step")}
    window_rows = []
    for name, values in windows.items():
        if not isinstance(values, list):
            continue
        calls = _WINDOWS_PER_CALL if name.startswith("window") else 1
        own = middle(values) / calls
        window_rows.append(
            [
                name,
                f"{own * 1e3:.2f}",
                f"{min(values) / calls * 1e3:.2f} to {max(values) / calls * 1e3:.2f}",
                *(f"{own / middle(step):.3f}" for step in steps.values()),
            ]
        )
    tables = [
        {
            "title": f"Parts of a window of {_NUM_DRAFTS} drafts, milliseconds",
            "columns": ["vocabulary", "part", "median", "range", "ratio"],
            "rows": rows,
        },
        {
            "title": "Windows around a table of one row, milliseconds",
            "columns": [
                "what",
                "median",
                "range",
                *(f"to {name.split(', ')[1]} step" for name in steps),
            ],
            "rows": window_rows,
        },
    ]
    return tables, faults


def _run() -> int:
    settings = {"smoke": _SMOKE.value, "rounds": _ROUNDS.value}
    results = Results("step_cost", settings)
    sizes = (4096,) if _SMOKE.value else _VOCABULARIES
    for size in sizes:
        if str(size) not in results.parts:
            results.keep(str(size), _time(_functions(size), "round"))
    if "windows" not in results.parts:
        functions = {**_windows(sizes[0]), **_model_steps(sizes[0])}
        results.keep("windows", _time(functions, "round"))
    tables, faults = _tables(results.parts)
    return results.finish(tables, faults)


if __name__ == "__main__":
    run_command(_run)
