"""What does a window of several rows cost, beside one row and beside XLA's own product?

Scores windows of 1, 2, 4 and 8 rows of SmolLM2 on four systems, in turn and over
several rounds: tiled float32 weights, the file's packed weights, rows one after another
on plain float32 weights, and XLA's batched product. The memory's bandwidth is measured
in the same run, as the best of ten sums with two threads, by NumPy and by XLA. A
window's first row is compared, bit by bit, with the program for one row.

  python experiments/window_cost.py --out /tmp/cost
  python experiments/window_cost.py --out /tmp/cost --smoke

Results: window_cost.json. Run it on a quiet machine.
"""

from __future__ import annotations

import concurrent.futures
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _command_line import run_command, show_progress
from _models import load_model, small_llama
from _results import Results
from absl import flags

from strata_jax import checkpoints, models

_WIDTHS = (1, 2, 4, 8)
_POSITION = 100
_LENGTH = 256
# Eight times the largest last-level cache that is common.
_BANDWIDTH_BYTES = 256 << 20
_CONTROLS = ("row by row, float32", "batched, float32")

_SMOKE = flags.DEFINE_bool("smoke", False, "A small random model and two rounds.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds over all systems.", 2)
_CALLS = flags.DEFINE_integer(
    "calls", 5, "Calls in a row, the best of which counts.", 1
)


def _bandwidth() -> dict[str, float]:
    """Bytes per second of two-thread sums over a large array, the best of ten."""
    array = np.ones(_BANDWIDTH_BYTES // 4, np.float32)
    halves = np.split(array, 2)
    total = jax.jit(jnp.sum)
    on_device = jnp.asarray(array)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:

        def by_numpy() -> None:
            list(pool.map(np.sum, halves))

        def by_xla() -> None:
            total(on_device).block_until_ready()

        return {
            name: array.nbytes / min(_seconds(run) for _ in range(10))
            for name, run in (("numpy", by_numpy), ("xla", by_xla))
        }


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _load() -> tuple[Any, dict[str, Any]]:
    """Returns the configuration and the weights by system."""
    if _SMOKE.value:
        config, params = small_llama(512)
        packed = None
    else:
        model = load_model("smollm2")
        config, params = model.config, model.params
        _, packed = checkpoints.load_gguf_tiled(checkpoints.find_smollm2())
    systems = {"tiled, float32": models.tile_params(config, params)}
    if packed is not None:
        systems["tiled, packed"] = packed
    return config, {**systems, **dict.fromkeys(_CONTROLS, params)}


class _System:
    """Windows of one width on one system's weights."""

    def __init__(self, config: Any, name: str, params: Any, width: int):
        self._params = params
        self._tokens = (
            jnp.arange(width, dtype=jnp.int32) * 7 + 100
        ) % config.vocab_size
        if name == "batched, float32":
            score = functools.partial(models.batched_rows, config)
            self._more: tuple[Any, ...] = ()
        else:
            is_tiled = name.startswith("tiled")
            score = models.score_tiled_rows if is_tiled else models.score_rows
            score = functools.partial(score, config)
            self._more = (jnp.int32(width), jnp.int32(0))
        if name.startswith("tiled"):
            self._state = models.empty_tiled_cache(config, _LENGTH)
        else:
            self._state = models.empty_cache(config, _LENGTH, jnp.dtype(jnp.float32))
        self._score = jax.jit(score, donate_argnums=1)
        self.logits = np.asarray(self._run())

    def _run(self) -> jax.Array:
        logits, _, self._state = self._score(
            self._params, self._state, self._tokens, jnp.int32(_POSITION), *self._more
        )
        return logits.block_until_ready()

    def best(self) -> float:
        """Seconds of a window, the best of some calls in a row."""
        return min(_seconds(self._run) for _ in range(_CALLS.value))


def _measure(results: Results) -> None:
    config, weights = _load()
    systems = {
        (name, width): _System(config, name, params, width)
        for name, params in weights.items()
        for width in _WIDTHS
    }
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in systems}
    with show_progress(0, _ROUNDS.value, "round") as show:
        for number in range(_ROUNDS.value):
            # In another order each time, so that none has the better place.
            order = np.random.default_rng(number).permutation(len(systems))
            keys = list(systems)
            for index in order:
                seconds[keys[index]].append(systems[keys[index]].best())
            show(number + 1, "")
    part: dict[str, Any] = {"bandwidth": _bandwidth(), "systems": {}}
    for name, params in weights.items():
        alone = systems[name, 1].logits[0]
        part["systems"][name] = {
            "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
            "widths": {
                str(width): {
                    "seconds": seconds[name, width],
                    "first_row_equal": bool(
                        (systems[name, width].logits[0] == alone).all()
                    ),
                }
                for width in _WIDTHS
            },
        }
    results.keep("windows", part)


def _tables(part: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    systems, bandwidth = part["systems"], part["bandwidth"]

    def median(name: str, width: int) -> float:
        return float(np.median(systems[name]["widths"][str(width)]["seconds"]))

    rows, faults = [], []
    for name, system in systems.items():
        for width in _WIDTHS:
            found = system["widths"][str(width)]
            times = np.array(found["seconds"]) * 1e3
            rows.append(
                [
                    name,
                    str(width),
                    f"{np.median(times):.1f}",
                    f"{times.min():.1f} to {times.max():.1f}",
                    f"{median(name, width) / median(name, 1):.2f}",
                    f"{median(name, width) / median('batched, float32', width):.2f}",
                    "yes" if found["first_row_equal"] else "no",
                ]
            )
            is_control = name == "batched, float32"
            if not found["first_row_equal"] and not is_control:
                faults.append(f"{name}, {width} rows: bits differ from one row's")
    control = systems["batched, float32"]["widths"]
    if all(control[str(width)]["first_row_equal"] for width in _WIDTHS):
        faults.append("batched, float32: no bit differs: nothing is shown")
    floors = []
    for name, system in systems.items():
        for source, speed in bandwidth.items():
            floor = system["bytes"] / speed
            floors.append(
                [
                    name,
                    f"{system['bytes'] / 1e6:.0f}",
                    f"{source}, {speed / 1e9:.1f}",
                    f"{floor * 1e3:.1f}",
                    f"{floor / median(name, 1):.2f}",
                ]
            )
    tables = [
        {
            "title": "Windows: milliseconds, median over rounds",
            "columns": [
                "system",
                "rows",
                "ms",
                "range",
                "to one row",
                "to batched",
                "first row's bits are one row's",
            ],
            "rows": rows,
        },
        {
            "title": "One row beside the time to read the weights once",
            "columns": [
                "system",
                "MB",
                "bandwidth by, GB/s",
                "floor, ms",
                "floor to one row",
            ],
            "rows": floors,
        },
    ]
    return tables, faults


def _run() -> int:
    settings = {
        "smoke": _SMOKE.value,
        "rounds": _ROUNDS.value,
        "calls": _CALLS.value,
        "position": _POSITION,
        "length": _LENGTH,
    }
    results = Results("window_cost", settings)
    if "windows" not in results.parts:
        _measure(results)
    tables, faults = _tables(results.parts["windows"])
    return results.finish(tables, faults)


if __name__ == "__main__":
    run_command(_run)
