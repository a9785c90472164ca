"""Counts the values that a window computes with other bits than plain decoding does.

For every configuration (format, Hadamard-folded inputs or not, place of the experts,
how many of them are cached) windows of 1 to 8 rows are compared, float by float, with
the singleton: the separately compiled program for one token, its experts resident.
Zero may differ. The batched control runs over the same windows and must differ, or the
comparison could not see anything.

  python experiments/arithmetic_parity.py --out /tmp/parity
  python experiments/arithmetic_parity.py --out /tmp/smoke --smoke

The results are in arithmetic_parity.json, and as a table in arithmetic_parity.md.
Started again with the same flags, the run skips the configurations that are done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import _command_line
import _parity_trials as trials
import _results
import jax
from _command_line import describe_run, replaced, run_command
from _results import Results
from absl import flags

_TABLE = "arithmetic_parity.md"
_COLD = "arithmetic_parity.cold.safetensors"  # while the run lasts
_LOG_SECONDS = 20.0  # between lines, where there is no progress bar
_SMOKE_CONFIGURATIONS = ("q8_0-hadamard-cold", "q4_0-host")

_SMOKE = flags.DEFINE_bool("smoke", False, "Two configurations, few rows: seconds.")
_COMPARISONS = flags.DEFINE_integer(
    "comparisons",
    None,
    "Least number of floats to compare in each configuration, in windows of the expert "
    "layer; the default is 4866048, or 36864 with --smoke.",
)
_CONFIGURATIONS = flags.DEFINE_list(
    "configurations",
    None,
    "Names with commas; the default is all, or two with --smoke.",
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights, inputs and windows.")


def find_faults(result: dict[str, Any]) -> list[str]:
    """Returns what speaks against a configuration's claim; nothing if it holds."""
    exact = result["exact"]
    faults = []
    if exact["num_different"]:
        faults.append(f"{exact['num_different']} values differ from the singleton")
    if exact["num_not_finite"]:
        faults.append(f"{exact['num_not_finite']} values are not finite")
    for part, control in result["control"].items():
        if not control["num_different"]:
            faults.append(f"the control does not differ ({part}): nothing is shown")
    if not result["num_jobs_of_several_rows"]:
        faults.append("no rows shared an expert: nothing is shown")
    if result["num_cached"] and not result["num_brought_into_cache"]:
        faults.append("nothing came into the cache: nothing is shown")
    return faults


_COLUMNS = (
    "configuration",
    "cached",
    "compared",
    "different",
    "control: layer",
    "control: model",
)


def _tabulate(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the cells of the table, a row for each configuration."""
    return [
        (
            name,
            str(result["num_cached"]),
            f"{result['exact']['num_compared']:,}",
            f"{result['exact']['num_different']:,}",
            *(f"{control['share']:.1%}" for control in result["control"].values()),
        )
        for name, result in results.items()
    ]


_PAGE = """\
# Arithmetic parity

Written by `experiments/arithmetic_parity.py` from `arithmetic_parity.json`.

{compared:,} float32 values were compared, bit for bit, with the singleton: the
separately compiled program for one token, its experts resident on the device.
{different:,} differ. Windows have 1 to 8 rows and run through one program with room for
8; rows that are not live hold NaN in the layer. Only finite values are counted, and any
other is a failure. The control shares products between rows, over the same weights and
windows: its columns say which share of the values differs.

A configuration is named by its format, `hadamard` if the experts' inputs are folded,
and their place; `cached` of a layer's {num_experts} experts are kept on the device.

| {header} |
|---|{alignment}
{rows}

In each configuration at least {comparisons:,} values come from windows of the expert
layer that decode an expert for each of its rows (the outputs of a row's {per_token}
experts, {width} wide), and as many from windows that decode it once for all. Experts
that are not resident are run one row at a time as well. The rest are hidden states and
logits of a text in a one-layer model whose windows have rejected rows. Weights are
normal, encoded in the configuration's format; the codes of trellises are drawn, since
every string of bits is one. The JSON has the parts by width of the window, and the
hashes of all inputs.

Seed {seed}, {device}, {versions}; {time}.
"""


def render_page(report: dict[str, Any]) -> str:
    """Returns the report as Markdown."""
    results, settings = report["configurations"], report["settings"]
    model = settings["model"]
    exact = [result["exact"] for result in results.values()]
    return _PAGE.format(
        compared=sum(tally["num_compared"] for tally in exact),
        different=sum(tally["num_different"] for tally in exact),
        num_experts=model["num_experts"],
        header=" | ".join(_COLUMNS),
        alignment="---:|" * (len(_COLUMNS) - 1),
        rows="\n".join(f"| {' | '.join(row)} |" for row in _tabulate(results)),
        comparisons=settings["comparisons"],
        per_token=model["num_experts_per_token"],
        width=model["hidden_size"],
        seed=settings["seed"],
        device=settings["device"],
        versions=", ".join(f"{name} {v}" for name, v in settings["versions"].items()),
        time=report["time"],
    )


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int, str, str], None]]:
    """Shows what is being done: a bar on a terminal, lines elsewhere."""
    if sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            import tqdm

            with tqdm.tqdm(total=total, unit="configuration") as bar:

                def advance(index: int, name: str, text: str) -> None:
                    bar.update(index - bar.n)
                    bar.set_description_str(f"{name}: {text}")

                yield advance
                bar.update(total - bar.n)
            return
    last = (-1, 0.0)

    def log(index: int, name: str, text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if index == last[0] and now - last[1] < _LOG_SECONDS:
            return
        last = (index, now)
        line = f"{index + 1}/{total}  {name}: {text}"
        print(line, file=sys.stderr, flush=True)

    yield log


def _choose_configurations() -> list[trials.Configuration]:
    known = {each.name: each for each in trials.CONFIGURATIONS}
    names = _CONFIGURATIONS.value
    if names is None:
        names = _SMOKE_CONFIGURATIONS if _SMOKE.value else known
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"--configurations must be of {', '.join(known)}; got "
            f"{', '.join(unknown) or 'none'}"
        )
    return [known[name] for name in known if name in names]


def _run() -> int:
    comparisons = _COMPARISONS.value
    if comparisons is None:
        comparisons = 36_864 if _SMOKE.value else 4_866_048
    for name, value, least in (
        ("comparisons", comparisons, 1),
        ("seed", _SEED.value, 0),
    ):
        if value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    chosen = _choose_configurations()
    settings = {
        "seed": _SEED.value,
        "comparisons": comparisons,
        "model": dataclasses.asdict(trials.MODEL),
        "device": jax.devices()[0].device_kind,
        "versions": describe_run("arithmetic_parity")["versions"],
    }
    results = Results(
        "arithmetic_parity",
        settings,
        key="configurations",
        order=[each.name for each in trials.CONFIGURATIONS],
    )
    waiting = [each for each in chosen if each.name not in results.parts]
    print(f"{len(chosen) - len(waiting)} of {len(chosen)} configurations are done")
    cold = results.folder / _COLD
    try:
        with _progress(len(waiting)) as show:
            for index, configuration in enumerate(waiting):
                result = trials.run_configuration(
                    configuration,
                    _SEED.value,
                    comparisons,
                    cold,
                    functools.partial(show, index, configuration.name),
                )
                results.keep(configuration.name, result)
    finally:
        cold.unlink(missing_ok=True)

    every = results.parts
    code = results.finish(
        [{"title": "", "columns": _COLUMNS, "rows": _tabulate(every)}],
        [
            f"{each.name}: {fault}"
            for each in chosen
            for fault in find_faults(every[each.name])
        ],
    )
    report = json.loads(results.path.read_text("utf-8"))
    with replaced(results.folder / _TABLE) as part:
        part.write_text(render_page(report), "utf-8")
    return code


flags.adopt_module_key_flags(_command_line)
flags.adopt_module_key_flags(_results)

if __name__ == "__main__":
    run_command(_run)
